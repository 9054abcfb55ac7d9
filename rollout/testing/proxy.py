"""A TCP proxy that breaks the network between two real programs, and can be switched while they talk.

async with ChaosProxy("127.0.0.1", port) as proxy:
    proxy.down.reset_after_bytes = 100   # what flows to the client
    proxy.up.stall()                     # what flows to the target
    await proxy.refuse()
    await proxy.heal()
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 65536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Flow:
    """One direction of all connections. Attributes may be changed at any time and count from the next chunk on."""

    def __init__(self) -> None:
        self.latency_seconds = 0.0
        """Pause before each chunk."""
        self.reset_after_bytes: int | None = None
        """Of each connection: so many bytes pass, then both ends get a RST."""
        self.cut_after_bytes: int | None = None
        """Of each connection: so many bytes pass, then both ends are closed in good order."""
        self._open = asyncio.Event()
        self._open.set()

    def stall(self) -> None:
        """Let nothing pass, and keep the connections."""
        self._open.clear()

    def resume(self) -> None:
        """Let pass what was held up."""
        self._open.set()

    def heal(self) -> None:
        """Back to a flow without faults."""
        self.latency_seconds, self.reset_after_bytes, self.cut_after_bytes = 0.0, None, None
        self.resume()

    async def wait_for_passage(self) -> None:
        """Return when the next chunk may go."""
        if self.latency_seconds:
            await asyncio.sleep(self.latency_seconds)
        await self._open.wait()

    @property
    def allowance_bytes(self) -> int | None:
        """How many bytes of a connection may pass at all."""
        limits = [limit for limit in (self.reset_after_bytes, self.cut_after_bytes) if limit is not None]
        return min(limits, default=None)


class _Link:
    """A client's connection and the one to the target that belongs to it."""

    def __init__(self, client: asyncio.StreamWriter, target: asyncio.StreamWriter) -> None:
        self._writers = (client, target)

    def reset(self) -> None:
        for writer in self._writers:
            if not writer.is_closing():
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()


class ChaosProxy:
    """Listens on 127.0.0.1 and a free port and passes everything on to the target; an async context manager."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self.up = Flow()
        """From the client to the target."""
        self.down = Flow()
        """From the target to the client."""
        self.connections_opened = 0
        self.port = 0
        self._target = (target_host, target_port)
        self._server: asyncio.Server | None = None
        self._refusing = True
        self._reserved: socket.socket | None = None
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Base URL of the proxy."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._reserved = self._bind()
        self.port = self._reserved.getsockname()[1]
        await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.refuse()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert self._reserved is not None
        self._reserved.close()

    # ------------------------------------------------------------ switches

    async def refuse(self) -> None:
        """Refuse new connections from now on; those that are open stay. The port is kept."""
        self._refusing = True
        if self._server is not None:
            self._server.close()
            self._server = None
            await asyncio.sleep(0)  # some loops close the listening socket in their next turn only
            self._reserved = self._bind()

    async def heal(self) -> None:
        """Take new connections, and end all faults of both directions."""
        self.up.heal()
        self.down.heal()
        await self._listen()

    def reset_now(self) -> None:
        """Reset all open connections."""
        for link in list(self._links):
            link.reset()

    def cut_now(self) -> None:
        """Close all open connections in good order."""
        for link in list(self._links):
            link.cut()

    # ------------------------------------------------------------ inside

    def _bind(self) -> socket.socket:
        """A bound socket that does not listen: it keeps the port, and whoever connects is refused."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", self.port))
        return sock

    async def _listen(self) -> None:
        self._refusing = False
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, sock=self._reserved, backlog=1024)
            self._reserved = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()  # it came in the very turn in which the listening ended
            return
        self.connections_opened += 1
        task = asyncio.create_task(self._connect(reader, writer), name=f"chaos-proxy-{self.connections_opened}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(writer, target_writer)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(self.up, reader, target_writer, link))
                pumps.create_task(self._pump(self.down, target_reader, writer, link))
            link.cut()
        except asyncio.CancelledError:
            link.reset()
            raise
        finally:
            self._links.discard(link)

    async def _pump(self, flow: Flow, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
        passed = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                await flow.wait_for_passage()
                allowance = flow.allowance_bytes
                if allowance is not None:
                    data = data[: max(0, allowance - passed)]
                passed += len(data)
                writer.write(data)
                await writer.drain()
                if allowance is not None and passed >= allowance:
                    link.cut() if allowance == flow.cut_after_bytes else link.reset()
                    return
            writer.write_eof()
