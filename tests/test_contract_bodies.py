"""PROTOCOL section 2: how a body may come, how large it may be, how long it may take."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import zlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, web
from conftest import Serve
from served import Instant, body_of, exchange, listening, post, settings_with

from rollout.server.app import create_app
from rollout.server.body import read_body
from rollout.server.guard import guarded
from rollout.server.middlewares import error_response
from rollout.testing import MockTrainer, make_request

pytestmark = pytest.mark.usefixtures("no_tracebacks")


# ---------------------------------------------------------------- 415 and encodings


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "APPLICATION/JSON",
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8 ; x=y",
        "application/vnd.api+json",
        " application/json ",
    ],
)
async def test_json_content_types_are_taken(serve: Serve, kind: str) -> None:
    server = await serve(Instant())
    assert (await post(server, body_of(server), Content_Type=kind))[0] == 202


async def test_an_absent_content_type_is_taken(serve: Serve) -> None:
    server = await serve(Instant())
    body = body_of(server)
    head = b"POST /init HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert (await exchange(server, head + body)).startswith(b"HTTP/1.1 202")


@pytest.mark.parametrize("path", ["/init", "/cancel"])
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "text/html", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
     "application/octet-stream", "application/jsonp", "application/x-json-seq", "json", "application/xml", "*/*", ";"],
)  # fmt: skip
async def test_other_content_types_are_415(serve: Serve, path: str, kind: str) -> None:
    server = await serve(Instant())
    answer = await server.call("POST", path, body_of(server), headers={"Content-Type": kind})
    assert (answer.status, answer.json["code"]) == (415, "unsupported_media_type")
    assert answer.json["detail"] == f"the Content-Type must be application/json, not {kind!r}"


@pytest.mark.parametrize("name", ["Content-Type", "Content-Encoding"])
async def test_what_was_received_is_not_repeated_at_any_length(serve: Serve, name: str) -> None:
    server = await serve(Instant())
    answer = await server.call("POST", "/init", b"{}", headers={"Content-Type": "application/json", name: "x" * 4000})
    assert answer.status == 415
    assert f"not '{'x' * 100}...'" in answer.json["detail"]


def gzipped(body: bytes) -> bytes:
    return gzip.compress(body, 1)


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


ENCODINGS = [
    ("gzip", gzipped),
    ("x-gzip", gzipped),
    ("GZip", gzipped),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("identity", bytes),
]


@pytest.mark.parametrize("unpacks_first", [False, True], ids=["served by us", "served by plain aiohttp"])
@pytest.mark.parametrize(("encoding", "pack"), ENCODINGS, ids=lambda v: getattr(v, "__name__", v))
async def test_compressed_bodies_are_unpacked(
    trainer: MockTrainer, encoding: str, pack: Any, unpacks_first: bool
) -> None:
    app = create_app(Instant(), settings_with(max_body_bytes=4096))
    async with listening(app, auto_decompress=unpacks_first) as url, ClientSession(url) as session:
        for name in ("r", "\u00e9\U0001f600"):
            body = pack(msgspec.json.encode(make_request(rollout_id=name, server_url=trainer.url)))
            headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
            async with session.post("/init", data=body, headers=headers) as answer:
                assert answer.status == 202, await answer.text()
                assert (await answer.json())["rollout_id"] == name


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "gzip, br", "utf-8", "none", "gzip;q=1"])
async def test_unknown_content_encodings_are_415(serve: Serve, encoding: str) -> None:
    server = await serve(Instant())
    assert await post(server, body_of(server), Content_Encoding=encoding) == (415, "unsupported_media_type")


BROKEN = {
    "cut": gzipped(b'{"ids": []}')[:-3],
    "cut at the head": gzipped(b'{"ids": []}')[:5],
    "bad checksum": gzipped(b'{"ids": []}')[:-8] + b"\x00" * 8,
    "garbage inside": gzipped(b'{"ids": []}' * 50)[:12] + b"\xff" * 20,
    "something follows": gzipped(b'{"ids": []}') + b"more",
    "not packed": b'{"ids": []}',
    "not packed, no JSON": b"hello",
    "nothing": b"",
    "deflate": zlib.compress(b'{"ids": []}'),
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
async def test_broken_gzip_is_400(serve: Serve, body: bytes) -> None:
    server = await serve(Instant())
    answer = await server.call("POST", "/cancel", body, headers={"Content-Encoding": "gzip"})
    assert (answer.status, answer.json["code"]) == (400, "invalid_json")
    assert (await server.get("/health")).status == 200


@pytest.mark.parametrize(
    "body", [BROKEN["cut"], BROKEN["garbage inside"], b"\x78\x9c\xff\xff", b"hello", b'{"ids": []}']
)
async def test_broken_deflate_is_400(serve: Serve, body: bytes) -> None:
    server = await serve(Instant())
    answer = await server.call("POST", "/cancel", body, headers={"Content-Encoding": "deflate"})
    assert (answer.status, answer.json["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("unpacks_first", [False, True], ids=["served by us", "served by plain aiohttp"])
@pytest.mark.parametrize(("encoding", "pack"), ENCODINGS[:5], ids=lambda v: getattr(v, "__name__", v))
async def test_a_bomb_is_413(trainer: MockTrainer, encoding: str, pack: Any, unpacks_first: bool) -> None:
    app = create_app(Instant(), settings_with(max_body_bytes=100_000))
    bomb = pack(b" " * 10_000_000)
    async with listening(app, auto_decompress=unpacks_first) as url, ClientSession(url) as session:
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        async with session.post("/init", data=io.BytesIO(bomb), headers=headers) as answer:
            assert (answer.status, (await answer.json())["code"]) == (413, "body_too_large")


# ---------------------------------------------------------------- 413: the size of the body

LIMIT = 2048


async def in_pieces(body: bytes, size: int = 500) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
@pytest.mark.parametrize(("extra", "expected"), [(-1, 202), (0, 202), (1, 413), (100_000, 413)])
async def test_the_body_may_have_exactly_max_body_bytes(serve: Serve, extra: int, expected: int, chunked: bool) -> None:
    server = await serve(Instant(), max_body_bytes=LIMIT)
    bare = body_of(server, rollout_id="r")
    body = bare + b" " * (LIMIT + extra - len(bare))
    data = in_pieces(body) if chunked else io.BytesIO(body)
    async with server.session.post("/init", data=data, headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == expected
        if expected == 413:
            assert (await answer.json())["code"] == "body_too_large"
            assert answer.headers["X-Request-ID"]


@pytest.mark.parametrize(("extra", "expected"), [(0, 202), (1, 413)])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_the_size_counts_after_decompression(serve: Serve, extra: int, expected: int, encoding: str) -> None:
    server = await serve(Instant(), max_body_bytes=LIMIT)
    bare = body_of(server, rollout_id="r")
    body = bare + b" " * (LIMIT + extra - len(bare))
    packed = gzipped(body) if encoding == "gzip" else zlib.compress(body)
    assert (await post(server, packed, Content_Encoding=encoding))[0] == expected


async def test_a_length_above_the_limit_is_refused_before_the_body_comes(serve: Serve) -> None:
    server = await serve(Instant(), max_body_bytes=LIMIT)
    reader, writer = await server.send_raw(b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


async def test_an_endless_chunked_body_is_cut_off(serve: Serve) -> None:
    server = await serve(Instant(), max_body_bytes=LIMIT)
    reader, writer = await server.send_raw(b"POST /init HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
    writer.write(b"7000\r\n" + b" " * 0x7000 + b"\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


@pytest.mark.parametrize("chunks", [b"zz\r\n{}\r\n", b"2\r\n{}zz0\r\n\r\n", b"-1\r\n\r\n"], ids=ascii)
async def test_a_broken_chunk_is_400(serve: Serve, chunks: bytes) -> None:
    server = await serve(Instant())
    head = b"POST /init HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert (await exchange(server, head + chunks)).split(b" ")[1] == b"400"


@pytest.mark.parametrize("sent", [b"", b"{", b'{"rollout_id"'], ids=["nothing", "a byte", "a part"])
async def test_a_caller_that_leaves_in_the_middle_of_its_body_disturbs_nobody(serve: Serve, sent: bytes) -> None:
    server = await serve(Instant())
    for _ in range(3):
        _, writer = await server.send_raw(b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n" + sent)
        writer.close()
    for _ in range(3):
        assert (await server.post_init()).status == 202


# ---------------------------------------------------------------- 408: silence


@contextlib.asynccontextmanager
async def guarded_server(pause_seconds: float, body: bytes) -> AsyncIterator[tuple[str, int]]:
    """The address of a server that answers this body and waits so long for headers."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(guarded(runner.server, pause_seconds, loop), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()
        await runner.cleanup()


