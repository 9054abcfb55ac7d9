"""PROTOCOL section 4: one rollout, once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from conftest import Serve
from served import Chat, Held, Instant, Served

from rollout.errors import RequestRejected
from rollout.testing import FakeClock, hold, make_request, status

USER = {"role": "user", "content": "x", "n": 1}
TTL = 60


class Asked(Instant):
    """Its async get_tools() counts how often it is asked, and answers (or raises) when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.called = asyncio.Event()
        self.answer = asyncio.Event()
        self.raises: BaseException | None = None

    async def get_tools(self, request: Any) -> list[Any]:
        self.asked += 1
        self.called.set()
        await self.answer.wait()
        if self.raises is not None:
            raise self.raises
        return [{"type": "function", "function": {"name": f"asked-{self.asked}"}}]


def make_body(server: Served, **fields: Any) -> dict[str, Any]:
    return make_request(**{"rollout_id": "r", "server_url": server.trainer.url, "messages": [USER], **fields})


# ---------------------------------------------------------------- the same again

REPEATS = {
    "by id": {},
    "by key": {"idempotency_key": "k"},
    "key is the id": {"idempotency_key": "r"},
    "null key": {"idempotency_key": None},
    "empty key": {"idempotency_key": ""},
    "blank key": {"idempotency_key": " \t "},
}


@pytest.mark.parametrize("fields", REPEATS.values(), ids=REPEATS)
async def test_the_same_key_again_gets_the_same_answer_and_no_second_run(serve: Serve, fields: dict[str, Any]) -> None:
    agent = Held()
    agent.tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1.0, "a": None}}}]  # type: ignore[misc]
    server = await serve(agent)
    request = make_body(server, **fields)
    first = await server.post_init(request)
    assert first.status == 202
    await agent.running.wait()
    again = [await server.post_init(request, path=path) for path in ("/init", "/v1/rollout/init")]
    agent.release.set()
    await server.wait_phase("r")
    again += [await server.post_init(request) for _ in range(3)]
    assert [(a.status, a.body) for a in again] == [(202, first.body)] * 5
    assert agent.ran == ["r"]
    assert len(server.trainer.completions("r")) == 1


@pytest.mark.parametrize("key", ["", " ", None, "r"])
async def test_a_key_that_is_absent_and_one_that_is_the_id_are_the_same_key(serve: Serve, key: str | None) -> None:
    agent = Instant()
    server = await serve(agent)
    assert (await server.post_init(make_body(server))).status == 202
    assert (await server.post_init(make_body(server, idempotency_key=key))).status == 202
    assert agent.ran == ["r"]


async def test_get_tools_is_not_asked_again_for_a_duplicate(serve: Serve) -> None:
    agent = Asked()
    agent.answer.set()
    server = await serve(agent)
    answers = [await server.post_init(make_body(server)) for _ in range(3)]
    assert agent.asked == 1
    assert len({a.body for a in answers}) == 1


async def test_a_rollout_that_ended_as_error_is_not_run_again(serve: Serve) -> None:
    server = await serve(Chat())
    server.trainer.on_chat(status(400))
    first = await server.post_init(make_body(server))
    assert (await server.result("r"))["status"] == "ERROR"
    assert (await server.post_init(make_body(server))).body == first.body
    assert len(server.trainer.chats("r")) == 1


async def test_a_cancelled_rollout_is_not_run_again(serve: Serve) -> None:
    agent = Held()
    server = await serve(agent)
    first = await server.post_init(make_body(server))
    await server.cancel(ids=["r"])
    await server.wait_phase("r")
    assert (await server.post_init(make_body(server))).body == first.body
    assert (await server.result("r"))["finish_reason"] == "cancelled"
    assert len(server.trainer.completions("r")) == 1


