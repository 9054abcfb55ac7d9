"""The contract, section 6: what goes out to the trainer, how often, and what its answers mean."""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Serve
from hypothesis import given
from hypothesis import strategies as st
from served import GENEROUS_SECONDS, Chat, Instant
from support import Doing

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutResult
from rollout.errors import HistoryRewritten, LLMError, TrainerRefused, TrainerUnavailable, TrainerUnreachable
from rollout.retry import RETRY_AFTER_LIMIT_SECONDS, RetryPolicy, parse_retry_after
from rollout.testing import (
    Answer,
    MockTrainer,
    RecordedRequest,
    Reply,
    close_after_answer,
    close_before_answer,
    garbage,
    half_body,
    hang,
    hold,
    lost_acknowledgement,
    raw,
    redirect,
    reset,
    status,
    text,
    wrong_content_type,
)
from rollout.testing.peer import Peer

USER = [{"role": "user", "content": "What is 2 + 2?"}]
OK = {"role": "assistant", "content": "ok"}
RETRIED = [408, 425, 429, 500, 501, 502, 503, 504, 599]
REFUSED = [400, 401, 403, 404, 405, 409, 413, 422, 451, 499]
REDIRECTS = [301, 302, 303, 304, 307, 308]


async def until_phase(server: Any, rollout_id: str, phase: str) -> dict[str, Any]:
    """The RolloutState once its phase is this one."""
    async with asyncio.timeout(GENEROUS_SECONDS):
        while True:
            found: dict[str, Any] = (await server.get(f"/status/{rollout_id}")).json
            if found["phase"] == phase:
                return found


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


# ---------------------------------------------------------------- completed: acknowledgement


@pytest.mark.parametrize("code", [200, 201, 202, 203, 204, 206, 226, 299])
async def test_any_2xx_is_an_acknowledgement(serve: Serve, trainer: MockTrainer, code: int) -> None:
    trainer.on_completed(Reply(b"", code))
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    found = await until_phase(server, "a", "delivered")
    assert found["delivery_attempts"] == 1
    assert len(trainer.completions("a")) == 1


class _Raw(Answer):
    """Bytes as they are; the connection stays open or is closed behind them."""

    def __init__(self, data: bytes, *, stays: bool) -> None:
        self._data, self._stays = data, stays

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        await peer.send(self._data)
        if not self._stays:
            peer.close()
        else:
            await peer.gone_before(asyncio.sleep(60))
            peer.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        half_body(Reply(b'{"half": "of it"}')),
        _Raw(HEAD + b"Content-Length: 100\r\n\r\n{", stays=False),
        _Raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", stays=False),
        _Raw(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd", stays=False),
        _Raw(b"HTTP/1.0 200 OK\r\n\r\n", stays=False),
        raw(b"not json at all", "text/plain"),
        Reply(b"x" * 300_000),
    ],
    ids=["half", "cut", "half-chunk", "bad-gzip", "http10", "text", "long"],
)
async def test_the_status_line_acknowledges_whatever_the_body_is(
    serve: Serve, trainer: MockTrainer, answer: Answer
) -> None:
    trainer.on_completed(answer)
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    assert (await until_phase(server, "a", "delivered"))["delivery_attempts"] == 1
    assert len(trainer.completions("a")) == 1


@pytest.mark.slow
async def test_a_body_that_never_ends_does_not_hold_back_the_acknowledgement(
    serve: Serve, trainer: MockTrainer
) -> None:
    trainer.on_completed(_Raw(HEAD + b"Content-Length: 100\r\n\r\n{", stays=True))
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    assert (await until_phase(server, "a", "delivered"))["delivery_attempts"] == 1


# ---------------------------------------------------------------- completed: retries


@pytest.mark.parametrize("code", RETRIED)
async def test_a_delivery_is_tried_again_after(serve: Serve, trainer: MockTrainer, code: int) -> None:
    trainer.on_completed([status(code), status(code), status(200)])
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    found = await until_phase(server, "a", "delivered")
    assert found["delivery_attempts"] == 3
    assert "last_delivery_error" not in found


