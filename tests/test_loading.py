"""`module:attribute`, and what a newcomer is told when it leads nowhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout.agent.loading import load_agent
from rollout.errors import AgentLoadError

AGENT = """
from rollout.agent.loop import RolloutAgentLoop, RolloutResult

class Calculator(RolloutAgentLoop):
    name = "calculator"
    async def run(self, ctx):
        return RolloutResult()
"""

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module into the working directory; modules imported from there are forgotten in the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def write_module(name: str, text: str) -> str:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    yield write_module
    for name in set(sys.modules) - before:
        del sys.modules[name]


def failure(spec: str) -> str:
    with pytest.raises(AgentLoadError) as caught:
        load_agent(spec)
    return str(caught.value)


def test_an_instance_is_loaded_from_the_working_directory(write: Write) -> None:
    write("my_agent", AGENT + "agent = Calculator()\n")
    assert load_agent(" my_agent:agent ").name == "calculator"


def test_packages_and_dotted_attributes_are_walked(write: Write) -> None:
    write("pack.sub.agents", AGENT + "class Box:\n    inner = Calculator()\n")
    assert load_agent("pack.sub.agents:Box.inner").name == "calculator"


def test_any_object_with_the_three_parts_is_an_agent(write: Write) -> None:
    write(
        "duck",
        "class Duck:\n    name = 'duck'\n    def get_tools(self, request): return []\n"
        "    async def run(self, ctx): ...\nd = Duck()\n",
    )
    assert load_agent("duck:d").name == "duck"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("my_agent", "has no colon"),
        ("", "has no colon"),
        ("a:b:c", "more than one colon"),
        (":agent", "names no module"),
        (".a:agent", "names no module"),
        ("a..b:agent", "names no module"),
        ("my_agent:", "names no attribute"),
        ("my_agent:a-b", "names no attribute"),
        ("my_agent:a.", "names no attribute"),
        ("examples/my_agent.py:agent", "'examples.my_agent:agent'"),
        ("./my_agent.py", "'my_agent:agent'"),
        ("examples\\my_agent:agent", "'examples.my_agent:agent'"),
        ("my_agent.py:agent", "'my_agent:agent'"),
    ],
)
def test_a_spec_of_the_wrong_form_is_explained(spec: str, says: str) -> None:
    assert says in failure(spec)


def test_a_missing_module_is_told_with_where_it_was_searched(write: Write, tmp_path: Path) -> None:
    text = failure("no_such_agent:agent")
    assert text.startswith("module 'no_such_agent' was not found")
    assert str(tmp_path) in text


def test_a_missing_parent_package_is_named(write: Write) -> None:
    assert "module 'no_such_pack.agents' (no 'no_such_pack')" in failure("no_such_pack.agents:agent")


def test_an_import_that_fails_inside_the_module_is_shown_with_its_place(write: Write, tmp_path: Path) -> None:
    write("needs_more", "import os\nimport no_such_library\n")
    text = failure("needs_more:agent")
    assert "was found, but importing it raised ModuleNotFoundError" in text
    assert f"{tmp_path / 'needs_more.py'}, line 2" in text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\nraise ValueError('bad key')\n", "ValueError: bad key"),
        ("x = 1\nimport sys; sys.exit()\n", "SystemExit"),
        ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax"),
    ],
    ids=["raises", "exits", "syntax"],
)
def test_what_an_import_raises_is_shown_with_file_and_line(
    write: Write, tmp_path: Path, source: str, says: str
) -> None:
    write("broken", source)
    text = failure("broken:agent")
    assert says in text
    assert f"{tmp_path / 'broken.py'}, line 2" in text


@pytest.mark.parametrize(
    ("source", "line", "says"),
    [
        ("class Nameless(RolloutAgentLoop):\n    async def run(self, ctx): ...\n", 9, "Nameless has no name"),
        (
            "class Half(RolloutAgentLoop):\n    name = 'half'\nagent = Half()\n",
            11,
            "abstract method 'run'; write `async def run(self, ctx)`",
        ),
        ("from rollout.agent.tools import tool\ntool(5)\n", 10, "a tool is made of a function"),
    ],
    ids=["class", "abstract", "tool"],
)
def test_what_the_library_raises_is_shown_with_the_users_line(
    write: Write, tmp_path: Path, source: str, line: int, says: str
) -> None:
    write("at_fault", f"{AGENT}\n{source}")
    text = failure("at_fault:agent")
    assert says.replace("'run'", "run") in text.replace("'run'", "run")
    assert f"({tmp_path / 'at_fault.py'}, line {line})" in text


def test_a_missing_attribute_is_told_with_near_names_and_agents(write: Write) -> None:
    write("my_agents", AGENT + "calculator = Calculator()\n")
    text = failure("my_agents:calculater")
    assert "no attribute 'calculater'" in text
    assert text.endswith(" or 'Calculator'?). Agent loops in my_agents: calculator")


def test_a_missing_attribute_beside_a_class_tells_how_to_make_an_instance(write: Write) -> None:
    write("only_class", AGENT)
    assert "add `agent = Calculator()`" in failure("only_class:agent")


def test_a_missing_attribute_of_a_module_without_agents_says_no_more(write: Write) -> None:
    write("empty", "")
    assert failure("empty:agent") == "empty has no attribute 'agent'"


def test_an_attribute_that_raises_is_told(write: Write) -> None:
    write("lazy", "def __getattr__(name):\n    raise RuntimeError('not today')\n")
    assert failure("lazy:agent") == "reading 'agent' of lazy raised RuntimeError: not today"


def test_a_class_is_refused_with_the_instance_to_name(write: Write) -> None:
    write("given", AGENT + "agent = Calculator()\n")
    assert failure("given:Calculator").endswith("name `given:agent`")


def test_a_class_without_an_instance_is_refused_with_the_line_to_add(write: Write) -> None:
    write("bare", AGENT + "class Other: ...\n")
    assert "add `agent = Calculator()` to bare" in failure("bare:Calculator")
    assert "is the class Other, not an agent loop" in failure("bare:Other")


def test_what_is_no_agent_is_told_with_what_it_lacks(write: Write) -> None:
    write(
        "odd",
        "agent = 5\nclass Half:\n    name = 'h'\n    @property\n    def run(self): raise ValueError\nhalf = Half()\n",
    )
    assert "is of type int, not an agent loop: it lacks a `name` and `get_tools()` and `run()`" in failure("odd:agent")
    assert "it lacks `get_tools()` and `run()`" in failure("odd:half")
