"""PROTOCOL section 3: the messages, as a trainer and an agent see them."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
from typing import Any

import msgspec
import pytest
from conftest import Serve
from served import Chat, Held, Instant

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.schemas import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
)
from rollout.testing import completion, make_request, status, text, tool_calls

RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)\Z")


async def accepts(serve: Serve, **fields: Any) -> Any:
    """The request as the agent sees it; the init must be accepted and the rollout end well."""
    agent = Instant()
    server = await serve(agent)
    body = make_request(**{"rollout_id": "r", "server_url": server.trainer.url, **fields})
    answer = await server.post_init(body)
    assert answer.status == 202, answer
    await server.result(body["rollout_id"])
    return agent.requests[0]


async def refuses(serve: Serve, word: str, **fields: Any) -> None:
    """422 that names the field; nothing runs."""
    agent = Instant()
    server = await serve(agent)
    body = make_request(**{"rollout_id": "r", "server_url": server.trainer.url, **fields})
    answer = await server.post_init(body)
    assert (answer.status, answer.json["code"]) == (422, "invalid_request"), answer
    assert word in answer.json["detail"]
    assert (await server.get("/health")).json["active_rollouts"] == 0
    assert agent.ran == []


# ---------------------------------------------------------------- RolloutRequest


@pytest.mark.parametrize(
    "rollout_id", ["a", " a ", "x" * 256, "\U0001f600" * 256, "\u00e9" * 256, "\x00", "../../etc/passwd", "%s{0}"]
)
async def test_a_rollout_id_of_1_to_256_characters_is_taken(serve: Serve, rollout_id: str) -> None:
    agent = Instant()
    server = await serve(agent)
    assert (await server.post_init(rollout_id=rollout_id)).json["rollout_id"] == rollout_id
    assert (await server.trainer.wait_completed(rollout_id)).json["rollout_id"] == rollout_id
    assert agent.ran == [rollout_id]


@pytest.mark.parametrize("rollout_id", ["", " ", "\t\n", "\u00a0", "\u3000 ", "x" * 257, "\U0001f600" * 257])
async def test_a_blank_or_longer_rollout_id_is_422(serve: Serve, rollout_id: str) -> None:
    await refuses(serve, "rollout_id", rollout_id=rollout_id)


@pytest.mark.parametrize("field", ["rollout_id", "server_url", "messages", "completion_params"])
async def test_a_required_field_that_is_missing_is_422_by_name(serve: Serve, field: str) -> None:
    await refuses(serve, field, **{field: msgspec.UNSET})


@pytest.mark.parametrize(
    "url",
    [
        "http://trainer",
        "http://trainer:8080",
        "http://trainer:8080/",
        "https://trainer/a/b/",
        "HTTP://TRAINER",
        "http://127.0.0.1:1",
        "http://[::1]:9000/x",
        "http://b\u00fccher.example",
        "http://xn--bcher-kva.example",
        "http://trainer_1.local",
        "http://trainer/%7Euser/a%2Fb",
        "http://trainer/@user",
    ],
)
async def test_an_http_url_with_a_host_is_taken(serve: Serve, url: str) -> None:
    server = await serve(Held())
    assert (await server.post_init(server_url=url)).status == 202


@pytest.mark.parametrize(
    "url",
    [
        "",
        " ",
        "trainer",
        "trainer:8080",
        "//trainer",
        "/path",
        "ftp://trainer",
        "file:///etc/passwd",
        "ws://trainer",
        "javascript:alert(1)",
        "http://",
        "http:///path",
        "http://:80",
        "http:trainer",
        "http://user@trainer",
        "http://user:pw@trainer",
        "http://:pw@trainer",
        "http://@trainer",
        "http://trainer?a=b",
        "http://trainer?",
        "http://trainer/#x",
        "http://trainer#",
        "http://trainer:99999",
        "http://trainer:0",
        "http://trainer:x",
        "http://[::1",
        "http://trai ner",
        "http://trainer/a b",
        "http://trainer/\r\nX: y",
        "http://trainer\\@evil",
        "http://trainer\x00",
        " http://trainer",
        "http://trainer\n",
        "http://" + "a" * 9000,
    ],
    ids=ascii,
)
async def test_any_other_server_url_is_422(serve: Serve, url: str) -> None:
    await refuses(serve, "server_url", server_url=url)


@pytest.mark.parametrize("suffix", ["", "/", "/a/b", "/a/b/"])
async def test_the_callbacks_go_below_the_server_url(serve: Serve, suffix: str) -> None:
    server = await serve(Chat())
    await server.post_init(rollout_id="r", server_url=server.trainer.url + suffix)
    await server.trainer.wait_completed("r")
    base = suffix.rstrip("/")
    assert [r.path for r in server.trainer.requests] == [f"{base}/v1/chat/completions", f"{base}/v1/rollout/completed"]


async def test_full_urls_take_the_place_of_the_server_url(serve: Serve) -> None:
    server = await serve(Chat())
    server.trainer.on_path("/llm", text("ok"))
    server.trainer.on_path("/done", status(200))
    urls = {
        "chat_completions_url": f"{server.trainer.url}/llm",
        "completion_callback_url": f"{server.trainer.url}/done",
    }
    for name, server_url in {"absent": msgspec.UNSET, "null": None, "beside": "http://127.0.0.1:1"}.items():
        assert (await server.post_init(rollout_id=name, server_url=server_url, **urls)).status == 202
        assert (await server.wait_phase(name))["status"] == "COMPLETED"
    assert [r.path for r in server.trainer.requests] == ["/llm", "/done"] * 3


@pytest.mark.parametrize("field", ["chat_completions_url", "completion_callback_url"])
async def test_one_full_url_goes_with_the_server_url_and_is_not_enough_alone(serve: Serve, field: str) -> None:
    server = await serve(Chat())
    path = {"chat_completions_url": "/v1/chat/completions", "completion_callback_url": "/v1/rollout/completed"}[field]
    url = f"{server.trainer.url}/own{path}"
    assert (await server.post_init(rollout_id="r", **{field: url})).status == 202
    await server.trainer.wait_completed("r")
    assert [r.path for r in server.trainer.requests if r.path.startswith("/own")] == [f"/own{path}"]
    await refuses(serve, "server_url", server_url=None, **{field: url})


@pytest.mark.parametrize("field", ["chat_completions_url", "completion_callback_url", "tool_server_url"])
@pytest.mark.parametrize("url", ["nowhere", "ftp://h/x", "http://u:p@h/x", "http:///x", "http://h:0/x"])
async def test_other_urls_are_checked_too(serve: Serve, field: str, url: str) -> None:
    await refuses(serve, field, **{field: url})


@pytest.mark.parametrize("messages", [[], [{}], [{"role": "user"}] * 500])
async def test_messages_are_any_list_of_objects(serve: Serve, messages: Any) -> None:
    assert (await accepts(serve, messages=messages)).messages == messages


DEFAULTS = {
    "tool_server_url": None,
    "max_turns": 10,
    "max_tokens_total": 8192,
    "metadata": {},
    "api_key": None,
    "idempotency_key": None,
    "chat_completions_url": None,
    "completion_callback_url": None,
    "llm_api_key": None,
    "timeout_seconds": None,
}


@pytest.mark.parametrize("given", [{}, dict.fromkeys(DEFAULTS)], ids=["absent", "null"])
async def test_null_for_an_optional_field_is_as_if_absent(serve: Serve, given: dict[str, Any]) -> None:
    request = await accepts(serve, **given)
    assert {name: getattr(request, name) for name in DEFAULTS} == DEFAULTS


async def test_unknown_fields_are_ignored(serve: Serve) -> None:
    request = await accepts(serve, zzz=[1, {"a": None}], stream=True, status="ERROR", **{"": 0, "__class__": "x"})
    assert request.rollout_id == "r"


@pytest.mark.parametrize("field", ["max_turns", "max_tokens_total"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, [], {}])
async def test_counts_below_one_or_of_another_type_are_422(serve: Serve, field: str, value: Any) -> None:
    await refuses(serve, field, **{field: value})


@pytest.mark.parametrize("value", [0, -1, -0.0, "1", True, [1], {}])
async def test_a_timeout_that_is_no_number_above_zero_is_422(serve: Serve, value: Any) -> None:
    await refuses(serve, "timeout_seconds", timeout_seconds=value)


@pytest.mark.parametrize("value", [1, 0.5, 1e308, 10**9])
async def test_a_timeout_above_zero_is_taken(serve: Serve, value: float) -> None:
    assert (await accepts(serve, timeout_seconds=value)).timeout_seconds == value


@pytest.mark.parametrize("key", ["k" * 256, "\U0001f600" * 256, " k ", "../x\n"])
async def test_an_idempotency_key_of_up_to_256_characters_is_taken(serve: Serve, key: str) -> None:
    assert (await accepts(serve, idempotency_key=key)).rollout_id == "r"


async def test_a_longer_idempotency_key_is_422(serve: Serve) -> None:
    await refuses(serve, "idempotency_key", idempotency_key="k" * 257)


@pytest.mark.parametrize(
    ("keys", "chat", "completed"),
    [
        ({}, None, None),
        ({"api_key": "a"}, "a", "a"),
        ({"api_key": "a", "llm_api_key": "b"}, "b", "a"),
        ({"llm_api_key": "b"}, "b", None),
        ({"api_key": "a", "llm_api_key": None}, "a", "a"),
        ({"api_key": ""}, None, None),
        ({"api_key": " a "}, "a", "a"),
    ],
    ids=str,
)
async def test_the_llm_key_goes_with_chats_only(
    serve: Serve, keys: dict[str, Any], chat: str | None, completed: str | None
) -> None:
    server = await serve(Chat())
    await server.post_init(rollout_id="r", **keys)
    await server.trainer.wait_completed("r")
    assert server.trainer.chats("r")[0].bearer == chat
    assert server.trainer.completions("r")[0].bearer == completed


# ---------------------------------------------------------------- tools


async def test_init_answers_the_id_and_the_tools_and_nothing_else(serve: Serve) -> None:
    agent = Instant()
    by_hand = OpenAIFunctionToolSchema(
        function=OpenAIFunctionSchema(
            name="f",
            description="d",
            parameters=OpenAIFunctionParametersSchema(
                type="object",
                properties={"a": OpenAIFunctionPropertySchema(type="string", description="p", enum=["x", "y"])},
                required=["a"],
            ),
            strict=True,
        )
    )
    as_dict = {"type": "function", "function": {"name": "g", "parameters": {"$defs": {"X": {}}}}, "extra": None}
    agent.tools = [by_hand, as_dict]  # type: ignore[misc]
    server = await serve(agent)
    answer = await server.post_init(rollout_id="r")
    assert answer.json == {
        "rollout_id": "r",
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": "d",
                    "parameters": {
                        "type": "object",
                        "properties": {"a": {"type": "string", "description": "p", "enum": ["x", "y"]}},
                        "required": ["a"],
                    },
                    "strict": True,
                },
            },
            as_dict,
        ],
    }


# ---------------------------------------------------------------- CompletionsRequest


class Asks(RolloutAgentLoop):
    """One chat with exactly these parameters."""

    name = "asks"

    def __init__(self, **params: Any) -> None:
        self.params = params

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        result = await ctx.chat(ctx.request.messages, **self.params)
        return ctx.complete([*ctx.request.messages, result.message])


async def sent_by(serve: Serve, **params: Any) -> dict[str, Any]:
    """The body of the one chat."""
    server = await serve(Asks(**params))
    await server.post_init(rollout_id="r", messages=[{"role": "user", "content": "\u00e9"}])
    await server.trainer.wait_completed("r")
    (chat,) = server.trainer.chats("r")
    assert chat.headers["Content-Type"].startswith("application/json")
    body: dict[str, Any] = json.loads(chat.body)
    return body


async def test_a_chat_carries_the_defaults_and_nothing_else(serve: Serve) -> None:
    assert await sent_by(serve) == {
        "model": "default",
        "messages": [{"role": "user", "content": "\u00e9"}],
        "rollout_id": "r",
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 512,
        "logprobs": True,
    }


async def test_what_the_agent_passes_goes_over_the_defaults_unchanged(serve: Serve) -> None:
    params = {
        "model": "m",
        "temperature": 0,
        "top_p": 0.5,
        "max_tokens": 7,
        "logprobs": False,
        "seed": 2**63,
        "top_k": -1,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function"},
        "response_format": {"type": "json_object"},
        "stop": ["a", "b"],
        "anything": None,
    }
    sent = await sent_by(serve, **params, stream=True, stream_options={"include_usage": True})
    assert {name: sent.get(name, "missing") for name in params} == params
    assert type(sent["temperature"]) is int
    assert set(sent) == {*params, "messages", "rollout_id"}


@pytest.mark.parametrize(("given", "sent"), [("x", ["x"]), ("", [""]), ([], []), (["x"], ["x"]), (("x",), ["x"])])
async def test_stop_as_one_text_becomes_a_list_of_one(serve: Serve, given: Any, sent: Any) -> None:
    assert (await sent_by(serve, stop=given))["stop"] == sent


async def test_every_turn_carries_the_full_history(serve: Serve) -> None:
    class Twice(RolloutAgentLoop):
        name = "twice"

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            history = list(ctx.request.messages)
            for _ in range(2):
                history.append((await ctx.chat(history)).message)
            return ctx.complete(history)

    server = await serve(Twice())
    server.trainer.on_chat([text("one"), text("two")])
    await server.post_init(rollout_id="r", messages=[{"role": "user", "content": "hi"}])
    result = (await server.trainer.wait_completed("r")).json
    first, second = (chat.json["messages"] for chat in server.trainer.chats("r"))
    assert second == [*first, {"role": "assistant", "content": "one"}]
    assert result["final_messages"] == [*second, {"role": "assistant", "content": "two"}]
    assert result["metrics"]["num_llm_calls"] == 2


# ---------------------------------------------------------------- RolloutResponse


class Returns(RolloutAgentLoop):
    """`run()` does what it is given, with the context."""

    name = "returns"

    def __init__(self, make: Any) -> None:
        self.make = make

    async def run(self, ctx: RolloutContext) -> Any:
        return self.make(ctx)


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


async def result_of(serve: Serve, make: Any) -> dict[str, Any]:
    """What the trainer is sent, strictly decoded."""
    server = await serve(Returns(make))
    assert (await server.post_init(rollout_id="r")).status == 202
    body = (await server.trainer.wait_completed("r")).body
    result: dict[str, Any] = json.loads(body.decode("utf-8"), parse_constant=no_constants)
    msgspec.json.decode(body)
    assert (await server.get("/result/r")).body == body
    assert result["rollout_id"] == "r"
    state = (await server.get("/status/r")).json
    assert (state["status"], state.get("finish_reason")) == (result["status"], result.get("finish_reason"))
    return result


async def test_a_result_without_reward_or_error_leaves_them_out(serve: Serve) -> None:
    result = await result_of(serve, lambda ctx: ctx.complete(ctx.request.messages))
    assert (result["status"], result["finish_reason"], result["extra_fields"]) == ("COMPLETED", "stop", {})
    assert result["final_messages"] == [{"role": "user", "content": "What is 2 + 2?"}]
    assert not {"error_message", "error_category", "retryable"} & {k for k, v in result.items() if v is not None}
    assert result.get("reward") is None


async def test_metrics_are_measured(serve: Serve) -> None:
    class Works(RolloutAgentLoop):
        name = "works"

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            history = list(ctx.request.messages)
            for _ in range(2):
                result = await ctx.chat(history)
                history += [result.message, *(await ctx.call_tools(result.tool_calls))]
            return ctx.complete(history)

    server = await serve(Works())
    usages = [{"prompt_tokens": 100, "completion_tokens": 7}, {"prompt_tokens": 50, "completion_tokens": 3}]
    server.trainer.on_chat([tool_calls([("f", {}), ("g", {})], usage=usages[0]), text("x", usage=usages[1])])
    await server.post_init(rollout_id="r")
    metrics = (await server.trainer.wait_completed("r")).json["metrics"]
    counts = {name: value for name, value in metrics.items() if not name.endswith("_ms")}
    assert counts == {
        "num_llm_calls": 2,
        "num_tool_calls": 2,
        "prompt_tokens": 150,
        "response_tokens": 10,
        "max_context_tokens": 107,
    }
    assert 0 < metrics["llm_latency_ms"] <= metrics["total_latency_ms"] < 5000
    assert 0 <= metrics["tool_latency_ms"] <= metrics["total_latency_ms"]


@pytest.mark.parametrize("reward", [0, 1, -1.5, 0.0, 1e300, decimal.Decimal("0.25"), 2**60])
async def test_a_finite_reward_is_sent_as_a_number(serve: Serve, reward: Any) -> None:
    result = await result_of(serve, lambda ctx: ctx.complete([], reward=reward))
    assert (result["status"], result["reward"]) == ("COMPLETED", reward)
    assert type(result["reward"]) in (int, float)


class Scalar:
    """A number as NumPy has them."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value

    def tolist(self) -> Any:
        return self.value


