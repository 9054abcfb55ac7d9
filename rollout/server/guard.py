"""The connection below the application: a time limit for request headers, and our words for what is not HTTP.

aiohttp has a limit for idle connections, but none for a request line that trickles in; and it answers malformed
requests by itself, in plain text, before any middleware sees them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from rollout.errors import InvalidRequest, RequestError
from rollout.schemas import error_body
from rollout.server.middlewares import REQUEST_ID, error_response, new_request_id

_TOO_SLOW = error_body("request_timeout", "the request's headers did not come in time")


def _timeout_answer() -> bytes:
    head = (
        "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"{REQUEST_ID}: {new_request_id()}\r\nContent-Length: {len(_TOO_SLOW)}\r\n\r\n"
    )
    return head.encode() + _TOO_SLOW


class MalformedRequest(InvalidRequest):
    """What came is not HTTP. Nothing of it is repeated: it may hold a key."""

    status = 400


class _Handler(web.RequestHandler):
    """aiohttp's protocol, whose own answers are JSON with a request id as all others are."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what could not be read, or to what escaped the application; aiohttp writes the log."""
        super().handle_error(request, status, exc, message)
        error = MalformedRequest("this is not a valid HTTP request") if status < 500 else RequestError("internal error")
        response = error_response(error)
        response.headers[REQUEST_ID] = new_request_id()
        response.force_close()
        return response


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
        elif self._timer is not None:  # they are complete: what follows is no pause within them
            self._timer.cancel()
            self._timer = None

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
        self._transport.write(_timeout_answer())
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
    server: web.Server | None, pause_seconds: float, loop: asyncio.AbstractEventLoop
) -> Callable[[], asyncio.Protocol]:
    """A protocol factory in the place of aiohttp's own, with the options that the runner was given."""
    assert server is not None, "the runner is not set up"
    options = server._kwargs
    return lambda: _Guard(_Handler(server, loop=loop, **options), pause_seconds, loop)
