"""The edge of every request: an id, the key, and errors as JSON, here and only here."""

from __future__ import annotations

import hmac
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Container

from aiohttp import web
from aiohttp.typedefs import Middleware

from rollout.errors import (
    BodyTooLarge,
    MethodNotAllowed,
    NotFound,
    RequestError,
    RequestTimeout,
    ServiceUnavailable,
    StoreError,
    Unauthorized,
)
from rollout.schemas import error_body

logger = logging.getLogger(__name__)

REQUEST_ID = "X-Request-ID"
_LONGEST_REQUEST_ID = 128
_PROCESS = uuid.uuid4().hex[:24]
_requests = itertools.count(1)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def request_id_of(request: web.BaseRequest) -> str:
    """The caller's own id if it may stand in a header and a log, else a new one."""
    given = request.headers.get(REQUEST_ID)
    if given and len(given) <= _LONGEST_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return new_request_id()


def new_request_id() -> str:
    """For a request that has none, or could not be read so far."""
    return f"{_PROCESS}{next(_requests):08x}"


def error_response(exc: RequestError) -> web.Response:
    """The answer that an error stands for."""
    response = web.Response(
        status=exc.status,
        body=error_body(exc.code, exc.detail),
        content_type="application/json",
        headers=exc.headers,
    )
    if isinstance(exc, (RequestTimeout, BodyTooLarge)):
        response.force_close()  # what is left of the body is not worth reading
    return response


def edge(api_key: str | None, open_handlers: Container[object]) -> Middleware:
    """The one middleware. `open_handlers` are those that need no key."""
    expected = None if api_key is None else api_key.encode()

    @web.middleware
    async def at_the_edge(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if expected is not None and _needs_key(request, open_handlers) and not _has_key(request, expected):
                raise Unauthorized("a valid key is needed: Authorization: Bearer <key>")
            response = await handler(request)
        except RequestError as exc:
            response = error_response(exc)
        except web.HTTPException as exc:
            translated = _translated(exc, request.path)
            if translated is None:
                exc.headers[REQUEST_ID] = request_id_of(request)
                raise
            response = translated
        except StoreError as exc:
            logger.warning("%s %s: %s", request.method, request.rel_url.raw_path, exc)
            response = error_response(ServiceUnavailable(f"the store fails: {exc}", "store_failed", 5))
        except Exception:
            if request.transport is None:
                return web.Response(status=400)  # the caller is gone: nobody will read it
            logger.exception("%s %s failed", request.method, request.rel_url.raw_path)
            response = error_response(RequestError("the service failed; its log says how"))
        if not response.prepared:
            response.headers[REQUEST_ID] = request_id_of(request)
        return response

    return at_the_edge


def _needs_key(request: web.Request, open_handlers: Container[object]) -> bool:
    return request.match_info.handler not in open_handlers


def _has_key(request: web.BaseRequest, expected: bytes) -> bool:
    given = request.headers.getall("Authorization", ())
    if len(given) != 1:
        return False
    scheme, _, token = given[0].partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        token.strip(" ").encode("utf-8", "surrogateescape"), expected
    )


def _translated(exc: web.HTTPException, path: str) -> web.Response | None:
    """aiohttp's own refusals in our words; None for what a handler raised on purpose."""
    if isinstance(exc, web.HTTPNotFound):
        hint = ": paths here do not end with a slash" if path.endswith("/") and path != "/" else ""
        return error_response(NotFound(f"no such path{hint}"))
    if isinstance(exc, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(exc.allowed_methods))
        return error_response(MethodNotAllowed(f"this path takes only {allowed}", allowed))
    if isinstance(exc, web.HTTPRequestEntityTooLarge):
        return error_response(BodyTooLarge("the body is larger than the surrounding application allows"))
    return None
