"""What a validation finds in an agent and its tools, before the first request does."""

from __future__ import annotations

import copy
import csv
import functools
import json
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import FOLDER, NEEDS_CASES
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.agent.tools import tool
from rollout.agent.validator import (
    AgentLoopValidationError,
    ValidationError,
    ValidationResult,
    check_before_serving,
    validate_agent_loop,
)
from rollout.errors import RequestRejected
from rollout.schemas import OpenAIFunctionSchema, OpenAIFunctionToolSchema, RolloutRequest

TOOL_FILES = sorted(FOLDER.glob("inputs/tools/*.json"))
needs_cases = pytest.mark.skipif(not TOOL_FILES, reason=NEEDS_CASES)


class Agent(RolloutAgentLoop):
    name = "tester"

    def __init__(self, *tools: Any) -> None:
        self.given = list(tools)

    def get_tools(self, request: RolloutRequest) -> list[Any] | Awaitable[list[Any]]:
        return self.given

    async def run(self, ctx: Any) -> RolloutResult:
        return RolloutResult()


def function(parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def properties(**given_properties: Any) -> dict[str, Any]:
    return function({"type": "object", "properties": given_properties})


def found(*tools: Any) -> list[tuple[str, str, str]]:
    """Code, path below the first tool, and severity of each finding."""
    result = validate_agent_loop(Agent(*tools))
    findings = [*result.errors, *result.warnings]
    return [(f.code, f.path.removeprefix("$.tools[0]"), f.severity) for f in findings]


def codes(agent: Any, request: RolloutRequest | None = None) -> list[str]:
    result = validate_agent_loop(agent, request)
    return [finding.code for finding in (*result.errors, *result.warnings)]


# ---------------------------------------------------------------- the agent


def test_a_good_agent_is_valid_with_its_tools_as_on_the_wire() -> None:
    @tool
    def add(a: int) -> int:
        return a

    struct = OpenAIFunctionToolSchema(function=OpenAIFunctionSchema(name="s"))
    plain = function(None)
    result = validate_agent_loop(Agent(add, struct, plain))
    assert result.valid
    assert result.agent_name == "tester"
    assert result.tools == [add.schema, json.loads(msgspec.json.encode(struct)), plain]
    result.raise_if_invalid()
    assert str(result) == "agent loop 'tester': valid, 0 errors, 0 warnings"


def test_errors_are_raised_together_and_survive_pickling() -> None:
    result = validate_agent_loop(Agent({"type": "function"}, properties(x={"type": "Boolean"})))
    with pytest.raises(AgentLoopValidationError) as caught:
        result.raise_if_invalid()
    again = pickle.loads(pickle.dumps(caught.value))
    assert [finding.code for finding in again.findings] == ["MISSING_FUNCTION"]
    assert "MISSING_FUNCTION at $.tools[0]" in str(again)
    assert "warning: UNKNOWN_TYPE" in str(again)
    assert isinstance(again.findings[0], ValidationError)


def test_a_result_becomes_plain_json() -> None:
    report = validate_agent_loop(Agent(5)).to_dict()
    assert json.loads(json.dumps(report)) == report
    assert report["valid"] is False
    assert report["errors"][0]["code"] == "NOT_A_TOOL"


def test_a_class_is_not_an_agent() -> None:
    assert codes(Agent) == ["AGENT_IS_CLASS"]


def test_an_object_without_any_part_lacks_all_three() -> None:
    assert codes(object()) == ["MISSING_AGENT_NAME", "MISSING_RUN", "MISSING_GET_TOOLS"]


def test_attributes_that_raise_are_reported() -> None:
    class Broken:
        @property
        def name(self) -> str:
            raise RuntimeError("no")

        run = get_tools = name

    assert codes(Broken()).count("ATTRIBUTE_FAILED") == 3


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (None, "MISSING_AGENT_NAME"),
        (5, "MISSING_AGENT_NAME"),
        (" ", "MISSING_AGENT_NAME"),
        ("a ", "BAD_AGENT_NAME"),
        ("a\n", "BAD_AGENT_NAME"),
        ("x" * 257, "BAD_AGENT_NAME"),
    ],
)
def test_names_are_checked(name: Any, code: str) -> None:
    agent = Agent()
    agent.name = name
    assert codes(agent) == [code]