async def test_all_but_messages_may_differ_and_the_first_counts(serve: Serve) -> None:
    agent = Instant()
    server = await serve(agent)
    first = await server.post_init(make_body(server, max_turns=3, metadata={"a": 1}, api_key="one"))
    other = make_body(
        server,
        server_url="http://127.0.0.1:9/elsewhere",
        completion_params={"temperature": 2},
        max_turns=99,
        max_tokens_total=1,
        metadata={"b": 2},
        api_key="two",
        llm_api_key="three",
        timeout_seconds=0.001,
        tool_server_url="http://tools",
    )
    second = await server.post_init(other)
    assert (second.status, second.body) == (202, first.body)
    await server.wait_phase("r")
    assert (await server.post_init(other)).body == first.body
    (request,) = agent.requests
    assert (request.max_turns, request.metadata, request.api_key) == (3, {"a": 1}, "one")
    assert server.trainer.completions("r")[0].bearer == "one"


EQUAL = {
    "blanks": '[ { "role" : "user",\n"content":"x" , "n":1 } ]',
    "key order": '[{"n":1,"content":"x","role":"user"}]',
    "escapes": '[{"role":"\\u0075ser","content":"\\u0078","n":1}]',
    "whole float": '[{"role":"user","content":"x","n":1.0}]',
    "exponent": '[{"role":"user","content":"x","n":1e0}]',
    "key twice, last wins": '[{"n":2,"role":"user","content":"x","n":1}]',
}
UNEQUAL = {
    "none": "[]",
    "one more": '[{"role":"user","content":"x","n":1},{}]',
    "other text": '[{"role":"user","content":"X","n":1}]',
    "blank in the text": '[{"role":"user","content":"x ","n":1}]',
    "other number": '[{"role":"user","content":"x","n":1.5}]',
    "number as text": '[{"role":"user","content":"x","n":"1"}]',
    "true for one": '[{"role":"user","content":"x","n":true}]',
    "null for missing": '[{"role":"user","content":"x","n":1,"m":null}]',
    "one key less": '[{"role":"user","content":"x"}]',
    "in a list": '[{"role":"user","content":["x"],"n":1}]',
}


def with_messages(request: dict[str, Any], messages: str) -> bytes:
    rest = {name: value for name, value in request.items() if name != "messages"}
    return msgspec.json.encode(rest)[:-1] + b',"messages":' + messages.encode() + b"}"


@pytest.mark.parametrize("ended", [False, True], ids=["live", "ended"])
@pytest.mark.parametrize("messages", EQUAL.values(), ids=EQUAL)
async def test_messages_are_compared_as_json_values(serve: Serve, messages: str, ended: bool) -> None:
    agent = Held()
    server = await serve(agent)
    first = await server.post_init(make_body(server))
    if ended:
        agent.release.set()
        await server.wait_phase("r")
    again = await server.post_init(with_messages(make_body(server), messages))
    assert (again.status, again.body) == (202, first.body)


@pytest.mark.parametrize("ended", [False, True], ids=["live", "ended"])
@pytest.mark.parametrize("messages", UNEQUAL.values(), ids=UNEQUAL)
async def test_other_messages_are_409_body_differs(serve: Serve, messages: str, ended: bool) -> None:
    agent = Held()
    server = await serve(agent)
    await server.post_init(make_body(server))
    if ended:
        agent.release.set()
        await server.wait_phase("r")
    again = await server.post_init(with_messages(make_body(server), messages))
    assert (again.status, again.json["code"]) == (409, "body_differs")
    assert (await server.post_init(make_body(server))).status == 202


# ---------------------------------------------------------------- conflicts

