"""Serves an application on a socket, with its own signal handling: drain first, then close the door."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from aiohttp import web

from rollout.errors import RolloutError
from rollout.server.app import SERVICE
from rollout.server.guard import guarded

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""How many connections the kernel may hold until we take them."""

_ACCEPTED_IN_ONE_GO = 16
"""asyncio calls this the backlog too. Out of descriptors it fails so many times, with a report for each."""

_RESERVED_DESCRIPTORS = 64
_SILENT_SECONDS = 10.0
KEEPALIVE_SECONDS = 75.0
_CLEANUP_SECONDS = 5.0


class AddressInUse(RolloutError):
    """Another process listens there already, or the address cannot be bound."""


class _Listener(socket.socket):
    """A socket that listens with our backlog, also when asyncio starts to listen again with its own."""

    def listen(self, backlog: int = BACKLOG, /) -> None:
        super().listen(BACKLOG)


class _AcceptFailures:
    """The loop's exception handler: that no descriptor is left is said now and then, not with every try."""

    def __init__(self) -> None:
        self._silent_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != "socket.accept() out of system resource":
            loop.default_exception_handler(context)
        elif loop.time() >= self._silent_until:
            self._silent_until = loop.time() + _SILENT_SECONDS
            logger.error("connections cannot be accepted: %s", context.get("exception"))


def connection_limit(client_connections: int) -> int | None:
    """How many connections may be open so that enough descriptors are left for those to the trainers; None: any."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return None
    return max(descriptors - _RESERVED_DESCRIPTORS - client_connections, descriptors // 2)


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for a host and port (0: a free one). Raises `AddressInUse` naming both.

    Never SO_REUSEPORT: a second server on the same port would get half of the requests without anybody noticing.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise AddressInUse(f"the host {host!r} cannot be resolved: {exc}") from None
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        listener = _Listener(family, kind, protocol)
        try:
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if port == 0 and sockets:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            listener.bind(address)
            listener.listen()
        except OSError as exc:
            listener.close()
            for other in sockets:
                other.close()
            raise AddressInUse(f"cannot listen on {host}:{port}: {why_not_listening(exc)}") from None
        listener.setblocking(False)
        sockets.append(listener)
    return sockets


def why_not_listening(exc: OSError) -> str:
    """Why an address could not be bound, for people."""
    return "it is in use by another process" if exc.errno == errno.EADDRINUSE else str(exc.strerror or exc)


async def serve_app(
    app: web.Application, sockets: list[socket.socket], *, on_ready: Callable[[int], Any] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT; returns after the drain. A second signal ends the process at once.

    While draining the door stays open, so that new inits are told 503 and `/health` says why.
    """
    service = app[SERVICE]
    runner = web.AppRunner(
        app,
        access_log=None,
        keepalive_timeout=KEEPALIVE_SECONDS,
        auto_decompress=False,  # bodies are unpacked where the limit is known
        handle_signals=False,
        shutdown_timeout=_CLEANUP_SECONDS,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_AcceptFailures())
    _handle_signals(loop, stop, service.fate_of_the_undelivered)
    servers: list[asyncio.Server] = []
    try:
        await runner.setup()
        server, client = service.settings.server, service.settings.client
        limit = connection_limit(client.max_connections or server.max_concurrent_rollouts)
        factory = guarded(runner.server, server.read_timeout_seconds, loop, limit)
        for listener in sockets:
            servers.append(await loop.create_server(factory, sock=listener, backlog=_ACCEPTED_IN_ONE_GO))
            listener.listen()  # what another loop than asyncio's has set too
        if on_ready is not None:
            on_ready(sockets[0].getsockname()[1])
        await stop.wait()
        await service.stop()
    finally:
        for opened in servers:
            opened.close()
        for listener in sockets:
            listener.close()
        await runner.cleanup()


def _handle_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, fate: str) -> None:
    def on_signal(number: int) -> None:
        if stop.is_set():
            logger.error("second signal: exiting at once; results that were not delivered are %s", fate)
            logging.shutdown()
            sys.stderr.flush()
            os._exit(128 + number)
        logger.info("signal %d: draining; once more to exit at once", number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
