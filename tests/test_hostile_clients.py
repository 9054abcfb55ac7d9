"""What callers of the service may do to it: flood it, hold it up, hang up halfway, or send what is costly to read."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from conftest import Serve
from hypothesis import given
from hypothesis import strategies as st
from served import GENEROUS_SECONDS, Instant, body_of, exchange, settings_with

from rollout.errors import InvalidJSON, InvalidRequest
from rollout.requests import MAX_CANCELLED_IDS, MAX_MESSAGES, parse_cancel, receive
from rollout.schemas import CancelRequest, RolloutRequest
from rollout.server.app import create_app
from rollout.server.guard import guarded
from rollout.server.serving import bind, connection_limit, serve_app
from rollout.testing import MockTrainer, make_request
from rollout.wire import (
    MAX_CONTAINERS,
    MAX_SLOW_NUMBERS,
    canonical_digest,
    decode,
    holds_too_many_containers,
    is_slow_to_decode,
)

GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
SECOND = 1.0
LARGE = b" " * 33_000
"""Padding beyond the size from which numbers are counted."""


def init_with(messages: bytes) -> bytes:
    """An init whose messages are this JSON text."""
    body = msgspec.json.encode(make_request(server_url="http://trainer"))
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "messages": msgspec.Raw(messages)})


def numbers(token: bytes, count: int) -> bytes:
    return b'[{"role":"user","n":[' + b",".join([token] * count) + b"]}]"


# ---------------------------------------------------------------- costly bodies


@pytest.mark.parametrize("token", [b"1e300", b"1E+308", b"-1.5e0000300", b"93e289"], ids=str)
def test_a_flood_of_numbers_that_decode_slowly_is_refused_at_once(token: bytes) -> None:
    body = init_with(numbers(token, 400_000))
    began = time.perf_counter()
    with pytest.raises(InvalidRequest, match="more than 2000 numbers with such exponents"):
        receive(body, 1 << 20)
    assert time.perf_counter() - began < SECOND


@pytest.mark.parametrize(
    "text",
    [
        numbers(b"1e300", MAX_SLOW_NUMBERS) + LARGE,
        numbers(b"1e-300", 3000) + LARGE,
        numbers(b"1e99", 20_000),
        numbers(b'"file123"', 20_000),
        numbers(b'"1e300"', 20_000),
        numbers(b'"\\"1e300,"', 20_000),
    ],
    ids=["few", "small-numbers", "two-digits", "words", "texts", "quotes-in-texts"],
)
def test_what_only_looks_like_such_a_flood_is_taken(text: bytes) -> None:
    assert receive(init_with(text), 1 << 20).view.messages == msgspec.json.decode(text)


def test_a_flood_that_is_no_json_is_400() -> None:
    with pytest.raises(InvalidJSON):
        receive(init_with(numbers(b"1e300", 20_000))[:-1], 1 << 20)


def test_arguments_with_such_a_flood_are_refused_as_json_too() -> None:
    with pytest.raises(InvalidJSON, match="such exponents"):
        decode(numbers(b"1e300", 20_000))


@pytest.mark.parametrize("end", [b"", b'"', b"\\", b'"\\'], ids=["open", "closed", "escape", "both"])
def test_no_text_makes_the_count_step_back(end: bytes) -> None:
    began = time.perf_counter()
    assert not is_slow_to_decode(b'["' + b'e100\\"' * 200_000 + end)
    assert time.perf_counter() - began < SECOND


@given(st.lists(st.sampled_from(["1e300", "2.5E+290", '"1e300"', '"a\\"1e300"', "1e20", "1e-300", "7"]), max_size=40))
def test_the_count_is_exact_where_it_decides(tokens: list[str]) -> None:
    slow = sum(token in ("1e300", "2.5E+290") for token in tokens)
    missing = MAX_SLOW_NUMBERS - slow
    text = "[" + ",".join(tokens + ["1e301"] * missing) + "]" + LARGE.decode()
    assert not is_slow_to_decode(text.encode())
    assert is_slow_to_decode(b"[1e300," + text.encode()[1:]) == (missing + slow + 1 > MAX_SLOW_NUMBERS)


def test_a_body_of_a_million_small_objects_is_refused_before_they_are_made() -> None:
    with pytest.raises(InvalidRequest, match="more than 1000000 objects and arrays"):
        receive(init_with(b'[{"a":[' + b"{}," * MAX_CONTAINERS + b"1]}]"), 1 << 20)


def test_brackets_in_texts_are_no_objects() -> None:
    assert not holds_too_many_containers(b'["' + b'{\\"[' * 50 + b'"]', 10)
    assert holds_too_many_containers(b"[" + b"[]," * 10 + b"1]", 10)
    assert not holds_too_many_containers(b"[" + b"[]," * 9 + b"1]", 10)


def test_more_messages_than_the_limit_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"100001 messages, the limit is 100000 - at `\$.messages`"):
        receive(init_with(b"[" + b"{}," * MAX_MESSAGES + b"{}]"), 1 << 20)


def test_more_ids_than_the_limit_are_refused_in_a_cancel() -> None:
    with pytest.raises(InvalidRequest, match=r"100001 ids, the limit is 100000 - at `\$.ids`"):
        parse_cancel(b'{"ids":[' + b'"",' * MAX_CANCELLED_IDS + b'""]}')


async def test_a_cancel_of_many_ids_lets_others_in(serve: Serve) -> None:
    server = await serve(Instant())
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    found = await server.service.cancel(CancelRequest(ids=[str(i) for i in range(5000)]))
    counting.cancel()
    assert len(found) == 5000
    assert turns >= 4


def test_huge_numbers_are_compared_without_writing_out_their_digits() -> None:
    text = b"[" + b"1e300," * 20_000 + b"1]"
    began = time.perf_counter()
    assert canonical_digest(text) == canonical_digest(text.replace(b"e", b"E+"))
    assert canonical_digest(text) != canonical_digest(text.replace(b"300", b"299"))
    assert time.perf_counter() - began < SECOND
    assert canonical_digest(b"[-9.0,9e3]") == canonical_digest(b"[-9,9000]")


# ---------------------------------------------------------------- floods of connections


@contextlib.asynccontextmanager
async def door(pause_seconds: float = 20, limit: int | None = None, size: int = 2) -> AsyncIterator[int]:
    """The port of a guarded server that answers so many bytes, `/slow` after a moment."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/slow":
            await asyncio.sleep(0.02)
        return web.Response(body=b"x" * size)

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", answer)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(guarded(runner.server, pause_seconds, loop, limit), "127.0.0.1", 0)
    try:
        async with asyncio.timeout(GENEROUS_SECONDS):
            yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await runner.cleanup()