async def test_a_numpy_like_reward_becomes_a_number(serve: Serve) -> None:
    assert (await result_of(serve, lambda ctx: ctx.complete([], reward=Scalar(0.5))))["reward"] == 0.5


@pytest.mark.parametrize(
    "reward",
    [math.nan, math.inf, -math.inf, True, False, "1", "nan", [1], {}, Scalar(math.nan), Scalar(True),
     decimal.Decimal("NaN"), decimal.Decimal("Infinity"), 10**400, object(), 1j],
    ids=lambda r: type(r).__name__,
)  # fmt: skip
async def test_any_other_reward_ends_the_rollout_as_a_validation_error(serve: Serve, reward: Any) -> None:
    messages = [{"role": "assistant", "content": "kept"}]
    result = await result_of(serve, lambda ctx: ctx.complete(messages, reward=reward))
    assert (result["status"], result["error_category"]) == ("ERROR", "validation_error")
    assert "reward" in result["error_message"]
    assert result.get("reward") is None
    assert isinstance(result["retryable"], bool)
    assert result["final_messages"] == messages


CONVERTED = {
    "tuple": ((1, 2), [1, 2]),
    "set": ({1}, [1]),
    "datetime": (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "2026-01-02T00:00:00Z"),
    "date": (datetime.date(2026, 1, 2), "2026-01-02"),
    "scalar": (Scalar(3), 3),
    "decimal": (decimal.Decimal("0.5"), 0.5),
    "number keys": ({1: {2.5: "x"}}, {"1": {"2.5": "x"}}),
    "nested": ([{"a": ({"b": Scalar(1)},)}], [{"a": [{"b": 1}]}]),
}


