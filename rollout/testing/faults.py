"""What the mock trainer can do to a request: answer it well, answer it badly, or not at all.

Good answers: `text`, `tool_calls`, `completion`, `raw`. All others are faults. A fault that needs an answer to spoil
takes the one it is given, else the default of the endpoint: `delay(0.1)` is the usual answer, late.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import functools
import http
from collections.abc import Iterable
from typing import Any, TypeAlias

from rollout.testing.builders import make_completion, make_tool_call
from rollout.testing.peer import Peer, RecordedRequest
from rollout.wire import JSON, encode_strict

Headers: TypeAlias = tuple[tuple[str, str], ...]

_FILLER = b"x" * 65536
_WITHOUT_BODY = frozenset({204, 304})
_PHRASES = {known.value: known.phrase for known in http.HTTPStatus}


class Answer(abc.ABC):
    """One thing that can happen to a request. The same object may serve any number of requests, also at once."""

    @abc.abstractmethod
    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        """Do it, and note on the request what became of it. `default` is the endpoint's usual answer."""


@dataclasses.dataclass(frozen=True)
class Reply(Answer):
    """A whole, well-formed HTTP answer."""

    body: bytes = b"{}"
    status: int = 200
    content_type: str = "application/json"
    headers: Headers = ()

    @functools.cached_property
    def wire(self) -> bytes:
        """The answer as it is sent; made once, however often it is given."""
        if self.status in _WITHOUT_BODY:
            return _head(self.status, self.headers)
        return _head(self.status, _entity(self.content_type, len(self.body)) + self.headers) + self.body

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        reply = self
        if request.wants_close:
            reply = dataclasses.replace(self, headers=(*self.headers, ("Connection", "close")))
        await peer.send(reply.wire)
        _note(request, self.status)


def _head(status: int, headers: Headers) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    return f"HTTP/1.1 {status} {_PHRASES.get(status, 'Custom')}\r\n{''.join(lines)}\r\n".encode("latin-1")


def _entity(content_type: str, length: int) -> Headers:
    return (("Content-Type", content_type), ("Content-Length", str(length)))


def _note(request: RecordedRequest, status: int) -> None:
    request.status = status
    request.accepted = 200 <= status < 300


# ---------------------------------------------------------------- good answers


def completion(content: str | None = "ok", **fields: Any) -> Reply:
    """A chat completion; takes what `make_completion` takes."""
    return Reply(encode_strict(make_completion(content, **fields)))


def text(content: str, **fields: Any) -> Reply:
    """A completion in which the model says this and stops."""
    return completion(content, **fields)


def tool_calls(calls: Iterable[dict[str, Any] | tuple[str, JSON]], content: str | None = None, **fields: Any) -> Reply:
    """A completion that calls tools: each a dict as it goes out, or `(name, arguments)`, numbered from `call_1`."""
    made = [
        call if isinstance(call, dict) else make_tool_call(*call, id=f"call_{number}")
        for number, call in enumerate(calls, 1)
    ]
    return completion(content, tool_calls=made, **fields)


def raw(body: bytes | str, content_type: str = "application/json", status: int = 200) -> Reply:
    """These very bytes."""
    return Reply(body.encode() if isinstance(body, str) else body, status, content_type)


# ---------------------------------------------------------------- answers that mean no


def status(code: int, *, retry_after: float | str | None = None, body: JSON = None) -> Reply:
    """Another status, with a Retry-After in seconds or as a date; from 400 on with an error body, if none is given."""
    if body is None:
        body = {} if code < 400 else {"error": {"message": f"scripted {code}", "code": code}}
    headers = () if retry_after is None else (("Retry-After", str(retry_after)),)
    return Reply(encode_strict(body), code, headers=headers)


def redirect(to: str, code: int = 302) -> Reply:
    """Sends the client elsewhere."""
    return Reply(b"", code, headers=(("Location", to),))


def wrong_content_type(content_type: str = "text/html", answer: Reply | None = None) -> Answer:
    """The right body under the wrong Content-Type."""
    return _Retyped(content_type, answer)


@dataclasses.dataclass(frozen=True)
class _Retyped(Answer):
    content_type: str
    answer: Reply | None

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        reply = default if self.answer is None else self.answer
        await dataclasses.replace(reply, content_type=self.content_type).play(peer, request, default)


# ---------------------------------------------------------------- late, or never


def delay(seconds: float, answer: Answer | None = None) -> Answer:
    """The answer, after this time."""
    return _Delay(seconds, answer)