async def get(port: int) -> bytes:
    """The answer to one request; nothing if the connection was not taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_connections_beyond_the_limit_are_closed_and_a_gap_is_filled(caplog: pytest.LogCaptureFixture) -> None:
    async with door(limit=2) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in held:
            writer.write(GET_HEALTH)
            await reader.readuntil(b"xx")
        refused = [await get(port) for _ in range(3)]
        held[0][1].close()
        while not (taken := await get(port)):
            pass  # the server notices within a turn or two
        held[1][1].close()

    assert refused == [b"", b"", b""]
    assert taken.startswith(b"HTTP/1.1 200")
    assert caplog.text.count("2 connections are open, more are closed at once") == 1


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """So many may be open in this process, until the test ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_half_of_the_descriptors_at_least_are_for_callers_and_the_rest_for_trainers(few_descriptors: int) -> None:
    assert connection_limit(10_000) == few_descriptors // 2
    assert connection_limit(-64) == few_descriptors


def test_without_a_limit_of_descriptors_there_is_none_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connection_limit(1) is None
    monkeypatch.setitem(__import__("sys").modules, "resource", None)
    assert connection_limit(1) is None


class Exhausted(socket.socket):
    """Stands for a listener in a process without a free descriptor."""

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self.tries = 0
        self.tried = asyncio.Event()

    def accept(self) -> Any:
        self.tries += 1
        self.tried.set()
        raise OSError(errno.EMFILE, "Too many open files")


async def test_a_process_without_descriptors_says_so_once_and_goes_on(
    trainer: MockTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(Instant(), settings_with())
    listener = Exhausted(bind("127.0.0.1", 0)[0].detach())
    listener.setblocking(False)
    ready = asyncio.Event()
    running = asyncio.create_task(serve_app(app, [listener], on_ready=lambda _: ready.set()))
    await ready.wait()
    with contextlib.closing(socket.create_connection(listener.getsockname())):
        await listener.tried.wait()
        asyncio.get_running_loop().call_exception_handler({"message": "something else"})
        running.cancel()
        await asyncio.wait([running])

    assert listener.tries <= 16
    assert caplog.text.count("connections cannot be accepted: [Errno 24]") == 1
    assert "something else" in caplog.text


# ---------------------------------------------------------------- readers and half-closed connections


async def test_a_reader_that_never_reads_loses_its_connection() -> None:
    async with door(pause_seconds=0.05, size=64 << 20) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(GET_HEALTH)
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.2)  # four times the pause without reading
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(64 << 20)
        writer.close()


async def test_a_reader_that_is_slow_but_reads_keeps_it() -> None:
    async with door(pause_seconds=0.05, size=16 << 20) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(GET_HEALTH)
        head = await reader.readuntil(b"\r\n\r\n")
        for _ in range(16):
            await reader.readexactly(1 << 20)
            await asyncio.sleep(0.01)
        writer.close()
    assert head.startswith(b"HTTP/1.1 200")