@pytest.mark.parametrize(("value", "sent"), CONVERTED.values(), ids=CONVERTED)
async def test_what_has_a_plain_meaning_is_converted(serve: Serve, value: Any, sent: Any) -> None:
    message = {"role": "assistant", "content": value}
    result = await result_of(serve, lambda ctx: ctx.complete([message], extra_fields={"x": value}))
    assert result["status"] == "COMPLETED"
    assert result["extra_fields"]["x"] == sent
    assert result["final_messages"] == [{"role": "assistant", "content": sent}]


LOST = {"NaN": math.nan, "inf": [math.inf], "object": object(), "function": print, "type": int, "big": 10**5000}


@pytest.mark.parametrize("where", ["extra_fields", "final_messages"])
@pytest.mark.parametrize("value", LOST.values(), ids=LOST)
async def test_what_has_none_is_named_and_the_result_is_not_lost(serve: Serve, value: Any, where: str) -> None:
    def make(ctx: RolloutContext) -> RolloutResult:
        if where == "extra_fields":
            return ctx.complete([{"role": "assistant", "content": "kept"}], extra_fields={"spot": value, "good": 1})
        return ctx.complete([{"role": "assistant", "content": "kept", "spot": value}], extra_fields={"good": 1})

    result = await result_of(serve, make)
    assert where in result["error_message"]
    assert "spot" in result["error_message"]
    assert result["extra_fields"]["good"] == 1
    assert result["final_messages"][0]["content"] == "kept"


