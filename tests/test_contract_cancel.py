"""The contract, section 5: what a cancel ends, and how."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import pytest
from conftest import Serve
from served import Held, Instant
from support import USER, Doing, chat_and_stay, state_of, swallow

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutResult
from rollout.testing import MockTrainer, hang, hold, status, text


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
    assert (await state_of(server, "b"))["phase"] == "queued"
    assert (await trainer.wait_completed("a")).json["finish_reason"] == "cancelled"
    assert time.monotonic() - began >= 0.1
    assert (await state_of(server, "b"))["phase"] == "running"
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
    assert (await state_of(server, "a"))["phase"] == "running"
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