async def half_closed(port: int, data: bytes) -> bytes:
    """All that is answered to one who says this and closes its sending side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("path", [b"/", b"/slow"])
@pytest.mark.parametrize("count", [1, 3])
async def test_who_closes_its_sending_side_gets_all_answers_and_then_the_end(path: bytes, count: int) -> None:
    async with door() as port:
        answers = await half_closed(port, count * (b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path))
    assert answers.count(b"HTTP/1.1 200 OK") == count


@pytest.mark.parametrize("data", [b"", b"GET"], ids=["none", "head"])
async def test_who_closes_it_before_the_head_is_whole_is_let_go(data: bytes) -> None:
    async with door() as port:
        assert b"200 OK" not in await half_closed(port, data)


async def test_who_closes_it_before_the_body_is_whole_is_let_go() -> None:
    async with door() as port:
        answer = await half_closed(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx")

    assert answer.count(b"200 OK") <= 1  # from Python 3.12 on a handler that needs no body may be done before the end


async def test_who_closes_it_between_two_requests_is_let_go() -> None:
    async with door() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET_HEALTH)
        await reader.readuntil(b"xx")
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()


async def test_an_init_whose_caller_closed_its_sending_side_is_answered(serve: Serve) -> None:
    server = await serve(Instant())
    body = body_of(server, rollout_id="half")
    head = b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert (await half_closed(server.port, head + body)).startswith(b"HTTP/1.1 202")


# ---------------------------------------------------------------- odd headers


@pytest.mark.parametrize(
    ("line", "status"),
    [("GET /health", 200), ("GET /status", 200), ("POST /health", 405), ("PUT /init", 417), ("GET /nowhere", 417)],
)
async def test_an_expectation_that_nobody_knows_is_answered_as_json(serve: Serve, line: str, status: int) -> None:
    server = await serve(Instant())
    request = f"{line} HTTP/1.1\r\nHost: x\r\nExpect: a-miracle\r\nConnection: close\r\n\r\n"
    head, _, body = (await exchange(server, request.encode())).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status)
    assert b"x-request-id: " in head.lower()
    assert msgspec.json.decode(body)


@pytest.mark.parametrize("body", [b"{}", b'{"rollout_id":1}', b""], ids=str)
async def test_plain_json_in_chunks_that_is_labelled_gzip_is_400(serve: Serve, body: bytes) -> None:
    server = await serve(Instant())
    chunks = (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
    head = b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"
    answer = await exchange(server, head + b"Connection: close\r\n\r\n" + chunks)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"code":"invalid_json"' in answer


async def test_a_transfer_encoding_that_is_not_only_chunked_is_415(serve: Serve) -> None:
    server = await serve(Instant())
    head = b"POST /init HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\nConnection: close\r\n\r\n"
    answer = await exchange(server, head + b"2\r\n{}\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 415")
    assert b'"code":"unsupported_media_type"' in answer


@pytest.mark.parametrize("wait", ["1_0", "\u0661", "%2B1", " 1", "1e1", "."])
async def test_a_wait_in_what_only_python_takes_for_a_number_is_422(serve: Serve, wait: str) -> None:
    server = await serve(Instant())
    assert (await server.get(f"/result/r?wait={wait}")).status in (404, 422)
    await server.post_init(rollout_id="r")
    assert (await server.get(f"/result/r?wait={wait}")).status == 422


# ---------------------------------------------------------------- the end


class Asked(Instant):
    """Its `get_tools()` does not return; with `swallows` not even when it is cancelled."""

    def __init__(self, swallows: bool = False) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.release = asyncio.Event()
        self._swallows = swallows

    async def get_tools(self, request: RolloutRequest) -> list[Any]:
        self.asked.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            if not self._swallows:
                raise
            await self.release.wait()
        return []


@pytest.mark.parametrize("swallows", [False, True], ids=["cancelled", "swallowed"])
async def test_a_drain_does_not_wait_for_tools_that_do_not_come(
    serve: Serve, swallows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.server.admissions._LEAST_GRACE_SECONDS", 0.01)
    agent = Asked(swallows)
    server = await serve(agent)
    waiting = asyncio.create_task(server.post_init(rollout_id="r"))
    await agent.asked.wait()
    async with asyncio.timeout(SECOND):
        await server.service.stop(0)
        answer = await waiting
    agent.release.set()
    assert (answer.status, answer.json["code"]) == (503, "draining")
    assert "Retry-After" in answer.headers


async def test_a_cancel_after_the_store_has_closed_is_503_draining(serve: Serve, tmp_path: Path) -> None:
    server = await serve(Instant(), state_url=f"sqlite:///{tmp_path / 'state.db'}")
    await server.post_init(rollout_id="r")
    await server.wait_phase("r")
    await server.service.stop(0)
    answer = await server.call("POST", "/cancel", b'{"ids":["r"]}')
    assert (answer.status, answer.json["code"]) == (503, "draining")
