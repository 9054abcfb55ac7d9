"""A time limit for request headers: aiohttp has one for idle connections, none for a request line that trickles in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from rollout.schemas import error_body

_BODY = error_body("request_timeout", "the request's headers did not come in time")
_ANSWER = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: " + str(len(_BODY)).encode() + b"\r\n\r\n" + _BODY
)


class _Guard(asyncio.Protocol):
    """Stands between the transport and aiohttp's protocol, hands everything on, and looks at the clock when the bytes
    that came did not complete the headers of a request. Whole requests pay one extra call.
    """

    __slots__ = ("_handler", "_last", "_loop", "_pause_seconds", "_timer", "_transport")

    def __init__(self, handler: Any, pause_seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._handler = handler
        self._pause_seconds = pause_seconds
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._handler.data_received(data)
        if self._awaits_headers():
            self._last = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._pause_seconds, self._check)

    def _awaits_headers(self) -> bool:
        """Whether aiohttp still waits for a request although bytes of one have come."""
        waiter = self._handler._waiter
        return waiter is not None and not waiter.done() and not self._handler._messages

    def _check(self) -> None:
        self._timer = None
        if self._transport is None or not self._awaits_headers():
            return
        left = self._last + self._pause_seconds - self._loop.time()
        if left > 0.001:
            self._timer = self._loop.call_later(left, self._check)
            return
        self._transport.write(_ANSWER)
        self._transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._handler.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return cast("bool | None", self._handler.eof_received())

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()


def guarded(
    server: Callable[[], Any] | None, pause_seconds: float, loop: asyncio.AbstractEventLoop
) -> Callable[[], asyncio.Protocol]:
    """A protocol factory around aiohttp's own."""
    assert server is not None, "the runner is not set up"
    return lambda: _Guard(server(), pause_seconds, loop)
