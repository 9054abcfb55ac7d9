"""From whatever an agent returned to one terminal result: odd values are converted or named, and nothing is lost."""

from __future__ import annotations

import decimal
import enum
import fractions
import math
from collections import UserDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutResult
from rollout.agent.outcome import Outcome, outcome_of
from rollout.agent.runner import Cause, RolloutRun, ended_before, ended_from_outside
from rollout.errors import BadCompletion, RolloutError, TrainerRefused, TrainerUnreachable
from rollout.schemas import ErrorCategory, RolloutMetrics, RolloutRequest, RolloutStatus
from rollout.testing import ScriptedLLM, make_request
from rollout.wire import decode

MEASURED = RolloutMetrics(total_latency_ms=5.0, num_llm_calls=2, prompt_tokens=7)
REACHED = Raw(b'[{"role":"user","content":"reached"}]')
REACHED_VALUE = [{"role": "user", "content": "reached"}]


def outcome(**fields: Any) -> Outcome:
    """The outcome of a result with these fields, assigned as an agent may."""
    result = RolloutResult()
    for name, value in fields.items():
        setattr(result, name, value)
    return outcome_of("r", result, measured=MEASURED, extra_fields={"own": 1}, reached=lambda: REACHED)


def body_of(found: Outcome) -> dict[str, Any]:
    """The body as a trainer decodes it; what the outcome says beside it has to agree."""
    body: dict[str, Any] = decode(found.body)
    assert body["rollout_id"] == "r"
    assert body["status"] == found.status
    assert body.get("finish_reason") == found.finish_reason
    assert body.get("error_message") == found.error_message
    assert body.get("error_category") == found.error_category
    return body


def sent(**fields: Any) -> dict[str, Any]:
    return body_of(outcome(**fields))


# ---------------------------------------------------------------- anything at all


