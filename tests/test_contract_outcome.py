"""The contract, sections 3 and 8: whatever an agent returns becomes one valid result."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import math
import uuid
from typing import Any

import msgspec
import pytest
from conftest import Serve
from hypothesis import given
from hypothesis import strategies as st
from served import Chat
from support import OK, USER, Doing

import rollout
from rollout import (
    RolloutContext,
    RolloutMetrics,
    RolloutResult,
    RolloutStatus,
    tool,
)
from rollout.agent.outcome import outcome_of
from rollout.testing import MockTrainer, completion, run_agent, tool_calls


async def returned(result_of: Any) -> rollout.RolloutResponse:
    """What the trainer gets of an agent that returns what the function makes of its context."""
    return await run_agent(Doing(result_of))


# ---------------------------------------------------------------- rewards


class NumpyLike:
    """What NumPy scalars, arrays and tensors have in common."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def item(self) -> Any:
        """The one element; raises as NumPy does if there are more."""
        if isinstance(self._value, list):
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self._value


class Level(enum.IntEnum):
    """A number with a name."""

    HIGH = 3


GOOD_REWARDS = [
    (0, 0),
    (1, 1),
    (-1.5, -1.5),
    (1e308, 1e308),
    (5e-324, 5e-324),
    (-0.0, 0),
    (2**53, 2**53),
    (decimal.Decimal("0.1"), 0.1),
    (fractions.Fraction(1, 4), 0.25),
    (NumpyLike(0.75), 0.75),
    (NumpyLike(3), 3),
    (Level.HIGH, 3),
    (None, None),
]
BAD_REWARDS = [
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    "1",
    "0.5",
    "nan",
    "",
    b"1",
    [],
    [1.0],
    {},
    1j,
    object(),
    10**400,
    decimal.Decimal("NaN"),
    decimal.Decimal("sNaN"),
    decimal.Decimal("Infinity"),
    decimal.Decimal("1e999"),
    fractions.Fraction(10**400),
    NumpyLike(math.nan),
    NumpyLike(True),
    NumpyLike("1"),
    NumpyLike([1, 2]),
    NumpyLike(None),
    RolloutStatus.ERROR,
]


@pytest.mark.parametrize(("reward", "sent"), GOOD_REWARDS, ids=repr)
async def test_a_finite_number_is_a_reward(reward: Any, sent: Any) -> None:
    response = await returned(lambda ctx: ctx.complete(USER, reward=reward))
    assert (response.status, response.reward) == ("COMPLETED", sent)
    assert response.error_message is None


@pytest.mark.parametrize("reward", BAD_REWARDS, ids=lambda reward: repr(reward)[:30])
async def test_what_is_no_finite_number_ends_the_rollout_as_a_validation_error(reward: Any) -> None:
    response = await returned(lambda ctx: ctx.complete(USER, reward=reward, extra_fields={"kept": 1}))
    assert (response.status, response.error_category) == ("ERROR", "validation_error")
    assert (response.reward, response.retryable) == (None, False)
    assert "reward" in (response.error_message or "")
    assert response.final_messages == USER, "the rest of the result is kept"
    assert response.extra_fields == {"kept": 1}


async def test_a_bad_reward_on_an_error_keeps_the_error_text() -> None:
    def run(ctx: RolloutContext) -> RolloutResult:
        result = ctx.error("the reason")
        result.reward = math.nan
        return result

    response = await returned(run)
    assert "the reason" in (response.error_message or "")
    assert "reward" in (response.error_message or "")
    assert response.error_category == "validation_error"


# ---------------------------------------------------------------- odd values


class Color(enum.Enum):
    """An enum whose value is text."""

    RED = "red"


class Hostile:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise RuntimeError("str")

    __repr__ = __str__


UUID = uuid.UUID(int=1)
CONVERTED = [
    ((1, 2), [1, 2]),
    ({3}, [3]),
    (frozenset([3]), [3]),
    (datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC), None),
    (datetime.date(2026, 1, 2), "2026-01-02"),
    (decimal.Decimal("1.5"), 1.5),
    (UUID, str(UUID)),
    (Color.RED, "red"),
    (NumpyLike(7), 7),
    (b"bytes", None),
    ({1: "a"}, {"1": "a"}),
    (RolloutMetrics(num_llm_calls=2), None),
    ("\ud800", None),
    ("\0", "\0"),
    (2**70, 2**70),
]
NAMED = [math.nan, math.inf, NumpyLike(math.nan), object(), lambda: None, 10**5000, Hostile()]


@pytest.mark.parametrize(("value", "sent"), CONVERTED, ids=lambda value: repr(value)[:30])
async def test_what_has_a_plain_meaning_is_converted(value: Any, sent: Any) -> None:
    response = await returned(
        lambda ctx: ctx.complete([{"role": "tool", "content": value}], extra_fields={"x": [value]}, reward=1.0)
    )
    assert (response.status, response.reward, response.error_message) == ("COMPLETED", 1.0, None)
    assert response.extra_fields["x"] == [response.final_messages[0]["content"]]
    assert sent is None or response.extra_fields["x"] == [sent]