async def test_a_body_that_stops_coming_is_408() -> None:
    async def handle(request: web.Request) -> web.Response:
        try:
            return web.Response(body=await read_body(request, LIMIT, 0.05))
        except Exception as exc:
            return error_response(exc)  # type: ignore[arg-type]

    app = web.Application()
    app.router.add_post("/", handle)
    async with listening(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b'POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"a":')
        answer = await reader.readuntil(b"}")
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer


async def test_headers_that_stop_coming_are_408() -> None:
    async with guarded_server(0.05, b"ok") as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nHost")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 408")
    assert b"x-request-id: " in head.lower()
    assert msgspec.json.decode(body)["code"] == "request_timeout"


async def test_headers_that_come_in_pieces_and_an_idle_connection_are_fine() -> None:
    async with guarded_server(0.05, b"ok") as address:
        reader, writer = await asyncio.open_connection(*address)
        for wait in (0, 0.07, 0):
            await asyncio.sleep(wait)  # between two requests nobody is slow
            for piece in (b"GET / HT", b"TP/1.1\r\nHost: x\r\n", b"\r\n"):
                writer.write(piece)
                await asyncio.sleep(0.001)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_caller_that_has_said_all_and_reads_slowly_gets_its_answer() -> None:
    body = b"x" * 8_000_000
    async with guarded_server(5, body) as address:
        reader, writer = await asyncio.open_connection(*address, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(body)) == body
        writer.close()
