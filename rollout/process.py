"""The service as a process of its own: what `python -m rollout serve` does, also for a program of the user's."""

from __future__ import annotations

import asyncio
import functools
import gc as collector
import ipaddress
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from rollout.agent.validator import check_before_serving
from rollout.errors import AgentLoadError, MissingExtra
from rollout.logs import configure_logging
from rollout.server.app import create_app, override
from rollout.server.serving import bind, serve_app
from rollout.settings import RolloutSettings

logger = logging.getLogger(__name__)

COLLECTOR_MODES = ("tuned", "python", "off")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def serve_agent_loop(
    agent: Any,
    settings: RolloutSettings | None = None,
    *,
    host: str | None = None,
    port: int | None = None,
    loop: str = "asyncio",
    gc: str = "tuned",
) -> None:
    """Serve the agent until SIGTERM or Ctrl-C, then drain: `python -m rollout serve` as a function.

    Without `settings` those of the environment and `.env` hold; `host` and `port` go over either. `loop` is "asyncio",
    "uvloop", or "auto" for uvloop where it is installed; `gc` is how the collector is set for this process:
    "tuned" for many long-lived objects, "python" to leave it alone, "off". Log lines go to stderr unless logging is
    set up already. Off loopback a key is made and printed if none is set. Must be called in the main thread, where no
    loop runs.
    Raises `AgentLoadError` for an agent that could not work, `SettingsError`, `AddressInUse` for a port that is taken.
    """
    factory = loop_factory(loop)
    set_collector(gc)
    if not logging.getLogger().handlers:
        configure_logging("text", "info")
    settings = override(RolloutSettings.from_env() if settings is None else settings, host=host, port=port)
    settings, is_made = _with_key(settings)
    app = create_app(agent, settings)
    _check(agent)
    sockets = bind(settings.server.host, settings.server.port)
    _run(serve_app(app, sockets, on_ready=functools.partial(_greet, agent.name, settings, is_made)), factory)


def loop_factory(loop: str) -> LoopFactory | None:
    """What makes the event loop of that name; None is Python's own. `MissingExtra` if it is not installed."""
    if loop == "asyncio":
        return None
    try:
        import uvloop
    except ImportError:
        if loop == "auto":
            return None
        raise MissingExtra("--loop uvloop", "speed") from None
    factory: LoopFactory = uvloop.new_event_loop
    return factory


def set_collector(mode: str) -> None:
    """Set the garbage collector of this process; `ValueError` for a mode that is none of `COLLECTOR_MODES`.

    A full collection goes over every live object, and thousands of live rollouts are many: with Python's own
    thresholds the loop stands still for 100 ms and more at a time. Nearly everything here is freed by its count.
    """
    if mode not in COLLECTOR_MODES:
        raise ValueError(f"gc must be one of {', '.join(COLLECTOR_MODES)}, got {mode!r}")
    if mode == "off":
        collector.disable()
    elif mode == "tuned":
        collector.set_threshold(50_000, 50, 1_000)
        collector.collect()
        collector.freeze()  # what is imported by now stays: no collection need look at it again


def _check(agent: Any) -> None:
    """Stop for what would fail in every rollout, warn of the rest."""
    found = check_before_serving(agent)
    for finding in found.warnings:
        logger.warning("agent %r: %s", agent.name, finding)
    if found.errors:
        lines = "".join(f"\n  {finding}" for finding in found.errors)
        raise AgentLoadError(f"the agent {agent.name!r} could not end one rollout well:{lines}")


def _with_key(settings: RolloutSettings) -> tuple[RolloutSettings, bool]:
    """Off loopback a key is needed: make one if none is set. Whether it was made."""
    if settings.server.api_key is not None or _is_loopback(settings.server.host):
        return settings, False
    return override(settings, api_key=f"osm_rollout_{secrets.token_urlsafe(24)}"), True


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there; 0.0.0.0 and :: are every address, so they are not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _greet(agent_name: str, settings: RolloutSettings, key_is_made: bool, port: int) -> None:
    host = settings.server.host
    shown = f"[{host}]" if ":" in host else host
    if key_is_made:
        print(f"API key (made now, shown once): {settings.server.api_key}", flush=True)
    print(f"serving agent {agent_name!r} on http://{shown}:{port}  (health: /health, API: /openapi.json)", flush=True)


def _run(main_coroutine: Coroutine[Any, Any, None], factory: LoopFactory | None) -> None:
    """Run to the end on the chosen loop. A SystemExit out of some task of an agent does not end the service."""
    with asyncio.Runner(loop_factory=factory) as runner:
        running = runner.get_loop().create_task(main_coroutine)
        while True:
            try:
                runner.get_loop().run_until_complete(running)
            except (SystemExit, KeyboardInterrupt):
                if running.done():
                    raise
                logger.exception("a task tried to end the process; the service goes on")
            else:
                return
