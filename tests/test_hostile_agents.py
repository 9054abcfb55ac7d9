"""Agents that break what they are given, leave things behind, or return what no encoder expects: each rollout ends with
one valid result, its slot is free again, and no other rollout notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from conftest import Serve
from msgspec import Raw
from served import Served
from stores import make_record
from support import OK, USER, Doing, state_of

import rollout
from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutResult
from rollout.errors import LLMError, RolloutError, TurnLimitReached
from rollout.schemas import Phase, RolloutStatus
from rollout.server import states
from rollout.state.memory import without_messages
from rollout.testing import MockTrainer, run_agent, tool_calls
from rollout.wire import decode, encode

BAD = Raw(b"{bad")


async def ended(server: Served, rollout_id: str = "r") -> dict[str, Any]:
    """The one result of a rollout that is started here; its slot must be free and its state readable then."""
    assert (await server.post_init(rollout_id=rollout_id)).status == 202
    result = await server.result(rollout_id)
    assert (await server.wait_phase(rollout_id))["status"] == result["status"]
    slots = (await server.get("/status")).json["slots"]
    assert slots == {"running": 0, "queued": 0}
    return result


async def end_of(run: Callable[[RolloutContext], Any], **options: Any) -> rollout.RolloutResponse:
    """What the trainer gets of an agent that does this; `run_agent()` decodes it, so it is valid JSON."""
    return await run_agent(Doing(run), **options)


# ---------------------------------------------------------------- what the agent holds, broken

REPLACED: dict[str, Any] = {
    "history": [],
    "metrics": None,
    "extra_fields": None,
    "limits": 5,
    "span": None,
    "request": None,
    "close": None,
    "measured": None,
    "_history": [],
    "_limits": 5,
}


@pytest.mark.parametrize(("name", "value"), REPLACED.items(), ids=REPLACED)
async def test_an_agent_that_replaces_a_part_of_its_context_frees_its_slot(name: str, value: Any, serve: Serve) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        answer = await ctx.chat(USER)
        setattr(ctx, name, value)
        return ctx.complete([*USER, answer.message])

    server = await serve(Doing(run))

    result = await ended(server)

    assert result["final_messages"] in ([*USER, OK], [])


@pytest.mark.parametrize("name", ["history", "metrics", "extra_fields", "limits", "span"])
async def test_what_a_result_is_made_of_cannot_be_replaced_and_the_error_says_so(name: str) -> None:
    async def run(ctx: RolloutContext) -> None:
        await ctx.chat(USER)
        setattr(ctx, name, None)

    response = await end_of(run)

    assert response.error_message is not None
    assert name in response.error_message
    assert response.final_messages == [*USER, OK]


@pytest.mark.parametrize("ends", ["cancel", "timeout"])
@pytest.mark.parametrize("name", ["close", "_history"])
async def test_a_broken_agent_that_will_not_end_loses_its_slot(ends: str, name: str, serve: Serve) -> None:
    broken, over = asyncio.Event(), asyncio.Event()

    async def run(ctx: RolloutContext) -> None:
        setattr(ctx, name, None)
        broken.set()
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    server = await serve(Doing(run), cancel_grace_seconds=0)
    limit: dict[str, Any] = {"timeout_seconds": 0.05} if ends == "timeout" else {}
    await server.post_init(rollout_id="r", **limit)
    await broken.wait()
    for _ in range(ends == "cancel"):
        assert await server.cancel(ids=["r"]) == {"r": "cancelled_running"}

    result = await server.result("r")
    over.set()

    assert result["error_category"] == {"cancel": "cancelled", "timeout": "timeout"}[ends]
    assert (await server.get("/status")).json["slots"]["running"] == 0


@pytest.mark.parametrize("value", [object(), None, "3", {}, math.nan, 10**400, MagicMock()], ids=repr)
async def test_a_metric_that_is_no_number_costs_that_metric_only(value: Any) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        answer = await ctx.chat(USER)
        result = ctx.complete([*USER, answer.message])
        assert result.metrics is not None
        result.metrics.num_tool_calls = value
        return result

    response = await end_of(run)

    assert response.metrics is not None
    assert (response.metrics.num_tool_calls, response.metrics.num_llm_calls) == (0, 1)
    assert response.final_messages == [*USER, OK]


async def test_metrics_of_the_agents_own_stand_over_broken_measured_ones() -> None:
    def run(ctx: RolloutContext) -> RolloutResult:
        ctx.metrics.num_tool_calls = object()  # type: ignore[assignment]
        ctx.metrics.prompt_tokens = 7
        return RolloutResult(metrics={"num_tool_calls": 3})  # type: ignore[arg-type]

    response = await end_of(run)

    assert response.metrics is not None
    assert (response.metrics.num_tool_calls, response.metrics.prompt_tokens) == (3, 7)


@pytest.mark.parametrize("turns", ["many", -1, 2**70])
async def test_turns_that_are_no_count_are_reported_as_none(turns: Any, serve: Serve, tmp_path: Path) -> None:
    def run(ctx: RolloutContext) -> RolloutResult:
        ctx.limits.turns = turns
        return ctx.complete(USER)

    server = await serve(Doing(run), state_url=f"sqlite:///{tmp_path / 'state.db'}")

    await ended(server)

    assert (await state_of(server, "r"))["turn"] == 0


@pytest.mark.parametrize("latency_ms", [math.nan, math.inf, -math.inf, -5.0])
async def test_a_latency_that_is_no_duration_counts_as_none(latency_ms: float, serve: Serve) -> None:
    def run(ctx: RolloutContext) -> RolloutResult:
        ctx.record_tool_call(latency_ms)
        ctx.record_tool_call(2)
        return ctx.complete(USER)

    server = await serve(Doing(run))

    metrics = (await ended(server))["metrics"]

    assert (metrics["num_tool_calls"], metrics["tool_latency_ms"]) == (2, 2.0)
    assert server.service.metrics.tool_seconds.sum == pytest.approx(0.002)


# ---------------------------------------------------------------- messages that are no list

NO_LISTS: dict[str, Callable[[], Any]] = {
    "an object": lambda: {"role": "user", "content": "x"},
    "a text": lambda: "hello",
    "a generator": lambda: (message for message in USER),
    "a Raw object": lambda: Raw(b"{}"),
    "a mock": MagicMock,
    "a Raw in it that is no JSON": lambda: [BAD],
}


@pytest.mark.parametrize("make", NO_LISTS.values(), ids=NO_LISTS)
async def test_chat_with_what_is_no_list_is_a_type_error(make: Callable[[], Any]) -> None:
    async def run(ctx: RolloutContext) -> None:
        await ctx.chat(make())

    response = await end_of(run)

    assert response.error_message is not None
    assert response.error_message.startswith("TypeError: messages ")
    assert response.final_messages == []
    assert response.metrics is not None
    assert response.metrics.num_llm_calls == 0


async def test_chat_with_an_object_leaves_the_history_as_it_was(serve: Serve) -> None:
    async def run(ctx: RolloutContext) -> None:
        await ctx.chat(USER)
        with contextlib.suppress(TypeError):
            await ctx.chat(USER[0])  # type: ignore[arg-type]
        raise ValueError("and now?")

    server = await serve(Doing(run))

    assert (await ended(server))["final_messages"] == [*USER, OK]


async def test_checkpoint_of_what_is_no_list_is_a_type_error(serve: Serve, tmp_path: Path) -> None:
    async def run(ctx: RolloutContext) -> None:
        await ctx.checkpoint("hello")  # type: ignore[arg-type]

    server = await serve(Doing(run), state_url=f"sqlite:///{tmp_path / 'state.db'}")

    assert (await ended(server))["error_message"] == "TypeError: messages must be a list of objects, not str"


BAD_RESULTS: dict[str, dict[str, Any]] = {
    "a message": {"final_messages": [BAD]},
    "inside a message": {"final_messages": [{"role": "user", "content": [BAD]}]},
    "the messages": {"final_messages": BAD},
    "messages that are no list": {"final_messages": Raw(b'{"a":1}')},
    "messages with bad UTF-8": {"final_messages": Raw(b'["\xff"]')},
    "an extra field": {"extra_fields": {"a": BAD, "b": 1}},
    "metrics": {"metrics": {"num_tool_calls": BAD}},
}


@pytest.mark.parametrize("fields", BAD_RESULTS.values(), ids=BAD_RESULTS)
async def test_raw_text_that_is_no_json_never_reaches_the_trainer(
    fields: dict[str, Any], serve: Serve, trainer: MockTrainer
) -> None:
    server = await serve(Doing(lambda ctx: RolloutResult(**fields)))

    result = await ended(server)

    assert decode(trainer.completions("r")[0].body) == result
    assert isinstance(result["final_messages"], list)


async def test_raw_text_that_is_json_arrives_as_it_is() -> None:
    given = RolloutResult(final_messages=Raw(b' [{"role":"user"} ]'), extra_fields={"a": Raw(b"[1]")})  # type: ignore[arg-type]

    response = await end_of(lambda ctx: given)

    assert (response.final_messages, response.extra_fields) == ([{"role": "user"}], {"a": [1]})
    assert response.error_message is None


async def test_an_answer_that_the_agent_spoils_costs_what_was_reached_and_no_more() -> None:
    async def run(ctx: RolloutContext) -> None:
        answer = await ctx.chat(USER)
        answer.message["content"] = BAD
        raise ValueError("spoilt")

    response = await end_of(run)

    assert (response.error_message, response.final_messages) == ("ValueError: spoilt", [])


def test_a_stored_result_that_is_no_json_still_has_a_state_and_can_be_dropped() -> None:
    record = make_record("r")
    record.status, record.phase, record.result = RolloutStatus.ERROR, Phase.DELIVERED, b'{"metrics":5,"a":[{bad'

    assert states.state_of(record, 2).turn == 2
    assert without_messages(record.result) == b"{}"


# ---------------------------------------------------------------- what an agent leaves behind


@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_a_timer_of_the_agent_that_cancels_its_task_too_late_loses_no_result(
    store: str, serve: Serve, trainer: MockTrainer, tmp_path: Path
) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        return ctx.complete(USER, reward=1.0)

    server = await serve(Doing(run), state_url="memory:" if store == "memory" else f"sqlite:///{tmp_path / 'state.db'}")

    result = await ended(server)

    assert (result["status"], result["reward"]) == ("COMPLETED", 1.0)
    assert {callback.body for callback in trainer.completions("r")} == {trainer.completions("r")[0].body}


async def test_a_stop_while_a_result_of_a_durable_store_is_on_its_way_waits_for_it(
    serve: Serve, trainer: MockTrainer, tmp_path: Path
) -> None:
    server = await serve(Doing(lambda ctx: ctx.complete(USER)), state_url=f"sqlite:///{tmp_path / 'state.db'}")
    await server.post_init(rollout_id="r")

    await server.service.stop(grace_seconds=1)

    assert len(trainer.completions("r")) == 1


# ---------------------------------------------------------------- objects that raise anything


class Raising:
    """Raises this when it is asked for its number or for its text."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def item(self) -> Any:
        raise self._error

    def __str__(self) -> str:
        raise self._error


