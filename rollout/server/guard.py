"""The connection below the application: time limits, a limit for their number, our words for what is not HTTP.

aiohttp has a limit for idle connections, but none for a request line that trickles in, for a peer that does not read
its answer, or for how many connections there are; it drops the answer of a peer that has closed its sending side; and
it answers malformed requests by itself, in plain text, before any middleware sees them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Any, cast

from aiohttp import StreamReader, web

from rollout.errors import InvalidRequest, RequestError
from rollout.schemas import error_body
from rollout.server.middlewares import REQUEST_ID, error_response, new_request_id

logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 0.05
_SILENT_SECONDS = 10.0
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


class ExpectationFailed(InvalidRequest):
    """An Expect header that nobody here can meet."""

    status = 417


class _Handler(web.RequestHandler):
    """aiohttp's protocol, whose own answers are JSON with a request id as all others are."""

    __slots__ = ("undoes_encodings",)

    undoes_encodings: bool
    """Whether the Content-Encoding of a body is undone before a handler reads it."""

    def finish_response(self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None) -> Any:
        """Send the answer; what aiohttp says to an Expect header on a path that is not there comes in our words."""
        if isinstance(resp, web.HTTPExpectationFailed):
            resp = _refusal(ExpectationFailed("the Expect header must be 100-continue"))
        return super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what could not be read, or to what escaped the application; aiohttp writes the log."""
        super().handle_error(request, status, exc, message)
        return _refusal(
            MalformedRequest("this is not a valid HTTP request") if status < 500 else RequestError("internal error")
        )


def _refusal(error: RequestError) -> web.Response:
    response = error_response(error)
    response.headers[REQUEST_ID] = new_request_id()
    response.force_close()
    return response


class _Door:
    """Counts the open connections and lets in so many: one more could take the descriptor that a delivery needs."""

    __slots__ = ("_limit", "_loop", "_open", "_silent_until")

    def __init__(self, limit: int | None, loop: asyncio.AbstractEventLoop) -> None:
        self._limit = limit
        self._loop = loop
        self._open = 0
        self._silent_until = 0.0

    def enter(self) -> bool:
        """Whether one more may come in; it is counted then."""
        if self._limit is None or self._open < self._limit:
            self._open += 1
            return True
        if self._loop.time() >= self._silent_until:
            self._silent_until = self._loop.time() + _SILENT_SECONDS
            logger.warning(
                "%d connections are open, more are closed at once; a higher ulimit -n lets more in", self._open
            )
        return False

    def leave(self) -> None:
        """One has gone."""
        self._open -= 1


class _Guard(asyncio.Protocol):
    """Stands between the transport and aiohttp's protocol and hands everything on.

    Looks at the clock when the bytes that came did not complete the headers of a request, and when an answer waits
    for its reader. Whole requests pay one extra call.
    """

    __slots__ = (
        "_body",
        "_door",
        "_handler",
        "_last",
        "_loop",
        "_pause_seconds",
        "_stall",
        "_timer",
        "_transport",
        "_unsent",
    )

    def __init__(self, handler: Any, pause_seconds: float, loop: asyncio.AbstractEventLoop, door: _Door) -> None:
        self._handler = handler
        self._pause_seconds = pause_seconds
        self._loop = loop
        self._door = door
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None  # of the last request that has come
        self._unsent = 0
        self._last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._door.enter():
            cast("asyncio.Transport", transport).abort()
            return
        self._transport = cast("asyncio.Transport", transport)
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._handler.data_received(data)
        if messages := self._handler._messages:
            self._body = messages[-1][1]
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
        if self._transport is None:
            return  # it was not let in
        self._door.leave()
        self._transport = None
        for timer in (self._timer, self._stall):
            if timer is not None:
                timer.cancel()
        self._timer = self._stall = None
        self._handler.connection_lost(exc)

    # ------------------------------------------------------------ a peer that sends no more

    def eof_received(self) -> bool:
        """A peer may close its sending side and wait for its answers: it keeps the connection until it has them."""
        if self._transport is None or not self._owes_answers():
            return False
        self._close_when_answered()
        return True

    def _owes_answers(self) -> bool:
        """Whether whole requests have come that are not answered yet."""
        handler = self._handler
        if handler._manager is None or handler._manager.handler_cancellation:
            return False  # to an application that asked for it, the end of what is sent is the end
        is_idle = handler._waiter is not None and not handler._messages
        return not is_idle and self._body is not None and self._body.is_eof()

    def _close_when_answered(self) -> None:
        handler = self._handler
        if self._transport is None:
            return
        if handler._messages:  # requests that it would forget if it were told to close now
            self._loop.call_later(_LOOK_AGAIN_SECONDS, self._close_when_answered)
        elif handler._waiter is None:
            handler.close()
        else:
            handler.force_close()

    # ------------------------------------------------------------ a peer that does not read

    def pause_writing(self) -> None:
        self._handler.pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self._handler.resume_writing()

    def _watch_reader(self) -> None:
        assert self._transport is not None
        self._unsent = self._transport.get_write_buffer_size()
        self._stall = self._loop.call_later(self._pause_seconds, self._check_reader)

    def _check_reader(self) -> None:
        self._stall = None
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() < self._unsent:
            self._watch_reader()
        else:
            self._transport.abort()


def guarded(
    server: web.Server | None,
    pause_seconds: float,
    loop: asyncio.AbstractEventLoop,
    max_connections: int | None = None,
) -> Callable[[], asyncio.Protocol]:
    """A protocol factory in the place of aiohttp's own, with the options that the runner was given.

    A connection beyond `max_connections` is closed at once; None is no limit.
    """
    assert server is not None, "the runner is not set up"
    return functools.partial(_guard, server, server._kwargs, pause_seconds, loop, _Door(max_connections, loop))


def _guard(
    server: web.Server, options: dict[str, Any], pause_seconds: float, loop: asyncio.AbstractEventLoop, door: _Door
) -> _Guard:
    handler = _Handler(server, loop=loop, **options)
    handler.undoes_encodings = options.get("auto_decompress", True)
    return _Guard(handler, pause_seconds, loop, door)