# ---------------------------------------------------------------- get_tools


async def async_tools(request: RolloutRequest) -> list[Any]:
    return [function()]


def make_agent(**attributes: Any) -> Agent:
    agent = Agent()
    for name, value in attributes.items():
        setattr(agent, name, value)
    return agent


def test_async_get_tools_is_awaited() -> None:
    assert validate_agent_loop(make_agent(get_tools=async_tools)).tools == [function()]


async def test_async_get_tools_is_awaited_while_a_loop_is_running() -> None:
    assert validate_agent_loop(make_agent(get_tools=async_tools)).tools == [function()]


def raiser(error: BaseException) -> Callable[[Any], Any]:
    def get_tools(request: Any) -> Any:
        raise error

    return get_tools


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(1), RecursionError()], ids=repr)
async def test_get_tools_that_raises_is_reported_also_beside_a_loop(error: BaseException) -> None:
    result = validate_agent_loop(make_agent(get_tools=raiser(error)))
    assert [finding.code for finding in result.errors] == ["GET_TOOLS_FAILED"]
    assert type(error).__name__ in result.errors[0].message


def test_an_interrupt_from_the_keyboard_is_not_a_finding() -> None:
    with pytest.raises(KeyboardInterrupt):
        validate_agent_loop(make_agent(get_tools=raiser(KeyboardInterrupt())))


def test_a_rejected_empty_request_is_only_a_warning() -> None:
    agent = make_agent(get_tools=raiser(RequestRejected("no task in metadata")))
    assert validate_agent_loop(agent).valid
    request = RolloutRequest(rollout_id="r", server_url="http://t", messages=[], completion_params={})
    assert codes(agent, request) == ["GET_TOOLS_FAILED"]


@pytest.mark.parametrize("returned", [None, (), {}, "tools", 5])
def test_get_tools_must_return_a_list(returned: Any) -> None:
    assert codes(make_agent(get_tools=lambda request: returned)) == ["GET_TOOLS_NOT_LIST"]


# ---------------------------------------------------------------- run


async def good_run(ctx: Any) -> None: ...


def plain_run(ctx: Any) -> None: ...


@functools.wraps(good_run)
def wrapped_run(*args: Any) -> Any: ...


def promising_run(ctx: Any) -> Awaitable[None]: ...  # type: ignore[empty-body]


def typed_run(ctx: Any) -> Any: ...


typed_run.__annotations__["return"] = Awaitable[None]


async def generating_run(ctx: Any) -> AsyncIterator[int]:
    yield 1


async def two_arguments(ctx: Any, more: Any) -> None: ...


class AsyncCallable:
    async def __call__(self, ctx: Any) -> None: ...


class PlainCallable:
    def __call__(self, ctx: Any) -> None: ...


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (good_run, []),
        (AsyncCallable(), []),
        (functools.partial(two_arguments, more=1), []),
        (functools.partial(AsyncCallable()), []),
        (wrapped_run, ["RUN_MAY_NOT_BE_ASYNC"]),
        (promising_run, ["RUN_MAY_NOT_BE_ASYNC"]),
        (typed_run, ["RUN_MAY_NOT_BE_ASYNC"]),
        (plain_run, ["RUN_NOT_ASYNC"]),
        (PlainCallable(), ["RUN_NOT_ASYNC"]),
        (generating_run, ["RUN_IS_GENERATOR"]),
        (two_arguments, ["BAD_RUN_SIGNATURE"]),
        (None, ["MISSING_RUN"]),
        (print, ["RUN_NOT_ASYNC"]),
        (dict.fromkeys, ["RUN_NOT_ASYNC"]),
        (type, ["RUN_NOT_ASYNC"]),
    ],
    ids=str,
)
def test_run_must_be_async_in_some_disguise(run: Any, expected: list[str]) -> None:
    assert codes(make_agent(run=run)) == expected


# ---------------------------------------------------------------- tools

PARAMETERS = ".function.parameters"


