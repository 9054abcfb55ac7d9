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
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from rollout.errors import StoreError
from rollout.state.sqlite_file import WAIT_SECONDS, open_file, reopen_file, size_of
from rollout.state.sqlite_schema import Row, delete_sql, insert_bodies_sql, touch, upsert_sql

PROBE_SECONDS = 1.0
"""How long a disk that has failed is left alone before it is tried again."""

logger = logging.getLogger(__name__)

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], Any]
Then = Callable[[Any], None]
"""Called on the loop with what came back, right after the commit, even if nobody waits any more."""
Ended = Callable[[bool], None]
"""Called on the loop when it is over, after `Then`, with whether it was committed."""

BATCH = 512
BATCH_BYTES = 32 * 1024 * 1024
"""The most that one transaction takes, so that it neither holds others up nor makes the log long."""

_ROWS_AT_ONCE = (64, 8, 1)  # so few different statements that all stay prepared


class Write(Struct):
    """What one verb wants written: records as rows, bodies by table, numbers to delete by table; all or nothing."""

    records: tuple[Row, ...] = ()
    tools: tuple[tuple[int, bytes], ...] = ()
    tools_gone: tuple[int, ...] = ()
    results: tuple[tuple[int, bytes], ...] = ()
    checkpoints: tuple[tuple[int, bytes], ...] = ()
    checkpoints_gone: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of the bodies."""
        return sum(len(body) for _, body in itertools.chain(self.results, self.checkpoints))


class _Item(Struct):
    """One thing in the queue: a write, or a job that gets the connection."""

    waiter: asyncio.Future[Any] | None = None
    """Of the caller, who may have gone away: nothing depends on it."""
    write: Write | None = None
    job: Job | None = None
    then: Then | None = None
    ended: Ended | None = None


class Writer:
    """Owner of the thread. `failure` says why the disk cannot be written at the moment; while there is one, the thread
    tries by itself every `probe_seconds`, so that it goes away when the disk is well again.
    """

    def __init__(self, path: Path, *, wait_seconds: float = WAIT_SECONDS, probe_seconds: float = PROBE_SECONDS) -> None:
        self._path = path
        self._wait_seconds = wait_seconds
        self._probe_seconds = probe_seconds
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollout-sqlite", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._connection: sqlite3.Connection | None = None
        self._was_open = False
        self._probe_at = 0.0
        self.failure: str | None = None
        self.commits = 0
        """Transactions that have reached the disk, or would have if they had something to write."""
        self.size_bytes = 0
        """Of the file and its log after the last transaction."""

    async def start(self) -> None:
        """Open the file in the thread. `StoreError` says what stands in the way; `stop()` is due then, too."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self.read(lambda connection: None)

    async def stop(self) -> None:
        """Write what is waiting, close the file, end the thread. What comes later is refused."""
        self._stopped = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    async def write(self, write: Write, then: Then | None = None, ended: Ended | None = None) -> None:
        """Return when the write is on the disk. `StoreError`: nothing of it is there.

        A caller that is cancelled stops waiting, nothing else: `then` and `ended` are called all the same.
        """
        await self._put(_Item(self._waiter(), write=write, then=then, ended=ended))

    async def read(self, job: Callable[[sqlite3.Connection], T], then: Callable[[T], None] | None = None) -> T:
        """What the job returns, run in the thread with the connection, inside a transaction."""
        result: T = await self._put(_Item(self._waiter(), job=job, then=then))
        return result

    def post(self, write: Write, then: Then | None = None) -> None:
        """As `write()`, without waiting; a failure is in the log only."""
        self._put(_Item(write=write, then=then))

    def run(self, job: Job, then: Then | None = None, ended: Ended | None = None) -> None:
        """As `read()`, without waiting; a failure is in the log only."""
        self._put(_Item(job=job, then=then, ended=ended))

    def _waiter(self) -> asyncio.Future[Any]:
        assert self._loop is not None, "start() comes first"
        return self._loop.create_future()

    def _put(self, item: _Item) -> Any:
        if self._stopped:
            _end(item, None, StoreError("the store is closed"))
        else:
            self._queue.put(item)
        return item.waiter

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        running = True
        while running:
            batch, running = self._next_batch()
            if batch:
                self._commit(batch)
            if self.failure is not None and running and time.monotonic() >= self._probe_at:
                self._note(self._transact(touch), wrote=True)
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()

    def _next_batch(self) -> tuple[list[_Item], bool]:
        """All that waits, up to a bound; whether more may come."""
        batch: list[_Item] = []
        size = 0
        try:
            seconds = None if self.failure is None else max(0.0, self._probe_at - time.monotonic())
            item = self._queue.get(timeout=seconds)
            while item is not None:
                batch.append(item)
                size += 0 if item.write is None else item.write.size_bytes
                if len(batch) >= BATCH or size >= BATCH_BYTES:
                    return batch, True
                item = self._queue.get_nowait()
        except queue.Empty:
            return batch, True
        return batch, False

    def _commit(self, batch: list[_Item]) -> None:
        """One transaction for the batch. If it fails, nothing of it has happened, and only who is at fault fails."""
        results: list[Any] = []
        failure = self._transact(lambda connection: results.extend(_carry_out(batch, connection)))
        if failure is None or len(batch) == 1:
            self._note(failure, wrote=any(item.write is not None for item in batch))
            self._resolve(batch, results, failure)
        elif not _is_of_the_disk(failure):
            for item in batch:
                self._commit([item])
        else:
            self._note(failure, wrote=True)
            writes, jobs = _parted(batch)
            self._resolve(writes, [], failure)
            if jobs and writes:
                self._commit(jobs)  # reading may go on
            else:
                self._resolve(jobs, [], failure)

    def _transact(self, work: Job) -> Exception | None:
        """Do the work in a transaction; what stood in the way."""
        try:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                work(connection)
                connection.execute("COMMIT")
            except BaseException:
                self._roll_back(connection)
                raise
        except Exception as exc:
            return exc
        self.commits += 1
        self.size_bytes = size_of(self._path)
        return None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            opens = reopen_file if self._was_open else open_file
            self._connection = opens(self._path, wait_seconds=self._wait_seconds)
            self._was_open = True
        return self._connection

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
            self._connection = None  # the next transaction opens the file anew

    def _note(self, failure: Exception | None, *, wrote: bool) -> None:
        """Keep `failure` true: reads that succeed say nothing of a disk that is full."""
        if failure is not None and (_is_of_the_disk(failure) or _is_damage(failure)):
            text = str(_for_the_caller(failure))
            if text != self.failure and self._was_open:  # who opens it is told by the error itself
                logger.error("the store cannot write %s: %s", self._path, text)
            self.failure, self._probe_at = text, time.monotonic() + self._probe_seconds
        elif failure is not None:
            logger.error("the store could not do one thing that was asked of it", exc_info=failure)
        elif wrote and self.failure is not None:
            self.failure = None
            logger.warning("the store can write %s again", self._path)

    def _resolve(self, batch: list[_Item], results: list[Any], failure: Exception | None) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(_give, batch, results, failure)


