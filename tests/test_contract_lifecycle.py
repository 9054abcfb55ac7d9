"""The contract, section 5: from acceptance to the one terminal result."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import pytest
from conftest import Serve
from served import GENEROUS_SECONDS, Held, Instant
from support import Doing

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutResult
from rollout.testing import MockTrainer, close_before_answer, hang, hold, status, text

USER = [{"role": "user", "content": "What is 2 + 2?"}]


async def state(server: Any, rollout_id: str) -> dict[str, Any]:
    """The RolloutState of a known rollout."""
    answer = await server.get(f"/v1/rollout/status/{rollout_id}")
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json
    return found


async def chat_and_stay(ctx: RolloutContext) -> RolloutResult:
    """One turn, then an LLM call that the trainer leaves open."""
    messages = list(ctx.request.messages)
    messages.append((await ctx.chat(messages)).message)
    messages.append({"role": "user", "content": "go on"})
    await ctx.chat(messages)
    return ctx.complete(messages)


# ---------------------------------------------------------------- states and phases


async def test_phases_go_from_queued_to_delivered(serve: Serve, trainer: MockTrainer) -> None:
    agent = Held()
    server = await serve(agent, max_concurrent_rollouts=1)
    acknowledgement = hold()
    trainer.on_completed(acknowledgement)
    await server.post_init(rollout_id="first")
    await server.post_init(rollout_id="second")
    await agent.running.wait()
    first, second = await state(server, "first"), await state(server, "second")
    assert (first["status"], first["phase"]) == ("STARTED", "running")
    assert (second["status"], second["phase"]) == ("STARTED", "queued")
    assert "started_at" not in second
    agent.release.set()
    await trainer.wait_completed(2)
    assert (await state(server, "second"))["phase"] == "delivering"
    acknowledgement.release()
    await trainer.wait_completed("second", accepted=True)
    await asyncio.wait_for(_until_phase(server, "second", "delivered"), GENEROUS_SECONDS)
    final = await state(server, "second")
    assert final["status"] == "COMPLETED"
    assert final["created_at"] <= final["started_at"] <= final["finished_at"] <= final["delivered_at"]


async def _until_phase(server: Any, rollout_id: str, phase: str) -> None:
    while (await state(server, rollout_id))["phase"] != phase:
        pass  # asking takes a turn of the loop or two


async def test_undelivered_is_final_and_keeps_its_status(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_completed(status(404))
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    await asyncio.wait_for(_until_phase(server, "a", "undelivered"), GENEROUS_SECONDS)
    found = await state(server, "a")
    assert found["status"] == "COMPLETED"
    assert found["delivery_attempts"] == 1
    assert "404" in found["last_delivery_error"]
    assert "delivered_at" not in found


# ---------------------------------------------------------------- slots and queue


async def test_no_more_than_the_limit_run_at_once(serve: Serve, trainer: MockTrainer) -> None:
    answers = hold()
    trainer.on_chat(answers)
    running: set[str] = set()
    counts: list[int] = []

    async def run(ctx: RolloutContext) -> RolloutResult:
        running.add(ctx.rollout_id)
        counts.append(len(running))
        await ctx.chat(USER)
        running.discard(ctx.rollout_id)
        return ctx.complete(USER)

    server = await serve(Doing(run), max_concurrent_rollouts=3)
    for number in range(12):
        assert (await server.post_init(rollout_id=f"r{number}")).status == 202
    await trainer.wait_chats(3)
    assert (await server.get("/status")).json["slots"] == {"running": 3, "queued": 9}
    answers.release()
    await trainer.wait_completed(12)
    assert max(counts) == 3


async def test_beyond_the_queue_an_init_gets_503_and_leaves_nothing(serve: Serve, trainer: MockTrainer) -> None:
    agent = Held()
    server = await serve(agent, max_concurrent_rollouts=1, max_queued_rollouts=2)
    for name in ("a", "b", "c"):
        assert (await server.post_init(rollout_id=name)).status == 202
    refused = await server.post_init(rollout_id="d")
    assert (refused.status, refused.json["code"]) == (503, "queue_full")
    assert int(refused.headers["Retry-After"]) >= 1
    assert (await server.get("/v1/rollout/status/d")).status == 404
    assert (await server.post_init(rollout_id="c")).status == 202, "a duplicate needs no room"
    agent.release.set()
    await trainer.wait_completed(3)
    assert (await server.post_init(rollout_id="d")).status == 202
    await trainer.wait_completed("d")


async def test_a_queue_of_zero_takes_only_what_can_run(serve: Serve) -> None:
    server = await serve(Held(), max_concurrent_rollouts=2, max_queued_rollouts=0)
    assert [(await server.post_init(rollout_id=name)).status for name in "abc"] == [202, 202, 503]


async def test_a_burst_beyond_the_bound_is_cut_exactly_there(serve: Serve) -> None:
    server = await serve(Held(), max_concurrent_rollouts=2, max_queued_rollouts=3)
    answers = await asyncio.gather(*(server.post_init(rollout_id=f"r{n}") for n in range(20)))
    assert sorted(answer.status for answer in answers) == [202] * 5 + [503] * 15


async def test_waiting_rollouts_start_first_come_first_served(serve: Serve, trainer: MockTrainer) -> None:
    agent = Held()
    server = await serve(agent, max_concurrent_rollouts=1)
    names = [f"r{number}" for number in range(8)]
    for name in names:
        await server.post_init(rollout_id=name)
    agent.release.set()
    await trainer.wait_completed(8)
    assert agent.ran == names


async def test_the_slot_is_free_before_the_delivery(serve: Serve, trainer: MockTrainer) -> None:
    acknowledgement = hold()
    trainer.on_completed(acknowledgement)
    agent = Instant()
    server = await serve(agent, max_concurrent_rollouts=1, max_queued_rollouts=0)
    for name in ("a", "b", "c"):
        assert (await server.post_init(rollout_id=name)).status == 202
        await trainer.wait_completed(name)
    assert agent.ran == ["a", "b", "c"]
    assert (await server.get("/status")).json["slots"] == {"running": 0, "queued": 0}
    acknowledgement.release()


async def test_a_cancelled_queued_rollout_makes_room(serve: Serve) -> None:
    server = await serve(Held(), max_concurrent_rollouts=1, max_queued_rollouts=1)
    for name in ("a", "b"):
        await server.post_init(rollout_id=name)
    assert (await server.post_init(rollout_id="c")).status == 503
    await server.cancel(ids=["b"])
    assert (await server.result("b"))["finish_reason"] == "cancelled"
    assert (await server.post_init(rollout_id="c")).status == 202


# ---------------------------------------------------------------- deadline


async def test_past_the_deadline_the_rollout_ends_with_the_messages_so_far(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_chat([text("4"), hang()])
    server = await serve(Doing(chat_and_stay))
    await server.post_init(rollout_id="a", messages=USER, timeout_seconds=0.15)
    result = (await trainer.wait_completed("a")).json
    assert (result["status"], result["finish_reason"]) == ("ERROR", "timeout")
    assert (result["error_category"], result["retryable"]) == ("timeout", True)
    assert result["final_messages"] == [
        *USER,
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "go on"},
    ]
    assert result["metrics"]["num_llm_calls"] == 2
    assert "reward" not in result
    await trainer.wait_until(lambda: trainer.chats("a")[1].abandoned)


async def test_the_deadline_of_the_settings_holds_without_one_in_the_request(
    serve: Serve, trainer: MockTrainer
) -> None:
    server = await serve(Held(), rollout_timeout_seconds=0.1)
    await server.post_init(rollout_id="a")
    assert (await trainer.wait_completed("a")).json["finish_reason"] == "timeout"


async def test_the_deadline_of_the_request_wins_in_both_directions(serve: Serve, trainer: MockTrainer) -> None:
    agent = Held()
    server = await serve(agent, rollout_timeout_seconds=0.1)
    await server.post_init(rollout_id="longer", timeout_seconds=60)
    await server.post_init(rollout_id="setting")
    assert (await trainer.wait_completed("setting")).json["finish_reason"] == "timeout"
    agent.release.set()
    assert (await trainer.wait_completed("longer")).json["status"] == "COMPLETED"


async def test_a_timeout_setting_of_zero_is_no_deadline(serve: Serve, trainer: MockTrainer) -> None:
    agent = Held()
    server = await serve(agent, rollout_timeout_seconds=0)
    await server.post_init(rollout_id="none")
    await server.post_init(rollout_id="short", timeout_seconds=0.05)
    assert (await trainer.wait_completed("short")).json["finish_reason"] == "timeout"
    agent.release.set()
    assert (await trainer.wait_completed("none")).json["status"] == "COMPLETED"


@pytest.mark.parametrize("seconds", [1e300, 1.7e308, 86_400 * 365 * 100])
async def test_a_far_deadline_is_no_trouble(serve: Serve, trainer: MockTrainer, seconds: float) -> None:
    server = await serve(Instant())
    assert (await server.post_init(rollout_id="a", timeout_seconds=seconds)).status == 202
    assert (await trainer.wait_completed("a")).json["status"] == "COMPLETED"


async def test_a_deadline_that_is_over_at_once_is_a_timeout(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(Held())
    assert (await server.post_init(rollout_id="a", timeout_seconds=1e-9)).status == 202
    assert (await trainer.wait_completed("a")).json["finish_reason"] == "timeout"


async def test_queueing_counts_against_the_deadline(serve: Serve, trainer: MockTrainer) -> None:
    agent = Held()
    server = await serve(agent, max_concurrent_rollouts=1)
    await server.post_init(rollout_id="running")
    await server.post_init(rollout_id="queued", timeout_seconds=0.1)
    result = (await trainer.wait_completed("queued")).json
    assert (result["finish_reason"], result["error_category"]) == ("timeout", "timeout")
    assert result["final_messages"] == []
    agent.release.set()
    await trainer.wait_completed("running")
    assert agent.ran == ["running"]


async def test_time_in_the_queue_is_taken_off_the_time_to_run(serve: Serve, trainer: MockTrainer) -> None:
    left: dict[str, float | None] = {}
    release = asyncio.Event()

    async def run(ctx: RolloutContext) -> RolloutResult:
        left[ctx.rollout_id] = ctx.remaining_seconds
        await release.wait()
        return ctx.complete(USER)

    server = await serve(Doing(run), max_concurrent_rollouts=1)
    await server.post_init(rollout_id="a", timeout_seconds=60)
    began = time.monotonic()
    await server.post_init(rollout_id="b", timeout_seconds=60)
    await server.post_init(rollout_id="marker", timeout_seconds=0.1)
    await trainer.wait_completed("marker")
    release.set()
    await trainer.wait_completed("b")
    waited = time.monotonic() - began
    assert waited >= 0.1
    assert left["b"] is not None
    assert left["b"] <= 60 - 0.1


async def test_an_agent_that_blocks_past_its_deadline_and_returns_is_a_timeout(
    serve: Serve, trainer: MockTrainer
) -> None:
    def run(ctx: RolloutContext) -> RolloutResult:
        deadline = time.monotonic() + 0.1
        while time.monotonic() < deadline:
            pass
        return ctx.complete(USER, reward=1.0)

    server = await serve(Doing(run))
    await server.post_init(rollout_id="a", timeout_seconds=0.05)
    result = (await trainer.wait_completed("a")).json
    assert (result["status"], result["finish_reason"]) == ("ERROR", "timeout")


async def test_an_agent_that_swallows_its_timeout_loses_its_say(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(Doing(swallow), cancel_grace_seconds=0.05, max_concurrent_rollouts=1)
    await server.post_init(rollout_id="a", timeout_seconds=0.05)
    assert (await trainer.wait_completed("a")).json["finish_reason"] == "timeout"
    assert (await server.get("/status")).json["slots"]["running"] == 0


# ---------------------------------------------------------------- cancel


async def swallow(ctx: RolloutContext) -> RolloutResult:
    """Does not end when it is told to, nor when it loses its slot; then it comes with a result."""
    for _ in range(2):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    return ctx.complete(USER, reward=1.0)


async def test_cancel_ends_a_queued_rollout_at_once(serve: Serve, trainer: MockTrainer) -> None:
    agent = Held()
    server = await serve(agent, max_concurrent_rollouts=1)
    await server.post_init(rollout_id="running")
    await server.post_init(rollout_id="queued")
    assert await server.cancel(ids=["queued"]) == {"queued": "cancelled_queued"}
    result = (await trainer.wait_completed("queued")).json
    assert (result["status"], result["finish_reason"]) == ("ERROR", "cancelled")
    assert (result["error_category"], result["retryable"]) == ("cancelled", False)
    agent.release.set()
    await trainer.wait_completed("running")
    assert agent.ran == ["running"]


async def test_cancel_aborts_the_llm_call_in_flight(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_chat([text("4"), hang()])
    server = await serve(Doing(chat_and_stay))
    await server.post_init(rollout_id="a", messages=USER)
    await trainer.wait_chats(2, "a")
    assert await server.cancel(ids=["a"]) == {"a": "cancelled_running"}
    await trainer.wait_until(lambda: trainer.chats("a")[1].abandoned)
    result = (await trainer.wait_completed("a")).json
    assert (result["status"], result["finish_reason"]) == ("ERROR", "cancelled")
    assert result["final_messages"][:2] == [*USER, {"role": "assistant", "content": "4"}]


async def test_cancel_ends_the_pause_between_retries(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_chat(status(503, retry_after=200))
    server = await serve(Doing(chat_and_stay))
    await server.post_init(rollout_id="a")
    await trainer.wait_chats(1, "a")
    await server.cancel(ids=["a"])
    assert (await trainer.wait_completed("a")).json["finish_reason"] == "cancelled"
    assert len(trainer.chats("a")) == 1


async def test_cancel_is_idempotent_and_tells_what_was_found(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(Held())
    await server.post_init(rollout_id="a")
    assert await server.cancel(ids=["a", "nobody"]) == {"a": "cancelled_running", "nobody": "not_found"}
    await trainer.wait_completed("a")
    assert await server.cancel(ids=["a", "nobody"]) == {"a": "finished", "nobody": "not_found"}
    assert len(trainer.completions("a")) == 1


async def test_cancel_of_a_finished_rollout_changes_nothing(serve: Serve, trainer: MockTrainer) -> None:
    acknowledgement = hold()
    trainer.on_completed(acknowledgement)
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    before = (await trainer.wait_completed("a")).body
    assert await server.cancel(ids=["a"]) == {"a": "finished"}
    assert (await server.get("/v1/rollout/result/a")).body == before
    acknowledgement.release()


@pytest.mark.parametrize("after", ["complete", "error", "raise", "none", "llm_error"])
async def test_once_cancelled_the_result_is_cancelled_whatever_run_does(
    serve: Serve, trainer: MockTrainer, after: str
) -> None:
    waiting = asyncio.Event()

    async def run(ctx: RolloutContext) -> Any:
        with contextlib.suppress(asyncio.CancelledError):
            waiting.set()
            await asyncio.Event().wait()
        if after == "raise":
            raise RuntimeError("no")
        if after == "llm_error":
            await ctx.chat(USER)
        return {"complete": ctx.complete(USER, reward=1.0), "error": ctx.error("mine")}.get(after)

    trainer.on_chat(status(400))
    server = await serve(Doing(run))
    await server.post_init(rollout_id="a")
    await waiting.wait()
    await server.cancel(ids=["a"])
    result = (await trainer.wait_completed("a")).json
    assert (result["status"], result["finish_reason"]) == ("ERROR", "cancelled")
    assert result["error_category"] == "cancelled"
    assert "reward" not in result


async def test_an_agent_that_swallows_the_cancel_loses_its_slot_after_the_grace(
    serve: Serve, trainer: MockTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve(Doing(swallow), cancel_grace_seconds=0.1, max_concurrent_rollouts=1)
    await server.post_init(rollout_id="a")
    await server.post_init(rollout_id="b")
    began = time.monotonic()
    await server.cancel(ids=["a"])
    assert (await state(server, "b"))["phase"] == "queued"
    assert (await trainer.wait_completed("a")).json["finish_reason"] == "cancelled"
    assert time.monotonic() - began >= 0.1
    assert (await state(server, "b"))["phase"] == "running"
    assert any("'a'" in r.getMessage() and r.levelno == logging.ERROR for r in caplog.records)


async def test_what_a_swallowing_agent_returns_later_is_dropped(serve: Serve, trainer: MockTrainer) -> None:
    finish = asyncio.Event()
    over = asyncio.Event()

    async def run(ctx: RolloutContext) -> RolloutResult:
        while not finish.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await finish.wait()
        asyncio.get_running_loop().call_later(0.05, over.set)
        return ctx.complete(USER, reward=1.0)

    server = await serve(Doing(run), cancel_grace_seconds=0)
    await server.post_init(rollout_id="a")
    await server.cancel(ids=["a"])
    first = (await trainer.wait_completed("a", accepted=True)).body
    finish.set()
    await over.wait()
    assert [request.body for request in trainer.completions("a")] == [first]
    assert (await server.get("/v1/rollout/result/a")).body == first


async def test_an_abandoned_agent_cannot_ask_the_llm_any_more(serve: Serve, trainer: MockTrainer) -> None:
    abandoned, met = asyncio.Event(), asyncio.Event()

    async def run(ctx: RolloutContext) -> None:
        while not abandoned.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await abandoned.wait()
        met.set()
        await ctx.chat(USER)

    server = await serve(Doing(run), cancel_grace_seconds=0)
    await server.post_init(rollout_id="a")
    await server.cancel(ids=["a"])
    await trainer.wait_completed("a")
    abandoned.set()
    await met.wait()
    await server.post_init(rollout_id="b")
    await trainer.wait_chats(1, "b")
    assert trainer.chats("a") == []


async def test_a_second_cancel_within_the_grace_does_not_shorten_it(serve: Serve, trainer: MockTrainer) -> None:
    cleaned = asyncio.Event()
    begun = asyncio.Event()

    async def run(ctx: RolloutContext) -> RolloutResult:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await cleaned.wait()
        return ctx.complete(USER)

    server = await serve(Doing(run))
    await server.post_init(rollout_id="a")
    await begun.wait()
    assert await server.cancel(ids=["a"]) == {"a": "cancelled_running"}
    assert await server.cancel(ids=["a"]) == {"a": "cancelled_running"}
    assert (await state(server, "a"))["phase"] == "running"
    cleaned.set()
    assert (await trainer.wait_completed("a")).json["finish_reason"] == "cancelled"


async def test_cancel_all_ends_everything_that_was_not_finished(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(Held(), max_concurrent_rollouts=2)
    for number in range(5):
        await server.post_init(rollout_id=f"r{number}")
    dispositions = await server.cancel(all=True)
    assert sorted(dispositions.values()) == ["cancelled_queued"] * 3 + ["cancelled_running"] * 2
    results = await trainer.wait_completed(5)
    assert {request.json["finish_reason"] for request in results} == {"cancelled"}
    assert (await server.get("/status")).json["slots"] == {"running": 0, "queued": 0}


# ---------------------------------------------------------------- one failure touches no other


BASE_EXCEPTIONS = [
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    BaseException("base"),
    BaseExceptionGroup("both", [SystemExit(1), ValueError("x")]),
    StopIteration(),
    StopAsyncIteration(),
    RecursionError(),
    MemoryError(),
    TimeoutError(),
    ConnectionResetError(),
    RuntimeError("{json} %s \ud800 \0"),
]


@pytest.mark.parametrize("failure", BASE_EXCEPTIONS, ids=lambda exc: type(exc).__name__)
async def test_whatever_an_agent_raises_is_its_own_error(
    serve: Serve, trainer: MockTrainer, failure: BaseException
) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        if ctx.rollout_id == "bad":
            raise failure
        await ctx.chat(USER)
        return ctx.complete(USER)

    server = await serve(Doing(run), max_concurrent_rollouts=1)
    for name in ("bad", "good"):
        await server.post_init(rollout_id=name)
    result = (await trainer.wait_completed("bad")).json
    assert (result["status"], result["finish_reason"]) == ("ERROR", "error")
    assert (result["error_category"], result["retryable"]) == ("agent_error", False)
    assert type(failure).__name__ in result["error_message"] or isinstance(failure, StopIteration)
    assert (await trainer.wait_completed("good")).json["status"] == "COMPLETED"
    assert (await server.get("/health")).status == 200


async def test_an_exception_that_cannot_be_shown_is_an_error_like_any(serve: Serve, trainer: MockTrainer) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise SystemExit(1)

    async def run(ctx: RolloutContext) -> None:
        raise Unspeakable

    server = await serve(Doing(run))
    await server.post_init(rollout_id="a")
    result = (await trainer.wait_completed("a")).json
    assert result["error_category"] == "agent_error"
    assert "Unspeakable" in result["error_message"]


async def test_an_agent_that_cancels_its_own_task_ends_only_itself(serve: Serve, trainer: MockTrainer) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if ctx.rollout_id == "returns":
            return ctx.complete(USER)
        await asyncio.sleep(1)
        return ctx.complete(USER)

    server = await serve(Doing(run))
    await server.post_init(rollout_id="awaits")
    await server.post_init(rollout_id="returns")
    assert (await trainer.wait_completed("awaits")).json["error_category"] == "agent_error"
    assert (await trainer.wait_completed("returns", accepted=True)).json["status"] == "COMPLETED"


async def test_a_broken_connection_of_one_rollout_does_not_touch_the_others(serve: Serve, trainer: MockTrainer) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        await ctx.chat(USER)
        return ctx.complete(USER)

    trainer.on_chat(close_before_answer(), rollout_id="bad")
    server = await serve(Doing(run), max_retries=1)
    for name in ("a", "bad", "b"):
        await server.post_init(rollout_id=name)
    results = {r.rollout_id: r.json["status"] for r in await trainer.wait_completed(3)}
    assert results == {"a": "COMPLETED", "bad": "ERROR", "b": "COMPLETED"}


async def test_a_task_left_behind_by_an_agent_gets_no_more_llm_calls(serve: Serve, trainer: MockTrainer) -> None:
    left: list[asyncio.Task[Any]] = []
    go = asyncio.Event()

    async def later(ctx: RolloutContext) -> None:
        await go.wait()
        await ctx.chat(USER)

    async def run(ctx: RolloutContext) -> RolloutResult:
        left.append(asyncio.create_task(later(ctx)))
        return ctx.complete(USER)

    server = await serve(Doing(run))
    await server.post_init(rollout_id="a")
    await trainer.wait_completed("a")
    go.set()
    await asyncio.wait(left, timeout=0.1)
    assert trainer.chats() == []
    left[0].cancel()
    await asyncio.wait(left)


async def test_drain_refuses_inits_answers_duplicates_and_delivers_what_runs(
    serve: Serve, trainer: MockTrainer
) -> None:
    agent = Held()
    server = await serve(agent)
    await server.post_init(rollout_id="a")
    stopping = asyncio.create_task(server.service.stop(grace_seconds=5))
    await asyncio.sleep(0)
    refused = await server.post_init(rollout_id="b")
    assert (refused.status, refused.json["code"]) == (503, "draining")
    assert "Retry-After" in refused.headers
    assert (await server.post_init(rollout_id="a")).status == 202
    health = await server.get("/health")
    assert (health.status, health.json["status"]) == (503, "draining")
    agent.release.set()
    await stopping
    assert [request.json["status"] for request in trainer.completions()] == ["COMPLETED"]


async def test_what_is_left_after_the_grace_ends_as_shutdown(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(Held(), max_concurrent_rollouts=1)
    for name in ("running", "queued"):
        await server.post_init(rollout_id=name)
    await server.service.stop(grace_seconds=0)
    results = {request.rollout_id: request.json for request in trainer.completions()}
    assert set(results) == {"running", "queued"}
    for result in results.values():
        assert (result["status"], result["finish_reason"]) == ("ERROR", "shutdown")
        assert (result["error_category"], result["retryable"]) == ("interrupted", True)


async def test_shutdown_delivers_for_an_agent_that_refuses_to_end(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(Doing(swallow), cancel_grace_seconds=0.05)
    await server.post_init(rollout_id="a")
    await server.service.stop(grace_seconds=0)
    assert [request.json["finish_reason"] for request in trainer.completions("a")] == ["shutdown"]


async def test_shutdown_tries_what_a_failing_trainer_has_not_taken(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_completed([status(503, retry_after=200), status(200)])
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    await trainer.wait_completed("a")
    await server.service.stop(grace_seconds=0)
    assert [request.status for request in trainer.completions("a")] == [503, 200]
