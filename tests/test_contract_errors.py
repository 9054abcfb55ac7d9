"""PROTOCOL section 2: what is wrong with a request, and how it is said."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import logging
import zlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, web
from conftest import Serve
from hypothesis import given, settings
from hypothesis import strategies as st
from served import Chat, Held, Instant, Served, listening, settings_with

from rollout.errors import InvalidJSON, InvalidRequest, RequestRejected, StoreError
from rollout.schemas import RolloutRequest, parse_cancel, parse_init
from rollout.server.app import create_app
from rollout.server.body import read_body
from rollout.server.guard import guarded
from rollout.server.middlewares import error_response
from rollout.state.memory import MemoryStore
from rollout.testing import MockTrainer, hold, make_request, status

SECRETS = ("s3cret-key", "s3cret-llm", "hunter2")


def body_of(server: Served, **fields: Any) -> bytes:
    """JSON of a valid request."""
    return msgspec.json.encode(make_request(server_url=server.trainer.url, **fields))


def insert(body: bytes, text: bytes) -> bytes:
    """The JSON object with more members put in front."""
    return b"{" + text + b"," + body[1:]


async def post(server: Served, body: bytes, **headers: str) -> tuple[int, str]:
    """Status and code of an init with these headers (underscores stand for hyphens)."""
    answer = await server.call("POST", "/init", body, headers={k.replace("_", "-"): v for k, v in headers.items()})
    return answer.status, answer.json.get("code", "")


async def exchange(server: Served, request: bytes) -> bytes:
    """All that is answered on a connection of its own."""
    reader, writer = await server.send_raw(request)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.fixture(autouse=True)
def no_tracebacks(caplog: pytest.LogCaptureFixture) -> Any:
    """What a caller does wrong is no error of the service."""
    yield
    tracebacks = [r.getMessage() for r in caplog.get_records("call") if r.exc_info and r.levelno > logging.DEBUG]
    assert [text for text in tracebacks if "get_tools" not in text] == []


# ---------------------------------------------------------------- the shape of every answer


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/health", None, 200),
        ("GET", "/status", None, 200),
        ("GET", "/metrics", None, 200),
        ("GET", "/openapi.json", None, 200),
        ("GET", "/nowhere", None, 404),
        ("GET", "/status/nobody", None, 404),
        ("DELETE", "/init", None, 405),
        ("POST", "/init", b"{", 400),
        ("POST", "/init", b"{}", 422),
        ("POST", "/cancel", b'{"ids":[]}', 200),
    ],
    ids=str,
)
async def test_every_answer_carries_a_request_id(
    serve: Serve, method: str, path: str, body: bytes | None, expected: int
) -> None:
    server = await serve(Instant())
    first = await server.call(method, path, body)
    second = await server.call(method, path, body)
    named = await server.call(method, path, body, headers={"X-Request-ID": "mine 1/2~"})
    assert first.status == second.status == named.status == expected
    assert len({first.headers["X-Request-ID"], second.headers["X-Request-ID"], "mine 1/2~"}) == 3
    assert named.headers.getall("X-Request-ID") == ["mine 1/2~"]
    if expected >= 400:
        assert named.headers["Content-Type"].startswith("application/json")
        assert set(named.json) == {"code", "detail"}
        assert all(isinstance(value, str) and value for value in named.json.values())


@pytest.mark.parametrize("given", ["a", "!~", "x" * 128, "with blank", "%0a", '"quotes"'])
async def test_a_printable_request_id_is_the_callers_own(serve: Serve, given: str) -> None:
    server = await serve(Instant())
    assert (await server.get("/health", headers={"X-Request-ID": given})).headers["X-Request-ID"] == given


@pytest.mark.parametrize("given", [b"x" * 129, b"\xc3\xa9", b"\xff", b"a\tb", b"", b"  "], ids=ascii)
async def test_any_other_request_id_is_replaced(serve: Serve, given: bytes) -> None:
    server = await serve(Instant())
    answer = await exchange(
        server, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-ID: " + given + b"\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 200")
    (line,) = [line for line in answer.split(b"\r\n") if line.lower().startswith(b"x-request-id: ")]
    made = line.partition(b": ")[2]
    assert made != given
    assert made.isalnum()


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/init", {"POST"}),
        ("HEAD", "/init", {"POST"}),
        ("PUT", "/v1/rollout/init", {"POST"}),
        ("GET", "/cancel", {"POST"}),
        ("POST", "/status", {"GET", "HEAD"}),
        ("POST", "/status/r", {"GET", "HEAD"}),
        ("DELETE", "/result/r", {"GET", "HEAD"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("PATCH", "/metrics", {"GET", "HEAD"}),
        ("OPTIONS", "/openapi.json", {"GET", "HEAD"}),
    ],
    ids=str,
)
async def test_a_wrong_method_is_405_and_names_the_right_ones(
    serve: Serve, method: str, path: str, allow: set[str]
) -> None:
    server = await serve(Instant())
    answer = await server.call(method, path)
    assert answer.status == 405
    assert {name.strip() for name in answer.headers["Allow"].split(",")} == allow
    if method != "HEAD":
        assert answer.json["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/health", "/status", "/status/r", "/result/r?wait=5", "/metrics", "/openapi.json"])
async def test_head_answers_as_get_without_a_body(serve: Serve, path: str) -> None:
    server = await serve(Instant())
    await server.post_init(rollout_id="r")
    await server.result("r")
    answer = await server.call("HEAD", path)
    assert (answer.status, answer.body) == (200, b"")
    assert int(answer.headers["Content-Length"]) > 0


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20000 + b"\r\n\r\n",
        b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 2\r\n\r\n",
        b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    ],
    ids=["TLS", "bad header", "bad version", "long path", "long header", "negative", "two lengths", "smuggling"],
)
async def test_what_is_not_http_is_400_in_json_with_a_request_id(serve: Serve, request_bytes: bytes) -> None:
    server = await serve(Instant(), api_key="secret")
    head, _, body = (await exchange(server, request_bytes)).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"400"
    assert b"application/json" in head
    assert b"x-request-id: " in head.lower()
    assert set(msgspec.json.decode(body)) == {"code", "detail"}
    assert (await server.get("/health")).status == 200


# ---------------------------------------------------------------- 400: not JSON

NOT_JSON = {
    "nothing": b"",
    "blank": b" \n",
    "cut": b'{"rollout_id": "r"',
    "text": b"hello",
    "form": b"rollout_id=r",
    "single quotes": b"{'a': 1}",
    "trailing comma": b'{"a": 1,}',
    "comment": b'{"a": 1} // no',
    "two documents": b"{}{}",
    "trailing text": b"{} x",
    "trailing NUL": b"{}\x00",
    "NUL": b"\x00",
    "bare key": b"{a: 1}",
    "hex": b'{"a": 0x1}',
    "leading zero": b'{"a": 01}',
    "plus": b'{"a": +1}',
    "point": b'{"a": 1.}',
    "raw newline in a string": b'{"a": "\n"}',
    "bad escape": b'{"a": "\\x41"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "UTF-32": '{"a": 1}'.encode("utf-32-le"),
    "undefined": b"undefined",
    "NaN alone": b"NaN",
    "closing": b"}",
    "array cut": b"[1, 2",
    "only quotes": b'"',
    "deep and cut": b"[" * 100_000,
    "deep and closed": b"[" * 5000 + b"]" * 5000,
    "deep objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "deep in text": b'{"rollout_id":' + b"[" * 2000 + b"]" * 2000 + b"}",
}


@pytest.mark.parametrize("path", ["/init", "/cancel"])
@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON)
async def test_what_is_not_json_is_400(serve: Serve, path: str, body: bytes) -> None:
    server = await serve(Instant())
    answer = await server.call("POST", path, body)
    assert (answer.status, answer.json["code"]) == (400, "invalid_json")


IN_A_MEMBER = {
    "bad UTF-8": b'"\xff"',
    "overlong": b'"\xc0\x80"',
    "cut UTF-8": b'"\xe4\xb8"',
    "encoded surrogate": b'"\xed\xa0\x80"',
    "lone surrogate": b'"\\ud83e"',
    "lone low surrogate": b'"\\udc00 x"',
    "swapped surrogates": b'"\\udc00\\ud800"',
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "-Infinity": b"-Infinity",
    "101 levels": b"[" * 100 + b"]" * 100,
    "101 levels of objects": b'{"a":' * 100 + b"1" + b"}" * 100,
    "raw control character": b'"\x01"',
}
PLACES = {
    "unknown field": b'"zz": %s',
    "metadata": b'"metadata": {"k": %s}',
    "message": b'"messages": [{"role": "user", "k": %s}]',
    "params": b'"completion_params": {"k": %s}',
    "known field": b'"tool_server_url": %s',
    "key": b"%s: 1",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("value", IN_A_MEMBER.values(), ids=IN_A_MEMBER)
async def test_what_is_not_json_is_400_wherever_it_stands(serve: Serve, place: bytes, value: bytes) -> None:
    server = await serve(Instant())
    fields = {"messages": [], "completion_params": {}}
    good = {k: v for k, v in make_request(server_url=server.trainer.url, **fields).items() if k.encode() not in place}
    answer = await server.call("POST", "/init", insert(msgspec.json.encode(good), place % value))
    assert (answer.status, answer.json["code"]) == (400, "invalid_json")
    assert server.service.agent.ran == []


async def test_not_json_counts_before_a_misfit_in_front_of_it(serve: Serve) -> None:
    server = await serve(Instant())
    for tail in (
        b',"a": NaN}',
        b',"a": "\xff"}',
        b"} x",
        b"",
        b',"a": "\\ud800"}',
        b',"a":' + b"[" * 120 + b"]" * 120 + b"}",
    ):
        assert await post(server, b'{"rollout_id": 1' + tail) == (400, "invalid_json")


async def test_a_bom_is_400(serve: Serve) -> None:
    server = await serve(Instant())
    assert await post(server, b"\xef\xbb\xbf" + body_of(server)) == (400, "invalid_json")
    assert (await server.call("POST", "/cancel", b'\xef\xbb\xbf{"ids":[]}')).status == 400


@pytest.mark.parametrize(
    ("place", "outer"),
    [(b'"zz": %s', 1), (b'"metadata": {"k": %s}', 2), (b'"messages": [{"role":"user","k": %s}]', 3),
     (b'"completion_params": {"k": %s}', 2)],
    ids=["unknown field", "metadata", "message", "params"],
)  # fmt: skip
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")], ids=["lists", "objects"])
async def test_json_may_nest_exactly_100_levels(
    serve: Serve, place: bytes, outer: int, opening: bytes, closing: bytes
) -> None:
    server = await serve(Chat())
    fields = {"messages": [], "completion_params": {}}
    for levels, expected in ((100, 202), (101, 400)):
        request = make_request(rollout_id=f"r{levels}", server_url=server.trainer.url, **fields)
        rest = msgspec.json.encode({k: v for k, v in request.items() if k.encode() not in place})
        inner = opening * (levels - outer) + (b"0" if opening != b"[" else b"") + closing * (levels - outer)
        assert (await post(server, insert(rest, place % inner)))[0] == expected
    assert (await server.result("r100"))["status"] == "COMPLETED"


async def test_brackets_in_texts_are_no_levels(serve: Serve) -> None:
    server = await serve(Instant())
    texts = ["[" * 500, '"[{' * 200, "\\" * 301 + "[" * 300, '\\"' * 99 + "{" * 200, "]}" * 300]
    messages = [{"role": "user", "content": text, text: 1} for text in texts]
    assert (await server.post_init(messages=messages, metadata={"t": texts})).status == 202


NUMBERS = {
    "huge exponent": b"1e999",
    "negative huge exponent": b"-1e999",
    "many digits": b"9" * 400,
    "5000 digits": b"9" * 5000,
    "digits and exponent": b"9" * 300 + b"e99",
}


@pytest.mark.parametrize("place", [p for p in PLACES.values() if b"metadata" in p or b"message" in p or b"param" in p])
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
async def test_numbers_out_of_range_are_400_or_422_or_taken_as_they_are(
    serve: Serve, place: bytes, number: bytes
) -> None:
    server = await serve(Chat())
    fields = {"messages": [], "completion_params": {}}
    request = make_request(rollout_id="r", server_url=server.trainer.url, **fields)
    good = {k: v for k, v in request.items() if k.encode() not in place}
    answer = await server.call("POST", "/init", insert(msgspec.json.encode(good), place % number))
    if number == b"9" * 400:  # an integer, and JSON has no bound for those
        assert answer.status in (202, 400, 422)
    else:
        assert answer.status in (400, 422)
    if answer.status == 202:
        assert (await server.result("r"))["status"] in ("COMPLETED", "ERROR")


@pytest.mark.parametrize("field", ["max_turns", "max_tokens_total", "timeout_seconds"])
@pytest.mark.parametrize(
    "number", [b"1e999", b"-1e999", b"1e400", b"9" * 5000, b"9" * 400], ids=lambda n: n[:6].decode()
)
async def test_a_number_field_out_of_range_is_400_or_422_or_harmless(serve: Serve, field: str, number: bytes) -> None:
    server = await serve(Chat())
    body = insert(body_of(server, rollout_id="r"), b'"%s": %s' % (field.encode(), number))
    code, _ = await post(server, body)
    assert code in (400, 422) or (field != "timeout_seconds" and number == b"9" * 400)
    if code == 202:
        assert (await server.result("r"))["status"] == "COMPLETED"


@given(st.binary(max_size=60))
def test_no_bytes_make_the_decoders_raise_anything_else(body: bytes) -> None:
    with contextlib.suppress(InvalidJSON, InvalidRequest):
        parse_init(body, 1 << 20)
    with contextlib.suppress(InvalidJSON, InvalidRequest):
        parse_cancel(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(RolloutRequest.__struct_fields__), json_values, max_size=3))
def test_no_value_of_any_field_makes_the_decoder_raise_anything_else(fields: dict[str, Any]) -> None:
    body = msgspec.json.encode({**make_request(), **fields})
    with contextlib.suppress(InvalidJSON, InvalidRequest):
        parse_init(body, 1 << 20).view()


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
    runner = web.AppRunner(web.Application())
    await runner.setup()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(guarded(runner.server, 0.05, loop), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    server.close()
    await runner.cleanup()
    assert head.startswith(b"HTTP/1.1 408")
    assert b"x-request-id: " in head.lower()
    assert msgspec.json.decode(body)["code"] == "request_timeout"


# ---------------------------------------------------------------- 422 names the field, never a secret

MISFITS = [
    ({"rollout_id": 5}, "rollout_id", "int"),
    ({"rollout_id": None}, "rollout_id", "null"),
    ({"rollout_id": ["a"]}, "rollout_id", "array"),
    ({"messages": {}}, "messages", "object"),
    ({"messages": [1]}, "messages[0]", "int"),
    ({"messages": [{}, "a"]}, "messages[1]", "str"),
    ({"messages": [{}, None]}, "messages[1]", "null"),
    ({"completion_params": []}, "completion_params", "array"),
    ({"completion_params": None}, "completion_params", "null"),
    ({"metadata": "x"}, "metadata", "str"),
    ({"metadata": [1]}, "metadata", "array"),
    ({"max_turns": "3"}, "max_turns", "str"),
    ({"max_turns": 1.5}, "max_turns", "float"),
    ({"max_tokens_total": True}, "max_tokens_total", "bool"),
    ({"server_url": 1}, "server_url", "int"),
    ({"tool_server_url": 1}, "tool_server_url", "int"),
    ({"api_key": 12345678}, "api_key", "int"),
    ({"llm_api_key": ["hunter2"]}, "llm_api_key", "array"),
    ({"idempotency_key": {"a": 1}}, "idempotency_key", "object"),
    ({"timeout_seconds": "soon"}, "timeout_seconds", "str"),
]


@pytest.mark.parametrize(("fields", "path", "kind"), MISFITS, ids=lambda v: str(v))
async def test_422_names_the_field_path_and_the_values_type(
    serve: Serve, fields: dict[str, Any], path: str, kind: str
) -> None:
    server = await serve(Instant())
    answer = await server.post_init(**fields)
    assert (answer.status, answer.json["code"]) == (422, "invalid_request")
    assert path in answer.json["detail"]
    assert kind in answer.json["detail"]


@pytest.mark.parametrize(
    "fields",
    [
        {"api_key": "s3cret-key\n", "max_turns": 0},
        {"api_key": "s3cret-key\u00e9"},
        {"llm_api_key": "s3cret-llm\u0000x"},
        {"api_key": ["s3cret-key"]},
        {"server_url": "http://user:hunter2@host"},
        {"server_url": "http://host/?token=hunter2"},
        {"server_url": "ftp://hunter2"},
        {"server_url": "hunter2"},
        {"chat_completions_url": "http://hunter2:x@h/", "completion_callback_url": "http://h/"},
        {"tool_server_url": "http://me:hunter2@h"},
        {"metadata": {"password": "hunter2" * 1000}},
        {"idempotency_key": "hunter2" * 100},
        {"rollout_id": "r", "messages": [{"content": "hunter2"}, "hunter2"]},
        {"hunter2": 1, "max_turns": "hunter2"},
    ],
    ids=str,
)
async def test_no_error_repeats_a_secret(serve: Serve, fields: dict[str, Any]) -> None:
    server = await serve(Instant(), max_metadata_size_bytes=1024)
    body = {"api_key": "s3cret-key", "llm_api_key": "s3cret-llm", **fields}
    answer = await server.post_init(**body)
    assert answer.status in (202, 422)
    if answer.status == 422:
        assert not [secret for secret in SECRETS if secret in answer.body.decode()]
    cut = msgspec.json.encode(body)[:-1]
    broken = await server.call("POST", "/init", cut)
    assert broken.status == 400
    assert not [secret for secret in SECRETS if secret in broken.body.decode()]


@pytest.mark.parametrize(("extra", "expected"), [(-1, 202), (0, 202), (1, 422)])
@pytest.mark.parametrize("limit", [1024, 5000])
async def test_metadata_may_have_exactly_its_limit_of_json_text(
    serve: Serve, limit: int, extra: int, expected: int
) -> None:
    server = await serve(Instant(), max_metadata_size_bytes=limit)
    text = b'{"a": "\xc3\xa9' + b"x" * (limit + extra - 11) + b'"}'
    assert len(text) == limit + extra
    answer = await server.call("POST", "/init", insert(body_of(server), b'"metadata": ' + text))
    assert answer.status == expected
    if expected == 422:
        assert "metadata" in answer.json["detail"]


async def test_large_metadata_reaches_the_agent_whole(serve: Serve) -> None:
    agent = Instant()
    server = await serve(agent)
    metadata = {"rows": [{"n": n, "text": "\u00e9"} for n in range(20_000)]}
    assert (await server.post_init(rollout_id="r", metadata=metadata)).status == 202
    await server.result("r")
    assert agent.requests[0].metadata == metadata


# ---------------------------------------------------------------- get_tools() and the agent's word


class ToolsAre(Instant):
    """`get_tools()` does what it is told to: raises an exception, or returns (the result of) something."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def get_tools(self, request: Any) -> Any:
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what() if callable(self.what) else self.what