ERRORS = [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("field", ["reward", "extra_fields", "finish_reason", "error_message"])
async def test_an_object_that_raises_when_it_is_looked_at_is_named_and_nothing_is_called_cancelled(
    field: str, error: BaseException
) -> None:
    given: Any = {"a": Raising(error)} if field == "extra_fields" else Raising(error)

    response = await end_of(lambda ctx: RolloutResult(final_messages=USER, **{field: given}))

    assert response.final_messages == USER
    assert response.error_category == ("validation_error" if field == "reward" else None)
    assert "Raising" in str((response.finish_reason, response.error_message))


@pytest.mark.parametrize("base", [ValueError, RolloutError, LLMError, TurnLimitReached])
async def test_an_exception_without_a_readable_text_ends_its_rollout_all_the_same(base: type[Exception]) -> None:
    class Mute(base):  # type: ignore[misc,valid-type]
        def __str__(self) -> str:
            raise SystemExit(9)

    def run(ctx: RolloutContext) -> None:
        raise Mute("x")

    response = await end_of(run)

    assert response.error_category != "cancelled"
    assert response.status == ("COMPLETED" if base is TurnLimitReached else "ERROR")


async def test_a_status_that_leaves_the_process_is_a_result_that_cannot_be_read() -> None:
    class Leaving(RolloutResult):
        def __getattribute__(self, name: str) -> Any:
            if name == "reward":
                raise SystemExit(4)
            return super().__getattribute__(name)

    async def run(ctx: RolloutContext) -> RolloutResult:
        await ctx.chat(USER)
        return Leaving()

    response = await end_of(run)

    assert response.error_message == "the result of run() cannot be read: SystemExit: 4"
    assert (response.error_category, response.final_messages) == ("validation_error", [*USER, OK])


async def test_a_tool_whose_exception_raises_once_more_is_an_error_for_the_model() -> None:
    @rollout.tool
    def leave() -> str:
        """Leave."""
        raise RuntimeError(Raising(SystemExit(9)))

    async def run(ctx: RolloutContext) -> RolloutResult:
        answer = await ctx.chat(USER)
        return ctx.complete(await ctx.call_tools(answer.tool_calls))

    response = await run_agent(Doing(run, [leave]), answers=[tool_calls([("leave", {})])])

    assert [message["content"] for message in response.final_messages] == ["Error: RuntimeError"]


# ---------------------------------------------------------------- values without a meaning


class Everything:
    """Has whatever attribute it is asked for, as a mock has, and all of them can be called."""

    def __getattr__(self, name: str) -> Any:
        return Everything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Everything()


@pytest.mark.parametrize("value", [MagicMock(), Everything()], ids=["mock", "everything"])
def test_a_mock_is_named_and_not_followed_into_its_mocks(value: Any) -> None:
    kind = type(value).__name__

    text, lost = encode({"m": value})

    assert decode(text) == {"m": f"<{kind}>"}
    assert lost == [f"$.m is a {kind}, which JSON cannot hold"]


async def test_messages_that_json_cannot_hold_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        messages = [{"role": "user", "content": object(), "n": math.nan}]
        for _ in range(2):
            messages.append((await ctx.chat(messages)).message)
        return ctx.complete([])

    with caplog.at_level(logging.WARNING, "rollout"):
        await end_of(run, answers=["a", "b"], rollout_id="r")

    assert [record.getMessage() for record in caplog.records] == [
        "rollout 'r': messages that JSON cannot hold: "
        "messages[0].content is a object, which JSON cannot hold; messages[0].n is nan, which JSON cannot hold"
    ]


async def test_parameters_that_json_cannot_hold_are_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        await ctx.chat(USER, temperature=math.nan)
        return ctx.complete([])

    server = await serve(Doing(run))
    with caplog.at_level(logging.WARNING, "rollout"):
        await ended(server)

    assert "rollout 'r': parameters that JSON cannot hold: parameters.temperature is nan" in caplog.text
