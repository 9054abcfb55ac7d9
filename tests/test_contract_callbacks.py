"""The contract, section 6: LLM calls as the trainer sees them, how often, and what its answers mean."""

from __future__ import annotations

import asyncio
import email.utils
import socket
import time
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver
from conftest import Serve
from hypothesis import given
from hypothesis import strategies as st
from served import GENEROUS_SECONDS, Chat
from support import USER, Doing
from yarl import URL

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutResult
from rollout.errors import LLMError, TrainerRefused, TrainerUnavailable, TrainerUnreachable
from rollout.metrics import Metrics
from rollout.retry import RETRY_AFTER_LIMIT_SECONDS, RetryPolicy, parse_retry_after
from rollout.settings import RolloutClientSettings
from rollout.testing import (
    Answer,
    MockTrainer,
    RecordedRequest,
    Reply,
    close_before_answer,
    garbage,
    half_body,
    hang,
    raw,
    redirect,
    reset,
    status,
    text,
    wrong_content_type,
)
from rollout.trainer import Trainer

RETRIED = [408, 425, 429, 500, 501, 502, 503, 504, 599]
REFUSED = [400, 401, 403, 404, 405, 409, 413, 422, 451, 499]
REDIRECTS = [301, 302, 303, 304, 307, 308]


def asking(caught: list[BaseException]) -> Doing:
    """An agent that asks once and keeps the error that it meets."""

    async def run(ctx: RolloutContext) -> RolloutResult:
        try:
            await ctx.chat(USER)
        except LLMError as exc:
            caught.append(exc)
            raise
        return ctx.complete(USER)

    return Doing(run)


# ---------------------------------------------------------------- where and with what


@pytest.mark.parametrize("prefix", ["", "/", "/a/b", "/a/b/"])
async def test_both_callbacks_go_below_the_server_url(serve: Serve, trainer: MockTrainer, prefix: str) -> None:
    server = await serve(Chat())
    await server.post_init(rollout_id="a", server_url=trainer.url + prefix)
    await trainer.wait_completed("a")
    base = prefix.rstrip("/")
    assert [(r.method, r.path, r.query) for r in trainer.requests] == [
        ("POST", base + "/v1/chat/completions", ""),
        ("POST", base + "/v1/rollout/completed", ""),
    ]
    assert {r.headers["Content-Type"] for r in trainer.requests} == {"application/json"}


@pytest.mark.parametrize(
    ("keys", "chat", "completed"),
    [
        ({}, None, None),
        ({"api_key": "key"}, "Bearer key", "Bearer key"),
        ({"llm_api_key": "llm"}, "Bearer llm", None),
        ({"api_key": "key", "llm_api_key": "llm"}, "Bearer llm", "Bearer key"),
        ({"api_key": None, "llm_api_key": None}, None, None),
    ],
    ids=["none", "one", "llm-only", "both", "nulls"],
)
async def test_each_callback_carries_its_own_key(
    serve: Serve, trainer: MockTrainer, keys: dict[str, str], chat: str | None, completed: str | None
) -> None:
    server = await serve(Chat())
    await server.post_init(rollout_id="a", **keys)
    await trainer.wait_completed("a")
    assert trainer.chats("a")[0].headers.get("Authorization") == chat
    assert trainer.completions("a")[0].headers.get("Authorization") == completed