class ToolsAreAsync(ToolsAre):
    """The same, awaited."""

    async def get_tools(self, request: Any) -> Any:
        await asyncio.sleep(0)
        return super().get_tools(request)


class Unprintable(Exception):
    """Not even its text can be had."""

    def __str__(self) -> str:
        raise RuntimeError("hunter2")


RAISED = [
    RuntimeError("hunter2"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(),
    RecursionError("hunter2"), MemoryError(), StopIteration(1), TimeoutError("hunter2"), BaseException("hunter2"),
    web.HTTPBadRequest(text="hunter2"), web.HTTPFound("/hunter2"), StopAsyncIteration(), Unprintable(),
]  # fmt: skip


@pytest.mark.parametrize("kind", [ToolsAre, ToolsAreAsync])
@pytest.mark.parametrize("raised", RAISED, ids=lambda e: type(e).__name__)
async def test_get_tools_that_raises_is_500_and_is_not_remembered(serve: Serve, kind: Any, raised: Any) -> None:
    agent = kind(raised)
    server = await serve(agent)
    answer = await server.post_init(rollout_id="r")
    assert (answer.status, answer.json["code"]) == (500, "get_tools_failed")
    assert "hunter2" not in answer.body.decode()
    assert "Traceback" not in answer.body.decode()
    assert (await server.get("/status/r")).status == 404
    agent.what = []
    assert (await server.post_init(rollout_id="r")).status == 202
    assert (await server.result("r"))["status"] == "COMPLETED"


async def test_the_traceback_of_get_tools_goes_to_the_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = await serve(ToolsAre(RuntimeError("the cause")))
    await server.post_init(rollout_id="r-17")
    (record,) = [r for r in caplog.records if r.exc_info and "get_tools" in r.getMessage()]
    assert "r-17" in record.getMessage()
    assert "the cause" in str(record.exc_info[1])


def async_generator() -> Any:
    async def generate() -> AsyncIterator[dict[str, Any]]:
        yield {}

    return generate()


NO_LISTS = {
    "None": None,
    "dict": {"type": "function"},
    "text": "tools",
    "bytes": b"[]",
    "number": 7,
    "set": {1},
    "generator": lambda: (tool for tool in ()),
    "async generator": async_generator,
    "iterator": lambda: iter([]),
    "class": lambda: list,
    "list of None": [None],
    "list of texts": ["add"],
    "list of lists": [[{}]],
    "list with a function": [len],
}


@pytest.mark.parametrize("kind", [ToolsAre, ToolsAreAsync])
@pytest.mark.parametrize("returned", NO_LISTS.values(), ids=NO_LISTS)
async def test_get_tools_that_returns_no_list_of_tools_is_500(serve: Serve, kind: Any, returned: Any) -> None:
    server = await serve(kind(returned))
    answer = await server.post_init(rollout_id="r")
    assert (answer.status, answer.json["code"]) == (500, "get_tools_failed")
    assert (await server.get("/status/r")).status == 404
    assert (await server.get("/health")).json["active_rollouts"] == 0


@pytest.mark.parametrize("kind", [ToolsAre, ToolsAreAsync])
async def test_a_tuple_of_tools_is_taken_for_a_list(serve: Serve, kind: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    server = await serve(kind((tool,)))
    assert (await server.post_init()).json["tools"] == [tool]


class OwnRejection(RequestRejected):
    """A user's subclass with arguments of its own."""

    def __init__(self, field: str, *, why: str) -> None:
        super().__init__(f"{field}: {why}")


@pytest.mark.parametrize("kind", [ToolsAre, ToolsAreAsync])
@pytest.mark.parametrize(
    ("raised", "detail"),
    [
        (RequestRejected("no such dataset"), "no such dataset"),
        (OwnRejection("metadata.split", why="unknown"), "metadata.split: unknown"),
        (RequestRejected(7), "7"),  # type: ignore[arg-type]
        (RequestRejected("half \ud83e"), "half ?"),
        (RequestRejected("\u00e9\n"), "\u00e9\n"),
    ],
    ids=ascii,
)
async def test_request_rejected_is_422_with_the_agents_words(serve: Serve, kind: Any, raised: Any, detail: str) -> None:
    agent = kind(raised)
    server = await serve(agent)
    answer = await server.post_init(rollout_id="r")
    assert (answer.status, answer.json["code"]) == (422, "request_rejected")
    assert answer.json["detail"].replace("\ufffd", "?") == detail
    agent.what = []
    assert (await server.post_init(rollout_id="r")).status == 202


async def test_what_get_tools_does_to_its_request_harms_nobody(serve: Serve) -> None:
    class Vandal(Instant):
        def get_tools(self, request: Any) -> Any:
            request.messages.clear()
            request.metadata.clear()
            request.rollout_id = "other"
            request.completion_params["temperature"] = "hot"
            return []

    agent = Vandal()
    server = await serve(agent)
    sent = make_request(rollout_id="r", server_url=server.trainer.url, metadata={"a": [1]})
    assert (await server.post_init(sent)).json["rollout_id"] == "r"
    await server.result("r")
    seen = agent.requests[0]
    assert (seen.messages, seen.metadata) == (sent["messages"], {"a": [1]})
    assert seen.completion_params == sent["completion_params"]
    assert (await server.post_init(sent)).status == 202


# ---------------------------------------------------------------- 503


def assert_unavailable(answer: Any, code: str) -> None:
    assert (answer.status, answer.json["code"]) == (503, code)
    assert int(answer.headers["Retry-After"]) >= 1


async def test_a_full_queue_is_503_and_duplicates_are_not_refused(serve: Serve) -> None:
    agent = Held()
    server = await serve(agent, max_concurrent_rollouts=1, max_queued_rollouts=1)
    requests = [make_request(rollout_id=name, server_url=server.trainer.url) for name in "abc"]
    assert [(await server.post_init(request)).status for request in requests[:2]] == [202, 202]
    assert_unavailable(await server.post_init(requests[2]), "queue_full")
    assert (await server.get("/status/c")).status == 404
    assert (await server.post_init(requests[0])).status == 202
    agent.release.set()
    await server.result("b")
    assert (await server.post_init(requests[2])).status == 202


async def test_a_burst_beyond_the_queue_is_refused_to_the_last_one(serve: Serve) -> None:
    agent = Held()
    server = await serve(agent, max_concurrent_rollouts=2, max_queued_rollouts=3)
    answers = await asyncio.gather(*(server.post_init() for _ in range(20)))
    assert sorted(a.status for a in answers) == [202] * 5 + [503] * 15


async def test_undelivered_results_close_admission_when_they_fill_their_budget(serve: Serve) -> None:
    server = await serve(Instant(), result_cache_bytes=1 << 20)
    server.trainer.on_completed(status(400))
    messages = [{"role": "user", "content": "x" * (1 << 20)}]
    assert (await server.post_init(rollout_id="r", messages=messages)).status == 202
    await server.result("r")
    assert_unavailable(await server.post_init(), "results_full")
    assert (await server.get("/result/r")).status == 200


async def test_a_delivery_under_way_counts_against_the_budget_and_frees_it(serve: Serve) -> None:
    server = await serve(Instant(), result_cache_bytes=1 << 20)
    gate = hold()
    server.trainer.on_completed([gate, None])
    messages = [{"role": "user", "content": "x" * (1 << 20)}]
    await server.post_init(rollout_id="r", messages=messages)
    await server.trainer.wait_completed("r")
    assert_unavailable(await server.post_init(), "results_full")
    gate.release()
    await server.wait_phase("r")
    assert (await server.post_init()).status == 202


class BrokenStore(MemoryStore):
    """A store that fails while `broken` is set."""

    broken = True

    def _check(self) -> None:
        if self.broken:
            raise StoreError("the disk is full")

    async def create(self, record: Any) -> Any:
        self._check()
        return await super().create(record)


class BlindStore(BrokenStore):
    """It fails when it is asked, too."""

    async def get(self, rollout_id: str, key: str | None = None) -> Any:
        self._check()
        return await super().get(rollout_id, key)


@pytest.mark.parametrize("kind", [BrokenStore, BlindStore])
async def test_a_store_that_fails_is_503_and_nothing_was_accepted(trainer: MockTrainer, kind: Any) -> None:
    store = kind(1 << 20)
    agent = Instant()
    app = create_app(agent, settings_with(), store=store)
    async with listening(app) as url, ClientSession(url) as session:
        server = Served(app, url, session, trainer)
        assert_unavailable(await server.post_init(rollout_id="r"), "store_failed")
        if kind is BlindStore:
            for path in ("/status/r", "/result/r"):
                assert_unavailable(await server.get(path), "store_failed")
            assert_unavailable(await server.call("POST", "/cancel", b'{"ids":["r"]}'), "store_failed")
        assert agent.ran == []
        store.broken = False
        assert (await server.get("/status/r")).status == 404
        assert (await server.post_init(rollout_id="r")).status == 202
        assert (await server.result("r"))["status"] == "COMPLETED"


async def test_a_bug_of_ours_is_500_without_a_traceback_on_the_wire(
    trainer: MockTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    class BuggyStore(MemoryStore):
        async def create(self, record: Any) -> Any:
            raise ZeroDivisionError("hunter2 is wanted in the log only")

    app = create_app(Instant(), settings_with(), store=BuggyStore(1 << 20))
    async with listening(app) as url, ClientSession(url) as session:
        answer = await Served(app, url, session, trainer).post_init(rollout_id="r")
        assert (answer.status, answer.json["code"]) == (500, "internal_error")
        assert "hunter2" not in answer.body.decode()
        assert any(r.exc_info for r in caplog.records)
        caplog.get_records("call").clear()


# ---------------------------------------------------------------- no input costs a slot


async def test_refused_requests_leave_nothing_behind(serve: Serve) -> None:
    server = await serve(Instant(), max_concurrent_rollouts=1, max_queued_rollouts=0)
    bad = [b"", b"{", b"[]", b"{}", body_of(server, max_turns=0), body_of(server, messages=1), b"\xff", b"[" * 3000]
    for body in bad * 3:
        assert (await post(server, body))[0] in (400, 422)
    health = (await server.get("/health")).json
    assert (health["active_rollouts"], health["completed_rollouts"]) == (0, 0)
    assert (await server.post_init()).status == 202


async def test_pipelined_requests_are_answered_in_order(serve: Serve) -> None:
    server = await serve(Instant())
    one = b"GET /status/nobody HTTP/1.1\r\nHost: x\r\nX-Request-ID: %d\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-ID: last\r\nConnection: close\r\n\r\n"
    answer = await exchange(server, b"".join(one % n for n in range(5)) + last)
    ids = [line.split(b": ")[1] for line in answer.split(b"\r\n") if line.lower().startswith(b"x-request-id")]
    assert ids == [b"0", b"1", b"2", b"3", b"4", b"last"]
