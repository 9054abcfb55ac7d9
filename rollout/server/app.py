"""The front door: an aiohttp application that serves one agent, alone or inside another application."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from aiohttp import web

from rollout.agent.loading import missing_agent_parts
from rollout.errors import AgentLoadError, SettingsError
from rollout.logs import quiet_malformed_requests
from rollout.server.middlewares import edge
from rollout.server.routes import Routes
from rollout.server.service import Service
from rollout.settings import RolloutSettings, variables_in
from rollout.state.memory import MemoryStore
from rollout.state.store import Store

logger = logging.getLogger(__name__)

SERVICE = web.AppKey("rollout_service", Service)
"""Where the application keeps its service: `app[SERVICE]`."""

_SQLITE = "sqlite:///"

Hook = Callable[[], Any]
"""A plain or async function without arguments."""


def open_store(settings: RolloutSettings) -> Store:
    """The store that `STATE_URL` names. `SettingsError` for one that is not known."""
    url = settings.server.state_url
    if url == "memory:":
        return MemoryStore(settings.server.result_cache_bytes)
    if url.startswith(_SQLITE):
        from rollout.state.sqlite import SqliteStore

        return SqliteStore(url.removeprefix(_SQLITE), settings.server.result_cache_bytes)
    raise SettingsError(f"OSMOSIS_ROLLOUT_SERVER_STATE_URL={url!r} names no store")


def create_app(
    agent: Any,
    settings: RolloutSettings | None = None,
    *,
    on_startup: Hook | None = None,
    on_shutdown: Hook | None = None,
    max_concurrent: int | None = None,
    record_ttl_seconds: float | None = None,
    api_key: str | None = None,
    debug_dir: str | None = None,
    store: Store | None = None,
) -> web.Application:
    """An application with all the paths of the protocol, to be run alone or mounted with `add_subapp("/any", app)`.

    Without `settings` the environment is not read: the defaults hold, so embedding never surprises;
    `RolloutSettings.from_env()` reads it. The four named after settings override them. `on_startup` runs before the
    first rollout is accepted, `on_shutdown` after the last one has ended. Raises `AgentLoadError` if the agent is none;
    `validate_agent_loop()` looks closer.
    """
    _check_agent(agent)
    settings = override(
        _defaults() if settings is None else _checked(settings),
        max_concurrent_rollouts=max_concurrent,
        record_ttl_seconds=record_ttl_seconds,
        api_key=api_key,
        debug_dir=debug_dir,
    )
    quiet_malformed_requests()
    service = Service(agent, settings, open_store(settings) if store is None else store)
    routes = Routes(service)
    app = web.Application(
        middlewares=[edge(settings.server.api_key, routes.open_handlers)],
        client_max_size=settings.server.max_body_bytes,
    )
    app[SERVICE] = service
    routes.add_to(app)
    app.cleanup_ctx.append(_life_of(service, on_startup, on_shutdown))
    return app


def _check_agent(agent: Any) -> None:
    if isinstance(agent, type):
        raise AgentLoadError(f"{agent.__name__} is a class, and an instance is needed: {agent.__name__}()")
    if isinstance(agent, str):
        raise AgentLoadError(f"{agent!r} is a text, and an agent is needed: use load_agent({agent!r})")
    if missing := missing_agent_parts(agent):
        raise AgentLoadError(f"{agent!r} cannot be served: it lacks {', '.join(missing)}")


def _defaults() -> RolloutSettings:
    ignored = variables_in(os.environ)
    if ignored:
        logger.warning(
            "create_app() was given no settings and reads no environment, so these do nothing: %s; "
            "if they should, pass RolloutSettings.from_env()",
            ", ".join(ignored),
        )
    return RolloutSettings()


def _checked(settings: object) -> RolloutSettings:
    if isinstance(settings, RolloutSettings):
        return settings
    part = str(getattr(settings, "section", ""))  # those of a server or a client alone are easily taken for all
    hint = f"pass RolloutSettings({part}=...)" if part else "pass RolloutSettings(...)"
    raise SettingsError(f"the settings are not RolloutSettings but {type(settings).__name__}: {hint}")


def override(settings: RolloutSettings, **given: Any) -> RolloutSettings:
    """The settings with these of the server's over them; None leaves one as it is."""
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        return settings
    return msgspec.structs.replace(settings, server=msgspec.structs.replace(settings.server, **changes))


def _life_of(
    service: Service, on_startup: Hook | None, on_shutdown: Hook | None
) -> Callable[[web.Application], AsyncIterator[None]]:
    async def life(app: web.Application) -> AsyncIterator[None]:
        await _call(on_startup)
        await service.start()
        try:
            yield
        finally:
            try:
                await service.stop()
            finally:
                await _call(on_shutdown)

    return life


async def _call(hook: Hook | None) -> None:
    if hook is not None:
        returned = hook()
        if inspect.isawaitable(returned):
            await returned