def _is_of_the_disk(failure: Exception) -> bool:
    """Whether it says something of the disk or the file, as opposed to one write or job."""
    return isinstance(failure, (OSError, StoreError, sqlite3.OperationalError))


def _is_damage(failure: Exception) -> bool:
    return type(failure) is sqlite3.DatabaseError  # its subclasses mean other things


def _for_the_caller(failure: Exception) -> StoreError:
    return StoreError(str(failure) if isinstance(failure, StoreError) else f"{type(failure).__name__}: {failure}")


def _parted(batch: list[_Item]) -> tuple[list[_Item], list[_Item]]:
    """The writes, and the jobs."""
    return [item for item in batch if item.write is not None], [item for item in batch if item.write is None]


def _give(batch: list[_Item], results: list[Any], failure: Exception | None) -> None:
    """On the loop: give every item of a batch its end."""
    if failure is not None:
        for item in batch:
            _end(item, None, failure)
        return
    for item, result in zip(batch, results, strict=True):
        _end(item, result, None)


def _end(item: _Item, result: Any, failure: Exception | None) -> None:
    if failure is None and item.then is not None:
        item.then(result)
    if item.ended is not None:
        item.ended(failure is None)
    if item.waiter is None or item.waiter.done():
        return
    if failure is None:
        item.waiter.set_result(result)
    else:
        item.waiter.set_exception(_for_the_caller(failure))


# ---------------------------------------------------------------- writing, in the thread


def _carry_out(batch: list[_Item], connection: sqlite3.Connection) -> list[Any]:
    """Write all that is to be written, then run the jobs; what the items come to."""
    writes = [item.write for item in batch if item.write is not None]
    if writes:
        _write(writes, connection)
    return [None if item.job is None else item.job(connection) for item in batch]


def _write(writes: list[Write], connection: sqlite3.Connection) -> None:
    _insert(connection, (row for write in writes for row in write.tools), "tools")
    _upsert(connection, [row for write in writes for row in write.records])
    _insert(connection, (row for write in writes for row in write.results), "results")
    _insert(connection, (row for write in writes for row in write.checkpoints), "checkpoints")
    _delete(connection, (number for write in writes for number in write.checkpoints_gone), "checkpoints")
    _delete(connection, (number for write in writes for number in write.tools_gone), "tools")


def _chunks(rows: list[T]) -> Iterator[list[T]]:
    """The rows in few different sizes."""
    start = 0
    for size in _ROWS_AT_ONCE:
        while len(rows) - start >= size:
            yield rows[start : start + size]
            start += size


def _upsert(connection: sqlite3.Connection, rows: list[Row]) -> None:
    for chunk in _chunks(rows):
        connection.execute(upsert_sql(len(chunk)), list(itertools.chain.from_iterable(chunk)))


def _insert(connection: sqlite3.Connection, bodies: Iterable[tuple[int, bytes]], table: str) -> None:
    for chunk in _chunks(list(bodies)):
        connection.execute(insert_bodies_sql(table, len(chunk)), list(itertools.chain.from_iterable(chunk)))


def _delete(connection: sqlite3.Connection, numbers: Iterable[int], table: str) -> None:
    connection.executemany(delete_sql(table), ((number,) for number in numbers))
