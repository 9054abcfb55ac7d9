"""JSON at the edge: what is refused on the way in, and that nothing on the way out is ever lost or broken."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
import string
import uuid
from collections import OrderedDict, UserDict, deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollout.errors import InvalidJSON
from rollout.wire import (
    MAX_DEPTH,
    canonical_digest,
    check_body,
    decode,
    digest,
    encode,
    encode_strict,
    nests_deeper,
    plain,
)

TRICKY_TEXT = st.text(alphabet='[]{}"\\:,aé\n', max_size=12) | st.text(max_size=5)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | TRICKY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TRICKY_TEXT, inner, max_size=4),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    """How deep a JSON value nests, by the book."""
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


def wrapped(value: Any, brackets: str) -> Any:
    """The value inside as many lists and objects as there are brackets."""
    for bracket in brackets:
        value = [value] if bracket == "[" else {"k[": value}
    return value


# ---------------------------------------------------------------- nests_deeper


@settings(max_examples=30, deadline=None)
@given(JSON_VALUES, st.text(alphabet="[{", max_size=30), st.integers(0, 40), st.booleans(), st.sampled_from([None, 1]))
def test_nesting_is_measured_as_a_parser_would(
    value: Any, brackets: str, limit: int, ascii_only: bool, indent: int | None
) -> None:
    value = wrapped(value, brackets)

    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()

    assert nests_deeper(text, limit) is (depth_of(value) > limit)


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"), ('{"a":[', "]}"), ('[[{"a":', "}]]"), ('{"[":{"]":[', "]}}")],
)
def test_the_limit_is_exact_however_arrays_and_objects_alternate(opening: str, closing: str) -> None:
    levels = len(closing)
    for units in (1, MAX_DEPTH // levels, MAX_DEPTH // levels + 1, 2 * MAX_DEPTH):
        text = (opening * units + "1" + closing * units).encode()

        assert nests_deeper(text) is (units * levels > MAX_DEPTH)


def test_a_hostile_depth_is_found_without_recursion() -> None:
    assert nests_deeper(b"[" * 1_000_000)
    assert nests_deeper(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)


def test_many_brackets_side_by_side_are_not_deep() -> None:
    assert not nests_deeper(b"[" + b",".join([b"[]"] * 100_000) + b"]", 2)


# ---------------------------------------------------------------- check_body, decode


@given(st.binary(max_size=40))
def test_any_bytes_are_decoded_or_refused_as_invalid_json(body: bytes) -> None:
    try:
        value = decode(body)
    except InvalidJSON:
        return
    assert decode(encode_strict(value)) == value


@settings(max_examples=30, deadline=None)
@given(JSON_VALUES)
def test_text_and_bytes_decode_alike(value: Any) -> None:
    text = json.dumps(value)

    assert decode(text) == decode(text.encode()) == value


@pytest.mark.parametrize(
    "text",
    ["", "{", "NaN", "[1] 2", '"\\ud800"', '"\ud800"', "[" * 101 + "]" * 101, "[" * 100_000, "1e999", "\ufeff{}"],
    ids=["empty", "open", "nan", "trailing", "escape", "surrogate", "deep", "very-deep", "out-of-range", "bom"],
)
def test_what_is_not_strictly_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidJSON):
        decode(text)


def test_bad_utf8_is_refused_with_its_place() -> None:
    with pytest.raises(InvalidJSON, match=r"byte 7 is 0xff"):
        check_body(b'{"a": "\xff"}')


def test_a_body_may_nest_to_the_limit_and_not_beyond() -> None:
    check_body(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(InvalidJSON, match="deeper than 100"):
        check_body(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


# ---------------------------------------------------------------- digests


def respelled(text: str) -> bytes:
    """The same JSON text with every character inside strings escaped."""
    value = json.loads(text)
    return json.dumps(_escape(value)).replace("\\\\u", "\\u").encode()


def _escape(value: Any) -> Any:
    if isinstance(value, dict):
        return {_escape(k): _escape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escape(v) for v in value]
    if isinstance(value, str):
        return "".join(f"\\u{unit:04x}" for unit in memoryview(value.encode("utf-16-le")).cast("H"))
    return value


def with_float_spelling(value: Any) -> Any:
    """The same value, integers written as floats."""
    if isinstance(value, dict):
        return {k: with_float_spelling(v) for k, v in value.items()}
    if isinstance(value, list):
        return [with_float_spelling(v) for v in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: reversed_keys(v) for k, v in reversed(value.items())}
    return [reversed_keys(v) for v in value] if isinstance(value, list) else value


@settings(max_examples=30, deadline=None)
@given(JSON_VALUES)
def test_spelling_makes_no_difference_to_the_canonical_digest(value: Any) -> None:
    text = json.dumps(value)

    expected = canonical_digest(text.encode())

    assert canonical_digest(json.dumps(value, indent=3, ensure_ascii=False).encode()) == expected
    assert canonical_digest(json.dumps(reversed_keys(value)).encode()) == expected
    assert canonical_digest(json.dumps(with_float_spelling(value)).encode()) == expected
    assert canonical_digest(respelled(text)) == expected


def tagged(value: Any) -> Any:
    """A form in which equal means equal as JSON: True is not 1."""
    if isinstance(value, dict):
        return {k: tagged(v) for k, v in value.items()}
    if isinstance(value, list):
        return [tagged(v) for v in value]
    return ("bool", value) if isinstance(value, bool) else value


@settings(max_examples=30, deadline=None)
@given(JSON_VALUES, JSON_VALUES)
def test_different_values_have_different_digests(one: Any, other: Any) -> None:
    assume(tagged(one) != tagged(other))

    assert canonical_digest(json.dumps(one).encode()) != canonical_digest(json.dumps(other).encode())


@pytest.mark.parametrize(("one", "other"), [(b"1", b"true"), (b"0", b"null"), (b'"1"', b"1"), (b"[]", b"{}")])
def test_values_of_other_kinds_differ(one: bytes, other: bytes) -> None:
    assert canonical_digest(one) != canonical_digest(other)


def test_the_plain_digest_stands_for_the_bytes() -> None:
    assert digest(b"[1]") == digest(b"[1]")
    assert digest(b"[1]") != digest(b"[1.0]")


# ---------------------------------------------------------------- encode


class Colour(enum.Enum):
    RED = "red"


class TextColour(str, enum.Enum):  # noqa: UP042 - its str() is not its value, and that is the point
    RED = "red"


class NewTextColour(enum.StrEnum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = dataclasses.field(init=False, repr=False)  # never set


class Named(msgspec.Struct, omit_defaults=True, rename="camel", tag="named"):
    some_field: Any
    other_field: Any = None
    left_out: Any = msgspec.UNSET


class Scalar:
    """What a NumPy scalar looks like from outside."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value


