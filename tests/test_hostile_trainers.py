"""What a trainer may do to the service: answer bombs and floods, repeat the key, move its name to another address."""

from __future__ import annotations

import dataclasses
import gzip
import socket
import time
import zlib
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver
from conftest import Serve
from served import Chat
from support import OK
from yarl import URL

from rollout.completions import EXCERPT_CHARACTERS, CompletionsResult, error_of, excerpt
from rollout.errors import BadCompletion, LLMError, TrainerRefused, TrainerUnreachable
from rollout.hosts import AllowedHosts
from rollout.metrics import Metrics
from rollout.settings import RolloutClientSettings
from rollout.testing import Answer, MockTrainer, Peer, RecordedRequest, Reply, make_completion, status
from rollout.trainer import AllowedResolver, Trainer, TrainerSession
from rollout.wire import encode_strict

KEY, LLM_KEY, IN_QUERY = "sk-key-12345", "sk-llm-12345", "query-secret"
COMPLETION = encode_strict(make_completion("ok"))


@dataclasses.dataclass(frozen=True)
class Bytes(Answer):
    """These bytes, then the end of the connection."""

    data: bytes

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        await peer.send(self.data)
        peer.close()


def head(*lines: str, first: str = "HTTP/1.1 200 OK") -> bytes:
    return "\r\n".join((first, *lines, "", "")).encode()


def packed(body: bytes) -> Reply:
    return Reply(body, headers=(("Content-Encoding", "gzip"),))


def bomb(mebibytes: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(mebibytes)) + packer.flush()


async def result_of(serve: Serve, trainer: MockTrainer, **fields: Any) -> dict[str, Any]:
    """The result of one rollout of an agent that chats once."""
    server = await serve(Chat(), max_retries=0, complete_rollout_retries=0, delivery_horizon_seconds=0)
    await server.post_init(rollout_id="r", **fields)
    return await server.result("r")


# ---------------------------------------------------------------- costly answers


async def test_a_bomb_is_refused_before_it_has_unpacked(serve: Serve, trainer: MockTrainer) -> None:
    trainer.on_chat(packed(bomb(20)))
    result = await result_of(serve, trainer)
    assert result["error_category"] == "llm_error"
    assert result["error_message"] == "the trainer's answer unpacks to more than 100 times what was sent"


async def test_an_answer_that_was_packed_well_is_no_bomb(serve: Serve, trainer: MockTrainer) -> None:
    text = "all work and no play " * 3000
    trainer.on_chat(packed(gzip.compress(encode_strict(make_completion(text)))))
    assert (await result_of(serve, trainer))["final_messages"][-1]["content"] == text


async def test_only_gzip_is_asked_for_and_nothing_for_a_delivery(serve: Serve, trainer: MockTrainer) -> None:
    await result_of(serve, trainer)
    await trainer.wait_completed("r")
    assert [request.headers["Accept-Encoding"] for request in trainer.requests] == ["gzip", "identity"]


@pytest.mark.parametrize("code", [200, 500])
async def test_an_answer_full_of_numbers_that_decode_slowly_is_an_error_at_once(
    serve: Serve, trainer: MockTrainer, code: int
) -> None:
    body = COMPLETION.replace(b'"role"', b'"n":[' + b"1e308," * 150_000 + b'1],"role"', 1)
    trainer.on_chat(Reply(body, code))
    began = time.perf_counter()
    result = await result_of(serve, trainer)
    assert time.perf_counter() - began < 1
    assert result["error_category"] == "llm_error"


def test_an_answer_of_a_million_objects_is_refused() -> None:
    body = COMPLETION.replace(b'"role"', b'"n":[' + b"{}," * 1_000_000 + b'1],"role"', 1)
    with pytest.raises(BadCompletion, match="too many objects"):
        CompletionsResult.from_body(body)


# ---------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "answer",
    [
        status(401, body={"error": {"message": f"Incorrect API key: {LLM_KEY}, not {KEY}"}}),
        Reply(f'{{"error": "{LLM_KEY} {KEY}"}}'.encode()),
        Reply(f"{LLM_KEY} {KEY}".encode(), content_type="text/plain"),
        Reply(f'{{"choices": [{{"finish_reason": "{LLM_KEY} {KEY}"}}]}}'.encode()),
        Reply(f'{{"choices": "{LLM_KEY} {KEY}"}}'.encode()),
        Bytes(f"{LLM_KEY} {KEY} {IN_QUERY}\r\n\r\n".encode()),
        Bytes(head(f"X: {LLM_KEY} {KEY}\x00")),
        Bytes(head("Transfer-Encoding: chunked") + f"{LLM_KEY} {KEY}\r\n".encode()),
        Bytes(head("Content-Encoding: br", "Content-Length: 2") + b"xx"),
        Bytes(b""),
    ],
    ids=["401", "error-200", "text", "reason", "choices", "no-http", "header", "chunk", "br", "nothing"],
)
async def test_what_a_trainer_repeats_of_the_keys_goes_nowhere(
    serve: Serve, trainer: MockTrainer, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "rollout")
    trainer.on_path("/chat", answer)
    trainer.on_path("/done", status(401, body={"error": f"no key is {KEY}"}))
    server = await serve(Chat(), max_retries=0, complete_rollout_retries=0, delivery_horizon_seconds=0)
    await server.post_init(
        rollout_id="r",
        api_key=KEY,
        llm_api_key=LLM_KEY,
        chat_completions_url=f"{trainer.url}/chat?token={IN_QUERY}",
        completion_callback_url=f"{trainer.url}/done?token={IN_QUERY}",
    )
    result = await server.get("/result/r?wait=5")
    assert result.json["error_category"] == "llm_error"
    state = await server.wait_phase("r", "undelivered")
    said = result.body.decode() + caplog.text + str(state)
    assert "no key is ***" in said
    assert [secret for secret in (KEY, LLM_KEY, IN_QUERY) if secret in said] == []


