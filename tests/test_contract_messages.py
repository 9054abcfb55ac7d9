"""PROTOCOL section 3: the requests, as a trainer and an agent see them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from conftest import Serve
from served import Chat, Held, Instant

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.testing import make_request, status, text


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