class Array:
    """What a NumPy array looks like from outside."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def tolist(self) -> list[Any]:
        return self.values

    def item(self) -> Any:
        raise ValueError("can only convert an array of size 1")


class Model:
    """What a Pydantic model looks like from outside."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        return self.fields


class Chain:
    """Converts into another of its kind, for ever."""

    def item(self) -> Any:
        return Chain()


class Hostile:
    """Everything that can be asked of it fails."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):  # hypothesis looks at these when it prints a failing case
            return object.__getattribute__(self, name)
        raise RuntimeError(name)


class HostileKey:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class HostileMapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError(key)

    def __iter__(self) -> Iterator[str]:
        yield "a"

    def __len__(self) -> int:
        return 1


class HostileList(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no items")


class LyingInt(int):
    def __int__(self) -> int:
        raise RuntimeError("no number")

    def bit_length(self) -> int:
        raise RuntimeError("no length")


def cycle(kind: str) -> Any:
    if kind == "list":
        items: list[Any] = [1]
        items.append({"items": items})
        return items
    point = Point(1)
    point.y = point
    return point


AWKWARD = st.one_of(
    st.floats(),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**1023, 2**64, -(2**63)]),
    st.text(alphabet=st.characters(codec=None, categories=None), max_size=4),
    st.binary(max_size=4),
    st.binary(max_size=4).map(bytearray),
    st.binary(max_size=4).map(lambda data: memoryview(data)),
    st.decimals(),
    st.sampled_from([decimal.Decimal("1e400"), decimal.Decimal("sNaN"), decimal.Decimal("1e-999999")]),
    st.fractions(),
    st.complex_numbers(),
    st.datetimes(timezones=st.none() | st.just(datetime.UTC)),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.sampled_from([*Colour, *TextColour, *NewTextColour, *Number]),
    st.sampled_from([object(), object, int, print, ..., NotImplemented, msgspec.UNSET, Hostile(), Chain()]),
    st.sampled_from([HostileMapping(), HostileList([1]), LyingInt(5), Slotted(1), range(3)]),
    st.sampled_from(["list", "dataclass"]).map(cycle),
    st.sampled_from([b"[1]", b'{"a":null}', b"[" * 200]).map(msgspec.Raw),
)
KEYS = (
    st.text(alphabet=st.characters(codec=None, categories=None), max_size=3)
    | st.integers()
    | st.floats()
    | st.binary(max_size=3)
    | st.booleans()
    | st.none()
    | st.tuples(st.integers())
    | st.uuids()
    | st.sampled_from([*Colour, *TextColour, *Number])
    | st.builds(HostileKey)
)
OBJECTS = st.recursive(
    st.none() | st.booleans() | AWKWARD,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=2).map(MappingProxyType),
        st.dictionaries(KEYS, inner, max_size=2).map(UserDict),
        st.sets(st.integers() | st.floats() | st.text(max_size=2), max_size=3),
        st.frozensets(st.binary(max_size=2) | st.integers(), max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Named, inner, inner),
        st.builds(Scalar, inner),
        st.lists(inner, max_size=3).map(Array),
        st.builds(Model, a=inner),
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(OBJECTS)
def test_whatever_is_encoded_is_strict_json_afterwards(value: Any) -> None:
    text, problems = encode(value)

    decode(text)
    assert all(isinstance(problem, str) for problem in problems)


MEANINGFUL = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.decimals(allow_nan=False, allow_infinity=False, min_value=-1000, max_value=1000, places=2)
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.sampled_from([*Colour, *TextColour, *NewTextColour, *Number]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.text(max_size=3) | st.integers() | st.uuids() | st.sampled_from(TextColour), inner, max_size=3
        ),
        st.builds(Point, inner, inner),
        st.builds(Named, inner, inner),
        st.lists(inner, max_size=3).map(Array),
    ),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None)
@given(MEANINGFUL)
def test_one_bad_value_changes_nothing_about_the_others(value: Any) -> None:
    alone, no_problems = encode([value])
    beside, problems = encode([value, math.nan])

    assert no_problems == []
    assert problems == ["$[1] is nan, which JSON cannot hold"]
    assert decode(beside) == [*decode(alone), None]


@settings(max_examples=30, deadline=None)
@given(JSON_VALUES)
def test_json_values_travel_unchanged(value: Any) -> None:
    text, problems = encode(value)

    assert decode(text) == value
    assert problems == []
    assert plain(value) == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Scalar(1.5), 1.5),
        (Array([1, [2.0]]), [1, [2.0]]),
        (Model(a={"b": 1}), {"a": {"b": 1}}),
        ((1, {2}, frozenset([3])), [1, [2], [3]]),
        (deque([1]), [1]),
        (range(3), [0, 1, 2]),
        (decimal.Decimal("1.50"), 1.5),
        (decimal.Decimal("3"), 3),
        ([decimal.Decimal("1E+5"), "1E+500"], [100000, "1E+500"]),
        ([None, decimal.Decimal("0.5"), b"a", 3], [None, 0.5, "YQ==", 3]),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC), "2026-01-02T03:04:00Z"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (Colour.RED, "red"),
        (TextColour.RED, "red"),
        ({Colour.RED: 1, TextColour.RED: 1}, {"red": 1}),
        (Number.ONE, 1),
        (Point(1, 2), {"x": 1, "y": 2}),
        (Named(1), {"type": "named", "someField": 1}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        ({1: "a", None: "b", False: "c"}, {"1": "a", "null": "b", "false": "c"}),
        ("half an emoji \ud83d", "half an emoji \ufffd"),
        ({"\udc00": 1}, {"\ufffd": 1}),
        (msgspec.Raw(b'{"a": 1}'), {"a": 1}),
        ([msgspec.Raw(b'{"a": 1}'), "\ud800"], [{"a": 1}, "\ufffd"]),
    ],
)
def test_what_has_a_plain_meaning_becomes_it(value: Any, expected: Any) -> None:
    text, problems = encode(value)

    assert decode(text) == expected
    assert problems == []


@pytest.mark.parametrize(
    ("value", "expected", "problem"),
    [
        ({"a": [1, math.nan]}, {"a": [1, None]}, "$.a[1] is nan, which JSON cannot hold"),
        ((math.inf,), [None], "$[0] is inf, which JSON cannot hold"),
        ([None, -math.inf], [None, None], "$[1] is -inf, which JSON cannot hold"),
        ({"a": decimal.Decimal("NaN")}, {"a": None}, "$.a is nan, which JSON cannot hold"),
        (Point(None, Scalar(math.nan)), {"x": None, "y": None}, "$.y is nan, which JSON cannot hold"),
        ([object()], ["<object>"], "$[0] is a object, which JSON cannot hold"),
        ([Colour], ["<EnumType>"], "$[0] is a EnumType, which JSON cannot hold"),
        ([decimal.Decimal("1e400")], [None], "$[0] is inf, which JSON cannot hold"),
        ([decimal.Decimal("-1e999999999")], [None], "$[0] is -inf, which JSON cannot hold"),
        ([Scalar(decimal.Decimal("NaN")), (None, {1})], [None, [None, [1]]], "$[0] is nan, which JSON cannot hold"),
        (
            [LyingInt(5), "\ud800"],
            ["<LyingInt>", "\ufffd"],
            "$[0] is a LyingInt that could not be converted (RuntimeError)",
        ),
        ([10**5000], [None], "$[0] is an integer of 16610 bits"),
        ({"a": 1j}, {"a": "<complex>"}, "$.a is a complex, which JSON cannot hold"),
        ([Array([])], [[]], None),
        (
            {"a": HostileMapping()},
            {"a": "<HostileMapping>"},
            "$.a is a HostileMapping that could not be converted (RuntimeError)",
        ),
        ([Slotted(1), object()], [{"x": 1}, "<object>"], "$[1] is a object, which JSON cannot hold"),
    ],
)
def test_what_json_cannot_hold_is_replaced_and_named(value: Any, expected: Any, problem: str | None) -> None:
    text, problems = encode(value)

    assert decode(text) == expected
    assert problems == ([] if problem is None else [problem])


def test_a_value_that_contains_itself_is_cut_there() -> None:
    text, problems = encode(cycle("list"), "final_messages")

    assert decode(text) == [1, {"items": None}]
    assert problems == ["final_messages[1].items contains itself"]


def test_the_same_object_twice_is_no_cycle() -> None:
    shared = {"a": object()}

    text, problems = encode([shared, shared])

    assert decode(text) == [{"a": "<object>"}] * 2
    assert len(problems) == 2


def test_what_nests_too_deep_is_cut_and_the_rest_travels() -> None:
    text, problems = encode({"good": 1, "deep": wrapped(1, "[" * 3000)})

    assert decode(text)["good"] == 1
    assert len(problems) == 1
    assert problems[0].endswith("nests deeper than 100 levels")


def test_a_depth_that_we_would_take_ourselves_we_also_send() -> None:
    value = wrapped(1, "[{" * 50)

    text, problems = encode(value)

    assert decode(text) == value
    assert problems == []


def test_letters_of_every_plane_survive() -> None:
    value = string.printable + "é中😀\u2028\x00"

    assert decode(encode([value, math.nan])[0])[0] == value
