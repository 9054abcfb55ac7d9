"""A service on a real socket, served as `rollout serve` does it, and small agents to put into it."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from aiohttp import ClientSession, web

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.schemas import RolloutRequest
from rollout.server.app import SERVICE, create_app
from rollout.server.guard import guarded
from rollout.server.service import Service
from rollout.settings import RolloutClientSettings, RolloutServerSettings, RolloutSettings
from rollout.testing import MockTrainer, ReadResponse, make_request

GENEROUS_SECONDS = 5
"""How long a test waits for what is due at once: only a failing test waits so long."""

_QUICK = {"shutdown_grace_seconds": 0, "retry_base_delay": 0.01, "retry_max_delay": 0.01}


class Chat(RolloutAgentLoop):
    """One LLM call with the parameters of the request, then done."""

    name = "chat"

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        messages = ctx.request.messages
        result = await ctx.chat(messages, **ctx.request.completion_params)
        return ctx.complete([*messages, result.message])


class Instant(RolloutAgentLoop):
    """Done before it began; counts its runs and keeps the requests that it was given."""

    name = "instant"

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.requests: list[RolloutRequest] = []

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        self.ran.append(ctx.request.rollout_id)
        self.requests.append(ctx.request)
        return ctx.complete(ctx.request.messages)


class Held(Instant):
    """Runs until the test sets `release`; `running` is set once a run has begun."""

    name = "held"

    def __init__(self) -> None:
        super().__init__()
        self.running = asyncio.Event()
        self.release = asyncio.Event()

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        self.running.set()
        await self.release.wait()
        return await super().run(ctx)


class Served:
    """A running service: where it listens, a session that knows the address, and what stands behind it."""

    def __init__(self, app: web.Application, url: str, session: ClientSession, trainer: MockTrainer) -> None:
        self.app = app
        self.url = url
        self.session = session
        self.trainer = trainer

    @property
    def service(self) -> Service:
        """The service of the application."""
        return self.app[SERVICE]

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    async def post_init(self, request: Any = None, *, path: str = "/v1/rollout/init", **fields: Any) -> ReadResponse:
        """POST an init: the request as it is (dict or bytes), or a valid one made from the fields."""
        body = make_request(**{"server_url": self.trainer.url, **fields}) if request is None else request
        return await self.call("POST", path, body if isinstance(body, bytes) else msgspec.json.encode(body))

    async def call(self, method: str, path: str, body: bytes | None = None, **options: Any) -> ReadResponse:
        """Any request; a body goes as JSON unless the options say otherwise."""
        if body is not None:
            options["headers"] = {"Content-Type": "application/json", **options.get("headers", {})}
            options["data"] = io.BytesIO(body)  # bytes themselves would draw a warning when there are many
        async with self.session.request(method, path, **options) as response:
            return ReadResponse(response.status, response.headers, await response.read())

    async def get(self, path: str, **options: Any) -> ReadResponse:
        """GET a path."""
        return await self.call("GET", path, **options)

    async def cancel(self, **body: Any) -> dict[str, str]:
        """Dispositions of a cancel that must be answered 200."""
        answer = await self.call("POST", "/v1/rollout/cancel", msgspec.json.encode(body))
        assert answer.status == 200, answer
        dispositions: dict[str, str] = answer.json["dispositions"]
        return dispositions

    async def result(self, rollout_id: str) -> dict[str, Any]:
        """The terminal result, waited for."""
        answer = await self.get(f"/v1/rollout/result/{rollout_id}?wait={GENEROUS_SECONDS}")
        assert answer.status == 200, answer
        result: dict[str, Any] = answer.json
        return result

    async def wait_phase(self, rollout_id: str, phase: str = "delivered") -> dict[str, Any]:
        """The state of the rollout once it is in this phase."""
        async with asyncio.timeout(GENEROUS_SECONDS):
            while True:
                state: dict[str, Any] = (await self.get(f"/status/{rollout_id}")).json
                if state["phase"] == phase:
                    return state
                await asyncio.sleep(0.002)

    async def wait_duplicates(self, count: int) -> None:
        """Return once the service has recognised so many inits as duplicates."""
        async with asyncio.timeout(GENEROUS_SECONDS):
            while True:
                if self.service.metrics.inits.value("duplicate", "") >= count:
                    return
                await asyncio.sleep(0.001)

    async def send_raw(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection on which these bytes have been sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        await writer.drain()
        return reader, writer


def body_of(server: Served, **fields: Any) -> bytes:
    """JSON of a valid request."""
    return msgspec.json.encode(make_request(server_url=server.trainer.url, **fields))


def insert(body: bytes, text: bytes) -> bytes:
    """The JSON object with more members put in front."""
    return b"{" + text + b"," + body[1:]


async def post(server: Served, body: bytes, **headers: str) -> tuple[int, str]:
    """Status and code of an init with these headers (underscores stand for hyphens)."""
    answer = await server.call("POST", "/init", body, headers={k.replace("_", "-"): v for k, v in headers.items()})
    return answer.status, answer.json.get("code", "")


async def exchange(server: Served, request: bytes) -> bytes:
    """All that is answered on a connection of its own."""
    reader, writer = await server.send_raw(request)
    answer = await reader.read()
    writer.close()
    return answer


def settings_with(**overrides: Any) -> RolloutSettings:
    """Settings with these fields replaced, whichever section has them; graces and pauses are short unless named."""
    given = {**_QUICK, **overrides}
    server = {name: given.pop(name) for name in list(given) if name in RolloutServerSettings.__struct_fields__}
    client = {name: given.pop(name) for name in list(given) if name in RolloutClientSettings.__struct_fields__}
    return RolloutSettings(server=RolloutServerSettings(**server), client=RolloutClientSettings(**client), **given)


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, *, handler_cancellation: bool = False, auto_decompress: bool = False
) -> AsyncIterator[str]:
    """The URL of an application that is served as `rollout.server.serving` does it."""
    service: Service | None = app.get(SERVICE)
    seconds = 20.0 if service is None else service.settings.server.read_timeout_seconds
    runner = web.AppRunner(
        app,
        access_log=None,
        auto_decompress=auto_decompress,
        handle_signals=False,
        shutdown_timeout=0.1,
        handler_cancellation=handler_cancellation,
    )
    await runner.setup()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(guarded(runner.server, seconds, loop), "127.0.0.1", 0, backlog=1024)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def serving(
    agent: Any,
    trainer: MockTrainer,
    *,
    handler_cancellation: bool = False,
    clock: Callable[[], float] | None = None,
    headers: dict[str, str] | None = None,
    **overrides: Any,
) -> AsyncIterator[Served]:
    """A service for one agent. `clock` takes the place of the one that records expire by."""
    app = create_app(agent, settings_with(**overrides))
    if clock is not None:
        app[SERVICE].registry.clock = clock
    async with (
        listening(app, handler_cancellation=handler_cancellation) as url,
        ClientSession(url, headers=headers) as session,
    ):
        yield Served(app, url, session, trainer)