CONFLICTS = {
    "same key, other id": ({"idempotency_key": "k"}, {"idempotency_key": "k", "rollout_id": "r2"}, "key_in_use"),
    "id of another as key": ({}, {"idempotency_key": "r", "rollout_id": "r2"}, "key_in_use"),
    "key of another as id": ({"idempotency_key": "k"}, {"rollout_id": "k"}, "key_in_use"),
    "same id, other key": ({"idempotency_key": "k"}, {"idempotency_key": "k2"}, "id_in_use"),
    "same id, no key": ({"idempotency_key": "k"}, {}, "id_in_use"),
    "same id, now a key": ({}, {"idempotency_key": "k"}, "id_in_use"),
    "same id, other messages": ({}, {"messages": [{}]}, "body_differs"),
    "same key and id, other messages": (
        {"idempotency_key": "k"},
        {"idempotency_key": "k", "messages": []},
        "body_differs",
    ),
}


@pytest.mark.parametrize("phase", ["admitting", "running", "ended"])
@pytest.mark.parametrize(("first", "second", "code"), CONFLICTS.values(), ids=CONFLICTS)
async def test_a_conflict_is_409_and_nothing_runs(
    serve: Serve, first: dict[str, Any], second: dict[str, Any], code: str, phase: str
) -> None:
    agent = Asked()
    server = await serve(agent)
    release = hold()
    server.trainer.on_completed([release, None])
    accepted = asyncio.create_task(server.post_init(make_body(server, **first)))
    await agent.called.wait()
    if phase != "admitting":
        agent.answer.set()
        await accepted
        if phase == "ended":
            release.release()
            await server.wait_phase("r")
    refused = await server.post_init(make_body(server, **second))
    assert (refused.status, refused.json["code"]) == (409, code)
    agent.answer.set()
    release.release()
    assert (await accepted).status == 202
    await server.result("r")
    assert agent.ran == ["r"]
    assert agent.asked == 1


async def test_two_rollouts_with_keys_of_their_own_do_not_meet(serve: Serve) -> None:
    agent = Instant()
    server = await serve(agent)
    for rollout_id, key in (("a", "k1"), ("b", "k2"), ("c", None), ("A", None), ("a ", None), ("K1", "K1 ")):
        answer = await server.post_init(make_body(server, rollout_id=rollout_id, idempotency_key=key))
        assert answer.status == 202, answer
    await server.trainer.wait_completed(6)
    assert len(agent.ran) == 6


# ---------------------------------------------------------------- concurrent duplicates


@pytest.mark.parametrize("cancellation", [False, True], ids=["handlers run on", "handlers are cancelled"])
async def test_concurrent_duplicates_wait_for_the_first_ones_get_tools(serve: Serve, cancellation: bool) -> None:
    agent = Asked()
    server = await serve(agent, handler_cancellation=cancellation)
    body = make_body(server)
    posts = [asyncio.create_task(server.post_init(body)) for _ in range(20)]
    await agent.called.wait()
    await server.wait_duplicates(19)
    agent.answer.set()
    answers = await asyncio.gather(*posts)
    assert {a.status for a in answers} == {202}
    assert len({a.body for a in answers}) == 1
    await server.result("r")
    assert (agent.asked, agent.ran) == (1, ["r"])
    assert len(server.trainer.completions("r")) == 1


def init_bytes(body: dict[str, Any]) -> bytes:
    text = msgspec.json.encode(body)
    return b"POST /v1/rollout/init HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text) + text


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("cancellation", [False, True], ids=["handlers run on", "handlers are cancelled"])
async def test_a_leader_that_disconnects_is_not_noticed(serve: Serve, cancellation: bool, reset: bool) -> None:
    agent = Asked()
    server = await serve(agent, handler_cancellation=cancellation)
    body = make_body(server)
    _, leader = await server.send_raw(init_bytes(body))
    await agent.called.wait()
    others = [asyncio.create_task(server.post_init(body)) for _ in range(5)]
    _, follower = await server.send_raw(init_bytes(body))
    await server.wait_duplicates(6)
    for writer in (leader, follower):
        writer.transport.abort() if reset else writer.close()
    await server.get("/health")
    agent.answer.set()
    answers = await asyncio.gather(*others)
    assert {a.status for a in answers} == {202}
    assert (await server.post_init(body)).body == answers[0].body
    assert (await server.result("r"))["status"] == "COMPLETED"
    assert (agent.asked, agent.ran) == (1, ["r"])


