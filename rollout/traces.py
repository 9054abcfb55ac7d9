"""What happened in each rollout, as one JSONL file a rollout, for `SERVER_DEBUG_DIR`.

These files hold message content, so they are readable by their owner only; keys are never in them. Lines are made on
the loop's thread, as the objects may change afterwards, and are written by one background thread: a slow or full disk
costs a rollout nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import logging
import os
import queue
import re
import threading
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from rollout.errors import SettingsError
from rollout.wire import JSON, encode

logger = logging.getLogger(__name__)

SECRET_FIELDS = frozenset({"api_key", "llm_api_key"})
"""What is removed from every event, however deep it lies."""

MAX_BACKLOG_BYTES = 64 * 1024 * 1024
"""How much may wait for the disk; events beyond it are dropped."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_PREFIX_LENGTH = 64


def file_name(rollout_id: str) -> str:
    """The name of a rollout's file: a readable part that cannot be a path, and a digest that keeps ids apart."""
    digest = hashlib.sha256(rollout_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{_UNSAFE.sub('_', rollout_id[:_PREFIX_LENGTH])}-{digest}.jsonl"


class _Entry(NamedTuple):
    name: str
    line: bytes


class Trace:
    """The trace of one rollout. It holds no file open, so there may be any number; not for use from other threads."""

    __slots__ = ("_name", "_writer")

    def __init__(self, writer: TraceWriter, name: str) -> None:
        self._writer: TraceWriter | None = writer
        self._name = name

    def write(self, event: str, **data: object) -> None:
        """Append one event with whatever data; never blocks, never raises. After `close()` it does nothing."""
        if self._writer is not None:
            self._writer.put(self._name, _line(event, data))

    def close(self) -> None:
        """Nothing more is written: a late event of an ended rollout is dropped."""
        self._writer = None


def _line(event: str, data: dict[str, object]) -> bytes:
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    head: dict[str, object] = {"at": now.isoformat(timespec="microseconds") + "Z", "event": event}
    line, problems = encode({**head, **data})
    if problems:
        line, _ = encode({**head, **data, "problems": problems})
    try:
        if b'api_key"' in line or b"\\u" in line:  # an escape may spell the name of a secret field
            line, _ = encode(_without_secrets(msgspec.json.decode(line)))
        if b"\n" in line or b"\r" in line:  # JSON text that was passed through keeps its white space
            line = msgspec.json.format(line, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        line, _ = encode({**head, "problems": ["JSON text in this event is broken"]})
    return line + b"\n"


def _without_secrets(value: JSON) -> JSON:
    """The decoded value with the secret fields taken out of all objects, in place."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            for field in SECRET_FIELDS & item.keys():
                del item[field]
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
    return value


class TraceWriter:
    """Writes the traces of a service into a directory, from entering the context until leaving it, which flushes.

    The directory is made if need be (mode 0700; the files 0600); `SettingsError` on entering if it cannot be. Later
    failures are logged once and end nothing. `put()`
    belongs to the loop's thread; of the two byte counts each thread writes its own, so no lock is needed.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
        stop_timeout_seconds: float = 10,
    ) -> None:
        self._directory = Path(directory)
        self._max_backlog_bytes = max_backlog_bytes
        self._stop_timeout_seconds = stop_timeout_seconds
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollout-traces", daemon=True)
        self._put_bytes = 0
        self._written_bytes = 0
        self._has_failed = False
        self._is_stopped = False

    async def __aenter__(self) -> TraceWriter:
        try:
            await asyncio.to_thread(self._directory.mkdir, mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise SettingsError(
                f"OSMOSIS_ROLLOUT_SERVER_DEBUG_DIR: {str(self._directory)!r} cannot be made: {exc.strerror}"
            ) from None
        self._thread.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_stopped = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, self._stop_timeout_seconds)
        if self._thread.is_alive():
            logger.warning("traces in %s are incomplete: the disk is too slow", self._directory)

    def open_trace(self, rollout_id: str) -> Trace:
        """The trace of the rollout; the file appears with its first event, and is continued if it is there."""
        return Trace(self, file_name(rollout_id))

    def put(self, name: str, line: bytes) -> None:
        """Queue a line for the named file, or drop it if the writer has stopped or too much is waiting."""
        if self._is_stopped:
            return
        if self._put_bytes - self._written_bytes > self._max_backlog_bytes:
            self._fail("the disk is too slow")
            return
        self._put_bytes += len(line)
        self._queue.put(_Entry(name, line))

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.error("events of traces in %s are lost, which is logged only once: %s", self._directory, reason)

    # ------------------------------------------------------------ the background thread

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._next_batch()
            for name, lines in batch.items():
                text = b"".join(lines)
                try:
                    _append(self._directory / name, text)
                except OSError as exc:
                    self._fail(str(exc))
                self._written_bytes += len(text)

    def _next_batch(self) -> tuple[dict[str, list[bytes]], bool]:
        """All lines that wait, at least one, by file; and whether more may come."""
        batch: dict[str, list[bytes]] = {}
        entry = self._queue.get()
        with contextlib.suppress(queue.Empty):
            while entry is not None:
                batch.setdefault(entry.name, []).append(entry.line)
                entry = self._queue.get_nowait()
            return batch, False
        return batch, True


def _append(path: Path, text: bytes) -> None:
    """Append to the file, which is made for its owner only; a symbolic link in its place is refused."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(path, flags, 0o600), "ab") as file:
        file.write(text)
