"""What stands beside the mock trainer: builders, fakes, the chaos proxy, the driving client, the pytest plugin."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from conftest import Serve
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from served import Chat

import rollout.testing
from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.completions import CompletionsResult
from rollout.errors import BadCompletion, TrainerRefused, TrainerUnavailable
from rollout.requests import parse_init
from rollout.schemas import DEFAULT_MAX_METADATA_SIZE_BYTES, RolloutRequest
from rollout.testing import (
    ChaosProxy,
    FakeClock,
    MockTrainer,
    ScriptedLLM,
    drive,
    half_body,
    hang,
    hold,
    huge,
    make_completion,
    make_request,
    make_tool_call,
    plugin,
    post_init,
    raw,
    status,
    text,
    tool_calls,
)
from rollout.wire import decode, encode_strict

pytest_plugins = ["pytester"]

mock_trainer = plugin.mock_trainer
run_agent = plugin.run_agent

CHAT = "/v1/chat/completions"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=8,
)

# ---------------------------------------------------------------- builders


def test_a_made_request_is_accepted_by_the_schema_and_has_an_id_of_its_own() -> None:
    first, second = make_request(), make_request(max_turns=3, messages=UNSET)

    assert parse_init(encode_strict(first), DEFAULT_MAX_METADATA_SIZE_BYTES).rollout_id == first["rollout_id"]
    assert first["rollout_id"] != second["rollout_id"]
    assert second["max_turns"] == 3
    assert "messages" not in second


@settings(max_examples=40, deadline=None)
@given(arguments=st.dictionaries(st.text("abc"), json_values, max_size=3))
def test_a_made_tool_call_carries_its_arguments_as_json_text(arguments: dict[str, Any]) -> None:
    call = make_tool_call("f", arguments, id="x")

    assert decode(call["function"]["arguments"]) == arguments


@settings(max_examples=40, deadline=None)
@given(content=st.none() | st.text(st.characters(exclude_categories=["Cs"])), reason=st.sampled_from([None, "length"]))
def test_a_made_completion_is_read_back_as_it_was_meant(content: str | None, reason: str | None) -> None:
    result = CompletionsResult.from_body(encode_strict(make_completion(content, finish_reason=reason)))

    assert (result.content, result.finish_reason) == (content, reason or "stop")
    assert result.usage["total_tokens"] == 15


def test_a_made_completion_takes_any_further_field() -> None:
    body = make_completion(usage=None, token_ids=[1, 2], choices=[])

    assert (body["token_ids"], body["choices"], "usage" in body) == ([1, 2], [], False)


# ---------------------------------------------------------------- the scripted model


async def test_the_scripted_model_gives_its_answers_and_keeps_what_it_was_asked() -> None:
    messages = [{"role": "user", "content": "2 + 2?"}]
    llm = ScriptedLLM([tool_calls([("add", {"a": 2})]), lambda asked, params: f"{len(asked)} {params['top_k']}"])

    first = await llm.chat_completions(messages)
    messages.append(first.message)
    second = await llm.chat_completions(messages, top_k=5)

    assert first.has_tool_calls
    assert second.content == "2 5"
    assert [(len(call.messages), call.params) for call in llm.calls] == [(1, {}), (2, {"top_k": 5})]


async def test_the_scripted_model_fails_as_the_trainer_would() -> None:
    llm = ScriptedLLM([status(503, retry_after=3), 404, raw("oops"), KeyError("mine")])

    with pytest.raises(TrainerUnavailable) as unavailable:
        await llm.chat_completions([])
    with pytest.raises(TrainerRefused):
        await llm.chat_completions([])
    with pytest.raises(BadCompletion):
        await llm.chat_completions([])
    with pytest.raises(KeyError, match="mine"):
        await llm.chat_completions([])

    assert unavailable.value.retry_after_seconds == 3


async def test_the_scripted_model_says_when_its_script_is_over() -> None:
    llm = ScriptedLLM(["only one"])
    await llm.chat_completions([])

    with pytest.raises(AssertionError, match="has 1 answers, and call 2 was made"):
        await llm.chat_completions([])


async def test_the_scripted_model_may_repeat_its_last_answer() -> None:
    llm = ScriptedLLM(["a", "b"], repeat_last=True)

    assert [(await llm.chat_completions([])).content for _ in range(3)] == ["a", "b", "b"]


async def test_the_scripted_model_has_no_connection_to_break() -> None:
    with pytest.raises(TypeError, match="needs a connection"):
        await ScriptedLLM([half_body()]).chat_completions([])  # type: ignore[list-item]


# ---------------------------------------------------------------- the clock


async def test_the_clock_stands_still_until_it_is_advanced() -> None:
    clock = FakeClock(10)
    sleeping = asyncio.create_task(clock.sleep(5))
    await clock.wait_for_sleepers()

    clock.advance(4.5)
    await clock.sleep(0)
    assert (clock(), sleeping.done(), clock.sleepers) == (14.5, False, 1)
    clock.advance(0.5)
    await sleeping

    assert (clock(), clock.sleepers) == (15, 0)


async def test_a_cancelled_sleeper_is_none() -> None:
    clock = FakeClock()
    sleeping = asyncio.create_task(clock.sleep(5))
    await clock.wait_for_sleepers(1)

    sleeping.cancel()
    await asyncio.gather(sleeping, return_exceptions=True)

    assert clock.sleepers == 0
    clock.advance(5)


def test_a_monotonic_clock_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        FakeClock().advance(-1)


@settings(max_examples=40, deadline=None)
@given(pauses=st.lists(st.integers(1, 20), min_size=1, max_size=8), step=st.integers(1, 20))
async def test_sleepers_wake_in_the_order_of_their_time_and_none_too_early(pauses: list[int], step: int) -> None:
    clock = FakeClock(0)
    woken: list[int] = []

    async def sleeper(pause: int) -> None:
        await clock.sleep(pause)
        assert clock() >= pause
        woken.append(pause)

    async with asyncio.TaskGroup() as group:
        for pause in pauses:
            group.create_task(sleeper(pause))
        await clock.wait_for_sleepers(len(pauses))
        while clock.sleepers:
            clock.advance(step)
            await clock.sleep(0)

    assert woken == sorted(pauses)


# ---------------------------------------------------------------- the proxy


@pytest.fixture
async def proxy(mock_trainer: MockTrainer) -> AsyncIterator[ChaosProxy]:
    async with ChaosProxy("127.0.0.1", int(mock_trainer.url.rsplit(":", 1)[1])) as running:
        yield running


async def say(proxy: ChaosProxy, session: aiohttp.ClientSession | None = None, seconds: float = 5) -> bytes:
    if session is None:
        async with aiohttp.ClientSession() as fresh:
            return await say(proxy, fresh, seconds)
    async with session.post(proxy.url + CHAT, json={}, timeout=aiohttp.ClientTimeout(total=seconds)) as response:
        return await response.read()


async def test_the_proxy_passes_on_what_it_gets(proxy: ChaosProxy, mock_trainer: MockTrainer) -> None:
    mock_trainer.on_chat(huge(200_000))

    assert len(await say(proxy)) > 200_000
    assert (proxy.connections_opened, len(mock_trainer.chats())) == (1, 1)


async def test_the_proxy_adds_latency_in_both_directions(proxy: ChaosProxy) -> None:
    proxy.up.latency_seconds = proxy.down.latency_seconds = 0.03
    began = asyncio.get_running_loop().time()

    await say(proxy)

    assert asyncio.get_running_loop().time() - began >= 0.06


@pytest.mark.parametrize("limit", [0, 10, 150])
async def test_the_proxy_resets_after_so_many_bytes(proxy: ChaosProxy, limit: int) -> None:
    proxy.down.reset_after_bytes = limit
    with pytest.raises(aiohttp.ClientError):
        await say(proxy)

    await proxy.heal()

    assert b'"ok"' in await say(proxy)


async def test_the_proxy_cuts_after_so_many_bytes(proxy: ChaosProxy) -> None:
    proxy.down.cut_after_bytes = 150

    with pytest.raises(aiohttp.ClientPayloadError):
        await say(proxy)


async def test_the_proxy_cuts_requests_too(proxy: ChaosProxy, mock_trainer: MockTrainer) -> None:
    proxy.up.cut_after_bytes = 20

    with pytest.raises(aiohttp.ServerDisconnectedError):
        await say(proxy)

    assert mock_trainer.requests == []


async def test_a_stalled_proxy_keeps_what_it_has_until_it_resumes(proxy: ChaosProxy, mock_trainer: MockTrainer) -> None:
    proxy.down.stall()
    call = asyncio.create_task(say(proxy))
    await mock_trainer.wait_until(lambda: any(chat.accepted for chat in mock_trainer.chats()))
    assert not call.done()

    proxy.down.resume()

    assert b'"ok"' in await call


async def test_a_refusing_proxy_takes_no_new_connections_and_keeps_the_old(proxy: ChaosProxy) -> None:
    async with aiohttp.ClientSession() as session:
        await say(proxy, session)
        await proxy.refuse()
        await proxy.refuse()

        with pytest.raises(aiohttp.ClientConnectorError):
            await say(proxy)
        assert b'"ok"' in await say(proxy, session)

    await proxy.heal()
    assert b'"ok"' in await say(proxy)


@pytest.mark.parametrize("switch", [ChaosProxy.reset_now, ChaosProxy.cut_now], ids=["reset", "cut"])
async def test_the_proxy_ends_open_connections_at_once(
    proxy: ChaosProxy, mock_trainer: MockTrainer, switch: Any
) -> None:
    mock_trainer.on_chat(hang(), times=1)
    call = asyncio.create_task(say(proxy))
    await mock_trainer.wait_chats()

    switch(proxy)

    with pytest.raises(aiohttp.ClientError):
        await call
    assert b'"ok"' in await say(proxy)


async def test_a_proxy_without_target_ends_the_connection(unused_tcp_port: int) -> None:
    async with ChaosProxy("127.0.0.1", unused_tcp_port) as proxy:
        with pytest.raises(aiohttp.ClientError):
            await say(proxy)


async def test_a_proxy_that_closes_lets_nobody_wait(mock_trainer: MockTrainer) -> None:
    mock_trainer.on_chat(hang())
    async with ChaosProxy("127.0.0.1", int(mock_trainer.url.rsplit(":", 1)[1])) as proxy:
        call = asyncio.create_task(say(proxy))
        await mock_trainer.wait_chats()

    with pytest.raises(aiohttp.ClientError):
        await call


# ---------------------------------------------------------------- driving a service


async def serve_init(request: web.Request) -> web.Response:
    """A service whose agent asks once, and whose result is there when it answers."""
    body = await request.json()
    if request.headers.get("Authorization") != "Bearer key":
        return web.json_response({"code": "unauthorized"}, status=401)
    async with aiohttp.ClientSession() as session:
        chat = {"rollout_id": body["rollout_id"], "messages": body["messages"]}
        async with session.post(body["server_url"] + CHAT, json=chat) as answer:
            message = (await answer.json())["choices"][0]["message"]
        result = {"rollout_id": body["rollout_id"], "final_messages": [*body["messages"], message]}
        async with session.post(body["server_url"] + "/v1/rollout/completed", json=result):
            pass
    return web.json_response({"rollout_id": body["rollout_id"], "tools": []}, status=202)


@pytest.fixture
async def service() -> AsyncIterator[TestClient[Any, Any]]:
    app = web.Application()
    app.router.add_post("/v1/rollout/init", serve_init)
    async with TestClient(TestServer(app)) as client:
        yield client


async def test_post_init_takes_a_url_or_a_client_and_reads_the_answer(
    service: TestClient[Any, Any], mock_trainer: MockTrainer
) -> None:
    request = make_request(server_url=mock_trainer.url)

    by_client = await post_init(service, request, api_key="key")
    by_url = await post_init(str(service.make_url("/")), encode_strict(request), api_key="key")

    assert by_client.json == by_url.json == {"rollout_id": request["rollout_id"], "tools": []}
    assert (by_url.status, by_url.headers["content-type"]) == (202, "application/json; charset=utf-8")


async def test_drive_brings_a_trainer_of_its_own(service: TestClient[Any, Any]) -> None:
    response = await drive(service, make_request(), answers=[text("4")], api_key="key")

    assert response["final_messages"][-1] == {"role": "assistant", "content": "4"}


async def test_drive_uses_the_trainer_that_it_is_given_and_leaves_its_prefixes_alone(
    service: TestClient[Any, Any], mock_trainer: MockTrainer
) -> None:
    request = make_request(server_url=mock_trainer.url_for("job-7"))

    await drive(service, request, trainer=mock_trainer, api_key="key")

    assert [each.path for each in mock_trainer.completions()] == ["/job-7/v1/rollout/completed"]


async def test_drive_says_why_an_init_was_not_accepted(service: TestClient[Any, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"init was answered 401: .*unauthorized"):
        await drive(service, make_request())


async def test_drive_says_that_a_rollout_id_was_used_before(serve: Serve) -> None:
    server, request = await serve(Chat()), make_request()
    await drive(server.url, request)
    await server.wait_phase(request["rollout_id"])

    with pytest.raises(TimeoutError, match=r"was already delivered, .*: take a new rollout_id"):
        await drive(server.url, request, timeout=0.05)


async def test_drive_says_where_a_rollout_stands_that_does_not_end(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(Chat(), max_retries=0)
    trainer.on_chat(hold(), rollout_id="held")
    trainer.on_completed(404)

    with pytest.raises(TimeoutError, match=r"the service has it in the phase 'running'$"):
        await drive(server.session, make_request(rollout_id="held"), trainer=trainer, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"in the phase 'undelivered': .*404"):
        await drive(server.session, make_request(), trainer=trainer, timeout=0.2)


async def test_drive_tells_of_the_timeout_where_the_status_cannot_be_asked(service: TestClient[Any, Any]) -> None:
    async with MockTrainer() as trainer:
        trainer.on_completed(503)
        with pytest.raises(TimeoutError, match="asking for its status failed, too: DecodeError"):
            await drive(service, make_request(), trainer=trainer, api_key="key", timeout=0.05)


def test_ids_of_requests_are_new_in_every_process() -> None:
    code = "from rollout.testing import make_request; print(make_request()['rollout_id'])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    assert other.endswith("-1")
    assert other != make_request()["rollout_id"] != make_request()["rollout_id"]
    assert other.rpartition("-")[0] != make_request()["rollout_id"].rpartition("-")[0]


# ---------------------------------------------------------------- running an agent


class Adder(RolloutAgentLoop):
    """Adds what the model asks it to, and rewards a 4."""

    name = "adder"

    async def get_tools(self, request: RolloutRequest) -> list[Any]:
        return [{"type": "function", "function": {"name": "add"}}]

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        while True:
            result = await ctx.chat(messages, tools=ctx.tools)
            messages.append(result.message)
            if not result.has_tool_calls:
                return ctx.complete(messages, reward=float(result.content == "4"))
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": "4"})


class Forgetful(RolloutAgentLoop):
    """Does not send again what it sent before."""

    name = "forgetful"

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        await ctx.chat(ctx.request.messages)
        await ctx.chat([])
        return ctx.complete([])


async def test_an_agent_is_tested_in_five_lines(run_agent: Any) -> None:
    result = await run_agent(Adder(), answers=[tool_calls([("add", {"a": 2, "b": 2})]), text("4")])

    assert (result.status, result.reward, result.metrics.num_llm_calls) == ("COMPLETED", 1, 2)


async def test_run_agent_takes_messages_request_fields_and_a_model_to_look_at_afterwards(run_agent: Any) -> None:
    llm = ScriptedLLM([tool_calls([("add", {})])])
    messages = [{"role": "user", "content": "two and two"}]

    result = await run_agent(Adder(), messages, llm, max_turns=1, metadata={"n": 1})

    assert result.finish_reason == "max_turns"
    assert llm.calls[0].messages == messages
    assert llm.calls[0].params["tools"][0]["function"]["name"] == "add"


async def test_run_agent_reports_what_the_agent_raised_as_the_service_would(run_agent: Any) -> None:
    failed = await run_agent(Adder(), answers=[status(400)])
    rewritten = await run_agent(Forgetful(), answers=["a", "b"], strict_history=True)

    assert (failed.status, failed.error_category, failed.retryable) == ("ERROR", "llm_error", False)
    assert "do not continue" in rewritten.error_message


async def test_run_agent_fails_the_test_when_the_script_is_too_short(run_agent: Any) -> None:
    with pytest.raises(AssertionError, match="has 1 answers, and call 2 was made"):
        await run_agent(Adder(), answers=[tool_calls([("add", {})])])


# ---------------------------------------------------------------- doors


def test_every_exported_name_exists_and_no_other() -> None:
    assert rollout.testing.__all__ == sorted(rollout.testing.__all__)
    assert dir(rollout.testing) == rollout.testing.__all__
    assert all(getattr(rollout.testing, name) is not None for name in rollout.testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        rollout.testing.nonsense  # noqa: B018


def test_the_plugin_imports_nothing_heavy_before_a_fixture_is_used() -> None:
    code = (
        "import sys, rollout.testing.plugin; print([m for m in ('aiohttp', 'msgspec', 'environs') if m in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_the_plugin_does_without_pytest_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest_asyncio", None)

    assert runpy.run_path(plugin.__file__)["mock_trainer"] is not None


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_the_fixtures_work_in_both_modes_of_pytest_asyncio(pytester: pytest.Pytester, mode: str) -> None:
    pytester.makeconftest("from rollout.testing.plugin import mock_trainer, run_agent")
    pytester.makeini(f"[pytest]\nasyncio_mode = {mode}\nasyncio_default_fixture_loop_scope = function\n")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.asyncio
        async def test_it(mock_trainer, run_agent):
            assert mock_trainer.url.startswith("http://127.0.0.1:")
            assert callable(run_agent)
        """
    )

    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