@pytest.mark.parametrize("cancellation", [False, True], ids=["handlers run on", "handlers are cancelled"])
async def test_a_rollout_whose_only_caller_has_left_runs_all_the_same(serve: Serve, cancellation: bool) -> None:
    agent = Asked()
    server = await serve(agent, handler_cancellation=cancellation)
    _, writer = await server.send_raw(init_bytes(make_body(server)))
    await agent.called.wait()
    writer.transport.abort()
    await server.get("/health")
    agent.answer.set()
    await server.trainer.wait_completed("r")
    assert agent.ran == ["r"]


FAILURES = {
    "exception": (RuntimeError("no"), 500, "get_tools_failed"),
    "exit": (SystemExit(1), 500, "get_tools_failed"),
    "cancelled": (asyncio.CancelledError(), 500, "get_tools_failed"),
    "rejected": (RequestRejected("no"), 422, "request_rejected"),
}


@pytest.mark.parametrize(("raises", "code", "name"), FAILURES.values(), ids=FAILURES)
async def test_all_who_waited_get_the_same_failure_and_the_next_try_starts_afresh(
    serve: Serve, raises: BaseException, code: int, name: str
) -> None:
    agent = Asked()
    agent.raises = raises
    server = await serve(agent, max_concurrent_rollouts=1, max_queued_rollouts=0)
    body = make_body(server)
    posts = [asyncio.create_task(server.post_init(body)) for _ in range(10)]
    await server.wait_duplicates(9)
    agent.answer.set()
    answers = await asyncio.gather(*posts)
    assert {(a.status, a.json["code"]) for a in answers} == {(code, name)}
    assert len({a.body for a in answers}) == 1
    assert agent.asked == 1
    assert (await server.get("/status/r")).status == 404
    agent.raises = None
    assert (await server.post_init(make_body(server, messages=[{}], idempotency_key="other"))).status == 202
    await server.result("r")
    assert (agent.asked, agent.ran) == (2, ["r"])


async def test_a_cancel_does_not_outlive_an_init_that_failed(serve: Serve) -> None:
    agent = Asked()
    agent.raises = RuntimeError("no")
    server = await serve(agent)
    init = asyncio.create_task(server.post_init(make_body(server)))
    await agent.called.wait()
    assert await server.cancel(ids=["r"]) == {"r": "cancelled_queued"}
    agent.answer.set()
    assert (await init).status == 500
    assert await server.cancel(ids=["r"]) == {"r": "not_found"}
    agent.raises = None
    assert (await server.post_init(make_body(server))).status == 202
    assert (await server.result("r"))["status"] == "COMPLETED"


# ---------------------------------------------------------------- how long


async def test_a_record_lives_for_the_ttl_beyond_its_delivery(serve: Serve) -> None:
    clock, agent = FakeClock(), Instant()
    server = await serve(agent, clock=clock, record_ttl_seconds=TTL)
    sweep = server.service.sweeper.sweep
    first = await server.post_init(make_body(server, idempotency_key="k"))
    await server.wait_phase("r")
    clock.advance(TTL - 0.01)
    assert await sweep() == 0
    assert (await server.post_init(make_body(server, idempotency_key="k"))).body == first.body
    clock.advance(0.02)
    assert await sweep() == 1
    for path in ("/status/r", "/result/r"):
        assert (await server.get(path)).status == 404
    assert await server.cancel(ids=["r"]) == {"r": "not_found"}
    assert (await server.post_init(make_body(server, messages=[]))).status == 202  # neither id nor key is taken
    await server.result("r")
    assert agent.ran == ["r", "r"]


