"""The schema of a tool, and its arguments, from the signature and the docstring of a function."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypedDict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.agent.tool_docs import read_docstring
from rollout.agent.tools import Tool, tool
from rollout.errors import ToolArgumentError

if TYPE_CHECKING:
    from somewhere import Hidden  # type: ignore[import-not-found]

    from rollout.agent.context import RolloutContext


class Unit(enum.Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


class Filter(TypedDict, total=False):
    limit: int


@dataclass
class Place:
    city: str
    zip_code: str | None = None


class Node(msgspec.Struct):
    """A node of a tree."""

    value: int
    children: list[Node] = []


def parameters(made: Tool) -> dict[str, Any]:
    found: dict[str, Any] = made.schema["function"]["parameters"]
    return found


def prop(made: Tool, name: str = "x") -> Any:
    return parameters(made)["properties"][name]


def test_no_parameters_give_an_empty_object() -> None:
    @tool
    def now() -> str:
        return ""

    assert now.schema == {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
    }


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, {"type": "null"}),
        (Any, {}),
        (object, {}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (list[str], {"type": "array", "items": {"type": "string"}}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Literal["b", "a"], {"enum": ["a", "b"]}),
        (Annotated[int, msgspec.Meta(ge=1, le=5)], {"type": "integer", "minimum": 1, "maximum": 5}),
        (Annotated[str, "a city"], {"type": "string", "description": "a city"}),
        (Annotated[str, 5], {"type": "string"}),
    ],
    ids=str,
)
def test_types_become_json_schema(hint: Any, schema: dict[str, Any]) -> None:
    def take(x: Any) -> None: ...

    take.__annotations__["x"] = hint
    assert prop(tool(take)) == schema


def test_sets_and_tuples_are_arrays() -> None:
    @tool
    def take(x: set[int], y: tuple[int, str]) -> None: ...

    assert prop(take)["uniqueItems"] is True
    assert prop(take, "y")["prefixItems"] == [{"type": "integer"}, {"type": "string"}]


def test_named_types_stand_under_defs_and_are_built_from_arguments() -> None:
    @tool
    def take(unit: Unit, place: Place, tree: Node, filter: Filter) -> None: ...

    schema = parameters(take)
    assert schema["required"] == ["unit", "place", "tree", "filter"]
    assert schema["properties"]["tree"] == {"$ref": "#/$defs/Node"}
    assert sorted(schema["$defs"]) == ["Filter", "Node", "Place", "Unit"]
    text = '{"unit": "C", "place": {"city": "Rome"}, "tree": {"value": 1, "children": [{"value": 2}]}, "filter": {}}'
    arguments = take.parse_arguments(text)
    assert arguments == {
        "unit": Unit.CELSIUS,
        "place": Place("Rome"),
        "tree": Node(1, [Node(2)]),
        "filter": {},
    }


def test_defaults_are_shown_and_left_to_the_function() -> None:
    marker = object()

    @tool
    def take(a: int = 3, b: Unit = Unit.CELSIUS, c: list[int] = [1], d: str = None, e: Any = marker) -> None: ...  # type: ignore[assignment]  # noqa: B006, RUF013

    properties = parameters(take)["properties"]
    assert [properties[name].get("default", "absent") for name in "abcde"] == [3, "C", [1], None, "absent"]
    assert "required" not in parameters(take)
    assert properties["d"]["anyOf"] == [{"type": "string"}, {"type": "null"}]
    assert take.parse_arguments({"a": None, "d": None}) == {"d": None}


def test_local_types_are_found_though_annotations_are_text() -> None:
    class Local(TypedDict):
        n: int

    @tool
    def take(x: Local) -> None: ...

    @tool(name="other")
    def take_other(x: list[Local]) -> None: ...

    assert parameters(take)["$defs"]["Local"]["properties"] == {"n": {"type": "integer"}}
    assert prop(take_other)["items"] == {"$ref": "#/$defs/Local"}


def test_the_context_is_known_by_name_or_annotation() -> None:
    @tool
    def by_name(x: int, ctx) -> None: ...  # type: ignore[no-untyped-def]

    @tool
    def by_text(x: int, c: RolloutContext | None = None) -> None: ...

    class RolloutContextLike: ...

    RolloutContextLike.__name__ = "RolloutContext"

    def typed(x: int, c: Any) -> None: ...

    typed.__annotations__["c"] = RolloutContextLike

    def typed_optional(x: int, c: Any) -> None: ...

    typed_optional.__annotations__["c"] = Optional["RolloutContext"]
    tools = [by_name, by_text, tool(typed), tool(typed_optional)]
    assert [list(parameters(made)["properties"]) for made in tools] == [["x"]] * 4
    assert by_text.bound_call({"x": 1}, "the context")() is None


def star(*args: int) -> None: ...


def stars(**kwargs: int) -> None: ...


def positional(x: int, /) -> None: ...


def hidden(x: Hidden) -> None: ...


def custom(x: Tool) -> None: ...


def two_structs(x: Node | dict[str, int]) -> None: ...


def bad_syntax(x: int) -> None: ...


bad_syntax.__annotations__["x"] = "1 +"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (star, r"star: \*args"),
        (stars, r"stars: \*\*kwargs"),
        (positional, "'x' is positional-only"),
        (hidden, "'Hidden' is not defined"),
        (custom, "parameter 'x' has a type that JSON cannot carry"),
        (two_structs, "parameter 'x' .*more than one dict-like"),
        (bad_syntax, "cannot be evaluated"),
        (functools.partial(dict.fromkeys), "signature cannot be read|positional-only"),
        (type, "signature cannot be read"),
    ],
)
def test_what_a_model_could_not_fill_in_is_refused_at_once(function: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        tool(function)


def test_integer_keys_and_enums_are_read_from_text() -> None:
    @tool
    def take(x: dict[int, Unit]) -> None: ...

    assert take.parse_arguments('{"x": {"1": "F"}}') == {"x": {1: Unit.FAHRENHEIT}}


def test_limits_in_annotations_are_held() -> None:
    @tool
    def take(x: Annotated[int, msgspec.Meta(ge=1)] = 1) -> None: ...

    with pytest.raises(ToolArgumentError, match=">= 1 - at `x`"):
        take.parse_arguments('{"x": 0}')


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c"]), st.none() | st.integers() | st.text() | st.booleans() | st.floats()
    )
)
def test_arguments_are_of_the_declared_types_or_refused(given_arguments: dict[str, Any]) -> None:
    @tool
    def take(a: int, b: str = "", c: bool | None = None) -> None: ...

    try:
        arguments = take.parse_arguments(given_arguments)
    except ToolArgumentError:
        return
    assert type(arguments["a"]) is int
    assert type(arguments.get("b", "")) is str
    assert type(arguments.get("c")) in (bool, type(None))


# ---------------------------------------------------------------- docstrings

GOOGLE = """Book a flight.

    Only economy.

    Args:
        city (str, optional): where to,
            as a name
        *days: how many: at most 9

    Returns:
        str: the ticket
    Raises:
        ValueError: never
    """

NUMPY = """Book a flight.

    Only economy.

    Parameters
    ----------
    city : str
        where to,
        as a name
    days, nights : int, optional
        how many: at most 9

    Returns
    -------
    str
        the ticket
    """

SPHINX = """Book a flight.

    Only economy.

    :param str city: where to,
        as a name
    :param days: how many: at most 9
    :type days: int
    :returns: the ticket
    """


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX], ids=["google", "numpy", "sphinx"])
def test_docstrings_of_three_styles_are_read(text: str) -> None:
    docs = read_docstring(text)
    assert docs.description == "Book a flight.\n\nOnly economy."
    assert docs.parameters["city"] == "where to, as a name"
    assert docs.parameters["days"] == "how many: at most 9"
    assert set(docs.parameters) <= {"city", "days", "nights"}


def test_text_after_a_section_belongs_to_no_parameter() -> None:
    docs = read_docstring("Do it.\n\nArgs:\n    x: one\n    y:\nMore text.\n    z: not a parameter")
    assert docs.parameters == {"x": "one"}


@pytest.mark.parametrize("text", [None, "", "   "])
def test_no_docstring_says_nothing(text: str | None) -> None:
    assert read_docstring(text).description == ""


@settings(max_examples=30, deadline=None)
@given(
    st.text()
    | st.lists(
        st.sampled_from(["Args:", "Parameters", "----", ":param x: y", ":returns:", "  x: y", "x : int", ""])
    ).map("\n".join)
)
def test_any_docstring_can_be_read(text: str) -> None:
    assert all(isinstance(words, str) for words in read_docstring(text).parameters.values())


def test_the_annotation_wins_over_the_docstring() -> None:
    @tool
    def take(
        x: Annotated[int, msgspec.Meta(description="from the annotation", ge=0)], y: Annotated[int, msgspec.Meta(ge=0)]
    ) -> None:
        """Take.

        Args:
            x: from the docstring
            y: from the docstring
        """

    assert prop(take)["description"] == "from the annotation"
    assert prop(take, "y") == {"type": "integer", "minimum": 0, "description": "from the docstring"}
