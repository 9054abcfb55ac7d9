"""PROTOCOL section 3: results and states, as a trainer sees them."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
from typing import Any

import msgspec
import pytest
from conftest import Serve
from served import Held, Instant

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.testing import completion, status, text, tool_calls

RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)\Z")


# ---------------------------------------------------------------- RolloutResponse


class Returns(RolloutAgentLoop):
    """`run()` does what it is given, with the context."""

    name = "returns"

    def __init__(self, make: Any) -> None:
        self.make = make

    async def run(self, ctx: RolloutContext) -> Any:
        return self.make(ctx)


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


async def result_of(serve: Serve, make: Any) -> dict[str, Any]:
    """What the trainer is sent, strictly decoded."""
    server = await serve(Returns(make))
    assert (await server.post_init(rollout_id="r")).status == 202
    body = (await server.trainer.wait_completed("r")).body
    result: dict[str, Any] = json.loads(body.decode("utf-8"), parse_constant=no_constants)
    msgspec.json.decode(body)
    assert (await server.get("/result/r")).body == body
    assert result["rollout_id"] == "r"
    state = (await server.get("/status/r")).json
    assert (state["status"], state.get("finish_reason")) == (result["status"], result.get("finish_reason"))
    return result


async def test_a_result_without_reward_or_error_leaves_them_out(serve: Serve) -> None:
    result = await result_of(serve, lambda ctx: ctx.complete(ctx.request.messages))
    assert (result["status"], result["finish_reason"], result["extra_fields"]) == ("COMPLETED", "stop", {})
    assert result["final_messages"] == [{"role": "user", "content": "What is 2 + 2?"}]
    assert not {"error_message", "error_category", "retryable"} & {k for k, v in result.items() if v is not None}
    assert result.get("reward") is None


async def test_metrics_are_measured(serve: Serve) -> None:
    class Works(RolloutAgentLoop):
        name = "works"

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            history = list(ctx.request.messages)
            for _ in range(2):
                result = await ctx.chat(history)
                history += [result.message, *(await ctx.call_tools(result.tool_calls))]
            return ctx.complete(history)

    server = await serve(Works())
    usages = [{"prompt_tokens": 100, "completion_tokens": 7}, {"prompt_tokens": 50, "completion_tokens": 3}]
    server.trainer.on_chat([tool_calls([("f", {}), ("g", {})], usage=usages[0]), text("x", usage=usages[1])])
    await server.post_init(rollout_id="r")
    metrics = (await server.trainer.wait_completed("r")).json["metrics"]
    counts = {name: value for name, value in metrics.items() if not name.endswith("_ms")}
    assert counts == {
        "num_llm_calls": 2,
        "num_tool_calls": 2,
        "prompt_tokens": 150,
        "response_tokens": 10,
        "max_context_tokens": 107,
    }
    assert 0 < metrics["llm_latency_ms"] <= metrics["total_latency_ms"] < 5000
    assert 0 <= metrics["tool_latency_ms"] <= metrics["total_latency_ms"]


@pytest.mark.parametrize("reward", [0, 1, -1.5, 0.0, 1e300, decimal.Decimal("0.25"), 2**60])
async def test_a_finite_reward_is_sent_as_a_number(serve: Serve, reward: Any) -> None:
    result = await result_of(serve, lambda ctx: ctx.complete([], reward=reward))
    assert (result["status"], result["reward"]) == ("COMPLETED", reward)
    assert type(result["reward"]) in (int, float)


class Scalar:
    """A number as NumPy has them."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value

    def tolist(self) -> Any:
        return self.value


async def test_a_numpy_like_reward_becomes_a_number(serve: Serve) -> None:
    assert (await result_of(serve, lambda ctx: ctx.complete([], reward=Scalar(0.5))))["reward"] == 0.5


@pytest.mark.parametrize(
    "reward",
    [math.nan, math.inf, -math.inf, True, False, "1", "nan", [1], {}, Scalar(math.nan), Scalar(True),
     decimal.Decimal("NaN"), decimal.Decimal("Infinity"), 10**400, object(), 1j],
    ids=lambda r: type(r).__name__,
)  # fmt: skip
async def test_any_other_reward_ends_the_rollout_as_a_validation_error(serve: Serve, reward: Any) -> None:
    messages = [{"role": "assistant", "content": "kept"}]
    result = await result_of(serve, lambda ctx: ctx.complete(messages, reward=reward))
    assert (result["status"], result["error_category"]) == ("ERROR", "validation_error")
    assert "reward" in result["error_message"]
    assert result.get("reward") is None
    assert isinstance(result["retryable"], bool)
    assert result["final_messages"] == messages


CONVERTED = {
    "tuple": ((1, 2), [1, 2]),
    "set": ({1}, [1]),
    "datetime": (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "2026-01-02T00:00:00Z"),
    "date": (datetime.date(2026, 1, 2), "2026-01-02"),
    "scalar": (Scalar(3), 3),
    "decimal": (decimal.Decimal("0.5"), 0.5),
    "number keys": ({1: {2.5: "x"}}, {"1": {"2.5": "x"}}),
    "nested": ([{"a": ({"b": Scalar(1)},)}], [{"a": [{"b": 1}]}]),
}