async def test_a_duplicate_does_not_prolong_a_record(serve: Serve) -> None:
    clock = FakeClock()
    server = await serve(Instant(), clock=clock, record_ttl_seconds=TTL)
    await server.post_init(make_body(server))
    await server.wait_phase("r")
    for _ in range(4):
        clock.advance(TTL / 4)
        await server.post_init(make_body(server))
    assert await server.service.sweeper.sweep() == 1


async def test_a_rollout_that_runs_is_never_forgotten(serve: Serve) -> None:
    clock, agent = FakeClock(), Held()
    server = await serve(agent, clock=clock, record_ttl_seconds=TTL)
    await server.post_init(make_body(server))
    clock.advance(TTL * 100)
    assert await server.service.sweeper.sweep() == 0
    assert (await server.post_init(make_body(server))).status == 202
    agent.release.set()
    await server.wait_phase("r")
    assert agent.ran == ["r"]
    assert await server.service.sweeper.sweep() == 0


async def test_the_ttl_counts_from_the_delivery_not_from_the_end(serve: Serve) -> None:
    clock = FakeClock()
    server = await serve(Instant(), clock=clock, record_ttl_seconds=TTL, complete_rollout_retries=0)
    gate = hold()
    server.trainer.on_completed([gate, None])
    await server.post_init(make_body(server))
    await server.trainer.wait_completed("r")
    clock.advance(TTL * 100)
    assert await server.service.sweeper.sweep() == 0
    assert (await server.post_init(make_body(server))).status == 202
    gate.release()
    await server.wait_phase("r")
    clock.advance(TTL - 1)
    assert await server.service.sweeper.sweep() == 0
    clock.advance(2)
    assert await server.service.sweeper.sweep() == 1


async def test_an_undelivered_result_stays_for_the_ttl(serve: Serve) -> None:
    clock = FakeClock()
    server = await serve(Instant(), clock=clock, record_ttl_seconds=TTL)
    server.trainer.on_completed(status(404))
    await server.post_init(make_body(server))
    await server.wait_phase("r", "undelivered")
    clock.advance(TTL - 1)
    assert await server.service.sweeper.sweep() == 0
    assert (await server.get("/result/r")).status == 200
    clock.advance(2)
    assert await server.service.sweeper.sweep() == 1


@pytest.mark.parametrize("jump", [-1e9, 1e9], ids=["back", "forward"])
async def test_a_jump_of_the_wall_clock_changes_nothing(serve: Serve, jump: float) -> None:
    now = 1_800_000_000.0
    clock, agent = FakeClock(), Held()
    server = await serve(agent, clock=clock, record_ttl_seconds=TTL)
    server.service.registry.wall_clock = lambda: now
    first = await server.post_init(make_body(server))
    await agent.running.wait()
    now += jump
    agent.release.set()
    await server.wait_phase("r")
    clock.advance(TTL - 1)
    assert await server.service.sweeper.sweep() == 0
    now -= 2 * jump
    assert (await server.post_init(make_body(server))).body == first.body
    result = await server.result("r")
    assert 0 <= result["metrics"]["total_latency_ms"] < 5000
    state = (await server.get("/status/r")).json
    assert state["status"] == "COMPLETED"
    clock.advance(2)
    assert await server.service.sweeper.sweep() == 1


async def test_what_is_swept_is_the_oldest_and_the_counts_follow(serve: Serve) -> None:
    clock, agent = FakeClock(), Instant()
    server = await serve(agent, clock=clock, record_ttl_seconds=TTL)
    for name in ("a", "b", "c"):
        await server.post_init(make_body(server, rollout_id=name))
        await server.wait_phase(name)
        clock.advance(10)
    clock.advance(TTL - 30)
    assert await server.service.sweeper.sweep() == 1
    assert (await server.get("/health")).json["completed_rollouts"] == 2
    assert [(await server.get(f"/status/{name}")).status for name in "abc"] == [404, 200, 200]
