"""The one thread that holds the one connection: everything the SQLite store writes or reads goes through it.

One connection, because the SQLite builds that people have can corrupt a WAL file that two write to (fixed in 3.51.3);
in a thread of its own, because a disk may take any time. Writes that wait together share one transaction and one
fsync, and each is acknowledged after its commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from rollout.errors import StoreError
from rollout.state.sqlite_schema import COLUMNS, VERSION, Row, insert_bodies_sql, prepare, upsert_sql

logger = logging.getLogger(__name__)

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], Any]

_BATCH = 512
_ROWS_AT_ONCE = (64, 8, 1)  # so few different statements that all stay prepared
_BUSY_SECONDS = 3.0
_PROBE_SECONDS = 1.0
_CACHE_KIB = 8192
_WAL_LIMIT_BYTES = 64 * 1024 * 1024


class Write(Struct):
    """What one verb wants written: records as rows, bodies by table, numbers to delete by table; all or nothing."""

    records: tuple[Row, ...] = ()
    tools: tuple[tuple[int, bytes], ...] = ()
    results: tuple[tuple[int, bytes], ...] = ()
    checkpoints: tuple[tuple[int, bytes], ...] = ()
    checkpoints_gone: tuple[int, ...] = ()


class _Item(Struct):
    """One thing in the queue: a write, or a job that gets the connection."""

    done: asyncio.Future[Any] | None
    write: Write | None = None
    job: Job | None = None
    on_commit: Callable[[], None] | None = None


class Writer:
    """Owner of the thread. `failure` says why the last transaction did not commit; while there is one, the thread tries
    by itself every second, so that it goes away when the disk is well again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollout-sqlite", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: sqlite3.Connection | None = None
        self.failure: str | None = None
        self.commits = 0

    async def start(self) -> None:
        """Open the file in the thread. Raises `StoreError` with what stands in the way."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self.read(lambda connection: None)

    async def stop(self) -> None:
        """Write what is waiting, close the file, end the thread."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    async def write(self, write: Write, on_commit: Callable[[], None] | None = None) -> None:
        """Return when the write is on the disk. `on_commit` runs on the loop then, even if the caller has gone.

        `StoreError`: nothing of it is there.
        """
        await asyncio.shield(self.post(write, on_commit))

    def post(self, write: Write, on_commit: Callable[[], None] | None = None) -> asyncio.Future[Any]:
        """As `write()`, without waiting; a failure that nobody looks at is not reported."""
        done = self._future()
        self._queue.put(_Item(done, write=write, on_commit=on_commit))
        return done

    async def read(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """What the job returns, run in the thread with the connection, inside the transaction of its batch."""
        done = self._future()
        self._queue.put(_Item(done, job=job))
        result: T = await asyncio.shield(done)
        return result

    def _future(self) -> asyncio.Future[Any]:
        assert self._loop is not None, "start() comes first"
        done = self._loop.create_future()
        done.add_done_callback(_retrieve)
        return done

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        running = True
        while running:
            batch, running = self._next_batch()
            if batch or self.failure is not None:
                self._commit(batch)
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()

    def _next_batch(self) -> tuple[list[_Item], bool]:
        batch: list[_Item] = []
        try:
            item = self._queue.get(timeout=_PROBE_SECONDS if self.failure is not None else None)
            while item is not None:
                batch.append(item)
                if len(batch) >= _BATCH:
                    return batch, True
                item = self._queue.get_nowait()
        except queue.Empty:
            return batch, True
        return batch, False

    def _commit(self, batch: list[_Item]) -> None:
        """One transaction for the batch; if it fails as a whole, each of its items fails."""
        results: list[Any] = [None] * len(batch)
        failure: StoreError | None = None
        try:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._write_all(connection, [item.write for item in batch if item.write is not None])
                for index, item in enumerate(batch):
                    if item.job is not None:
                        results[index] = _outcome(item.job, connection)
                if not batch:
                    connection.execute(f"PRAGMA user_version = {VERSION}")  # writes, and changes nothing
                connection.execute("COMMIT")
            except BaseException:
                self._roll_back(connection)
                raise
        except (sqlite3.Error, OSError) as exc:
            failure = StoreError(f"{type(exc).__name__}: {exc}")
        except StoreError as exc:
            failure = exc
        self._note(failure, bool(batch))
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(_resolve, batch, results, failure)

    def _note(self, failure: StoreError | None, had_work: bool) -> None:
        before, self.failure = self.failure, None if failure is None else str(failure)
        if failure is None:
            self.commits += 1
            if before is not None:
                logger.info("the store works again: %s", self._path)
        elif before is None or had_work:
            logger.error("the store cannot write %s: %s", self._path, failure)

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
            self._connection = None  # the next batch opens the file anew

    def _write_all(self, connection: sqlite3.Connection, writes: list[Write]) -> None:
        _insert(connection, itertools.chain.from_iterable(w.tools for w in writes), "tools")
        _upsert(connection, list(itertools.chain.from_iterable(w.records for w in writes)))
        _insert(connection, itertools.chain.from_iterable(w.results for w in writes), "results")
        _insert(connection, itertools.chain.from_iterable(w.checkpoints for w in writes), "checkpoints")
        gone = [(number,) for w in writes for number in w.checkpoints_gone]
        if gone:
            connection.executemany("DELETE FROM checkpoints WHERE number = ?", gone)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = open_file(self._path)
        return self._connection


def _retrieve(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


def _outcome(job: Job, connection: sqlite3.Connection) -> Any:
    """What a job returns. Its own errors are its caller's, those of the disk are everybody's."""
    try:
        return job(connection)
    except (sqlite3.Error, OSError):
        raise
    except Exception as exc:
        return _Raised(exc)


class _Raised(Struct):
    exception: Exception


def _resolve(batch: list[_Item], results: list[Any], failure: StoreError | None) -> None:
    """On the loop: give every item of a batch its end."""
    for item, result in zip(batch, results, strict=True):
        if failure is None and item.on_commit is not None:
            item.on_commit()
        if item.done is None or item.done.done():
            continue
        if failure is not None:
            item.done.set_exception(StoreError(*failure.args))
        elif isinstance(result, _Raised):
            item.done.set_exception(result.exception)
        else:
            item.done.set_result(result)


def _chunks(count: int) -> Iterable[int]:
    """The count as a sum of few different sizes."""
    for size in _ROWS_AT_ONCE:
        while count >= size:
            yield size
            count -= size


def _upsert(connection: sqlite3.Connection, rows: list[Row]) -> None:
    start = 0
    for size in _chunks(len(rows)):
        values = list(itertools.chain.from_iterable(rows[start : start + size]))
        connection.execute(upsert_sql(size), values)
        start += size


def _insert(connection: sqlite3.Connection, bodies: Iterable[tuple[int, bytes]], table: str) -> None:
    rows, start = list(bodies), 0
    for size in _chunks(len(rows)):
        values = list(itertools.chain.from_iterable(rows[start : start + size]))
        connection.execute(insert_bodies_sql(table, size), values)
        start += size


def open_file(path: Path) -> sqlite3.Connection:
    """A connection that owns the file alone. `StoreError` if it is in use, newer than this program, or not ours.

    A damaged file is set aside under a name that says so, and a new one is begun: never silently.
    """
    try:
        return _connect(path)
    except sqlite3.DatabaseError as exc:
        if isinstance(exc, sqlite3.OperationalError):
            if "locked" in str(exc):
                raise StoreError(f"{path} is in use by another process: one file, one service") from None
            raise StoreError(f"{path} cannot be opened: {exc}") from None
        aside = _set_aside(path)
        logger.error("%s is damaged (%s): it is now %s, and a NEW, EMPTY state file is begun", path, exc, aside)
    return _connect(path)


def _set_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    for suffix in ("", "-wal", "-journal"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


def _connect(path: Path) -> sqlite3.Connection:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as exc:
        raise StoreError(f"{path} cannot be opened: {exc.strerror}") from None
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=32
    )
    try:
        for pragma in (
            "locking_mode = EXCLUSIVE",  # before WAL: no shared memory file, and nobody else gets in
            "auto_vacuum = INCREMENTAL",
            "journal_mode = WAL",
            "synchronous = FULL",
            f"cache_size = -{_CACHE_KIB}",
            f"journal_size_limit = {_WAL_LIMIT_BYTES}",
            "trusted_schema = OFF",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
        prepare(connection)
        if len(connection.execute("SELECT * FROM records LIMIT 0").description) != len(COLUMNS):
            raise StoreError("the tables of the file are not as this version made them")
    except BaseException:
        connection.close()
        raise
    return connection
