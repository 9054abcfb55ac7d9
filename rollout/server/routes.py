"""What each path does: decode, ask the service, encode."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from rollout.errors import InvalidRequest, MethodNotAllowed, MissingExtra, NotFound, RequestError
from rollout.metrics import CONTENT_TYPE, render
from rollout.requests import parse_cancel, receive
from rollout.schemas import CancelResponse
from rollout.server.body import read_body
from rollout.server.middlewares import error_response
from rollout.server.openapi import openapi_json
from rollout.server.service import Service
from rollout.tracing import extract
from rollout.wire import encode_strict

PREFIX = "/v1/rollout"
LONGEST_WAIT_SECONDS = 60.0

_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9}", re.ASCII)
"""Python's `float()` takes more: other digits, 1_0, exponents."""

_ID = "{rollout_id:[^/]+}"
"""Any characters: a slash comes percent-encoded, and braces, which a plain placeholder refuses, may be in an id."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MetricsUnavailable(RequestError):
    """The library that renders metrics is not installed."""

    status, code = 501, "not_installed"


class Routes:
    """The handlers of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        server = service.settings.server
        self._body_limit_bytes = server.max_body_bytes
        self._pause_seconds = server.read_timeout_seconds
        self._has_key = server.api_key is not None
        self._metrics = service.metrics

    def add_to(self, app: web.Application) -> None:
        """Register every path, most of them twice: bare and under `/v1/rollout`."""
        posts: dict[str, Handler] = {"/init": self.init, "/cancel": self.cancel}
        gets: dict[str, Handler] = {
            "/status": self.status,
            "/status/" + _ID: self.state,
            "/result/" + _ID: self.result,
            "/openapi.json": self.openapi,
        }
        for prefix in (PREFIX, ""):
            for path, handler in posts.items():
                app.router.add_post(prefix + path, handler, expect_handler=_expect_nothing_yet)
            for path, handler in gets.items():
                app.router.add_get(prefix + path, handler, expect_handler=_expect_nothing_yet)
        others = {"/health": self.health, "/platform/health": self.platform_health, "/metrics": self.metrics}
        for path, handler in others.items():
            app.router.add_get(path, handler, expect_handler=_expect_nothing_yet)
        app.router.add_route("*", "/health", self.no_such_method, expect_handler=_expect_nothing_yet)

    @property
    def open_handlers(self) -> tuple[Handler, ...]:
        """Those that never need a key."""
        return (self.health, self.no_such_method) if self._has_key else ()

    async def init(self, request: web.Request) -> web.Response:
        """POST /init."""
        began = self._service.clock()
        try:
            body = await read_body(request, self._body_limit_bytes, self._pause_seconds)
            received = receive(body, self._service.settings.metadata_limit_bytes)
            trace = extract(request.headers) if "traceparent" in request.headers else None
            answer = await self._service.init(received, trace)
        except RequestError as exc:
            self._metrics.inits.inc("rejected", exc.code)
            raise
        self._metrics.init_seconds.observe(self._service.clock() - began)
        return _json(answer, 202)

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /cancel."""
        body = await read_body(request, self._body_limit_bytes, self._pause_seconds)
        dispositions = await self._service.cancel(parse_cancel(body))
        return _json(encode_strict(CancelResponse(dispositions=dispositions)))

    async def status(self, request: web.Request) -> web.Response:
        """GET /status."""
        return _json(encode_strict(self._service.reports.status()))

    async def state(self, request: web.Request) -> web.Response:
        """GET /status/{rollout_id}."""
        return _json(encode_strict(await self._service.state(request.match_info["rollout_id"])))

    async def result(self, request: web.Request) -> web.Response:
        """GET /result/{rollout_id}?wait=SECONDS."""
        result = await self._service.result(request.match_info["rollout_id"], _wait_of(request))
        if result.body is None:
            return _json(encode_strict(result.state), 202)
        return _json(result.body)

    async def health(self, request: web.Request) -> web.Response:
        """GET /health."""
        body = self._service.reports.health()
        return _json(encode_strict(body), 200 if body["status"] == "healthy" else 503)

    async def no_such_method(self, request: web.Request) -> web.Response:
        """Other methods of /health: a route of its own, so that they are told so without a key."""
        raise MethodNotAllowed("this path takes only GET, HEAD", "GET, HEAD")

    async def platform_health(self, request: web.Request) -> web.Response:
        """GET /platform/health: the same for those who hold the key; without a key in use it is not there."""
        if not self._has_key:
            raise NotFound("no such path: no API key is configured")
        return await self.health(request)

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        try:
            text = render(self._metrics)
        except MissingExtra as exc:
            return error_response(MetricsUnavailable(str(exc)))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, request: web.Request) -> web.Response:
        """GET /openapi.json."""
        base = request.path.removesuffix("/openapi.json").removesuffix(PREFIX)
        return _json(openapi_json(requires_key=self._has_key, base_path=base))


async def _expect_nothing_yet(request: web.Request) -> None:
    """A caller that waits for "100 Continue" gets it from `read_body()`: once the key is known to be right."""


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _wait_of(request: web.Request) -> float:
    text = request.query.get("wait")
    if text is None or text == "":
        return 0.0
    if not _SECONDS.fullmatch(text) or float(text) > LONGEST_WAIT_SECONDS:
        raise InvalidRequest(f"must be a number of seconds from 0 to {LONGEST_WAIT_SECONDS:g} - at `?wait`")
    return float(text)


def describe_routes(app: web.Application) -> list[tuple[str, str]]:
    """Method and path of every route, for the start-up message and the docs' test."""
    found: list[tuple[str, str]] = []
    for route in app.router.routes():
        resource: Any = route.resource
        if resource is not None and route.method not in ("HEAD", "*"):
            found.append((route.method, resource.canonical))
    return found
