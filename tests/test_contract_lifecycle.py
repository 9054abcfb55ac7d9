"""The contract, section 5: from acceptance to the one terminal result."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from conftest import Serve
from served import Held, Instant
from support import USER, Doing, chat_and_stay, state_of, swallow, until_phase

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutResult
from rollout.testing import MockTrainer, close_before_answer, hang, hold, status, text

# ---------------------------------------------------------------- states and phases


async def test_phases_go_from_queued_to_delivered(serve: Serve, trainer: MockTrainer) -> None:
    agent = Held()
    server = await serve(agent, max_concurrent_rollouts=1)
    acknowledgement = hold()
    trainer.on_completed(acknowledgement)
    await server.post_init(rollout_id="first")
    await server.post_init(rollout_id="second")
    await agent.running.wait()
    first, second = await state_of(server, "first"), await state_of(server, "second")
    assert (first["status"], first["phase"]) == ("STARTED", "running")
    assert (second["status"], second["phase"]) == ("STARTED", "queued")
    assert "started_at" not in second
    agent.release.set()
    await trainer.wait_completed(2)
    assert (await state_of(server, "second"))["phase"] == "delivering"
    acknowledgement.release()
    await trainer.wait_completed("second", accepted=True)
    await until_phase(server, "second", "delivered")
    final = await state_of(server, "second")
    assert final["status"] == "COMPLETED"
    assert final["created_at"] <= final["started_at"] <= final["finished_at"] <= final["delivered_at"]


async def test_undelivered_is_final_and_keeps_its_status(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_completed(status(404))
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    await until_phase(server, "a", "undelivered")
    found = await state_of(server, "a")
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
