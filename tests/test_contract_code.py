"""The contract, section 8 and the public names: what an agent's author may rely on."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from conftest import Serve
from served import Chat
from support import OK, USER, Doing

import rollout
from rollout import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    RequestRejected,
    RolloutAgentLoop,
    RolloutContext,
    RolloutMetrics,
    RolloutRequest,
    RolloutResult,
    RolloutStatus,
    create_app,
    tool,
)
from rollout.errors import AgentLoadError
from rollout.testing import MockTrainer, completion, make_tool_call, run_agent, text, tool_calls


async def returned(result_of: Any) -> rollout.RolloutResponse:
    """What the trainer gets of an agent that returns what the function makes of its context."""
    return await run_agent(Doing(result_of))


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    [
        "RolloutAgentLoop",
        "RolloutContext",
        "RolloutResult",
        "RolloutRequest",
        "InitResponse",
        "RolloutResponse",
        "RolloutStatus",
        "RolloutMetrics",
        "CompletionsRequest",
        "CompletionsResponse",
        "OpenAIFunctionToolSchema",
        "OpenAIFunctionSchema",
        "OpenAIFunctionParametersSchema",
        "OpenAIFunctionPropertySchema",
        "OpenAIFunctionToolCall",
        "OpenAIFunctionCallSchema",
        "OpenAIFunctionParsedSchema",
        "RolloutSettings",
        "RolloutServerSettings",
        "RolloutClientSettings",
        "RolloutState",
        "create_app",
        "validate_agent_loop",
        "tool",
        "RequestRejected",
    ],
)
def test_a_name_of_the_contract_is_there(name: str) -> None:
    assert getattr(rollout, name) is not None
    assert name in rollout.__all__
    assert name in dir(rollout)


def test_every_public_name_can_be_looked_up_and_no_other() -> None:
    for name in rollout.__all__:
        assert getattr(rollout, name) is not None
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = rollout.NoSuchName
    assert len(set(rollout.__all__)) == len(rollout.__all__)


@pytest.mark.parametrize("agent", [None, 5, "module:agent", Chat, object(), {}])
def test_what_is_no_agent_cannot_be_served(agent: Any) -> None:
    with pytest.raises(AgentLoadError):
        create_app(agent)


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        (Chat, r"^Chat is a class, and an instance is needed: Chat\(\)$"),
        ("shop:agent", r"use load_agent\('shop:agent'\)"),
    ],
    ids=["class", "text"],
)
def test_what_was_meant_as_an_agent_is_told_what_to_write(agent: Any, says: str) -> None:
    with pytest.raises(AgentLoadError, match=says):
        create_app(agent)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (rollout.RolloutServerSettings(), r"pass RolloutSettings\(server=\.\.\.\)"),
        (rollout.RolloutClientSettings(), r"pass RolloutSettings\(client=\.\.\.\)"),
        ({"server": {}}, r"not RolloutSettings but dict: pass RolloutSettings\(\.\.\.\)"),
    ],
    ids=["server", "client", "dict"],
)
def test_settings_of_another_kind_are_told_what_to_pass(settings: Any, says: str) -> None:
    with pytest.raises(rollout.SettingsError, match=says):
        create_app(Chat(), settings)


def test_variables_that_an_embedded_service_ignores_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OSMOSIS_ROLLOUT_SERVER_API_KEY", "my-own-key")
    monkeypatch.setenv("OSMOSIS_ROLLOUT_SERVER_PORT", " ")
    create_app(Chat(), rollout.RolloutSettings.from_env(dotenv=None))
    assert caplog.messages == []
    create_app(Chat())
    [line] = caplog.messages
    assert "these do nothing: OSMOSIS_ROLLOUT_SERVER_API_KEY;" in line
    assert "RolloutSettings.from_env()" in line
    assert "my-own-key" not in line


def test_the_errors_of_the_reference_are_there_under_their_names() -> None:
    assert rollout.OsmosisRolloutError is rollout.RolloutError
    assert rollout.OsmosisTransportError is rollout.TrainerUnreachable
    assert rollout.OsmosisServerError is rollout.TrainerUnavailable
    assert rollout.OsmosisValidationError is rollout.TrainerRefused
    assert rollout.OsmosisTimeoutError is rollout.TrainerTimeout


# ---------------------------------------------------------------- RolloutResult, complete, error


async def test_a_result_stays_assignable(serve: Serve, trainer: MockTrainer) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        result = ctx.complete([])
        result.status = "ERROR"
        result.final_messages = [OK]
        result.finish_reason = "gave_up"
        result.error_message = "why"
        result.metrics = RolloutMetrics(num_llm_calls=7)
        result.reward = 0.25
        result.extra_fields = {"a": 1}
        return result

    server = await serve(Doing(run))
    await server.post_init(rollout_id="a")
    sent = (await trainer.wait_completed("a")).json
    assert sent.pop("metrics")["num_llm_calls"] == 7
    assert sent == {
        "rollout_id": "a",
        "status": "ERROR",
        "final_messages": [OK],
        "finish_reason": "gave_up",
        "error_message": "why",
        "reward": 0.25,
        "extra_fields": {"a": 1},
        "error_category": "agent_error",
        "retryable": False,
    }


async def test_a_result_made_by_hand_counts() -> None:
    made = RolloutResult(status=RolloutStatus.COMPLETED, final_messages=USER, finish_reason="stop")
    assert made.extra_fields == {}
    response = await returned(lambda ctx: made)
    assert (response.status, response.final_messages) == ("COMPLETED", USER)
    assert response.metrics is not None


async def test_complete_has_the_defaults_of_the_contract() -> None:
    response = await returned(lambda ctx: ctx.complete(USER))
    assert (response.status, response.finish_reason, response.reward) == ("COMPLETED", "stop", None)
    assert (response.extra_fields, response.error_message) == ({}, None)
    assert (response.error_category, response.retryable) == (None, None)


async def test_complete_takes_its_arguments_by_position() -> None:
    response = await returned(lambda ctx: ctx.complete(USER, "done", 0.5, {"a": None}))
    assert (response.finish_reason, response.reward, response.extra_fields) == ("done", 0.5, {"a": None})


async def test_error_has_the_defaults_of_the_contract() -> None:
    response = await returned(lambda ctx: ctx.error("no idea"))
    assert (response.status, response.finish_reason, response.error_message) == ("ERROR", "error", "no idea")
    assert (response.final_messages, response.reward, response.extra_fields) == ([], None, {})
    assert (response.error_category, response.retryable) == ("agent_error", False)


async def test_error_takes_its_arguments_by_position() -> None:
    response = await returned(lambda ctx: ctx.error("no", USER, {"a": 1}))
    assert (response.final_messages, response.extra_fields) == (USER, {"a": 1})


async def test_an_error_without_messages_reports_those_reached() -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        await ctx.chat(USER)
        return ctx.error("no")

    assert (await returned(run)).final_messages == [*USER, OK]


async def test_an_error_may_carry_a_reward() -> None:
    def run(ctx: RolloutContext) -> RolloutResult:
        result = ctx.error("no")
        result.reward = -1
        return result

    assert (await returned(run)).reward == -1


async def test_only_what_run_returns_counts() -> None:
    def run(ctx: RolloutContext) -> RolloutResult:
        ctx.complete(USER, reward=1.0)
        ctx.error("no")
        return ctx.complete([OK], reward=0.5)

    response = await returned(run)
    assert (response.status, response.final_messages, response.reward) == ("COMPLETED", [OK], 0.5)


@pytest.mark.parametrize("value", [None, "done", 5, {"status": "COMPLETED"}, [], object(), RolloutResult])
async def test_anything_but_a_result_is_an_error_that_says_so(value: Any) -> None:
    response = await returned(lambda ctx: value)
    assert (response.status, response.error_category) == ("ERROR", "agent_error")
    assert "RolloutResult" in (response.error_message or "")


async def test_messages_that_change_after_complete_are_not_sent_twice() -> None:
    messages = copy.deepcopy(USER)

    def run(ctx: RolloutContext) -> RolloutResult:
        result = ctx.complete(messages)
        messages.append(OK)
        return result

    assert (await returned(run)).final_messages == USER


# ---------------------------------------------------------------- ctx.request, ctx.tools


async def test_mutating_the_request_harms_nobody(serve: Serve, trainer: MockTrainer) -> None:
    seen: list[RolloutRequest] = []

    class Vandal(RolloutAgentLoop):
        name = "vandal"

        def get_tools(self, request: RolloutRequest) -> list[Any]:
            seen.append(copy.deepcopy(request))
            self._destroy(request)
            return []

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            seen.append(copy.deepcopy(ctx.request))
            self._destroy(ctx.request)
            return ctx.complete([])

        def _destroy(self, request: RolloutRequest) -> None:
            request.messages.clear()
            request.metadata["nested"]["list"].clear()
            request.completion_params.clear()
            request.rollout_id = "other"
            request.api_key = request.llm_api_key = "stolen"
            request.server_url = "http://127.0.0.1:1"

    server = await serve(Vandal())
    fields: dict[str, Any] = {
        "messages": USER,
        "metadata": {"nested": {"list": [1]}},
        "completion_params": {"top_k": 5},
        "api_key": "key",
        "llm_api_key": "llm",
        "max_turns": 3,
        "tool_server_url": "http://127.0.0.1:1/tools",
    }
    await server.post_init(rollout_id="a", **fields)
    delivered = await trainer.wait_completed("a")
    assert (delivered.json["rollout_id"], delivered.bearer) == ("a", "key")
    assert (await server.post_init(rollout_id="a", **fields)).status == 202
    assert len(seen) == 2
    for request in seen:
        assert (request.rollout_id, request.server_url, request.api_key) == ("a", trainer.url, "key")
        assert {name: getattr(request, name) for name in fields} == fields
    assert seen[0].max_tokens_total == 8192


async def test_rollouts_at_the_same_time_do_not_share_their_requests(serve: Serve, trainer: MockTrainer) -> None:
    both = asyncio.Barrier(2)

    async def run(ctx: RolloutContext) -> RolloutResult:
        ctx.request.metadata["mine"] = ctx.rollout_id
        ctx.request.messages.append({"role": "user", "content": ctx.rollout_id})
        await both.wait()
        return ctx.complete(ctx.request.messages, extra_fields=ctx.request.metadata)

    server = await serve(Doing(run))
    for name in ("a", "b"):
        await server.post_init(rollout_id=name, messages=USER)
    for request in await trainer.wait_completed(2):
        assert request.json["extra_fields"] == {"mine": request.rollout_id}
        assert request.json["final_messages"] == [*USER, {"role": "user", "content": request.rollout_id}]


PARAMETERS = OpenAIFunctionParametersSchema(
    type="object", properties={"x": OpenAIFunctionPropertySchema(type="string")}, required=["x"]
)
SCHEMA = OpenAIFunctionToolSchema(
    type="function", function=OpenAIFunctionSchema(name="by_hand", description="d", parameters=PARAMETERS)
)
DICT = {"type": "function", "function": {"name": "as_dict", "parameters": {"$ref": "#/x"}, "odd": None}, "more": [1.5]}


@tool
def plain(x: str) -> str:
    """Give it back."""
    return x


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_context_has_the_very_tools_that_get_tools_returned(
    serve: Serve, trainer: MockTrainer, is_async: bool
) -> None:
    given_tools: list[Any] = [plain, SCHEMA, DICT]
    found: list[Any] = []

    class Mixed(RolloutAgentLoop):
        name = "mixed"

        def get_tools(self, request: RolloutRequest) -> Any:
            return self._later() if is_async else given_tools

        async def _later(self) -> list[Any]:
            return given_tools

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            found.append(ctx.tools)
            return ctx.complete([])

    server = await serve(Mixed())
    answer = (await server.post_init(rollout_id="a")).json
    await trainer.wait_completed("a")
    assert found == [given_tools]
    assert all(mine is theirs for mine, theirs in zip(found[0], given_tools, strict=True))
    assert [item["function"]["name"] for item in answer["tools"]] == ["plain", "by_hand", "as_dict"]
    assert answer["tools"][2] == DICT


async def test_the_default_get_tools_returns_the_tools_attribute(serve: Serve, trainer: MockTrainer) -> None:
    class Listed(RolloutAgentLoop):
        name = "listed"
        tools = [plain, DICT]

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            messages = await ctx.call_tools([make_tool_call("plain", {"x": "1"}, id="c1")])
            return ctx.complete(messages)

    server = await serve(Listed())
    answer = (await server.post_init(rollout_id="a")).json
    assert [item["function"]["name"] for item in answer["tools"]] == ["plain", "as_dict"]
    sent = (await trainer.wait_completed("a")).json
    assert sent["final_messages"] == [{"role": "tool", "content": "1", "tool_call_id": "c1"}]


async def test_the_messages_of_tool_calls_come_in_the_order_of_the_calls() -> None:
    second_is_done = asyncio.Event()

    @tool
    async def wait_for_the_other() -> str:
        """Ends second."""
        await second_is_done.wait()
        return "first"

    @tool
    async def quick() -> str:
        """Ends first."""
        second_is_done.set()
        return "second"

    async def run(ctx: RolloutContext) -> RolloutResult:
        answer = await ctx.chat(USER)
        return ctx.complete(await ctx.call_tools(answer.tool_calls))

    calls = [make_tool_call("wait_for_the_other", id="x"), make_tool_call("quick", id=None), {"id": "z"}]
    response = await run_agent(Doing(run, [wait_for_the_other, quick]), answers=[tool_calls(calls)])
    assert [m["content"] for m in response.final_messages[:2]] == ["first", "second"]
    assert [m.get("tool_call_id", "absent") for m in response.final_messages] == ["x", "absent", "z"]


async def test_an_agent_may_reject_a_request(serve: Serve) -> None:
    class Picky(Chat):
        def get_tools(self, request: RolloutRequest) -> list[Any]:
            raise RequestRejected("no metadata.answer")

    server = await serve(Picky())
    answer = await server.post_init(rollout_id="a")
    assert (answer.status, answer.json["code"]) == (422, "request_rejected")
    assert "no metadata.answer" in answer.json["detail"]


# ---------------------------------------------------------------- ctx.chat


async def sent_by(serve: Serve, trainer: MockTrainer, params: dict[str, Any]) -> dict[str, Any]:
    """What the trainer is asked when the agent passes these completion parameters on."""
    server = await serve(Chat())
    answer = await server.post_init(rollout_id="a", messages=USER, completion_params=params)
    assert answer.status == 202, answer
    result = (await trainer.wait_completed("a")).json
    assert result["status"] == "COMPLETED", result
    asked: dict[str, Any] = trainer.chats("a")[0].json
    return asked


DEFAULTS = {
    "model": "default",
    "messages": USER,
    "rollout_id": "a",
    "temperature": 1.0,
    "top_p": 1.0,
    "max_tokens": 512,
    "logprobs": True,
}


@pytest.mark.parametrize(
    ("params", "changed"),
    [
        ({}, {}),
        ({"temperature": 0, "top_p": 0.5, "max_tokens": 1, "logprobs": False, "model": "m"}, None),
        ({"temperature": None, "stop": None, "seed": None, "logprobs": None, "tools": None}, None),
        ({"stop": "END"}, {"stop": ["END"]}),
        ({"stop": ""}, {"stop": [""]}),
        ({"stop": ["a", "b"]}, None),
        ({"stop": []}, None),
        ({"stream": True, "stream_options": {"include_usage": True}}, {}),
        ({"stream": False, "stream_options": None}, {}),
        ({"rollout_id": "other", "messages": []}, {}),
        ({"messages": [{"role": "user", "content": "other"}]}, {}),
        ({"tools": [DICT], "tool_choice": {"type": "function", "function": {"name": "as_dict"}}}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": None}}}}, None),
        ({"top_k": -1, "min_p": 1e-9, "seed": 2**63, "n": 1, "top_logprobs": 20, "user": "\u2028"}, None),
        ({"extra_body": {"a": [None, {}]}, "": 1, "kebab-case": 2, "params": 3, "ctx": 4, "body": 5, "url": 6}, None),
        ({"max_completion_tokens": 5}, None),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_chat_sends_exactly_the_parameters_given_over_the_defaults(
    serve: Serve, trainer: MockTrainer, params: dict[str, Any], changed: dict[str, Any] | None
) -> None:
    assert await sent_by(serve, trainer, params) == DEFAULTS | (params if changed is None else changed)


async def test_numbers_in_parameters_keep_their_kind(serve: Serve, trainer: MockTrainer) -> None:
    asked = await sent_by(serve, trainer, {"temperature": 0, "top_p": 1.0, "seed": 12345678901234567890})
    assert [type(asked[name]) for name in ("temperature", "top_p", "seed")] == [int, float, int]


async def test_chat_takes_messages_by_name_too() -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        answer = await ctx.chat(messages=USER, temperature=0)
        return ctx.complete([answer.message])

    assert (await returned(run)).final_messages == [OK]


async def test_chat_without_messages_is_the_agents_error() -> None:
    response = await returned(lambda ctx: ctx.chat(temperature=0))
    assert (response.error_category, response.error_message) == ("agent_error", "TypeError: chat() needs messages")


async def test_the_tools_are_not_added_by_themselves(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(Doing(lambda ctx: ctx.chat(USER), [plain]))
    await server.post_init(rollout_id="a")
    await trainer.wait_completed("a")
    assert trainer.chats("a")[0].json == DEFAULTS


async def test_the_assistant_message_is_handed_on_deep_equal(serve: Serve, trainer: MockTrainer) -> None:
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "\u2028…",
        "tool_calls": [{"id": None, "function": {"name": "f", "arguments": "{bad"}, "odd": [1.0, None]}],
        "unknown": {"deep": [{}]},
    }
    trainer.on_chat(completion(choices=[{"message": message}]))
    server = await serve(Chat())
    await server.post_init(rollout_id="a", messages=USER)
    assert (await trainer.wait_completed("a")).json["final_messages"] == [*USER, message]


async def test_limits_end_the_rollout_completed_with_what_was_reached(serve: Serve, trainer: MockTrainer) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        while True:
            messages.append((await ctx.chat(messages)).message)

    server = await serve(Doing(run))
    await server.post_init(rollout_id="turns", messages=USER, max_turns=2)
    await server.post_init(rollout_id="tokens", messages=USER, max_tokens_total=1)
    turns, tokens = [(await trainer.wait_completed(name)).json for name in ("turns", "tokens")]
    assert (turns["status"], turns["finish_reason"]) == ("COMPLETED", "max_turns")
    assert turns["final_messages"] == [*USER, OK, OK]
    assert len(trainer.chats("turns")) == 2
    assert (tokens["status"], tokens["finish_reason"]) == ("COMPLETED", "max_tokens")
    assert len(trainer.chats("tokens")) == 1


async def test_the_first_answer_stands_in_a_result_of_an_outage_later(serve: Serve, trainer: MockTrainer) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        while True:
            messages.append((await ctx.chat(messages)).message)

    trainer.on_chat([text("4"), 500])
    server = await serve(Doing(run), max_retries=0)
    await server.post_init(rollout_id="a", messages=USER)
    result = (await trainer.wait_completed("a")).json
    assert (result["status"], result["error_category"]) == ("ERROR", "llm_error")
    assert "reward" not in result
    assert result["final_messages"] == [*USER, {"role": "assistant", "content": "4"}]
