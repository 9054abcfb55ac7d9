"""The documents are true: their code runs, their commands parse, their tables are those of the code."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import re
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from documents import (
    PAGES,
    ROOT,
    Block,
    all_blocks,
    anchors_of,
    blocks_of,
    code_in,
    links_of,
    prose_of,
    rows_of,
    section_of,
    text_of,
)
from served import listening

import rollout
import rollout.testing
from rollout.agent.loading import load_agent
from rollout.cli import build_parser
from rollout.errors import RequestError
from rollout.examples.calculator import CalculatorAgent
from rollout.metrics import FINISH_REASONS, INIT_REJECTIONS, Metrics
from rollout.schemas import ErrorCategory, Phase, RolloutMetrics, RolloutResponse, RolloutState
from rollout.server.app import create_app
from rollout.server.routes import describe_routes
from rollout.setting_spec import PREFIX
from rollout.settings import SPECS
from rollout.testing import MockTrainer, run_agent

DOCS = ROOT / "docs"
BLOCKS = all_blocks()
MARKERS = re.compile(r"run|run against \S+:\S+ on \S+|file \w+\.py|tests|none, because .+")


def blocks(language: str, marker: str = "") -> list[Any]:
    """The blocks of a language whose marker begins so, as parameters of a test."""
    return [
        pytest.param(block, id=block.id)
        for block in BLOCKS
        if block.language == language and block.marker.startswith(marker)
    ]


# ---------------------------------------------------------------- code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory from where modules are imported, forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def save_files(block: Block, folder: Path) -> None:
    """Save the files that the page shows above the block."""
    for other in blocks_of(block.page):
        if other.marker.startswith("file ") and other.line <= block.line:
            (folder / other.marker.removeprefix("file ")).write_text(other.text)


def execute(block: Block, text: str | None = None) -> dict[str, Any]:
    """Run the block as a program; the names that it has defined."""
    names: dict[str, Any] = {"__name__": "__main__"}
    padding = "\n" * block.line  # tracebacks show the line of the page
    exec(compile(padding + (block.text if text is None else text), str(block.page), "exec"), names)
    return names


async def serve_briefly(app: web.Application) -> None:
    """What `run_app()` does, but on a free port and until the application has answered somebody."""
    async with listening(app) as url, ClientSession(url) as session, session.get("/none") as answer:
        assert answer.status == 404


@contextlib.contextmanager
def served(agent: Any) -> Iterator[str]:
    """The address of a service that runs in a thread of its own."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    address: list[str] = []
    ready = threading.Event()

    async def serve() -> None:
        async with listening(create_app(agent)) as url:
            address.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(5)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.mark.parametrize("block", blocks("python"))
def test_python_blocks_say_how_they_are_tested(block: Block) -> None:
    assert MARKERS.fullmatch(block.marker), f"{block.id}: {block.marker!r}"


@pytest.mark.parametrize("block", blocks("python", "file "))
def test_files_can_be_imported(block: Block, folder: Path) -> None:
    save_files(block, folder)

    module = importlib.import_module(block.marker.removeprefix("file ").removesuffix(".py"))

    result = rollout.validate_agent_loop(module.agent)
    assert result.valid, str(result)