@dataclasses.dataclass(frozen=True)
class _Delay(Answer):
    seconds: float
    answer: Answer | None

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        if await peer.gone_before(asyncio.sleep(self.seconds)):
            raise ConnectionAbortedError("the client did not wait for the answer")
        await (default if self.answer is None else self.answer).play(peer, request, default)


def hold(answer: Answer | None = None) -> Hold:
    """The answer, once the test says `.release()`: concurrency without sleeping for luck."""
    return Hold(answer)


class Hold(Answer):
    """What `hold()` gives. Belongs to the trainer's loop."""

    def __init__(self, answer: Answer | None = None) -> None:
        self._answer = answer
        self._released = asyncio.Event()

    def release(self) -> None:
        """Let go of all requests that are held, and hold none from now on."""
        self._released.set()

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        if await peer.gone_before(self._released.wait()):
            raise ConnectionAbortedError("the client did not wait for the answer")
        await (default if self._answer is None else self._answer).play(peer, request, default)


def hang() -> Answer:
    """No answer, for as long as the client stays."""
    return hold()


def slow_bytes(interval: float, answer: Reply | None = None, *, chunk_bytes: int = 1) -> Answer:
    """The answer, headers included, in small pieces with a pause between."""
    return _SlowBytes(interval, answer, chunk_bytes)


@dataclasses.dataclass(frozen=True)
class _SlowBytes(Answer):
    interval_seconds: float
    answer: Reply | None
    chunk_bytes: int

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        reply = default if self.answer is None else self.answer
        data = reply.wire
        for start in range(0, len(data), self.chunk_bytes):
            if start and await peer.gone_before(asyncio.sleep(self.interval_seconds)):
                raise ConnectionAbortedError("the client did not wait for the answer")
            await peer.send(data[start : start + self.chunk_bytes])
        _note(request, reply.status)


# ---------------------------------------------------------------- broken connections


def reset() -> Answer:
    """The connection ends with a RST."""
    return _Drop(with_reset=True)


def close_before_answer() -> Answer:
    """The connection ends in good order, without an answer."""
    return _Drop()


def lost_acknowledgement() -> Answer:
    """The trainer takes the request (it counts as `accepted`), but the connection breaks before the client knows."""
    return _Drop(with_reset=True, accepted=True)


@dataclasses.dataclass(frozen=True)
class _Drop(Answer):
    with_reset: bool = False
    accepted: bool = False

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        request.accepted = self.accepted
        if self.with_reset:
            peer.reset()
        else:
            peer.close()


def half_body(answer: Reply | None = None) -> Answer:
    """All headers, half of the body they promise, then the end of the connection."""
    return _HalfBody(answer)


@dataclasses.dataclass(frozen=True)
class _HalfBody(Answer):
    answer: Reply | None

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        reply = default if self.answer is None else self.answer
        await peer.send(reply.wire[: len(reply.wire) - (len(reply.body) + 1) // 2])
        peer.close()


def close_after_answer(answer: Reply | None = None) -> Answer:
    """A whole answer that promises keep-alive, and a closed connection right behind it."""
    return _CloseAfter(answer)


@dataclasses.dataclass(frozen=True)
class _CloseAfter(Answer):
    answer: Reply | None

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        await (default if self.answer is None else self.answer).play(peer, request, default)
        peer.close()


# ---------------------------------------------------------------- nonsense


def garbage(data: bytes = b"\x16\x03\x01\x00\xffnot HTTP at all\r\n\r\n") -> Answer:
    """Bytes that are no HTTP, then the end of the connection."""
    return _Garbage(data)


@dataclasses.dataclass(frozen=True)
class _Garbage(Answer):
    data: bytes

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        await peer.send(self.data)
        peer.close()


def huge(size_bytes: int) -> Answer:
    """A valid completion whose text alone has this many bytes; made while it is sent, so it costs no memory here."""
    return _Huge(size_bytes)


@dataclasses.dataclass(frozen=True)
class _Huge(Answer):
    size_bytes: int

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        before, after = encode_strict(make_completion("\x00")).split(b"\\u0000")
        length = len(before) + self.size_bytes + len(after)
        await peer.send(_head(200, _entity("application/json", length)) + before)
        for sent in range(0, self.size_bytes, len(_FILLER)):
            await peer.send(_FILLER[: self.size_bytes - sent])
        await peer.send(after)
        _note(request, 200)
