"""Every fault of the mock trainer, and its HTTP reader, as clients meet them on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rollout.testing import (
    Answer,
    MockTrainer,
    close_after_answer,
    close_before_answer,
    delay,
    garbage,
    half_body,
    hang,
    hold,
    huge,
    lost_acknowledgement,
    raw,
    redirect,
    reset,
    slow_bytes,
    status,
    text,
    wrong_content_type,
)

CHAT = "/v1/chat/completions"
COMPLETED = "/v1/rollout/completed"


@pytest.fixture
async def trainer() -> AsyncIterator[MockTrainer]:
    async with MockTrainer() as running:
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as running:
        yield running


async def post(
    session: aiohttp.ClientSession, url: str, body: Any = None, **options: Any
) -> tuple[int, Any, aiohttp.ClientResponse]:
    payload = {"rollout_id": "r1", "messages": []} if body is None else body
    async with session.post(url, json=payload, allow_redirects=False, **options) as response:
        data = await response.read()
        is_json = response.content_type == "application/json" and data
        return response.status, (await response.json()) if is_json else data, response


async def said(session: aiohttp.ClientSession, trainer: MockTrainer, rollout_id: str = "r1") -> str:
    _, body, _ = await post(session, trainer.url + CHAT, {"rollout_id": rollout_id, "messages": []})
    return str(body["choices"][0]["message"]["content"])


async def exchange(trainer: MockTrainer, request: bytes) -> bytes:
    """What comes back for these very bytes, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(trainer.url.rsplit(":", 1)[1]))
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


# ---------------------------------------------------------------- faults


