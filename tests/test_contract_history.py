"""The contract, section 6: the history of a rollout only grows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Serve
from support import OK, USER, Doing

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutResult
from rollout.errors import HistoryRewritten
from rollout.testing import (
    MockTrainer,
)

Rewrite = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
REWRITES: dict[str, Rewrite] = {
    "shorter": lambda m: m[1:],
    "empty": lambda m: [],
    "changed": lambda m: [{**m[0], "content": "other"}, *m[1:]],
    "reordered": lambda m: [*m[1:], m[0]],
    "null-dropped": lambda m: [{k: v for k, v in m[0].items() if v is not None}, *m[1:]],
    "inserted": lambda m: [{"role": "system", "content": "new"}, *m],
}


def rewriting(rewrite: Rewrite) -> Doing:
    """An agent that changes the history before its second turn."""

    async def run(ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        messages.append((await ctx.chat(messages)).message)
        messages = rewrite(messages)
        messages.append((await ctx.chat(messages)).message)
        messages.append((await ctx.chat(messages)).message)
        return ctx.complete(messages, extra_fields={"mine": 1})

    return Doing(run)


NAMED = [{"role": "user", "content": "What is 2 + 2?", "name": None}]


@pytest.mark.parametrize("name", REWRITES)
async def test_a_rewritten_history_is_counted_logged_and_reported(
    serve: Serve, trainer: MockTrainer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    server = await serve(rewriting(REWRITES[name]))
    await server.post_init(rollout_id="a", messages=NAMED)
    result = (await trainer.wait_completed("a")).json
    assert result["status"] == "COMPLETED"
    assert result["extra_fields"] == {"mine": 1, "history_rewrites": 1}
    assert len(trainer.chats("a")) == 3
    assert any("'a'" in r.getMessage() and "histor" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("name", REWRITES)
async def test_strict_history_makes_a_rewrite_an_error(serve: Serve, trainer: MockTrainer, name: str) -> None:
    server = await serve(rewriting(REWRITES[name]), strict_history=True)
    await server.post_init(rollout_id="a", messages=NAMED)
    result = (await trainer.wait_completed("a")).json
    assert (result["status"], result["error_category"]) == ("ERROR", "llm_error")
    assert result["final_messages"] == [*NAMED, OK]
    assert result["extra_fields"] == {"history_rewrites": 1}
    assert len(trainer.chats("a")) == 1, "what breaks the history is not sent"


@pytest.mark.parametrize("strict", [False, True])
async def test_a_history_that_only_grows_is_no_rewrite(serve: Serve, trainer: MockTrainer, strict: bool) -> None:
    def as_it_is(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [dict(reversed(m.items())) for m in messages]

    server = await serve(rewriting(as_it_is), strict_history=strict)
    await server.post_init(rollout_id="a", messages=NAMED)
    result = (await trainer.wait_completed("a")).json
    assert result["status"] == "COMPLETED"
    assert result["extra_fields"] == {"mine": 1}
    sent = [r.json["messages"] for r in trainer.chats("a")]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(sent))


async def test_messages_that_are_mutated_in_place_are_a_rewrite_too(serve: Serve, trainer: MockTrainer) -> None:
    def mutate(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        messages[0]["content"] = "changed under the hand"
        return messages

    server = await serve(rewriting(mutate))
    await server.post_init(rollout_id="a")
    assert (await trainer.wait_completed("a")).json["extra_fields"]["history_rewrites"] == 1


async def test_a_strict_rewrite_can_be_caught(serve: Serve, trainer: MockTrainer) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        await ctx.chat(USER)
        with pytest.raises(HistoryRewritten):
            await ctx.chat([{"role": "user", "content": "other"}])
        await ctx.chat([*USER, OK])
        return ctx.complete(USER)

    server = await serve(Doing(run), strict_history=True)
    await server.post_init(rollout_id="a")
    assert (await trainer.wait_completed("a")).json["status"] == "COMPLETED"
    assert len(trainer.chats("a")) == 2