@pytest.mark.parametrize("code", [*REFUSED, *REDIRECTS])
async def test_a_delivery_ends_at_once_after(
    serve: Serve, trainer: MockTrainer, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    trainer.on_completed(redirect(trainer.url_for("/elsewhere/v1/rollout/completed"), code), times=1)
    server = await serve(Instant())
    await server.post_init(rollout_id="a")
    found = await until_phase(server, "a", "undelivered")
    assert found["delivery_attempts"] == 1
    assert str(code) in found["last_delivery_error"]
    assert [r.path for r in trainer.requests] == ["/v1/rollout/completed"]
    assert any("'a'" in r.getMessage() and r.levelno == logging.ERROR for r in caplog.records)
    assert (await server.get("/result/a")).status == 200
    assert (await server.get("/health")).json["undelivered_rollouts"] == 1


@pytest.mark.parametrize(
    "fault",
    [reset(), close_before_answer(), garbage(), lost_acknowledgement()],
    ids=["reset", "closed", "garbage", "lost-acknowledgement"],
)
async def test_every_attempt_carries_the_same_bytes_and_the_same_key(
    serve: Serve, trainer: MockTrainer, fault: Answer
) -> None:
    trainer.on_completed([fault, status(500), fault, status(200)])
    server = await serve(Chat())
    await server.post_init(rollout_id="a", api_key="key")
    assert (await until_phase(server, "a", "delivered"))["delivery_attempts"] == 4
    attempts = trainer.completions("a")
    assert len(attempts) == 4
    assert len({r.body for r in attempts}) == 1
    assert len({r.headers["Idempotency-Key"] for r in attempts}) == 1
    assert {r.bearer for r in attempts} == {"key"}
    assert (await server.get("/result/a")).body == attempts[0].body


async def test_different_rollouts_have_different_idempotency_keys(serve: Serve, trainer: MockTrainer) -> None:
    names = ["a", "A", "a ", "a%20", "ä", "%C3%A4", "a\nb", "日本", "x" * 256]
    server = await serve(Instant())
    for name in names:
        assert (await server.post_init(rollout_id=name)).status == 202, name
    found = await trainer.wait_completed(len(names))
    assert sorted(r.json["rollout_id"] for r in found) == sorted(names)
    assert len({r.headers["Idempotency-Key"] for r in found}) == len(names)


async def test_the_outbox_goes_on_after_the_retries(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_completed(status(503), times=5)
    server = await serve(Instant(), complete_rollout_retries=1)
    await server.post_init(rollout_id="a")
    found = await until_phase(server, "a", "delivered")
    assert found["delivery_attempts"] == 6
    times = [r.at for r in trainer.completions("a")]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[-1] > pauses[1], "the pauses of the outbox grow"


@pytest.mark.parametrize("retries", [0, 2])
async def test_with_a_horizon_of_zero_only_the_retries_are_made(
    serve: Serve, trainer: MockTrainer, retries: int
) -> None:
    trainer.on_completed(status(503))
    server = await serve(Instant(), delivery_horizon_seconds=0, complete_rollout_retries=retries)
    await server.post_init(rollout_id="a")
    assert (await until_phase(server, "a", "undelivered"))["delivery_attempts"] == retries + 1
    assert len(trainer.completions("a")) == retries + 1


async def test_a_delivery_is_given_up_at_the_horizon_and_not_before(
    serve: Serve, trainer: MockTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.on_completed(status(503))
    server = await serve(Instant(), delivery_horizon_seconds=0.4, complete_rollout_retries=0, retry_base_delay=0.05)
    await server.post_init(rollout_id="a")
    first = await trainer.wait_completed("a")
    found = await until_phase(server, "a", "undelivered")
    last = trainer.completions("a")[-1]
    assert 0.35 <= last.at - first.at <= 0.6
    assert found["status"] == "COMPLETED"
    assert (await server.get("/result/a")).json["status"] == "COMPLETED"
    assert any("UNDELIVERED" in r.getMessage() and r.levelno == logging.ERROR for r in caplog.records)


async def test_a_trainer_that_hangs_holds_up_no_other(serve: Serve, trainer: MockTrainer) -> None:
    stuck = hold()
    trainer.on_completed(stuck, when=lambda request: (request.rollout_id or "").startswith("slow"))
    server = await serve(Instant())
    for number in range(80):
        await server.post_init(rollout_id=f"slow-{number}")
    await trainer.wait_completed(80)
    await server.post_init(rollout_id="fast")
    await until_phase(server, "fast", "delivered")
    stuck.release()
    await trainer.wait_until(lambda: all(r.accepted for r in trainer.completions()))


async def test_a_large_result_arrives_whole(serve: Serve, trainer: MockTrainer) -> None:
    content = "ä" * 2_000_000

    async def run(ctx: RolloutContext) -> RolloutResult:
        return ctx.complete([{"role": "assistant", "content": content}])

    trainer.on_completed(status(503), times=1)
    server = await serve(Doing(run))
    await server.post_init(rollout_id="a")
    await trainer.wait_completed("a", accepted=True)
    first, second = trainer.completions("a")
    assert first.body == second.body
    assert first.json["final_messages"][0]["content"] == content


# ---------------------------------------------------------------- keep-alive


async def test_connections_are_used_again(serve: Serve, trainer: MockTrainer) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        for _ in range(5):
            messages.append((await ctx.chat(messages)).message)
        return ctx.complete(messages)

    server = await serve(Doing(run))
    await server.post_init(rollout_id="a")
    await trainer.wait_completed("a")
    assert trainer.connections_opened == 1


async def test_a_connection_that_went_stale_costs_neither_the_call_nor_a_pause(
    serve: Serve, trainer: MockTrainer
) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        for _ in range(3):
            messages.append((await ctx.chat(messages)).message)
        return ctx.complete(messages)

    trainer.on_chat(close_after_answer())
    trainer.on_completed(close_after_answer())
    server = await serve(Doing(run), retry_base_delay=30, retry_max_delay=30)
    for name in ("a", "b"):
        await server.post_init(rollout_id=name)
        assert (await trainer.wait_completed(name, accepted=True)).json["status"] == "COMPLETED"


async def test_a_stale_connection_costs_a_delivery_no_pause(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_completed([close_before_answer(), status(200)])
    server = await serve(Instant(), retry_base_delay=30, retry_max_delay=30)
    await server.post_init(rollout_id="a")
    assert (await until_phase(server, "a", "delivered"))["delivery_attempts"] == 2


# ---------------------------------------------------------------- the history only grows


Rewrite = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
REWRITES: dict[str, Rewrite] = {
    "shorter": lambda m: m[1:],
    "empty": lambda m: [],
    "changed": lambda m: [{**m[0], "content": "other"}, *m[1:]],
    "reordered": lambda m: [*m[1:], m[0]],
    "null-dropped": lambda m: [{k: v for k, v in m[0].items() if v is not None}, *m[1:]],
    "inserted": lambda m: [{"role": "system", "content": "new"}, *m],
}


def rewriting(rewrite: Rewrite) -> Doing:
    """An agent that changes the history before its second turn."""

    async def run(ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        messages.append((await ctx.chat(messages)).message)
        messages = rewrite(messages)
        messages.append((await ctx.chat(messages)).message)
        messages.append((await ctx.chat(messages)).message)
        return ctx.complete(messages, extra_fields={"mine": 1})

    return Doing(run)


NAMED = [{"role": "user", "content": "What is 2 + 2?", "name": None}]


@pytest.mark.parametrize("name", REWRITES)
async def test_a_rewritten_history_is_counted_logged_and_reported(
    serve: Serve, trainer: MockTrainer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    server = await serve(rewriting(REWRITES[name]))
    await server.post_init(rollout_id="a", messages=NAMED)
    result = (await trainer.wait_completed("a")).json
    assert result["status"] == "COMPLETED"
    assert result["extra_fields"] == {"mine": 1, "history_rewrites": 1}
    assert len(trainer.chats("a")) == 3
    assert any("'a'" in r.getMessage() and "histor" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("name", REWRITES)
async def test_strict_history_makes_a_rewrite_an_error(serve: Serve, trainer: MockTrainer, name: str) -> None:
    server = await serve(rewriting(REWRITES[name]), strict_history=True)
    await server.post_init(rollout_id="a", messages=NAMED)
    result = (await trainer.wait_completed("a")).json
    assert (result["status"], result["error_category"]) == ("ERROR", "llm_error")
    assert result["final_messages"] == [*NAMED, OK]
    assert result["extra_fields"] == {"history_rewrites": 1}
    assert len(trainer.chats("a")) == 1, "what breaks the history is not sent"


@pytest.mark.parametrize("strict", [False, True])
async def test_a_history_that_only_grows_is_no_rewrite(serve: Serve, trainer: MockTrainer, strict: bool) -> None:
    def as_it_is(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [dict(reversed(m.items())) for m in messages]

    server = await serve(rewriting(as_it_is), strict_history=strict)
    await server.post_init(rollout_id="a", messages=NAMED)
    result = (await trainer.wait_completed("a")).json
    assert result["status"] == "COMPLETED"
    assert result["extra_fields"] == {"mine": 1}
    sent = [r.json["messages"] for r in trainer.chats("a")]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(sent))


async def test_messages_that_are_mutated_in_place_are_a_rewrite_too(serve: Serve, trainer: MockTrainer) -> None:
    def mutate(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        messages[0]["content"] = "changed under the hand"
        return messages

    server = await serve(rewriting(mutate))
    await server.post_init(rollout_id="a")
    assert (await trainer.wait_completed("a")).json["extra_fields"]["history_rewrites"] == 1


async def test_a_strict_rewrite_can_be_caught(serve: Serve, trainer: MockTrainer) -> None:
    async def run(ctx: RolloutContext) -> RolloutResult:
        await ctx.chat(USER)
        with pytest.raises(HistoryRewritten):
            await ctx.chat([{"role": "user", "content": "other"}])
        await ctx.chat([*USER, OK])
        return ctx.complete(USER)

    server = await serve(Doing(run), strict_history=True)
    await server.post_init(rollout_id="a")
    assert (await trainer.wait_completed("a")).json["status"] == "COMPLETED"
    assert len(trainer.chats("a")) == 2