class Scalar:
    """What a NumPy scalar looks like from outside."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class HostileMapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError(key)

    def __iter__(self) -> Iterator[str]:
        yield "a"

    def __len__(self) -> int:
        return 1


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = object.__repr__


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(alphabet=st.characters(codec=None, categories=None), max_size=4),
    st.binary(max_size=4),
    st.sampled_from([10**400, -(10**400), 2**1023, decimal.Decimal("1e400"), decimal.Decimal("sNaN")]),
    st.sampled_from([decimal.Decimal("0.5"), fractions.Fraction(1, 3), fractions.Fraction(10**400), 1j, object(), int]),
    st.sampled_from([Scalar(0.5), Scalar(math.nan), Scalar("x"), Scalar(ValueError("many")), HostileMapping()]),
    st.sampled_from([Unprintable(), {1, 2}, deque([1]), range(2), iter([1]), REACHED, "COMPLETED", "ERROR", "STARTED"]),
    st.sampled_from([*RolloutStatus, *ErrorCategory]),
    st.lists(st.dictionaries(st.text(max_size=2), st.floats() | st.just("\ud800"), max_size=2), max_size=2),
    st.dictionaries(st.text(max_size=2) | st.just("\udc00"), st.floats() | st.builds(object), max_size=2),
    st.dictionaries(st.sampled_from(RolloutMetrics.__struct_fields__), st.floats() | st.text(max_size=2), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2).map(UserDict),
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(RolloutResult.__struct_fields__), ODD, max_size=4))
def test_whatever_an_agent_puts_into_its_result_there_is_one(fields: dict[str, Any]) -> None:
    body = sent(**fields)

    assert body["status"] in ("COMPLETED", "ERROR")
    assert isinstance(body["final_messages"], list)
    assert isinstance(body["extra_fields"], dict)
    assert isinstance(body["metrics"], dict)
    assert body.get("reward") is None or math.isfinite(body["reward"])
    if body["status"] == "ERROR":
        assert body["error_message"]
        assert body["finish_reason"] != "stop"
        assert isinstance(body["retryable"], bool)
        assert body["error_category"] in list(ErrorCategory)
    else:
        assert "error_category" not in body
        assert "retryable" not in body


# ---------------------------------------------------------------- what goes well


def test_a_plain_result_goes_out_as_it_is() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]

    body = sent(final_messages=messages, reward=0.25, extra_fields={"a": [1, None]})

    assert body == {
        "rollout_id": "r",
        "status": "COMPLETED",
        "final_messages": messages,
        "metrics": {name: getattr(MEASURED, name) for name in RolloutMetrics.__struct_fields__},
        "extra_fields": {"own": 1, "a": [1, None]},
        "finish_reason": "stop",
        "reward": 0.25,
    }


def test_the_agents_extra_fields_win_over_the_contexts() -> None:
    assert sent(extra_fields={"own": 2})["extra_fields"] == {"own": 2}
    assert sent(extra_fields=None)["extra_fields"] == {"own": 1}


def test_a_completed_rollout_without_messages_has_none() -> None:
    assert sent()["final_messages"] == []
    assert sent(final_messages=Raw(b'[{"a":1}]'))["final_messages"] == [{"a": 1}]


def test_a_result_may_complete_with_a_remark() -> None:
    body = sent(error_message="but slowly", finish_reason="my_own")

    assert (body["status"], body["error_message"], body["finish_reason"]) == ("COMPLETED", "but slowly", "my_own")


class OwnReason(enum.Enum):
    TIRED = "tired"


@pytest.mark.parametrize(
    ("reason", "expected"), [(OwnReason.TIRED, "tired"), (7, "7"), (None, None), ("x" * 9000, "x" * 4000)]
)
def test_a_finish_reason_becomes_text(reason: Any, expected: str | None) -> None:
    assert sent(finish_reason=reason).get("finish_reason") == expected


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (None, None),
        (0, 0),
        (-1.5, -1.5),
        (2**70, 2**70),
        (Scalar(0.5), 0.5),
        (Scalar(3), 3),
        (decimal.Decimal("0.5"), 0.5),
        (fractions.Fraction(1, 4), 0.25),
    ],
    ids=str,
)
def test_a_number_is_a_reward(reward: Any, expected: float | None) -> None:
    body = sent(reward=reward)

    assert (body["status"], body.get("reward")) == ("COMPLETED", expected)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (math.nan, "reward is nan, not a finite number"),
        (math.inf, "reward is inf, not a finite number"),
        (True, "reward is True, not a number"),
        ("1.0", "reward is '1.0', not a number"),
        ([1.0], "reward is a list, not a number"),
        (10**400, "reward is an integer of 1329 bits"),
        (Scalar(math.nan), "reward is nan, not a finite number"),
        (Scalar(True), "not a number"),
        (Scalar(ValueError("many")), "reward is a Scalar that is no single number (ValueError)"),
        (decimal.Decimal("NaN"), "reward is nan, not a finite number"),
        (decimal.Decimal("sNaN"), "reward is a Decimal"),
        (fractions.Fraction(10**400), "reward is a Fraction that is no single number (OverflowError)"),
        (1j, "reward is a complex, not a number"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_finite_number_ends_the_rollout_as_an_error(reward: Any, says: str) -> None:
    body = sent(reward=reward, final_messages=[{"a": 1}])

    assert (body["status"], body["error_category"], body.get("reward")) == ("ERROR", "validation_error", None)
    assert says in body["error_message"]
    assert body["final_messages"] == [{"a": 1}]
    assert body["retryable"] is False


# ---------------------------------------------------------------- errors


def test_an_error_without_messages_reports_what_was_reached() -> None:
    assert sent(status="ERROR")["final_messages"] == REACHED_VALUE
    assert sent(status="ERROR", final_messages=[{"a": 1}])["final_messages"] == [{"a": 1}]


def test_an_error_always_has_a_message_and_a_reason() -> None:
    body = sent(status="ERROR", error_message="", finish_reason="stop")

    assert body["error_message"] == "the agent ended the rollout as an error and gave no reason"
    assert (body["finish_reason"], body["error_category"], body["retryable"]) == ("error", "agent_error", False)


@pytest.mark.parametrize("status", ["STARTED", "completed", "", None, 1, [], object(), Unprintable()])
def test_a_status_that_is_no_end_is_an_error(status: Any) -> None:
    body = sent(status=status)

    assert (body["status"], body["error_category"]) == ("ERROR", "validation_error")
    assert "status is" in body["error_message"]


@pytest.mark.parametrize("messages", ["text", 5, {"role": "user"}, iter([])], ids=["text", "int", "dict", "iterator"])
def test_messages_that_are_no_list_are_an_error_that_reports_what_was_reached(messages: Any) -> None:
    body = sent(final_messages=messages)

    assert (body["status"], body["error_category"]) == ("ERROR", "validation_error")
    assert body["final_messages"] == REACHED_VALUE
    assert "final_messages is" in body["error_message"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"extra_fields": {"a": math.nan}}, "extra_fields.a is nan, which JSON cannot hold"),
        ({"extra_fields": [1]}, "extra_fields is a list, not an object"),
        ({"extra_fields": {"a": object()}}, "extra_fields.a is a object, which JSON cannot hold"),
        ({"final_messages": [{"a": math.inf}]}, "final_messages[0].a is inf, which JSON cannot hold"),
        ({"metrics": 5}, "metrics is 5, not an object"),
        ({"metrics": {"own": math.nan}}, "metrics.own is nan, which JSON cannot hold"),
        ({"extra_fields": {"\ud800": math.nan}}, "extra_fields.\ufffd is nan, which JSON cannot hold"),
    ],
    ids=str,
)
def test_what_json_cannot_hold_is_named_and_the_rest_goes_out(fields: dict[str, Any], says: str) -> None:
    body = sent(reward=1.0, **fields)

    assert (body["status"], body["reward"]) == ("COMPLETED", 1.0)
    assert says in body["error_message"]


def test_a_mapping_that_fails_costs_itself_only() -> None:
    body = sent(reward=1.0, extra_fields=HostileMapping(), metrics=HostileMapping())

    assert (body["reward"], body["extra_fields"]) == (1.0, {"own": 1})
    assert body["metrics"]["num_llm_calls"] == 2
    assert body["error_message"]


def test_what_is_said_is_bounded() -> None:
    body = sent(status="ERROR", error_message="x" * 100_000, extra_fields={"y" * 5000: math.nan})

    assert len(body["error_message"]) == 4000


# ---------------------------------------------------------------- metrics


def test_the_agents_metrics_go_over_the_measured_ones() -> None:
    body = sent(metrics={"prompt_tokens": 9, "mine": "x", "num_llm_calls": None})

    assert body["metrics"]["prompt_tokens"] == 9
    assert body["metrics"]["mine"] == "x"
    assert body["metrics"]["num_llm_calls"] == 2


def test_metrics_of_another_kind_do_not_replace_measured_ones() -> None:
    body = sent(metrics={"prompt_tokens": "nine", "total_latency_ms": math.nan})

    assert (body["metrics"]["prompt_tokens"], body["metrics"]["total_latency_ms"]) == (7, 5.0)
    assert "metrics.prompt_tokens" in body["error_message"]


# ---------------------------------------------------------------- ended by a run, or from outside


def make_context(*answers: Any, **fields: Any) -> RolloutContext:
    request = RolloutRequest(**make_request(rollout_id="r", **fields))
    return RolloutContext(request, ScriptedLLM(answers))


class Doing:
    """An agent whose run is the function it was given."""

    def __init__(self, run: Any) -> None:
        self.run = run


async def run(what: Any, *answers: Any, **fields: Any) -> dict[str, Any]:
    return body_of(await RolloutRun(Doing(what), make_context(*answers, **fields)).run())


async def test_a_limit_that_is_let_pass_completes_with_what_was_reached() -> None:
    async def chats_for_ever(ctx: RolloutContext) -> Any:
        messages = ctx.request.messages
        while True:
            messages.append((await ctx.chat(messages)).message)

    body = await run(chats_for_ever, "one", "two", max_turns=2)

    assert (body["status"], body["finish_reason"]) == ("COMPLETED", "max_turns")
    assert [message.get("content") for message in body["final_messages"][1:]] == ["one", "two"]


@pytest.mark.parametrize(
    ("failure", "retryable"),
    [(TrainerUnreachable("gone"), True), (TrainerRefused("no", 404), False), (BadCompletion("what"), False)],
    ids=["unreachable", "refused", "bad"],
)
async def test_an_llm_error_that_is_let_pass_says_whether_another_try_may_help(
    failure: RolloutError, retryable: bool
) -> None:
    async def chats(ctx: RolloutContext) -> Any:
        await ctx.chat(ctx.request.messages)

    body = await run(chats, failure)

    assert (body["error_category"], body["retryable"], body["error_message"]) == ("llm_error", retryable, str(failure))
    assert body["final_messages"] == [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.mark.parametrize(
    "exception", [ValueError("why"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError()]
)
async def test_whatever_an_agent_raises_is_its_own_error(exception: BaseException) -> None:
    async def raises(ctx: RolloutContext) -> Any:
        raise exception

    body = await run(raises)

    assert (body["status"], body["error_category"], body["retryable"]) == ("ERROR", "agent_error", False)
    assert body["error_message"].startswith(type(exception).__name__)


async def test_an_exception_without_a_readable_text_is_still_named() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    async def raises(ctx: RolloutContext) -> Any:
        raise Silent

    assert (await run(raises))["error_message"] == "Silent: (its text could not be read)"


class HostileMessages(Sequence[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("no item")

    def __len__(self) -> int:
        raise RuntimeError("no length")


async def test_a_result_that_fails_when_it_is_looked_at_is_an_error_that_says_so() -> None:
    def returns(ctx: RolloutContext) -> Any:
        result = ctx.error("why")
        result.final_messages = HostileMessages()  # type: ignore[assignment]
        return result

    body = await run(returns)

    assert (body["status"], body["error_category"]) == ("ERROR", "validation_error")
    assert "the result of run() cannot be read: RuntimeError: no length" in body["error_message"]


async def test_the_tokens_of_the_conversation_are_a_limit_too() -> None:
    seen = []

    async def chats_for_ever(ctx: RolloutContext) -> Any:
        while True:
            seen.append((ctx.remaining_turns, ctx.remaining_tokens))
            await ctx.chat([])

    body = await run(chats_for_ever, "one", "two", "three", max_turns=9, max_tokens_total=20)

    assert (body["status"], body["finish_reason"]) == ("COMPLETED", "max_tokens")
    assert seen == [(9, 20), (8, 5), (7, 0)]


@pytest.mark.parametrize("returned", [None, {"status": "COMPLETED"}, 5])
async def test_a_return_that_is_no_result_says_how_to_end(returned: Any) -> None:
    async def returns(ctx: RolloutContext) -> Any:
        return returned

    body = await run(returns)

    assert body["error_category"] == "agent_error"
    assert f"run() returned {type(returned).__name__}, not a RolloutResult" in body["error_message"]


async def test_a_run_that_is_no_coroutine_counts_too() -> None:
    body = await run(lambda ctx: ctx.complete([], reward=1))

    assert (body["status"], body["reward"]) == ("COMPLETED", 1)


@pytest.mark.parametrize(
    ("cause", "category", "retryable"),
    [
        (Cause.CANCELLED, "cancelled", False),
        (Cause.TIMEOUT, "timeout", True),
        (Cause.SHUTDOWN, "interrupted", True),
        (Cause.INTERRUPTED, "interrupted", True),
    ],
)
async def test_what_is_ended_from_outside_says_by_what(cause: Cause, category: str, retryable: bool) -> None:
    ctx = make_context("hello")
    await ctx.chat([{"role": "user"}])

    with_context = body_of(ended_from_outside("r", cause, ctx))
    without = body_of(ended_from_outside("r", cause))

    for body in (with_context, without):
        assert (body["status"], body["error_category"], body["retryable"]) == ("ERROR", category, retryable)
        assert body["finish_reason"] == cause.finish_reason
    assert [message["role"] for message in with_context["final_messages"]] == ["user", "assistant"]
    assert (with_context["metrics"]["num_llm_calls"], without["metrics"]["num_llm_calls"]) == (1, 0)
    assert without["final_messages"] == []


def test_what_ended_before_it_ran_here_reports_what_is_known_of_it() -> None:
    body = body_of(ended_before("r", Cause.INTERRUPTED, REACHED))

    assert (body["finish_reason"], body["error_category"], body["retryable"]) == ("interrupted", "interrupted", True)
    assert body["final_messages"] == REACHED_VALUE