def test_a_key_at_the_end_of_an_excerpt_is_not_cut_in_half() -> None:
    for padding in (EXCERPT_CHARACTERS - 5, 4 * EXCERPT_CHARACTERS - 5):
        said = excerpt(
            b" " * (padding - EXCERPT_CHARACTERS + 5) + b"x" * (EXCERPT_CHARACTERS - 5) + KEY.encode(), [KEY]
        )
        assert KEY[:5] not in said


def test_a_text_too_short_to_be_a_key_is_left_where_it_stands() -> None:
    assert str(error_of(400, b"a bad one", None, "chat", ["a"])) == "the trainer answered 400 to chat: a bad one"


# ---------------------------------------------------------------- acknowledgements


@pytest.mark.parametrize(
    "data",
    [
        head("Content-Encoding: br", "Content-Length: 2") + b"xx",
        head("Content-Encoding: gzip", "Content-Length: 2") + b"xx",
        head("X: " + "a" * 9000, "Content-Length: 0"),
        b"HTTP/1.1 204 No Content\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Le",
    ],
    ids=["br", "gzip", "long-header", "only-the-status", "half-a-header"],
)
async def test_a_status_line_with_2xx_is_an_acknowledgement_whatever_follows(
    serve: Serve, trainer: MockTrainer, data: bytes
) -> None:
    trainer.on_completed(Bytes(data))
    server = await serve(Chat(), complete_rollout_retries=0, delivery_horizon_seconds=0)
    await server.post_init(rollout_id="r")
    await server.result("r")
    assert (await server.wait_phase("r"))["delivery_attempts"] == 1


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 500 No\r\n", b"HTTP/1.1"], ids=["nothing", "500", "half-a-line"])
async def test_a_connection_that_ends_without_such_a_line_is_none(
    serve: Serve, trainer: MockTrainer, data: bytes
) -> None:
    trainer.on_completed(Bytes(data))
    server = await serve(Chat(), complete_rollout_retries=0, delivery_horizon_seconds=0)
    await server.post_init(rollout_id="r")
    assert "delivery_attempts" in await server.wait_phase("r", "undelivered")


# ---------------------------------------------------------------- addresses


class Moving(AbstractResolver):
    """A name server whose only name has these addresses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.is_closed = False

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> Any:
        return [
            {"hostname": host, "host": address, "port": port, "family": family, "proto": 0, "flags": 0}
            for address in self.addresses
        ]

    async def close(self) -> None:
        self.is_closed = True


async def post_to(url: str, resolver: AbstractResolver, allowed_hosts: str) -> bytes:
    async with Trainer(RolloutClientSettings(allowed_hosts=allowed_hosts), Metrics(), resolver=resolver) as trainer:
        return (await trainer.post(URL(url), b"{}", {})).body


async def test_a_name_that_has_moved_to_an_address_outside_the_blocks_is_not_called(trainer: MockTrainer) -> None:
    url = f"http://trainer.example:{URL(trainer.url).port}/v1/chat/completions"
    with pytest.raises(TrainerUnreachable, match=r"no address of 'trainer.example' is on the list of allowed hosts"):
        await post_to(url, Moving("127.0.0.1"), "10.0.0.0/8")
    assert trainer.requests == []


@pytest.mark.parametrize("allowed", ["127.0.0.0/8", "trainer.example", "*.example", "*"])
async def test_of_many_addresses_those_that_the_list_allows_are_called(trainer: MockTrainer, allowed: str) -> None:
    url = f"http://trainer.example:{URL(trainer.url).port}/v1/chat/completions"
    assert b"ok" in await post_to(url, Moving("127.0.0.1"), allowed)


async def test_an_address_outside_the_blocks_is_dropped_from_the_others(trainer: MockTrainer) -> None:
    url = f"http://trainer.example:{URL(trainer.url).port}/v1/chat/completions"
    assert b"ok" in await post_to(url, Moving("192.0.2.1", "127.0.0.1"), "127.0.0.0/8")


async def test_a_name_without_an_address_is_told_as_such() -> None:
    with pytest.raises(TrainerUnreachable, match=r"no address of 'trainer\.example'"):
        await post_to("http://trainer.example/", Moving(), "127.0.0.0/8")


async def test_the_resolver_behind_the_list_is_closed_with_it() -> None:
    behind = Moving()
    await AllowedResolver(AllowedHosts.parse("127.0.0.0/8"), behind).close()
    assert behind.is_closed


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"])
async def test_an_address_in_the_place_of_a_name_is_held_against_the_list_too(trainer: MockTrainer, host: str) -> None:
    with pytest.raises(TrainerRefused, match="not on the list of allowed hosts"):
        await post_to(f"http://{host}:{URL(trainer.url).port}/", Moving(), "10.0.0.0/8")
    assert trainer.requests == []


async def test_a_session_keeps_its_key_out_of_its_errors_without_being_told_twice(trainer: MockTrainer) -> None:
    trainer.on_chat(status(400, body={"error": f"bad key {KEY}"}))
    async with Trainer(RolloutClientSettings(), Metrics()) as client:
        session = TrainerSession(client, URL(trainer.url + "/v1/chat/completions"), rollout_id="r", key=KEY)
        with pytest.raises(LLMError) as caught:
            await session.chat_completions([OK])
    assert "bad key ***" in str(caught.value)