@pytest.mark.parametrize("value", NAMED, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("place", ["extra_fields", "final_messages"])
async def test_what_has_none_is_named_and_the_result_is_not_lost(value: Any, place: str) -> None:
    fields = {"fine": 1, "odd": value}

    def run(ctx: RolloutContext) -> RolloutResult:
        if place == "extra_fields":
            return ctx.complete(USER, extra_fields=fields, reward=1.0)
        return ctx.complete([fields], reward=1.0)

    response = await returned(run)
    assert response.reward == 1.0
    assert place in (response.error_message or "")


async def test_values_that_contain_themselves_or_nest_without_end_are_named() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    response = await returned(lambda ctx: ctx.complete(USER, extra_fields={"loop": loop, "deep": deep}, reward=1.0))
    assert response.reward == 1.0
    assert "loop" in (response.error_message or "")
    assert "deep" in (response.error_message or "")


@pytest.mark.parametrize("field", ["status", "final_messages", "finish_reason", "error_message", "metrics", "reward"])
@pytest.mark.parametrize(
    "value", [5, "text", b"bytes", object(), Hostile(), {"a": Hostile()}], ids=lambda v: str(type(v))
)
async def test_no_field_however_odd_costs_the_result(field: str, value: Any) -> None:
    def run(ctx: RolloutContext) -> RolloutResult:
        result = ctx.complete(USER, extra_fields={"kept": True})
        setattr(result, field, value)
        return result

    response = await returned(run)
    assert response.status in ("COMPLETED", "ERROR")
    assert response.extra_fields == {"kept": True}
    assert response.error_category in (None, "validation_error")


@pytest.mark.parametrize("value", ["text", 5, iter([OK]), {"role": "user"}])
async def test_final_messages_that_are_no_list_are_a_validation_error(value: Any) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        await ctx.chat(USER)
        result = ctx.complete([])
        result.final_messages = value
        return result

    response = await returned(run)
    assert (response.status, response.error_category) == ("ERROR", "validation_error")
    assert response.final_messages == [*USER, OK]


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary(max_size=5)
    | st.decimals()
    | st.dates()
    | st.uuids()
    | st.sampled_from([Color.RED, Level.HIGH, NumpyLike(1), NumpyLike([1])])
    | st.builds(Hostile),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(anything, anything, anything, anything)
def test_an_outcome_is_valid_json_whatever_the_agent_returns(a: Any, b: Any, c: Any, d: Any) -> None:
    result = RolloutResult(final_messages=[{"x": a}], reward=b, metrics=c, extra_fields={"x": d}, finish_reason="stop")
    outcome = outcome_of(
        "r", result, measured=RolloutMetrics(), extra_fields={}, reached=msgspec.Raw(b"[]"), category=None
    )
    sent = msgspec.json.decode(outcome.body, type=rollout.RolloutResponse)
    assert sent.reward is None or math.isfinite(sent.reward)
    assert (sent.status == "ERROR") == (sent.error_category is not None)


# ---------------------------------------------------------------- metrics


async def test_metrics_are_measured() -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    async def run(ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        answer = await ctx.chat(messages)
        messages += [answer.message, *await ctx.call_tools(answer.tool_calls)]
        messages.append((await ctx.chat(messages)).message)
        return ctx.complete(messages)

    first = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    second = {"prompt_tokens": 30, "completion_tokens": 2}
    calls = [("add", {"a": 1, "b": 2}), ("nothing", {})]
    response = await run_agent(
        Doing(run, [add]), answers=[tool_calls(calls, usage=first), completion("3", usage=second)]
    )
    metrics = response.metrics
    assert metrics is not None
    assert (metrics.num_llm_calls, metrics.num_tool_calls) == (2, 2)
    assert (metrics.prompt_tokens, metrics.response_tokens) == (40, 7)
    assert metrics.max_context_tokens == 32
    assert 0 < metrics.llm_latency_ms <= metrics.total_latency_ms
    assert 0 < metrics.tool_latency_ms <= metrics.total_latency_ms


@pytest.mark.parametrize(
    "usage", [None, {}, {"prompt_tokens": None}, {"prompt_tokens": "5"}, {"prompt_tokens": -5}, {"prompt_tokens": True}]
)
async def test_tokens_that_were_not_told_are_not_invented(usage: Any) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        await ctx.chat(USER)
        return ctx.complete(USER)

    metrics = (await run_agent(Doing(run), answers=[completion("ok", usage=usage)])).metrics
    assert metrics is not None
    assert (metrics.prompt_tokens, metrics.response_tokens, metrics.max_context_tokens) == (0, 0, 0)
    assert metrics.num_llm_calls == 1


async def test_metrics_keep_their_types_on_the_wire(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(Chat())
    await server.post_init(rollout_id="a")
    metrics = (await trainer.wait_completed("a")).json["metrics"]
    floats = {"total_latency_ms", "llm_latency_ms", "tool_latency_ms"}
    ints = {"num_llm_calls", "num_tool_calls", "prompt_tokens", "response_tokens", "max_context_tokens"}
    assert set(metrics) == floats | ints
    assert all(type(metrics[name]) is float for name in floats)
    assert all(type(metrics[name]) is int for name in ints)


@pytest.mark.parametrize(
    ("given_metrics", "calls", "named"),
    [
        ({"num_llm_calls": 5}, 5, False),
        ({"num_llm_calls": 5.0}, 5, False),
        ({"num_llm_calls": NumpyLike(5)}, 5, False),
        ({"num_llm_calls": None, "own": [1]}, 0, False),
        ({"num_llm_calls": 5.5}, 0, True),
        ({"num_llm_calls": "5"}, 0, True),
        ({"num_llm_calls": True}, 0, True),
        ({"num_llm_calls": math.nan}, 0, True),
        (RolloutMetrics(num_llm_calls=5), 5, False),
        ("text", 0, True),
    ],
    ids=repr,
)
async def test_metrics_of_the_agent_stand_where_they_are_numbers(given_metrics: Any, calls: int, named: bool) -> None:
    def run(ctx: RolloutContext) -> RolloutResult:
        result = ctx.complete(USER, reward=1.0)
        result.metrics = given_metrics
        return result

    response = await returned(run)
    assert (response.status, response.reward) == ("COMPLETED", 1.0)
    assert response.metrics is not None
    assert response.metrics.num_llm_calls == calls
    assert ("metrics" in (response.error_message or "")) is named
