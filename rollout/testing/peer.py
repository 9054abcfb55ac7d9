"""The trainer's end of a connection: a small HTTP/1.1 reader, and a writer that may also misbehave."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import socket
import struct
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
from multidict import CIMultiDict

from rollout.wire import JSON

READ_LIMIT_BYTES = 1 << 20
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class MalformedRequest(Exception):
    """What arrived is not an HTTP/1.1 request."""


class _Envelope(msgspec.Struct):
    """What tells requests apart; the large fields are skipped, not decoded."""

    rollout_id: Any = None
    messages: msgspec.Raw = msgspec.Raw()
    final_messages: msgspec.Raw = msgspec.Raw()


_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_NO_ENVELOPE = _Envelope()


@dataclasses.dataclass(eq=False)
class RecordedRequest:
    """One request as it arrived, and what became of it."""

    method: str
    path: str
    query: str
    headers: CIMultiDict[str]
    body: bytes
    connection_id: int
    at: float = dataclasses.field(default_factory=time.monotonic)
    """When it had been read, on the monotonic clock."""
    status: int | None = None
    """Status of the answer, once that was sent in full."""
    accepted: bool = False
    """The trainer took it: a 2xx was sent in full, or was meant to be and got lost on the way."""
    abandoned: bool = False
    """The client hung up before it had the answer."""

    @functools.cached_property
    def json(self) -> JSON:
        """The decoded body; raises `msgspec.DecodeError` if it is not JSON."""
        return msgspec.json.decode(self.body)

    @functools.cached_property
    def envelope(self) -> _Envelope:
        """The few fields that say whose request this is; all empty if the body is not a JSON object."""
        try:
            return _decode_envelope(self.body)
        except msgspec.DecodeError:
            return _NO_ENVELOPE

    @property
    def rollout_id(self) -> str | None:
        """The `rollout_id` of the body, if it names one."""
        found = self.envelope.rollout_id
        return found if isinstance(found, str) else None

    @property
    def bearer(self) -> str | None:
        """The token of the Authorization header, if that has the scheme Bearer."""
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if scheme.lower() == "bearer" else None

    @property
    def wants_close(self) -> bool:
        """Whether the client asked for the connection to end with this request."""
        return self.headers.get("Connection", "").lower() == "close"

    def __str__(self) -> str:
        ending = (
            f"-> {self.status}" if self.status is not None else "-> abandoned" if self.abandoned else "-> no answer"
        )
        return f"{self.method} {self.path} rollout_id={self.rollout_id!r} {len(self.body)} bytes {ending}"


class Peer:
    """One accepted connection. Used by one task at a time, so it needs no lock."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection_id: int) -> None:
        self.connection_id = connection_id
        self._reader = reader
        self._writer = writer
        self._unread = b""

    @property
    def is_open(self) -> bool:
        """Whether this side still means to use the connection."""
        return not self._writer.is_closing()

    async def read_request(self) -> RecordedRequest | None:
        """The next request, or None when the client has hung up. Raises `MalformedRequest`."""
        try:
            head = self._unread + await self._reader.readuntil(b"\r\n\r\n")
            self._unread = b""
            request_line, *lines = head[:-4].decode("latin-1").split("\r\n")
            method, target, _version = request_line.split(" ")
            headers = CIMultiDict(_split_header(line) for line in lines)
            body = await self._read_body(headers)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except (asyncio.LimitOverrunError, ValueError) as exc:
            raise MalformedRequest(str(exc)) from exc
        path, _, query = target.partition("?")
        return RecordedRequest(method, path, query, headers, body, self.connection_id)

    async def _read_body(self, headers: CIMultiDict[str]) -> bytes:
        if headers.get("Expect", "").lower() == "100-continue":
            await self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" in headers.get("Transfer-Encoding", "").lower():
            return await self._read_chunks()
        length = int(headers.get("Content-Length", "0"))
        return await self._reader.readexactly(length) if length else b""

    async def _read_chunks(self) -> bytes:
        chunks = []
        while size := int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            chunks.append((await self._reader.readexactly(size + 2))[:-2])
        while await self._reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers
        return b"".join(chunks)

    async def send(self, data: bytes) -> None:
        """Write the bytes; raises `ConnectionError` once the client is gone."""
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """End the connection in good order (FIN), after what has been written."""
        self._writer.close()

    def reset(self) -> None:
        """End the connection at once with a RST; what has not been sent is lost."""
        sock: socket.socket = self._writer.get_extra_info("socket")
        if self.is_open:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._writer.transport.abort()

    async def gone_before(self, pause: Coroutine[Any, Any, object]) -> bool:
        """Await the pause, but no longer than the client stays; whether it was the client that ended first."""
        waiting = asyncio.create_task(pause)
        watch = asyncio.create_task(self._client_speaks())
        try:
            await asyncio.wait((waiting, watch), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return False
            if not watch.result():
                return True
            await waiting  # the next request is here already, so the client is too
            return False
        finally:
            waiting.cancel()
            watch.cancel()
            await asyncio.gather(waiting, watch, return_exceptions=True)

    async def _client_speaks(self) -> bool:
        try:
            first = await self._reader.read(1)
        except ConnectionError:
            return False
        self._unread += first
        return bool(first)


def _split_header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip():
        raise ValueError(f"not a header: {line[:100]!r}")
    return name.strip(), value.strip()