@pytest.mark.parametrize("block", [b for b in blocks("python", "run") if "against" not in b.values[0].marker])
def test_programs_run(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_files(block, folder)
    monkeypatch.setattr(web, "run_app", lambda app, **_: asyncio.run(serve_briefly(app)))

    execute(block)


@pytest.mark.parametrize("block", blocks("python", "run against "))
def test_programs_run_against_a_service(block: Block, folder: Path) -> None:
    save_files(block, folder)
    spec, _, url = block.marker.removeprefix("run against ").partition(" on ")
    assert url in block.text

    with served(load_agent(spec)) as address:
        execute(block, block.text.replace(url, address))


@pytest.mark.parametrize("block", blocks("python", "tests"))
async def test_tests_pass(block: Block, folder: Path, trainer: MockTrainer) -> None:
    save_files(block, folder)
    fixtures = {"run_agent": run_agent, "mock_trainer": trainer}
    tests = [found for name, found in execute(block).items() if name.startswith("test_")]

    assert tests
    for test in tests:
        await test(**{name: fixtures[name] for name in inspect.signature(test).parameters})


# ---------------------------------------------------------------- commands and variables


def command_lines() -> list[Any]:
    """Every call of our command line in a shell block."""
    found = []
    for block in BLOCKS:
        if block.language not in ("bash", "console"):
            continue
        for line in block.text.splitlines():
            for command in line.split("&&"):
                if "-m rollout " in command:
                    found.append(pytest.param(command.partition("-m rollout ")[2], id=f"{block.id} {command.strip()}"))
    return found


@pytest.mark.parametrize("arguments", command_lines())
def test_commands_are_understood(arguments: str) -> None:
    build_parser().parse_args(shlex.split(arguments, comments=True))


def test_commands_in_the_text_are_understood() -> None:
    commands = {
        code.partition("-m rollout ")[2]
        for page in PAGES
        for code in code_in(prose_of(page))
        if code.startswith("python -m rollout ")
    }

    for arguments in commands:
        build_parser().parse_args(shlex.split(arguments))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_exist(page: Path) -> None:
    full = set(re.findall(rf"{PREFIX}[A-Z_]+[A-Z]", text_of(page)))
    short = set(re.findall(r"`((?:SERVER|CLIENT)_[A-Z_]+)[`=]", text_of(page)))

    assert full <= {spec.variable for spec in SPECS}
    assert short <= {spec.suffix for spec in SPECS}


# ---------------------------------------------------------------- tables


def test_the_table_of_settings_is_complete() -> None:
    rows = rows_of(section_of(DOCS / "operations.md", "Settings"))
    documented = {code_in(name)[0]: (default, bounds) for name, default, bounds, _ in rows}

    assert documented == {
        spec.suffix: (
            f"`{spec.default_text}`" if spec.default_text else "none",
            spec.bounds if spec.kind == "text" else f"`{spec.bounds}`",
        )
        for spec in SPECS
    }


def test_defaults_in_the_readme_are_the_defaults() -> None:
    rows = rows_of(section_of(ROOT / "README.md", "Settings"))
    defaults = {spec.suffix: spec.default_text for spec in SPECS}
    claimed = [
        (name, default)
        for names, texts, _ in rows
        if "`" in texts
        for name, default in zip(code_in(names), code_in(texts), strict=True)
    ]

    assert len(claimed) >= 8
    assert [(name, defaults[name]) for name, _ in claimed] == claimed


def test_the_table_of_metrics_is_complete() -> None:
    rows = rows_of(section_of(DOCS / "operations.md", "Metrics"))
    suffixes = {"counter": "_total"}

    assert {code_in(name)[0]: kind for name, kind, *_ in rows} == {
        instrument.name + suffixes.get(instrument.kind, ""): instrument.kind for instrument in Metrics().instruments()
    }


def test_the_table_of_paths_is_complete() -> None:
    rows = rows_of(section_of(DOCS / "protocol.md", "Paths"))
    documented = {tuple(code_in(path)[0].split()) for path, _ in rows}
    routes = set(describe_routes(create_app(CalculatorAgent())))
    twins = {(method, path.removeprefix("/v1/rollout")) for method, path in routes if path.startswith("/v1/rollout")}

    assert documented == {(method, path) for method, path in routes if not path.startswith("/v1/rollout")}
    assert len(twins) == 6


def subclasses_of(error: type[RequestError]) -> Iterator[type[RequestError]]:
    yield error
    for child in error.__subclasses__():
        yield from subclasses_of(child)


def test_the_table_of_errors_is_complete() -> None:
    rows = rows_of(section_of(DOCS / "protocol.md", "Errors"))
    documented = {code_in(code)[0]: int(status) for status, code, _ in rows}
    classes = {
        found.code: found.status
        for found in subclasses_of(RequestError)
        if "code" in vars(found) and isinstance(vars(found)["code"], str)
    }

    assert documented.keys() == {*classes, *INIT_REJECTIONS}
    assert {code: documented[code] for code in classes} == classes


@pytest.mark.parametrize(
    "message", [RolloutResponse, RolloutState, RolloutMetrics], ids=lambda message: message.__name__
)
def test_every_field_of_a_message_is_described(message: Any) -> None:
    described = set(code_in(prose_of(DOCS / "protocol.md")))

    assert set(message.__struct_fields__) <= described


def test_every_field_of_a_request_is_described() -> None:
    rows = rows_of(section_of(DOCS / "protocol.md", "RolloutRequest"))

    assert {code_in(name)[0] for name, *_ in rows} == set(rollout.RolloutRequest.__struct_fields__)


@pytest.mark.parametrize(
    "words", [FINISH_REASONS, tuple(ErrorCategory), tuple(Phase)], ids=["finish reasons", "categories", "phases"]
)
def test_every_fixed_word_is_described(words: tuple[str, ...]) -> None:
    text = text_of(DOCS / "protocol.md")

    assert [str(word) for word in words if f'"{word}"' not in text] == []


# ---------------------------------------------------------------- names and links


def test_the_reference_lists_every_public_name() -> None:
    documented = [code_in(name)[0] for name, _ in rows_of(text_of(DOCS / "reference.md"))]

    assert sorted(documented) == sorted(rollout.__all__)


def test_the_testing_page_lists_every_name_of_the_kit() -> None:
    documented = code_in(section_of(DOCS / "testing.md", "Names"))[1:]

    assert documented == sorted(rollout.testing.__all__)


def test_pages_import_only_names_that_are_public() -> None:
    names = {
        alias.name
        for block in BLOCKS
        if block.language == "python"
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.ImportFrom) and node.module == "rollout"
        for alias in node.names
    }

    assert len(names) >= 10
    assert names <= set(rollout.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in links_of(page):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        other = (page.parent / target).resolve() if target else page
        if not other.exists() or (anchor and anchor not in anchors_of(other)):
            dead.append(link)

    assert not dead


def test_the_readme_leads_to_every_page() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links_of(ROOT / "README.md")}

    assert {page.resolve() for page in PAGES[1:]} <= linked


def test_the_readme_begins_with_the_two_commands_of_a_stranger() -> None:
    first, second = [block for block in blocks_of(ROOT / "README.md") if block.language == "bash"][:2]

    assert first.text.strip().endswith("python -m rollout demo")
    assert second.text.strip().endswith("pytest")
    assert len(first.text.splitlines()) == len(second.text.splitlines()) == 1


def test_the_changelog_has_the_version() -> None:
    assert f"\n## {rollout.__version__} " in text_of(ROOT / "CHANGELOG.md")
