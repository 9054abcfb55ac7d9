"""The contract, section 6: the terminal result on its way to the trainer."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest
from conftest import Serve
from served import Chat, Instant
from support import Doing, until_phase

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutResult
from rollout.testing import (
    Answer,
    MockTrainer,
    RecordedRequest,
    Reply,
    close_after_answer,
    close_before_answer,
    garbage,
    half_body,
    hold,
    lost_acknowledgement,
    raw,
    redirect,
    reset,
    status,
)
from rollout.testing.peer import Peer

RETRIED = [408, 425, 429, 500, 501, 502, 503, 504, 599]
REFUSED = [400, 401, 403, 404, 405, 409, 413, 422, 451, 499]
REDIRECTS = [301, 302, 303, 304, 307, 308]


# ---------------------------------------------------------------- completed: acknowledgement


@pytest.mark.parametrize("code", [200, 201, 202, 203, 204, 206, 226, 299])
async def test_any_2xx_is_an_acknowledgement(serve: Serve, trainer: MockTrainer, code: int) -> None:
    trainer.on_completed(Reply(b"", code))
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    found = await until_phase(server, "a", "delivered")
    assert found["delivery_attempts"] == 1
    assert len(trainer.completions("a")) == 1


class _Raw(Answer):
    """Bytes as they are; the connection stays open or is closed behind them."""

    def __init__(self, data: bytes, *, stays: bool) -> None:
        self._data, self._stays = data, stays

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        await peer.send(self._data)
        if not self._stays:
            peer.close()
        else:
            await peer.gone_before(asyncio.sleep(60))
            peer.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        half_body(Reply(b'{"half": "of it"}')),
        _Raw(HEAD + b"Content-Length: 100\r\n\r\n{", stays=False),
        _Raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", stays=False),
        _Raw(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd", stays=False),
        _Raw(b"HTTP/1.0 200 OK\r\n\r\n", stays=False),
        raw(b"not json at all", "text/plain"),
        Reply(b"x" * 300_000),
    ],
    ids=["half", "cut", "half-chunk", "bad-gzip", "http10", "text", "long"],
)
async def test_the_status_line_acknowledges_whatever_the_body_is(
    serve: Serve, trainer: MockTrainer, answer: Answer
) -> None:
    trainer.on_completed(answer)
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    assert (await until_phase(server, "a", "delivered"))["delivery_attempts"] == 1
    assert len(trainer.completions("a")) == 1


@pytest.mark.slow
async def test_a_body_that_never_ends_does_not_hold_back_the_acknowledgement(
    serve: Serve, trainer: MockTrainer
) -> None:
    trainer.on_completed(_Raw(HEAD + b"Content-Length: 100\r\n\r\n{", stays=True))
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    assert (await until_phase(server, "a", "delivered"))["delivery_attempts"] == 1


# ---------------------------------------------------------------- completed: retries


@pytest.mark.parametrize("code", RETRIED)
async def test_a_delivery_is_tried_again_after(serve: Serve, trainer: MockTrainer, code: int) -> None:
    trainer.on_completed([status(code), status(code), status(200)])
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    found = await until_phase(server, "a", "delivered")
    assert found["delivery_attempts"] == 3
    assert "last_delivery_error" not in found


@pytest.mark.parametrize("code", [*REFUSED, *REDIRECTS])
async def test_a_delivery_ends_at_once_after(
    serve: Serve, trainer: MockTrainer, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    trainer.on_completed(redirect(trainer.url_for("/elsewhere/v1/rollout/completed"), code), times=1)
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    found = await until_phase(server, "a", "undelivered")
    assert found["delivery_attempts"] == 1
    assert str(code) in found["last_delivery_error"]
    assert [r.path for r in trainer.requests] == ["/v1/rollout/completed"]
    assert any("'a'" in r.getMessage() and r.levelno == logging.ERROR for r in caplog.records)
    assert (await server.get("/result/a")).status == 200
    assert (await server.get("/health")).json["undelivered_rollouts"] == 1


@pytest.mark.parametrize(
    "fault",
    [reset(), close_before_answer(), garbage(), lost_acknowledgement()],
    ids=["reset", "closed", "garbage", "lost-acknowledgement"],
)
async def test_every_attempt_carries_the_same_bytes_and_the_same_key(
    serve: Serve, trainer: MockTrainer, fault: Answer
) -> None:
    trainer.on_completed([fault, status(500), fault, status(200)])
    server = await serve(Chat())
    await server.post_init(rollout_id="a", api_key="key")
    assert (await until_phase(server, "a", "delivered"))["delivery_attempts"] == 4
    attempts = trainer.completions("a")
    assert len(attempts) == 4
    assert len({r.body for r in attempts}) == 1
    assert len({r.headers["Idempotency-Key"] for r in attempts}) == 1
    assert {r.bearer for r in attempts} == {"key"}
    assert (await server.get("/result/a")).body == attempts[0].body


async def test_different_rollouts_have_different_idempotency_keys(serve: Serve, trainer: MockTrainer) -> None:
    names = ["a", "A", "a ", "a%20", "ä", "%C3%A4", "a\nb", "日本", "x" * 256]
    server = await serve(Instant())
    for name in names:
        assert (await server.post_init(rollout_id=name)).status == 202, name
    found = await trainer.wait_completed(len(names))
    assert sorted(r.json["rollout_id"] for r in found) == sorted(names)
    assert len({r.headers["Idempotency-Key"] for r in found}) == len(names)


async def test_the_outbox_goes_on_after_the_retries(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_completed(status(503), times=5)
    server = await serve(Instant(), complete_rollout_retries=1)
    await server.post_init(rollout_id="a")
    found = await until_phase(server, "a", "delivered")
    assert found["delivery_attempts"] == 6
    times = [r.at for r in trainer.completions("a")]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[-1] > pauses[1], "the pauses of the outbox grow"


@pytest.mark.parametrize("retries", [0, 2])
async def test_with_a_horizon_of_zero_only_the_retries_are_made(
    serve: Serve, trainer: MockTrainer, retries: int
) -> None:
    trainer.on_completed(status(503))
    server = await serve(Instant(), delivery_horizon_seconds=0, complete_rollout_retries=retries)
    await server.post_init(rollout_id="a")
    assert (await until_phase(server, "a", "undelivered"))["delivery_attempts"] == retries + 1
    assert len(trainer.completions("a")) == retries + 1


async def test_a_delivery_is_given_up_at_the_horizon_and_not_before(
    serve: Serve, trainer: MockTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.on_completed(status(503))
    server = await serve(Instant(), delivery_horizon_seconds=0.4, complete_rollout_retries=0, retry_base_delay=0.05)
    await server.post_init(rollout_id="a")
    first = await trainer.wait_completed("a")
    found = await until_phase(server, "a", "undelivered")
    last = trainer.completions("a")[-1]
    assert 0.35 <= last.at - first.at <= 0.6
    assert found["status"] == "COMPLETED"
    assert (await server.get("/result/a")).json["status"] == "COMPLETED"
    assert any("UNDELIVERED" in r.getMessage() and r.levelno == logging.ERROR for r in caplog.records)


async def test_a_trainer_that_hangs_holds_up_no_other(serve: Serve, trainer: MockTrainer) -> None:
    stuck = hold()
    trainer.on_completed(stuck, when=lambda request: (request.rollout_id or "").startswith("slow"))
    server = await serve(Instant())
    for number in range(80):
        await server.post_init(rollout_id=f"slow-{number}")
    await trainer.wait_completed(80)
    await server.post_init(rollout_id="fast")
    await until_phase(server, "fast", "delivered")
    stuck.release()
    await trainer.wait_until(lambda: all(r.accepted for r in trainer.completions()))


async def test_a_large_result_arrives_whole(serve: Serve, trainer: MockTrainer) -> None:
    content = "ä" * 2_000_000

    async def run(ctx: RolloutContext) -> RolloutResult:
        return ctx.complete([{"role": "assistant", "content": content}])

    trainer.on_completed(status(503), times=1)
    server = await serve(Doing(run))
    await server.post_init(rollout_id="a")
    await trainer.wait_completed("a", accepted=True)
    first, second = trainer.completions("a")
    assert first.body == second.body
    assert first.json["final_messages"][0]["content"] == content


# ---------------------------------------------------------------- keep-alive


async def test_connections_are_used_again(serve: Serve, trainer: MockTrainer) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        for _ in range(5):
            messages.append((await ctx.chat(messages)).message)
        return ctx.complete(messages)

    server = await serve(Doing(run))
    await server.post_init(rollout_id="a")
    await trainer.wait_completed("a")
    assert trainer.connections_opened == 1


async def test_a_connection_that_went_stale_costs_neither_the_call_nor_a_pause(
    serve: Serve, trainer: MockTrainer
) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        for _ in range(3):
            messages.append((await ctx.chat(messages)).message)
        return ctx.complete(messages)

    trainer.on_chat(close_after_answer())
    trainer.on_completed(close_after_answer())
    server = await serve(Doing(run), retry_base_delay=30, retry_max_delay=30)
    for name in ("a", "b"):
        await server.post_init(rollout_id=name)
        assert (await trainer.wait_completed(name, accepted=True)).json["status"] == "COMPLETED"


async def test_a_stale_connection_costs_a_delivery_no_pause(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_completed([close_before_answer(), status(200)])
    server = await serve(Instant(), retry_base_delay=30, retry_max_delay=30)
    await server.post_init(rollout_id="a")
    assert (await until_phase(server, "a", "delivered"))["delivery_attempts"] == 2
