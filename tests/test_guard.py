"""The time limit for headers, on real sockets: slow ones are cut off, whole requests never notice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from aiohttp import web

from rollout.server.guard import guarded
from rollout.wire import decode

PAUSE_SECONDS = 0.1
REQUEST = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"


class Door:
    """A guarded server on a free port, whose handler answers with the body and counts the requests."""

    def __init__(self) -> None:
        self.requests = 0
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.lost: list[BaseException | None] = []
        self.port = 0

    async def echo(self, request: web.Request) -> web.Response:
        self.requests += 1
        return web.Response(body=await request.read())

    async def hold(self, request: web.Request) -> web.Response:
        self.entered.set()
        await self.release.wait()
        return web.Response(text="held")

    async def large(self, request: web.Request) -> web.Response:
        return web.Response(body=b"x" * (8 << 20))


@contextlib.asynccontextmanager
async def opened(pause_seconds: float = PAUSE_SECONDS) -> AsyncIterator[Door]:
    door = Door()
    app = web.Application()
    app.router.add_post("/echo", door.echo)
    app.router.add_get("/hold", door.hold)
    app.router.add_get("/large", door.large)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(guarded(runner.server, pause_seconds, loop), "127.0.0.1", 0)
    door.port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(5):
            yield door
    finally:
        server.close()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def connected(door: Door) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One answer off the wire: status, headers in lower case, body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def send_slowly(writer: asyncio.StreamWriter, parts: Iterable[bytes], pause_seconds: float) -> None:
    """What a slow peer sends: these parts, with pauses."""
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(pause_seconds)


# ---------------------------------------------------------------- slow headers


@pytest.mark.parametrize(
    "start", [b"P", b"POST /echo HTTP/1.1\r\n", b"POST /echo HTTP/1.1\r\nHost: a\r\n"], ids=range(3)
)
async def test_headers_that_do_not_come_get_408_and_the_connection_ends(start: bytes) -> None:
    async with opened() as door, connected(door) as (reader, writer):
        began = asyncio.get_running_loop().time()
        writer.write(start)
        answers = []
        while not reader.at_eof():
            with contextlib.suppress(asyncio.IncompleteReadError):
                answers.append(await read_answer(reader))
        took = asyncio.get_running_loop().time() - began

    status, headers, body = answers[-1]
    assert status == 408
    assert took >= PAUSE_SECONDS
    assert decode(body)["code"] == "request_timeout"
    assert (headers["content-type"], headers["connection"]) == ("application/json", "close")
    assert headers["x-request-id"]


async def test_each_408_has_an_id_of_its_own() -> None:
    async with opened(0.02) as door:
        ids = []
        for _ in range(2):
            async with connected(door) as (reader, writer):
                writer.write(b"GET")
                ids.append((await read_answer(reader))[1]["x-request-id"])

    assert ids[0] != ids[1]


async def test_headers_that_trickle_in_within_the_pause_are_fine() -> None:
    async with opened() as door, connected(door) as (reader, writer):
        parts = [REQUEST[:10], REQUEST[10:20], REQUEST[20:40], REQUEST[40:]]
        await send_slowly(writer, parts, PAUSE_SECONDS * 0.4)
        answer = await read_answer(reader)

    assert (answer[0], answer[2]) == (200, b"hi")


async def test_a_slow_second_request_on_a_connection_is_cut_off_too() -> None:
    async with opened() as door, connected(door) as (reader, writer):
        writer.write(REQUEST)
        first = await read_answer(reader)
        writer.write(b"POST /ec")
        second = await read_answer(reader)

    assert (first[0], second[0]) == (200, 408)


async def test_a_peer_that_leaves_in_the_middle_of_its_headers_is_forgotten() -> None:
    async with opened(0.02) as door:
        async with connected(door) as (_, writer):
            writer.write(b"POST /ec")
            await writer.drain()
        async with connected(door) as (reader, writer):
            await asyncio.sleep(0.03)  # the other's time would be up
            writer.write(REQUEST)
            assert (await read_answer(reader))[0] == 200


# ---------------------------------------------------------------- whole requests


async def test_an_idle_connection_is_left_alone() -> None:
    async with opened(0.02) as door, connected(door) as (reader, writer):
        answers = []
        for _ in range(2):
            await asyncio.sleep(0.04)  # twice the pause without a byte, before the first request and between two
            writer.write(REQUEST)
            answers.append((await read_answer(reader))[0])

    assert answers == [200, 200]


async def test_requests_that_come_at_once_are_answered_in_their_order() -> None:
    def request(body: bytes) -> bytes:
        return b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    bodies = [b"%d" % i for i in range(40)]
    async with opened() as door, connected(door) as (reader, writer):
        writer.write(b"".join(map(request, bodies)))
        answers = [await read_answer(reader) for _ in bodies]

    assert [body for _, _, body in answers] == bodies
    assert {status for status, _, _ in answers} == {200}


@pytest.mark.parametrize("size", [1, 7, 30])
async def test_pieces_of_any_size_make_the_same_requests(size: int) -> None:
    stream = REQUEST * 3
    async with opened() as door, connected(door) as (reader, writer):
        for at in range(0, len(stream), size):
            writer.write(stream[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
        answers = [await read_answer(reader) for _ in range(3)]

    assert [(status, body) for status, _, body in answers] == [(200, b"hi")] * 3


async def test_a_handler_may_take_longer_than_the_pause() -> None:
    async with opened(0.02) as door, connected(door) as (reader, writer):
        writer.write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await door.entered.wait()
        await asyncio.sleep(0.05)
        door.release.set()
        answer = await read_answer(reader)

    assert (answer[0], answer[2]) == (200, b"held")


async def test_the_start_of_a_next_request_does_not_disturb_the_one_that_is_being_handled() -> None:
    async with opened(0.02) as door, connected(door) as (reader, writer):
        writer.write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\nPOST /echo HT")
        await door.entered.wait()
        await asyncio.sleep(0.05)
        door.release.set()
        held = await read_answer(reader)
        writer.write(REQUEST.removeprefix(b"POST /echo HT"))
        rest = await read_answer(reader)

    assert (held[2], rest[2]) == (b"held", b"hi")


async def test_a_body_may_come_slower_than_headers_may() -> None:
    async with opened(0.02) as door, connected(door) as (reader, writer):
        await send_slowly(writer, [REQUEST[:-2], b"h", b"i"], 0.04)
        answer = await read_answer(reader)

    assert (answer[0], answer[2]) == (200, b"hi")


async def test_a_reader_that_is_slow_gets_all_of_a_large_answer() -> None:
    async with opened() as door, connected(door) as (reader, writer):
        writer.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        status, _, body = await read_answer(reader)

    assert (status, len(body)) == (200, 8 << 20)


async def test_a_peer_that_closes_its_side_still_gets_its_answer() -> None:
    async with opened() as door, connected(door) as (reader, writer):
        writer.write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await door.entered.wait()
        writer.write_eof()
        door.release.set()
        received = await reader.read()

    assert received == b"" or b"held" in received


# ---------------------------------------------------------------- what is no HTTP


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x00\xa5\x01\r\n\r\n", b"GET / HTTP/x\r\n\r\n", b"POST /echo HTTP/1.1\r\nContent-Length: x\r\n\r\n"],
    ids=["tls", "bad-version", "bad-length"],
)
async def test_what_is_no_http_is_refused_as_json(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as door, connected(door) as (reader, writer):
        writer.write(data)
        status, headers, body = await read_answer(reader)
        assert await reader.read() == b""

    refusal: dict[str, Any] = decode(body)
    assert (status, set(refusal)) == (400, {"code", "detail"})
    assert headers["x-request-id"]
    assert headers["content-type"].startswith("application/json")