@pytest.mark.parametrize(
    ("given_tool", "code", "path", "severity"),
    [
        (5, "NOT_A_TOOL", "", "error"),
        (good_run, "NOT_A_TOOL", "", "error"),
        ({"type": "function", "name": "flat"}, "MISSING_FUNCTION", "", "error"),
        ({"type": "function", "function": "f"}, "MISSING_FUNCTION", "", "error"),
        ({"function": {"name": "f"}}, "MISSING_TOOL_TYPE", ".type", "error"),
        ({"type": "web_search"}, "TOOL_TYPE_NOT_FUNCTION", ".type", "warning"),
        ({"type": 5}, "TOOL_TYPE_NOT_FUNCTION", ".type", "error"),
        ({"type": "function", "function": {}}, "MISSING_NAME", ".function.name", "error"),
        ({"type": "custom", "function": {"name": "f"}}, "TOOL_TYPE_NOT_FUNCTION", ".type", "warning"),
        ({"type": "function", "function": {"name": " "}}, "MISSING_NAME", ".function.name", "error"),
        ({"type": "function", "function": {"name": "a.b"}}, "BAD_NAME", ".function.name", "warning"),
        ({"type": "function", "function": {"name": "a\n"}}, "BAD_NAME", ".function.name", "warning"),
        (function(description=5), "BAD_DESCRIPTION", ".function.description", "error"),
        (function([]), "PARAMETERS_NOT_OBJECT", PARAMETERS, "error"),
        (function({"type": "string"}), "PARAMETERS_NOT_OBJECT", PARAMETERS + ".type", "error"),
        (function({"foo": "bar"}), "MISSING_TYPE", PARAMETERS, "warning"),
        (properties(x={"type": "Boolean"}), "UNKNOWN_TYPE", PARAMETERS + ".properties.x.type", "warning"),
        (properties(x={"type": ["string", 5]}), "UNKNOWN_TYPE", PARAMETERS + ".properties.x.type", "error"),
        (properties(x=5), "SCHEMA_NOT_OBJECT", PARAMETERS + ".properties.x", "error"),
        (properties(x={"type": "array"}), "ARRAY_WITHOUT_ITEMS", PARAMETERS + ".properties.x", "warning"),
        (properties(x={"items": {"type": ""}}), "UNKNOWN_TYPE", PARAMETERS + ".properties.x.items.type", "warning"),
        (properties(x={"anyOf": [{}, 7]}), "SCHEMA_NOT_OBJECT", PARAMETERS + ".properties.x.anyOf[1]", "error"),
        (properties(x={"anyOf": {}}), "NOT_A_LIST", PARAMETERS + ".properties.x.anyOf", "error"),
        (properties(x={"$defs": []}), "NOT_A_MAP", PARAMETERS + ".properties.x.$defs", "error"),
        (properties(**{"a b": 5}), "SCHEMA_NOT_OBJECT", PARAMETERS + ".properties['a b']", "error"),
        (properties(x={"required": True}), "REQUIRED_NOT_LIST", PARAMETERS + ".properties.x.required", "error"),
        (properties(x={"enum": "a"}), "ENUM_NOT_LIST", PARAMETERS + ".properties.x.enum", "error"),
        (properties(x={"enum": []}), "EMPTY_ENUM", PARAMETERS + ".properties.x.enum", "warning"),
        (properties(x={"$ref": "#/$defs/No"}), "DANGLING_REF", PARAMETERS + ".properties.x.$ref", "warning"),
        (properties(x={"$ref": 5}), "DANGLING_REF", PARAMETERS + ".properties.x.$ref", "warning"),
        (properties(x={"$ref": "other.json"}), "DANGLING_REF", PARAMETERS + ".properties.x.$ref", "warning"),
        (properties(x={"default": float("nan")}), "NOT_JSON", PARAMETERS + ".properties.x.default", "error"),
        (properties(x={"default": object()}), "NOT_JSON", PARAMETERS + ".properties.x.default", "error"),
        (properties(x={5: 1}), "NOT_JSON", PARAMETERS + ".properties.x", "error"),
        (
            function({"type": "object", "properties": {"city": {}}, "required": ["City"]}),
            "REQUIRED_UNKNOWN_PROPERTY",
            PARAMETERS + ".required",
            "error",
        ),
    ],
)
def test_what_is_wrong_with_a_tool_is_named_with_its_place(
    given_tool: Any, code: str, path: str, severity: str
) -> None:
    assert found(given_tool) == [(code, path, severity)]


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object"},
        {"type": ["object", "null"], "properties": {"x": True}},
        {"allOf": [{"properties": {"a": {}}}], "required": ["a"]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "required": ["b"]},
        {"$ref": "#/definitions/Node", "definitions": {"Node": {"items": {"$ref": "#/definitions/Node"}}}},
        {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "properties": {"x": {"$ref": "#"}}},
        {"properties": {"$id": {"type": "string"}, "type": {"type": "string"}, "required": {"type": "boolean"}}},
        {"properties": {"x": {"enum": [1, 2.5, None, True]}, "y": {"const": True, "nullable": True}}},
        {"properties": {"x": {"type": ["array", "null"]}, "y": {"type": "array", "prefixItems": [{}]}}},
        {"properties": {"a/b": {}, "x": {"$ref": "#/properties/a~1b"}}},
        {"properties": {"a": {"oneOf": [{}]}, "x": {"$ref": "#/properties/a/oneOf/0"}}},
        {"properties": {"x": {"$ref": "https://example.org/x.json"}, "y": {"$ref": "#anchor"}}},
        {"additionalProperties": {"type": "integer"}, "patternProperties": {"^x-": {}}, "required": ["x-a"]},
    ],
)
def test_legal_parameters_pass_without_a_word(parameters: Any) -> None:
    given_tool = function(parameters)
    before = copy.deepcopy(given_tool)
    result = validate_agent_loop(Agent(given_tool))
    assert [*result.errors, *result.warnings] == []
    assert given_tool == before == result.tools[0]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("Boolean", "use boolean"),
        ("dict", "use object"),
        ("intger", "use integer"),
        ("???", "use one of"),
        (" ", "leave `type` out"),
        ("any", "no `type`"),
    ],
)
def test_unknown_types_come_with_the_nearest_known_one(kind: str, says: str) -> None:
    (warning,) = validate_agent_loop(Agent(properties(x={"type": kind}))).warnings
    assert says in str(warning.suggestion)