async def test_lone_surrogates_and_cycles_do_not_lose_a_result(serve: Serve) -> None:
    loop: dict[str, Any] = {"text": "half \ud83e", "\ud83e": 1}
    loop["self"] = loop
    result = await result_of(serve, lambda ctx: ctx.complete([{"role": "assistant", **loop}], extra_fields=loop))
    assert "half" in result["final_messages"][0]["text"]


@pytest.mark.parametrize("returned", [None, 5, "done", {}, [], True, object], ids=str)
async def test_a_run_that_returns_no_result_is_an_agent_error(serve: Serve, returned: Any) -> None:
    result = await result_of(serve, lambda ctx: returned)
    assert (result["status"], result["finish_reason"], result["error_category"]) == ("ERROR", "error", "agent_error")
    assert result["retryable"] is False


@pytest.mark.parametrize("reason", ["stop", "max_turns", "own reason", "\u00e9"])
async def test_a_finish_reason_of_the_agents_own_is_sent(serve: Serve, reason: str) -> None:
    assert (await result_of(serve, lambda ctx: ctx.complete([], finish_reason=reason)))["finish_reason"] == reason


async def test_an_agents_own_error_keeps_what_it_handed_over(serve: Serve) -> None:
    def make(ctx: RolloutContext) -> RolloutResult:
        result = ctx.error("went wrong", final_messages=[{"role": "user", "content": "so far"}], extra_fields={"a": 1})
        result.reward = -1
        return result

    result = await result_of(serve, make)
    assert (result["status"], result["error_message"], result["error_category"]) == (
        "ERROR",
        "went wrong",
        "agent_error",
    )
    assert (result["final_messages"], result["extra_fields"]) == ([{"role": "user", "content": "so far"}], {"a": 1})
    assert result["reward"] == -1


