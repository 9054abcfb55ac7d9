"""The mock trainer as a plain HTTP client meets it: answers, scripts, the record of what arrived."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rollout.testing import (
    Answer,
    MockTrainer,
    Reply,
    completion,
    make_tool_call,
    reset,
    status,
    text,
    tool_calls,
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


# ---------------------------------------------------------------- answers and scripts


async def test_the_defaults_are_a_completion_with_usage_and_an_acknowledgement(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    chat_status, chat, _ = await post(session, trainer.url + CHAT)
    completed_status, _, _ = await post(session, trainer.url + COMPLETED)

    assert (chat_status, completed_status) == (200, 200)
    assert chat["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "ok"},
        "finish_reason": "stop",
    }
    assert chat["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


async def test_one_connection_serves_many_requests(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    for _ in range(20):
        await post(session, trainer.url + CHAT)

    assert trainer.connections_opened == 1
    assert {request.connection_id for request in trainer.requests} == {1}


async def test_a_list_is_given_one_after_the_other_and_its_last_answer_repeats(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    trainer.on_chat([text("a"), "b", lambda request: f"c of {request.rollout_id}"])

    assert [await said(session, trainer) for _ in range(4)] == ["a", "b", "c of r1", "c of r1"]


async def test_a_script_may_be_an_async_function(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    async def think(request: Any) -> Answer:
        return text(request.json["rollout_id"])

    trainer.on_chat(think)

    assert await said(session, trainer, "r7") == "r7"


async def test_a_rule_with_times_ends_and_the_next_one_takes_over(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    trainer.on_completed(201)
    trainer.on_completed(status(503), times=2)

    assert [(await post(session, trainer.url + COMPLETED))[0] for _ in range(4)] == [503, 503, 201, 201]


async def test_a_new_rule_takes_the_place_of_the_one_for_the_same_requests(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    trainer.on_chat("old")
    trainer.on_chat("other", rollout_id="r2")
    trainer.on_chat("new")

    assert [await said(session, trainer), await said(session, trainer, "r2")] == ["new", "other"]


async def test_rules_for_a_rollout_or_a_predicate_go_before_general_ones(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    trainer.on_chat("general", times=9)
    trainer.on_chat("mine", rollout_id="r1")
    trainer.on_chat("odd", when=lambda request: request.rollout_id == "r3")

    assert [await said(session, trainer, each) for each in ("r1", "r2", "r3")] == ["mine", "general", "odd"]


async def test_each_rollout_gets_the_whole_list_for_itself(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    trainer.on_chat(["first", "second"], each_rollout=True)

    assert [await said(session, trainer, each) for each in ("a", "b", "a", "b")] == [
        "first",
        "first",
        "second",
        "second",
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (text("4"), {"content": "4"}),
        (None, {"content": "ok"}),
        ({"choices": [{"message": {"content": "from a dict"}}]}, {"content": "from a dict"}),
        (b'{"choices": [{"message": {"content": "from bytes"}}]}', {"content": "from bytes"}),
        (completion(None, usage=None, model="m"), {"content": None}),
    ],
    ids=["reply", "default", "dict", "bytes", "completion"],
)
async def test_answers_may_be_written_short(
    session: aiohttp.ClientSession, trainer: MockTrainer, given: Any, expected: dict[str, Any]
) -> None:
    trainer.on_chat(given)

    _, body, _ = await post(session, trainer.url + CHAT)

    assert expected.items() <= body["choices"][0]["message"].items()


async def test_tool_calls_are_numbered_and_carry_json_text(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    trainer.on_chat(tool_calls([("add", {"a": 2}), ("broken", "{not json"), make_tool_call("mul", id=None)]))

    _, body, _ = await post(session, trainer.url + CHAT)

    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["choices"][0]["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}},
        {"id": "call_2", "type": "function", "function": {"name": "broken", "arguments": "{not json"}},
        {"type": "function", "function": {"name": "mul", "arguments": "{}"}},
    ]


@pytest.mark.parametrize("wrong", [1.5, True, object()], ids=["float", "bool", "object"])
async def test_what_is_no_answer_is_refused_where_it_is_scripted(trainer: MockTrainer, wrong: Any) -> None:
    with pytest.raises(TypeError, match="is not an answer"):
        trainer.on_chat(wrong)


async def test_an_empty_script_is_refused(trainer: MockTrainer) -> None:
    with pytest.raises(ValueError, match="at least one answer"):
        trainer.on_chat([])


async def test_a_script_that_raises_is_reported_when_the_trainer_closes(session: aiohttp.ClientSession) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with MockTrainer() as trainer:
            trainer.on_chat(lambda request: request.json["no such key"])
            assert (await post(session, trainer.url + CHAT))[0] == 500

    assert isinstance(caught.value.exceptions[0], KeyError)


async def test_an_answer_that_raises_is_reported_when_the_trainer_closes(session: aiohttp.ClientSession) -> None:
    class Broken(Answer):
        async def play(self, peer: Any, request: Any, default: Reply) -> None:
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        async with MockTrainer() as trainer:
            trainer.on_chat(Broken())
            with pytest.raises(aiohttp.ClientError):
                await post(session, trainer.url + CHAT)

    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)


async def test_the_own_error_of_a_test_is_not_hidden_by_a_script_that_failed(
    session: aiohttp.ClientSession,
) -> None:
    with pytest.raises(LookupError, match="of the test"):
        async with MockTrainer() as trainer:
            trainer.on_chat(lambda request: request.json["no such key"])
            await post(session, trainer.url + CHAT)
            raise LookupError("of the test")


# ---------------------------------------------------------------- paths and keys


async def test_every_prefix_leads_to_the_same_endpoints(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    await post(session, trainer.url_for("/deep/down/") + CHAT + "?x=1")
    await post(session, trainer.url_for("") + COMPLETED)

    assert [(each.path, each.query) for each in trainer.chats()] == [("/deep/down/v1/chat/completions", "x=1")]
    assert len(trainer.completions("r1")) == 1


async def test_custom_paths_are_told_apart_by_their_body(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    await post(session, trainer.url + "/my/llm", {"rollout_id": "r1", "messages": []})
    await post(session, trainer.url + "/my/end", {"rollout_id": "r1", "final_messages": []})

    assert [each.path for each in trainer.chats("r1")] == ["/my/llm"]
    assert [each.path for each in trainer.completions("r1")] == ["/my/end"]


async def test_a_path_can_be_scripted_by_itself(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    trainer.on_path("/health", {"fine": True})

    async with session.get(trainer.url + "/health") as response:
        assert await response.json() == {"fine": True}
    async with session.get(trainer.url + "/nothing/here") as response:
        assert response.status == 404
    async with session.get(trainer.url + CHAT) as response:
        assert response.status == 405


async def test_without_the_right_key_the_answer_is_401(session: aiohttp.ClientSession) -> None:
    async with MockTrainer(api_key="gate", llm_api_key="llm") as trainer:
        seen = []
        for path, value in [
            (CHAT, "Bearer llm"),
            (CHAT, "Bearer gate"),
            (CHAT, "llm"),
            (COMPLETED, "bearer gate"),
            (COMPLETED, "Bearer llm"),
        ]:
            headers = {"Authorization": value}
            seen.append((await post(session, trainer.url + path, headers=headers))[0])

    assert seen == [200, 401, 401, 200, 401]
    assert trainer.requests[0].bearer == "llm"
    assert trainer.requests[2].bearer is None


# ---------------------------------------------------------------- the record


async def test_a_request_is_recorded_as_it_came(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    before = asyncio.get_running_loop().time()

    await post(session, trainer.url + CHAT, {"rollout_id": "r1", "messages": [{"n": 1}]}, headers={"X-Mine": "yes"})

    (request,) = trainer.requests
    assert (request.method, request.path) == ("POST", CHAT)
    assert request.headers["x-mine"] == "yes"
    assert request.body == b'{"rollout_id": "r1", "messages": [{"n": 1}]}'
    assert request.json["messages"] == [{"n": 1}]
    assert request.at >= before
    assert (request.status, request.accepted, request.abandoned) == (200, True, False)


async def test_a_body_that_is_not_json_belongs_to_no_rollout(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    async with session.post(trainer.url + CHAT, data=b"[") as response:
        assert response.status == 200

    assert trainer.chats()[0].rollout_id is None


async def test_wait_completed_returns_what_is_there_already_and_what_comes(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    waiting = asyncio.create_task(trainer.wait_completed("r2"))
    await post(session, trainer.url + COMPLETED, {"rollout_id": "r1", "status": "COMPLETED"})
    await post(session, trainer.url + COMPLETED, {"rollout_id": "r2", "status": "ERROR"})

    assert (await waiting).json["status"] == "ERROR"
    assert (await trainer.wait_completed("r1")).json["status"] == "COMPLETED"
    assert [each.rollout_id for each in await trainer.wait_completed(2)] == ["r1", "r2"]


async def test_wait_completed_lists_what_did_arrive(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    with pytest.raises(TimeoutError, match=r"no 1 callbacks within 0.01 s; no request has arrived at all"):
        await trainer.wait_completed(timeout=0.01)
    await post(session, trainer.url + CHAT)
    trainer.on_completed(reset())
    with contextlib.suppress(aiohttp.ClientError):
        await post(session, trainer.url + COMPLETED)

    with pytest.raises(TimeoutError) as caught:
        await trainer.wait_completed("r9", timeout=0.01)

    assert str(caught.value).splitlines() == [
        "no callback of 'r9' within 0.01 s; 2 requests have arrived, the latest:",
        "  POST /v1/chat/completions rollout_id='r1' 36 bytes -> 200",
        "  POST /v1/rollout/completed rollout_id='r1' 36 bytes -> no answer",
    ]


async def test_wait_for_an_accepted_callback_passes_over_the_refused_ones(
    session: aiohttp.ClientSession, trainer: MockTrainer
) -> None:
    trainer.on_completed([503, 204])
    waiting = asyncio.create_task(trainer.wait_completed("r1", accepted=True))
    await post(session, trainer.url + COMPLETED)
    await trainer.wait_completed("r1")
    assert not waiting.done()

    await post(session, trainer.url + COMPLETED)

    assert (await waiting).status == 204


async def test_forget_drops_the_record(session: aiohttp.ClientSession, trainer: MockTrainer) -> None:
    await post(session, trainer.url + CHAT)

    trainer.forget()

    assert (trainer.requests, trainer.chats(), trainer.chats("r1")) == ([], [], [])


# ---------------------------------------------------------------- another thread


async def test_a_trainer_in_a_thread_serves_and_can_be_waited_for_from_any_loop(
    session: aiohttp.ClientSession,
) -> None:
    with MockTrainer.run_in_thread() as trainer:
        trainer.on_chat("from the thread")
        assert await said(session, trainer) == "from the thread"
        waiting = asyncio.create_task(trainer.wait_completed("r1"))
        await post(session, trainer.url + COMPLETED)
        assert (await waiting).status in (None, 200)
        assert len(await asyncio.to_thread(trainer.run, trainer.wait_chats())) == 1


async def test_a_trainer_in_a_thread_reports_a_script_that_raised(session: aiohttp.ClientSession) -> None:
    with pytest.raises(ExceptionGroup), MockTrainer.run_in_thread() as trainer:
        trainer.on_chat(lambda request: request.json["no such key"])
        await post(session, trainer.url + CHAT)


async def test_a_taken_port_is_reported_where_the_trainer_is_started(trainer: MockTrainer) -> None:
    taken = int(trainer.url.rsplit(":", 1)[1])

    with pytest.raises(OSError, match="address already in use"), MockTrainer.run_in_thread(port=taken):
        pass
