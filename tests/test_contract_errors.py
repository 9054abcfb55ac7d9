"""PROTOCOL section 2: what is wrong with a request, and how it is said."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, web
from conftest import Serve
from hypothesis import given, settings
from hypothesis import strategies as st
from served import Held, Instant, Served, body_of, exchange, insert, listening, post, settings_with

from rollout.errors import InvalidJSON, InvalidRequest, StoreError
from rollout.requests import parse_cancel, parse_init
from rollout.schemas import RolloutRequest
from rollout.server.app import create_app
from rollout.state.memory import MemoryStore
from rollout.testing import MockTrainer, hold, make_request, status

SECRETS = ("s3cret-key", "s3cret-llm", "hunter2")
pytestmark = pytest.mark.usefixtures("no_tracebacks")


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
        assert answer.json == {
            "code": "method_not_allowed",
            "detail": f"this path takes only {', '.join(sorted(allow))}",
        }


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


@settings(max_examples=60)
@given(st.binary(max_size=60))
def test_no_bytes_make_the_decoders_raise_anything_else(body: bytes) -> None:
    with contextlib.suppress(InvalidJSON, InvalidRequest):
        parse_init(body, 1 << 20)
    with contextlib.suppress(InvalidJSON, InvalidRequest):
        parse_cancel(body)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
json_values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=3), scalars, max_size=3)


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from(RolloutRequest.__struct_fields__), json_values, max_size=3))
def test_no_value_of_any_field_makes_the_decoder_raise_anything_else(fields: dict[str, Any]) -> None:
    body = msgspec.json.encode({**make_request(), **fields})
    with contextlib.suppress(InvalidJSON, InvalidRequest):
        parse_init(body, 1 << 20).view()


# ---------------------------------------------------------------- routes of the user's own


async def test_what_a_users_own_route_raises_is_told_in_its_way_with_a_request_id(trainer: MockTrainer) -> None:
    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPFound("/health")

    async def too_large(request: web.Request) -> web.Response:
        raise web.HTTPRequestEntityTooLarge(1, 2)

    async def gone(request: web.Request) -> web.Response:
        raise web.HTTPNotFound(text="hunter2")

    app = create_app(Instant(), settings_with())
    app.router.add_get("/elsewhere", elsewhere)
    app.router.add_get("/large", too_large)
    app.router.add_get("/gone", gone)
    async with listening(app) as url, ClientSession(url) as session:
        server = Served(app, url, session, trainer)
        found = await server.get("/elsewhere", allow_redirects=False, headers={"X-Request-ID": "mine"})
        assert (found.status, found.headers["Location"], found.headers["X-Request-ID"]) == (302, "/health", "mine")
        assert (await server.get("/large")).json["code"] == "body_too_large"
        assert (await server.get("/gone")).json["code"] == "not_found"