async def test_a_status_can_name_when_to_come_back(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    trainer.on_chat(status(503, retry_after=7))

    code, body, response = await post(session, trainer.url + CHAT)

    assert (code, response.headers["Retry-After"], body["error"]["code"]) == (503, "7", 503)
    assert not trainer.chats()[0].accepted


async def test_a_status_that_nobody_knows_is_sent_all_the_same(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    trainer.on_chat(status(599, body={"detail": "own"}))

    assert (await post(session, trainer.url + CHAT))[:2] == (599, {"detail": "own"})


async def test_redirects_name_their_target(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    trainer.on_completed(redirect("http://elsewhere/", 307))

    code, _, response = await post(session, trainer.url + COMPLETED)

    assert (code, response.headers["Location"]) == (307, "http://elsewhere/")


@pytest.mark.parametrize(
    ("answer", "kind", "body"),
    [
        (wrong_content_type(answer=text("4")), "text/html", b'"content":"4"'),
        (wrong_content_type("text/plain"), "text/plain", b'"content":"ok"'),
        (raw("data: [DONE]\n\n", "text/event-stream"), "text/event-stream", b"data: [DONE]"),
    ],
    ids=["html", "default", "sse"],
)
async def test_the_content_type_can_be_wrong(
    session: aiohttp.ClientSession, trainer: MockTrainer, answer: Answer, kind: str, body: bytes
) -> None:
    trainer.on_chat(answer)

    async with session.post(trainer.url + CHAT, json={}) as response:
        assert response.content_type == kind
        assert body in await response.read()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (reset(), aiohttp.ClientOSError),
        (close_before_answer(), aiohttp.ServerDisconnectedError),
        (half_body(), aiohttp.ClientPayloadError),
        (half_body(raw(b"1")), aiohttp.ClientPayloadError),
        (garbage(), aiohttp.ClientError),
        (garbage(b"HTTP/9.9 nonsense\r\n\r\n"), aiohttp.ClientError),
    ],
    ids=["reset", "close", "half", "half-of-one-byte", "garbage", "bad-status-line"],
)
async def test_broken_answers_break_the_call_and_are_recorded_as_not_accepted(
    session: aiohttp.ClientSession, trainer: MockTrainer, answer: Answer, error: type[Exception]
) -> None:
    trainer.on_chat([answer, text("healed")])

    with pytest.raises(error):
        await post(session, trainer.url + CHAT)

    assert (trainer.chats()[0].status, trainer.chats()[0].accepted) == (None, False)
    assert await said(session, trainer) == "healed"


async def test_a_lost_acknowledgement_was_accepted_although_the_client_saw_an_error(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    trainer.on_completed([lost_acknowledgement(), 200])

    with pytest.raises(aiohttp.ClientOSError):
        await post(session, trainer.url + COMPLETED)

    assert (await trainer.wait_completed("r1", accepted=True)).status is None


async def test_a_close_after_the_answer_costs_a_new_connection(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    trainer.on_chat(close_after_answer(text("bye")), times=1)

    first = await said(session, trainer)
    trainer_closed = trainer.chats()[0].accepted
    async with aiohttp.ClientSession() as fresh:
        second = await said(fresh, trainer)

    assert (first, trainer_closed, second, trainer.connections_opened) == ("bye", True, "ok", 2)


async def test_a_client_that_asks_for_the_end_of_the_connection_gets_it(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    for _ in range(2):
        await post(session, trainer.url + CHAT, headers={"Connection": "close"})

    assert trainer.connections_opened == 2


async def test_a_delayed_answer_comes_late(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    trainer.on_chat([delay(0.05), delay(0.05, text("late"))])
    began = asyncio.get_running_loop().time()

    answers = [await said(session, trainer), await said(session, trainer)]

    assert answers == ["ok", "late"]
    assert asyncio.get_running_loop().time() - began >= 0.1


async def test_held_answers_go_out_together_when_they_are_released(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    held = hold(text("now"))
    trainer.on_chat(held)
    calls = [asyncio.create_task(said(session, trainer, f"r{n}")) for n in range(5)]
    await trainer.wait_chats(5)
    assert not any(call.done() for call in calls)

    held.release()

    assert await asyncio.gather(*calls) == ["now"] * 5
    assert len(await trainer.wait_chats(1, "r3")) == 1


@pytest.mark.parametrize(
    "answer",
    [hang(), delay(60), slow_bytes(60), slow_bytes(60, text("x"), chunk_bytes=10)],
    ids=["hang", "delay", "slow", "slow-chunks"],
)
async def test_a_client_that_gives_up_is_noticed(
    session: aiohttp.ClientSession, trainer: MockTrainer, answer: Answer
) -> None:
    trainer.on_chat(answer)

    with pytest.raises(TimeoutError):
        await post(session, trainer.url + CHAT, timeout=aiohttp.ClientTimeout(total=0.05))
    await trainer.wait_until(lambda: trainer.chats()[0].abandoned)

    assert str(trainer.chats()[0]).endswith("-> abandoned")


async def test_a_client_that_resets_is_noticed(trainer: MockTrainer) -> None:
    trainer.on_chat(hang())
    _, writer = await asyncio.open_connection("127.0.0.1", int(trainer.url.rsplit(":", 1)[1]))
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a close is a RST
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n\r\n")
    await trainer.wait_chats()

    writer.transport.abort()

    await trainer.wait_until(lambda: trainer.chats()[0].abandoned)


async def test_slow_bytes_arrive_whole_in_the_end(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    trainer.on_chat([slow_bytes(0, chunk_bytes=16), slow_bytes(0, text("slow"), chunk_bytes=100)])

    assert [await said(session, trainer), await said(session, trainer)] == ["ok", "slow"]
    assert trainer.chats()[1].accepted


async def test_a_huge_answer_is_a_valid_completion_of_that_size(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    trainer.on_chat(huge(300_000))

    assert await said(session, trainer) == "x" * 300_000


async def test_a_client_that_does_not_read_a_huge_answer_to_its_end_is_noticed(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    trainer.on_chat(huge(1 << 30))

    async with session.post(trainer.url + CHAT, json={}) as response:
        await response.content.readexactly(1000)
        response.close()

    await trainer.wait_until(lambda: trainer.chats()[0].abandoned)


async def test_a_trainer_that_closes_lets_nobody_wait() -> None:
    async with aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(MockTrainer())
        trainer.on_chat(hang())
        call = asyncio.create_task(post(session, trainer.url + CHAT))
        await trainer.wait_chats()

        await stack.aclose()

        with pytest.raises(aiohttp.ClientError):
            await call


# ---------------------------------------------------------------- bytes on the wire


async def test_chunked_bodies_are_put_together(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b'{"rollout_id": '
        yield b'"r1"}'

    async with session.post(trainer.url + COMPLETED, data=parts()) as response:
        assert response.status == 200

    assert trainer.completions("r1")[0].body == b'{"rollout_id": "r1"}'


async def test_chunk_extensions_and_trailers_are_skipped(trainer: MockTrainer) -> None:
    head = b"POST /v1/rollout/completed HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"

    answer = await exchange(trainer, head + b"2;ext=1\r\n{}\r\n0\r\nX-Trailer: 1\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert trainer.completions()[0].body == b"{}"


async def test_a_client_that_expects_a_go_ahead_gets_it(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    async with session.post(trainer.url + COMPLETED, json={"rollout_id": "r1"}, expect100=True) as response:
        assert response.status == 200

    assert trainer.completions("r1")[0].accepted


async def test_a_request_sent_ahead_is_answered_in_its_turn(trainer: MockTrainer) -> None:
    one = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
    trainer.on_chat([delay(0.01, text("a")), text("b")])

    answer = await exchange(trainer, one + one)

    assert answer.index(b'"a"') < answer.index(b'"b"')


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"hello\r\n\r\n",
        b"POST / HTTP/1.1\r\nno colon here\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n",
    ],
    ids=["no-request-line", "no-header", "no-length"],
)
async def test_what_is_not_http_is_answered_400(trainer: MockTrainer, request_bytes: bytes) -> None:
    answer = await exchange(trainer, request_bytes)

    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert trainer.requests == []


async def test_a_head_without_end_costs_the_connection(trainer: MockTrainer) -> None:
    with contextlib.suppress(ConnectionError):
        await exchange(trainer, b"POST / HTTP/1.1\r\nX: " + b"x" * (2 << 20))

    assert (trainer.connections_opened, trainer.requests) == (1, [])


async def test_half_a_request_is_no_request(trainer: MockTrainer) -> None:
    answer = await exchange(trainer, b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf")

    assert (answer, trainer.requests) == (b"", [])