async def test_an_error_holds_the_last_history_sent_and_its_answer(serve: Serve) -> None:
    class Fails(RolloutAgentLoop):
        name = "fails"

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            await ctx.chat(ctx.request.messages)
            raise ValueError("after the first turn")

    server = await serve(Fails())
    message = {"role": "assistant", "content": "one"}
    server.trainer.on_chat(completion("one"))
    await server.post_init(rollout_id="r", messages=[{"role": "user", "content": "q"}])
    result = (await server.trainer.wait_completed("r")).json
    assert result["final_messages"] == [{"role": "user", "content": "q"}, message]
    assert (result["status"], result["finish_reason"], result["error_category"]) == ("ERROR", "error", "agent_error")
    assert "after the first turn" in result["error_message"]
    assert result.get("reward") is None


# ---------------------------------------------------------------- RolloutState


async def test_a_state_grows_with_its_rollout(serve: Serve) -> None:
    agent = Held()
    server = await serve(agent, max_concurrent_rollouts=1)
    await server.post_init(rollout_id="first")
    await agent.running.wait()
    await server.post_init(rollout_id="r")
    queued = (await server.get("/status/r")).json
    assert (queued["status"], queued["phase"], queued["turn"]) == ("STARTED", "queued", 0)
    assert not {"started_at", "finished_at", "delivered_at"} & set(queued)
    assert None not in queued.values()
    agent.release.set()
    await server.result("r")
    state = await server.wait_phase("r")
    assert (state["status"], state["phase"], state["finish_reason"]) == ("COMPLETED", "delivered", "stop")
    assert state["delivery_attempts"] == 1
    times = [state[name] for name in ("created_at", "started_at", "finished_at", "delivered_at")]
    assert all(RFC_3339.match(time) for time in times)
    assert times == sorted(times)
    assert state["metrics"]["num_llm_calls"] == 0


async def test_a_state_tells_of_deliveries_that_failed(serve: Serve) -> None:
    server = await serve(Instant())
    server.trainer.on_completed(status(418))
    await server.post_init(rollout_id="r")
    await server.result("r")
    state = await server.wait_phase("r", "undelivered")
    assert (state["phase"], state["delivery_attempts"]) == ("undelivered", 1)
    assert "418" in state["last_delivery_error"]
    assert "delivered_at" not in state