def test_definitions_of_other_kinds_are_told_how_to_become_functions() -> None:
    result = validate_agent_loop(Agent({"name": "lookup", "inputSchema": {"type": "object"}}))
    assert [finding.code for finding in result.errors] == ["MISSING_TOOL_TYPE", "MISSING_FUNCTION"]
    assert all("'lookup'" in finding.message for finding in result.errors)
    assert "`inputSchema` renamed to `parameters`" in str(result.errors[1].suggestion)


def test_two_tools_of_one_name_are_an_error() -> None:
    assert found(function(), function()) == [("DUPLICATE_NAME", "$.tools[1].function.name", "error")]


def test_structs_inside_dicts_are_seen_through() -> None:
    mixed = {"type": "function", "function": OpenAIFunctionSchema(name="mixed", parameters={"type": "string"})}
    result = validate_agent_loop(Agent(mixed))
    assert [finding.code for finding in result.errors] == ["PARAMETERS_NOT_OBJECT"]
    assert "'mixed'" in result.errors[0].message


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return function(schema)


@pytest.mark.parametrize(("depth", "code"), [(10, []), (47, []), (48, ["TOO_DEEP"]), (1000, ["TOO_DEEP"])])
def test_deep_schemas_pass_until_the_wire_could_not_carry_them(depth: int, code: list[str]) -> None:
    assert [entry[0] for entry in found(nested(depth))] == code


def test_a_definition_that_contains_itself_is_too_deep() -> None:
    loop = function({"type": "object"})
    loop["function"]["parameters"]["again"] = loop
    assert [entry[0] for entry in found(loop)] == ["TOO_DEEP"]