async def test_the_keys_of_rollouts_at_the_same_time_are_never_mixed_up(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(Chat(), max_concurrent_rollouts=5)
    for number in range(30):
        await server.post_init(rollout_id=f"r{number}", api_key=f"key-{number}", llm_api_key=f"llm-{number}")
    await trainer.wait_completed(30)
    for number in range(30):
        assert [r.bearer for r in trainer.chats(f"r{number}")] == [f"llm-{number}"]
        assert [r.bearer for r in trainer.completions(f"r{number}")] == [f"key-{number}"]


async def test_the_environment_names_no_proxy_and_no_credentials(
    serve: Serve, trainer: MockTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    server = await serve(Chat())
    await server.post_init(rollout_id="a")
    assert (await trainer.wait_completed("a")).json["status"] == "COMPLETED"
    assert all("Authorization" not in r.headers for r in trainer.requests)


async def test_cookies_of_the_trainer_are_not_sent_back(serve: Serve, trainer: MockTrainer) -> None:
    cookie = ("Set-Cookie", "sid=1; Path=/")
    trainer.on_chat(Reply(text("4").body, headers=(cookie,)))
    trainer.on_completed(Reply(headers=(cookie,)))
    server = await serve(Chat())
    for name in ("a", "b"):
        await server.post_init(rollout_id=name)
        await trainer.wait_completed(name, accepted=True)
    assert len(trainer.requests) == 4
    assert all("Cookie" not in r.headers for r in trainer.requests)


@pytest.mark.parametrize("connections", [0, 150])
async def test_many_calls_are_open_at_once(serve: Serve, trainer: MockTrainer, connections: int) -> None:
    count = 104  # aiohttp's own cap is 100
    server = await serve(Chat(), max_concurrent_rollouts=count, max_connections=connections)
    everybody = asyncio.Barrier(count)

    async def together(request: RecordedRequest) -> None:
        await everybody.wait()

    trainer.on_chat(together)
    await asyncio.gather(*(server.post_init(rollout_id=f"r{n}") for n in range(count)))
    await trainer.wait_completed(count)


async def test_a_cap_on_connections_holds(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(Chat(), max_connections=2)
    await asyncio.gather(*(server.post_init(rollout_id=f"r{n}") for n in range(8)))
    await trainer.wait_completed(8)
    assert trainer.connections_opened <= 2


# ---------------------------------------------------------------- chat: what is retried


@pytest.mark.parametrize("code", RETRIED)
async def test_a_chat_is_tried_again_after(serve: Serve, trainer: MockTrainer, code: int) -> None:
    trainer.on_chat([status(code), status(code), text("4")])
    server = await serve(Chat())
    await server.post_init(rollout_id="a")
    assert (await trainer.wait_completed("a")).json["status"] == "COMPLETED"
    assert len(trainer.chats("a")) == 3
    assert len({r.body for r in trainer.chats("a")}) == 1


@pytest.mark.parametrize("code", REFUSED)
async def test_a_chat_is_not_tried_again_after(serve: Serve, trainer: MockTrainer, code: int) -> None:
    caught: list[BaseException] = []
    trainer.on_chat(status(code, body={"error": {"message": "because"}}, retry_after=0))
    server = await serve(asking(caught))
    await server.post_init(rollout_id="a")
    result = (await trainer.wait_completed("a")).json
    assert len(trainer.chats("a")) == 1
    assert isinstance(caught[0], TrainerRefused)
    assert caught[0].status == code
    assert (result["status"], result["error_category"], result["retryable"]) == ("ERROR", "llm_error", False)
    assert str(code) in result["error_message"]
    assert "because" in result["error_message"]


@pytest.mark.parametrize("code", REDIRECTS)
async def test_a_redirect_of_a_chat_is_not_followed(serve: Serve, trainer: MockTrainer, code: int) -> None:
    caught: list[BaseException] = []
    trainer.on_chat(redirect(trainer.url_for("/elsewhere/v1/chat/completions"), code))
    server = await serve(asking(caught))
    await server.post_init(rollout_id="a", api_key="secret")
    assert (await trainer.wait_completed("a")).json["error_category"] == "llm_error"
    assert [r.path for r in trainer.requests] == ["/v1/chat/completions", "/v1/rollout/completed"]
    assert isinstance(caught[0], LLMError)


@pytest.mark.parametrize(
    "fault",
    [reset(), close_before_answer(), half_body(), garbage()],
    ids=["reset", "closed", "half-body", "garbage"],
)
async def test_a_chat_is_tried_again_after_a_broken_connection(
    serve: Serve, trainer: MockTrainer, fault: Answer
) -> None:
    trainer.on_chat([fault, fault, text("4")])
    server = await serve(Chat())
    await server.post_init(rollout_id="a")
    assert (await trainer.wait_completed("a")).json["final_messages"][-1]["content"] == "4"
    assert len(trainer.chats("a")) == 3


@pytest.mark.parametrize("retries", [0, 1, 4])
async def test_max_retries_counts_the_tries_after_the_first(serve: Serve, trainer: MockTrainer, retries: int) -> None:
    caught: list[BaseException] = []
    trainer.on_chat(status(503))
    server = await serve(asking(caught), max_retries=retries)
    await server.post_init(rollout_id="a")
    result = (await trainer.wait_completed("a")).json
    assert len(trainer.chats("a")) == retries + 1
    assert isinstance(caught[0], TrainerUnavailable)
    assert (result["error_category"], result["retryable"]) == ("llm_error", True)
    assert result["final_messages"] == USER


async def test_a_trainer_that_is_not_there_is_a_typed_error(serve: Serve, trainer: MockTrainer) -> None:
    caught: list[BaseException] = []
    server = await serve(asking(caught), max_retries=1)
    await server.post_init(
        rollout_id="a", chat_completions_url="http://127.0.0.1:1/v1/chat/completions", server_url=trainer.url
    )
    result = (await trainer.wait_completed("a")).json
    assert isinstance(caught[0], TrainerUnreachable)
    assert (result["status"], result["error_category"], result["retryable"]) == ("ERROR", "llm_error", True)


@pytest.mark.slow
async def test_a_chat_that_takes_too_long_is_tried_again(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_chat([hang(), text("4")])
    server = await serve(Chat(), timeout_seconds=1)
    await server.post_init(rollout_id="a")
    assert (await trainer.wait_completed("a")).json["status"] == "COMPLETED"
    assert trainer.chats("a")[0].abandoned


@pytest.mark.parametrize(
    "answer",
    [
        raw(b""),
        raw(b"plain text", "text/plain"),
        raw(b"<html></html>", "text/html"),
        raw(b'data: {"choices": []}\n\ndata: [DONE]\n\n', "text/event-stream"),
        raw(b"null"),
        raw(b"[]"),
        raw(b"{}"),
        raw(b'{"choices": null}'),
        raw(b'{"choices": []}'),
        raw(b'{"choices": [{}]}'),
        raw(b'{"choices": [{"message": null}]}'),
        raw(b'{"choices": [{"message": "text"}]}'),
        raw(b'{"error": {"message": "the model is gone", "code": "gone"}}'),
        raw(b'{"choices": [{"message": {"content": NaN}}]}'),
        raw(b'{"choices": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        raw(b"\xff\xfe{}"),
    ],
)
async def test_an_answer_without_a_usable_choice_is_a_typed_error(
    serve: Serve, trainer: MockTrainer, answer: Reply
) -> None:
    caught: list[BaseException] = []
    trainer.on_chat(answer)
    server = await serve(asking(caught))
    await server.post_init(rollout_id="a")
    result = (await trainer.wait_completed("a")).json
    assert isinstance(caught[0], LLMError)
    assert result["error_category"] == "llm_error"
    assert result["error_message"]


@pytest.mark.parametrize("kind", ["text/plain", "text/html", "application/octet-stream", ""])
async def test_a_good_answer_under_a_wrong_content_type_is_good(serve: Serve, trainer: MockTrainer, kind: str) -> None:
    trainer.on_chat(wrong_content_type(kind))
    server = await serve(Chat())
    await server.post_init(rollout_id="a")
    assert (await trainer.wait_completed("a")).json["status"] == "COMPLETED"


# ---------------------------------------------------------------- Retry-After and backoff


async def test_retry_after_in_seconds_is_waited_for(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_chat([status(429, retry_after="0.3"), text("4")])
    server = await serve(Chat(), retry_max_delay=0.01)
    await server.post_init(rollout_id="a")
    await trainer.wait_completed("a")
    first, second = trainer.chats("a")
    assert second.at - first.at >= 0.3


async def test_retry_after_as_a_date_is_waited_for(serve: Serve, trainer: MockTrainer) -> None:
    date = email.utils.formatdate(int(time.time()) + 1, usegmt=True)  # up to a second from now
    due = time.monotonic() + email.utils.mktime_tz(email.utils.parsedate_tz(date) or ()) - time.time()
    trainer.on_chat([status(503, retry_after=date), text("4")])
    server = await serve(Chat(), retry_max_delay=0.01)
    await server.post_init(rollout_id="a")
    await trainer.wait_completed("a")
    assert trainer.chats("a")[1].at >= due - 0.01


@pytest.mark.parametrize(
    "value",
    [
        "",
        "abc",
        "-5",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "1_000",
        "0x10",
        "٣",
        "Wed, 99 Foo 2015 07:28:00 GMT",
        "1;2",
        "1,2",
    ],
)
async def test_a_retry_after_that_says_nothing_leaves_the_usual_pause(
    serve: Serve, trainer: MockTrainer, value: str
) -> None:
    trainer.on_chat([Reply(b"{}", 503, headers=(("Retry-After", value.encode().decode("latin-1")),)), text("4")])
    server = await serve(Chat())
    await server.post_init(rollout_id="a")
    assert (await trainer.wait_completed("a", timeout=1)).json["status"] == "COMPLETED"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        ("120", 120),
        (" 7 ", 7),
        ("1.5", 1.5),
        ("301", 300),
        ("99999999999999999999", 300),
        ("Thu, 01 Jan 1970 00:16:42 GMT", 2),
        ("Thursday, 01-Jan-70 00:16:42 GMT", 2),
        ("Thu Jan  1 00:16:42 1970", 2),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("Thu, 01 Jan 2099 00:00:00 GMT", 300),
        ("Thu, 01 Jan 1970 01:16:42 +0100", 2),
    ],
)
def test_retry_after_means(monkeypatch: pytest.MonkeyPatch, value: str, seconds: float) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert parse_retry_after(value, wall_clock=lambda: 1000.0) == seconds
    finally:
        monkeypatch.undo()
        time.tzset()


@given(st.text(max_size=40))
def test_retry_after_is_bounded_whatever_it_says(value: str) -> None:
    seconds = parse_retry_after(value)
    assert seconds is None or 0 <= seconds <= RETRY_AFTER_LIMIT_SECONDS


@given(st.integers(1, 1000), st.floats(0.01, 60), st.floats(0.01, 300))
def test_backoff_grows_with_jitter_up_to_the_maximum(failures: int, base: float, longest: float) -> None:
    policy = RetryPolicy(retries=10, base_delay_seconds=base, max_delay_seconds=longest)
    ceiling = min(longest, base * 2.0 ** min(failures - 1, 60))
    assert ceiling / 2 <= policy.pause(failures) <= ceiling
    assert policy.pause(failures, 300) == 300, "what the peer asks for wins over the maximum"


def test_pauses_differ() -> None:
    policy = RetryPolicy(retries=1, base_delay_seconds=1, max_delay_seconds=1)
    assert len({policy.pause(1) for _ in range(50)}) > 40


async def test_backoff_pauses_are_made(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_chat([status(503), status(503), text("4")])
    server = await serve(Chat(), retry_base_delay=0.08, retry_max_delay=30)
    await server.post_init(rollout_id="a")
    await trainer.wait_completed("a")
    first, second, third = trainer.chats("a")
    assert second.at - first.at >= 0.04
    assert third.at - second.at >= 0.08


async def test_the_maximum_caps_a_larger_base(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_chat([status(503), text("4")])
    server = await serve(Chat(), retry_base_delay=60, retry_max_delay=0.01)
    await server.post_init(rollout_id="a")
    await trainer.wait_completed("a", timeout=1)


async def test_retry_after_never_leads_past_the_deadline(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_chat(status(503, retry_after=120))
    server = await serve(Chat())
    await server.post_init(rollout_id="a", timeout_seconds=0.5)
    result = (await trainer.wait_completed("a", timeout=1)).json
    assert result["status"] == "ERROR"
    assert result["retryable"] is True
    assert len(trainer.chats("a")) == 1


# ---------------------------------------------------------------- what a failure is called


async def told_of(serve: Serve, server_url: str) -> str:
    """How the agent's error begins when there is no trainer at the URL."""
    caught: list[BaseException] = []
    server = await serve(asking(caught), max_retries=0)
    await server.post_init(rollout_id="a", server_url=server_url, completion_callback_url=server.trainer.url)
    async with asyncio.timeout(GENEROUS_SECONDS):
        while not caught:
            await server.get("/status/a")
    return str(caught[0])


async def test_a_refused_connection_is_told_in_plain_words(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert await told_of(serve, f"http://127.0.0.1:{port}") == (
        f"the trainer cannot be reached: connection refused by 127.0.0.1:{port}"
    )


async def test_an_address_of_version_6_stands_in_brackets(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert f" [::1]:{port}" in await told_of(serve, f"http://[::1]:{port}")


class KnowsNobody(AbstractResolver):
    """Resolves no name."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def close(self) -> None:
        """Nothing is open."""


async def test_a_name_that_nobody_knows_is_told_in_plain_words() -> None:
    async with Trainer(RolloutClientSettings(), Metrics(), resolver=KnowsNobody()) as trainer:
        with pytest.raises(TrainerUnreachable) as caught:
            await trainer.post(URL("http://trainer.example/v1"), b"{}", {})
    assert str(caught.value) == (
        "the trainer cannot be reached: the name 'trainer.example' is not known (Name or service not known)"
    )


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (close_before_answer(), "the trainer cannot be reached: the connection was closed before the answer came"),
        (reset(), "the trainer cannot be reached: the connection was reset"),
    ],
    ids=["closed", "reset"],
)
async def test_a_broken_connection_is_told_in_plain_words(
    serve: Serve, trainer: MockTrainer, fault: Answer, says: str
) -> None:
    trainer.on_chat(fault)
    assert await told_of(serve, trainer.url) == says