@pytest.mark.parametrize(("value", "sent"), CONVERTED.values(), ids=CONVERTED)
async def test_what_has_a_plain_meaning_is_converted(serve: Serve, value: Any, sent: Any) -> None:
    message = {"role": "assistant", "content": value}
    result = await result_of(serve, lambda ctx: ctx.complete([message], extra_fields={"x": value}))
    assert result["status"] == "COMPLETED"
    assert result["extra_fields"]["x"] == sent
    assert result["final_messages"] == [{"role": "assistant", "content": sent}]


LOST = {"NaN": math.nan, "inf": [math.inf], "object": object(), "function": print, "type": int, "big": 10**5000}


@pytest.mark.parametrize("where", ["extra_fields", "final_messages"])
@pytest.mark.parametrize("value", LOST.values(), ids=LOST)
async def test_what_has_none_is_named_and_the_result_is_not_lost(serve: Serve, value: Any, where: str) -> None:
    def make(ctx: RolloutContext) -> RolloutResult:
        if where == "extra_fields":
            return ctx.complete([{"role": "assistant", "content": "kept"}], extra_fields={"spot": value, "good": 1})
        return ctx.complete([{"role": "assistant", "content": "kept", "spot": value}], extra_fields={"good": 1})

    result = await result_of(serve, make)
    assert where in result["error_message"]
    assert "spot" in result["error_message"]
    assert result["extra_fields"]["good"] == 1
    assert result["final_messages"][0]["content"] == "kept"


async def test_lone_surrogates_and_cycles_do_not_lose_a_result(serve: Serve) -> None:
    loop: dict[str, Any] = {"text": "half \ud83e", "\ud83e": 1}
    loop["self"] = loop
    result = await result_of(serve, lambda ctx: ctx.complete([{"role": "assistant", **loop}], extra_fields=loop))
    assert "half" in result["final_messages"][0]["text"]


@pytest.mark.parametrize("returned", [None, 5, "done", {}, [], True, object], ids=str)
async def test_a_run_that_returns_no_result_is_an_agent_error(serve: Serve, returned: Any) -> None:
    result = await result_of(serve, lambda ctx: returned)
    assert (result["status"], result["finish_reason"], result["error_category"]) == ("ERROR", "error", "agent_error")
    assert result["retryable"] is False


@pytest.mark.parametrize("reason", ["stop", "max_turns", "own reason", "\u00e9"])
async def test_a_finish_reason_of_the_agents_own_is_sent(serve: Serve, reason: str) -> None:
    assert (await result_of(serve, lambda ctx: ctx.complete([], finish_reason=reason)))["finish_reason"] == reason


async def test_an_agents_own_error_keeps_what_it_handed_over(serve: Serve) -> None:
    def make(ctx: RolloutContext) -> RolloutResult:
        result = ctx.error("went wrong", final_messages=[{"role": "user", "content": "so far"}], extra_fields={"a": 1})
        result.reward = -1
        return result

    result = await result_of(serve, make)
    assert (result["status"], result["error_message"], result["error_category"]) == (
        "ERROR",
        "went wrong",
        "agent_error",
    )
    assert (result["final_messages"], result["extra_fields"]) == ([{"role": "user", "content": "so far"}], {"a": 1})
    assert result["reward"] == -1


async def test_an_error_holds_the_last_history_sent_and_its_answer(serve: Serve) -> None:
    class Fails(RolloutAgentLoop):
        name = "fails"

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            await ctx.chat(ctx.request.messages)
            raise ValueError("after the first turn")

    server = await serve(Fails())
    message = {"role": "assistant", "content": "one"}
    server.trainer.on_chat(completion("one"))
    await server.post_init(rollout_id="r", messages=[{"role": "user", "content": "q"}])
    result = (await server.trainer.wait_completed("r")).json
    assert result["final_messages"] == [{"role": "user", "content": "q"}, message]
    assert (result["status"], result["finish_reason"], result["error_category"]) == ("ERROR", "error", "agent_error")
    assert "after the first turn" in result["error_message"]
    assert result.get("reward") is None


# ---------------------------------------------------------------- RolloutState


async def test_a_state_grows_with_its_rollout(serve: Serve) -> None:
    agent = Held()
    server = await serve(agent, max_concurrent_rollouts=1)
    await server.post_init(rollout_id="first")
    await agent.running.wait()
    await server.post_init(rollout_id="r")
    queued = (await server.get("/status/r")).json
    assert (queued["status"], queued["phase"], queued["turn"]) == ("STARTED", "queued", 0)
    assert not {"started_at", "finished_at", "delivered_at"} & set(queued)
    assert None not in queued.values()
    agent.release.set()
    await server.result("r")
    state = await server.wait_phase("r")
    assert (state["status"], state["phase"], state["finish_reason"]) == ("COMPLETED", "delivered", "stop")
    assert state["delivery_attempts"] == 1
    times = [state[name] for name in ("created_at", "started_at", "finished_at", "delivered_at")]
    assert all(RFC_3339.match(time) for time in times)
    assert times == sorted(times)
    assert state["metrics"]["num_llm_calls"] == 0


async def test_a_state_tells_of_deliveries_that_failed(serve: Serve) -> None:
    server = await serve(Instant())
    server.trainer.on_completed(status(418))
    await server.post_init(rollout_id="r")
    await server.result("r")
    state = await server.wait_phase("r", "undelivered")
    assert (state["phase"], state["delivery_attempts"]) == ("undelivered", 1)
    assert "418" in state["last_delivery_error"]
    assert "delivered_at" not in state