def test_a_definition_that_unfolds_without_end_is_too_large() -> None:
    part: list[Any] = [1] * 60
    for _ in range(4):
        part = [part] * 60
    assert [entry[0] for entry in found(function({"type": "object", "x": part}))] == ["TOO_LARGE"]


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "function", "name", "parameters", "properties", "required", "items", "anyOf", "$ref", "enum"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=30, deadline=None)
@given(st.lists(ODD | st.builds(function, ODD), max_size=3))
def test_no_list_of_tools_makes_a_validation_raise_or_changes_it(tools: list[Any]) -> None:
    before = repr(tools)
    result = validate_agent_loop(Agent(*tools))
    assert isinstance(result, ValidationResult)
    assert repr(tools) == before
    json.dumps(result.to_dict())


# ---------------------------------------------------------------- before serving


class Tooled(RolloutAgentLoop):
    name = "tooled"

    def __init__(self, *tools: Any) -> None:
        self.tools = tools

    async def run(self, ctx: Any) -> RolloutResult:
        return RolloutResult()


@pytest.mark.parametrize(
    ("item", "error", "warning"),
    [
        (print, ["NOT_A_TOOL"], []),
        (function({"type": "object", "default": {1, 2}, "properties": {"x": {"default": object()}}}), ["NOT_JSON"], []),
        (properties(x={"type": "float"}), [], ["UNKNOWN_TYPE"]),
        (function(name="a b"), [], ["BAD_NAME"]),
    ],
    ids=["function", "not-json", "odd-type", "odd-name"],
)
def test_only_tools_that_can_never_be_sent_stand_in_the_way_of_serving(
    item: Any, error: list[str], warning: list[str]
) -> None:
    result = check_before_serving(Tooled(item))
    assert list(dict.fromkeys(finding.code for finding in result.errors)) == error
    assert [finding.code for finding in result.warnings] == warning


def test_a_get_tools_of_the_agents_own_is_not_called_before_serving() -> None:
    class Careful(Agent):
        def get_tools(self, request: RolloutRequest) -> list[Any]:
            raise AssertionError("this is no loop of a service")

    assert check_before_serving(Careful()) == ValidationResult(agent_name="tester", errors=[], warnings=[], tools=[])


def test_what_fails_in_every_rollout_stands_in_the_way_of_serving() -> None:
    class Blocking(Agent):
        def run(self) -> None:  # type: ignore[override]
            """Neither async nor with a context."""

    class Broken(Tooled):
        def __init__(self) -> None:
            self.tools = None  # type: ignore[assignment]

    assert [f.code for f in check_before_serving(Blocking()).errors] == ["RUN_NOT_ASYNC", "BAD_RUN_SIGNATURE"]
    assert [f.code for f in check_before_serving(Broken()).warnings] == ["GET_TOOLS_FAILED"]


# ---------------------------------------------------------------- definitions from the wild


def expected_of(path: Path) -> str:
    with (FOLDER / "INDEX.tsv").open(encoding="utf-8", newline="") as lines:
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return next(row[3] for row in rows if row[0].endswith(f"tools/{path.name}"))


@needs_cases
@pytest.mark.parametrize("path", TOOL_FILES, ids=lambda path: path.stem)
def test_tools_from_the_wild_are_judged_as_they_deserve(path: Path) -> None:
    given_tool = json.loads(path.read_bytes())
    expected = expected_of(path)
    result = validate_agent_loop(Agent(given_tool))
    errors = {finding.code for finding in result.errors}
    text = str(result)
    assert result.tools == [json.loads(path.read_bytes())] == [given_tool]
    verdicts = {
        "Must hold: an agent whose get_tools() returns this validates": not errors,
        "Real but not valid JSON Schema": (bool(result.warnings) or bool(errors)) and ".function." in text,
        "Has no `function` object": "MISSING_FUNCTION" in errors and str(given_tool.get("name")) in text,
        'type is not "function"': not errors and f"{given_tool.get('type')!r}" in text,
        "Agent authors paste these in": errors == {"MISSING_TOOL_TYPE", "MISSING_FUNCTION"},
    }
    assert [holds for start, holds in verdicts.items() if expected.startswith(start)] == [True]
