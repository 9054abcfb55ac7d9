"""The rooms of the package and who may import whom, held against the imports (docs/architecture.md)."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import rollout

PACKAGE = Path(rollout.__file__).parent

WORDS = (
    "_version",
    "errors",
    "wire",
    "hosts",
    "schemas",
    "requests",
    "envfile",
    "setting_spec",
    "settings",
    "retry",
    "metrics",
    "tracing",
    "logs",
    "traces",
    "completions",
    "trainer",
)
"""In the order in which they may use each other: a word knows only words before it."""

ROOMS = {
    "agent": {"words"},
    "state": {"words"},
    "executors": {"words", "agent"},
    "server": {"words", "agent", "state", "executors"},
    "examples": {"words", "agent", "server"},
    "testing": {"words", "agent", "server"},
    "doors": {"words", "agent", "state", "executors", "server", "examples", "testing"},
}
"""Which rooms a room may import from, beside itself."""

DOORS = {"", "__main__", "cli", "demo", "demo_report", "process", "state_cli"}
NAMELESS_ROOMS = {"common", "core", "helpers", "misc", "util", "utils"}
LONGEST_MODULE = 500
LONGEST_FUNCTION = 50


class Import(NamedTuple):
    """One import of a module of ours by another, both without the leading `rollout.`."""

    importer: str
    imported: str
    line: int
    for_types_only: bool

    def __str__(self) -> str:
        return f"rollout.{self.importer} line {self.line} imports rollout.{self.imported}"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def room_of(module: str) -> str:
    first = module.partition(".")[0]
    if first in WORDS:
        return "words"
    return "doors" if first in DOORS else first


def imports_of(module: str) -> Iterator[Import]:
    typing_only = {
        inner
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree_of(module)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for target in targets_of(node):
                if target.partition(".")[0] == "rollout":
                    yield Import(module, target.removeprefix("rollout").lstrip("."), node.lineno, node in typing_only)


def targets_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, f"line {node.lineno}: relative imports hide where a name comes from"
    modules = [f"{node.module}.{alias.name}" for alias in node.names]
    return [module if module.removeprefix("rollout.") in MODULES else str(node.module) for module in modules]


@functools.cache
def all_imports() -> list[Import]:
    return [found for module in MODULES for found in imports_of(module)]


# ---------------------------------------------------------------- who imports whom


def test_every_module_stands_in_a_room() -> None:
    unknown = {room_of(module) for module in MODULES} - ROOMS.keys() - {"words"}

    assert not unknown, "enter it in WORDS or ROOMS here, and in docs/architecture.md"


def test_no_room_is_without_a_name() -> None:
    parts = {part for module in MODULES for part in module.split(".")}

    assert not parts & NAMELESS_ROOMS


def test_rooms_import_only_what_the_table_allows() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if (room := room_of(found.importer)) != "words"
        and room_of(found.imported) != room
        and room_of(found.imported) not in ROOMS[room]
    ]

    assert not wrong


def test_a_word_knows_only_words_before_it() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if found.importer in WORDS
        and (found.imported not in WORDS or WORDS.index(found.imported) >= WORDS.index(found.importer))
    ]

    assert not wrong


def test_nobody_imports_from_the_front_of_the_package() -> None:
    assert not [str(found) for found in all_imports() if found.imported == ""]


def test_agent_and_state_never_see_each_other() -> None:
    assert not [str(found) for found in all_imports() if {room_of(found[0]), room_of(found[1])} == {"agent", "state"}]


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    left = {
        module: {found.imported for found in all_imports() if found.importer == module and not found.for_types_only}
        for module in MODULES
        if module
    }
    while free := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in free:
            del left[module]

    assert not left, "these import each other in a circle, or import from one"


# ---------------------------------------------------------------- how large things are


def test_no_module_is_longer_than_500_lines() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}

    assert {module: length for module, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_no_function_is_longer_than_50_lines() -> None:
    long = {
        f"rollout.{module}:{node.name}": length
        for module in MODULES
        for node in ast.walk(tree_of(module))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    }

    assert long == {}


def test_only_the_doors_print() -> None:
    printing = {
        module
        for module in MODULES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }

    assert {room_of(module) for module in printing} <= {"doors"}


# ---------------------------------------------------------------- what it shows


@pytest.mark.parametrize("front", ["rollout", "rollout.testing"])
def test_every_public_name_resolves(front: str) -> None:
    module = importlib.import_module(front)

    missing = [name for name in module.__all__ if not hasattr(module, name)]

    assert not missing
    assert len(module.__all__) == len(set(module.__all__))


def test_public_names_have_docstrings() -> None:
    undocumented = [
        name
        for name in rollout.__all__
        if callable(getattr(rollout, name)) and not (getattr(rollout, name).__doc__ or "").strip()
    ]

    assert not undocumented


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'RolloutAgentLop'"):
        _ = rollout.RolloutAgentLop
