"""Durable state in one file: what was acknowledged survives the process.

Open records are in memory too, so a running rollout reads nothing from the disk; settled ones are on the disk only.
Every change of an open record is decided in memory, on the event loop, and shows there after its commit.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollout.retry import Clock
from rollout.schemas import Phase, RolloutStatus
from rollout.state.memory import without_messages
from rollout.state.open_records import OpenRecords, apply_finish, apply_settlement, with_prefix
from rollout.state.sqlite_schema import COLUMNS, record_of, row_of
from rollout.state.sqlite_writer import Write, Writer
from rollout.state.store import (
    Checkpointed,
    Delivered,
    Due,
    Finished,
    Move,
    Postponed,
    Record,
    Restarted,
    Settlement,
    Started,
    Store,
    Tally,
)

_SELECT = (
    f"SELECT {','.join('r.' + c for c in COLUMNS)}, t.body, s.body, c.messages FROM records r "  # noqa: S608
    "LEFT JOIN tools t ON t.number = r.tools LEFT JOIN results s ON s.number = r.number "
    "LEFT JOIN checkpoints c ON c.number = r.number"
)
_DROP_UNUSED_TOOLS = "DELETE FROM tools WHERE number NOT IN (SELECT tools FROM records)"
_MANY_TOOL_LISTS = 4096
_TRIM = 64
_VACUUM_PAGES = 512


class SqliteStore(Store):
    """State in an SQLite file that this process owns alone.

    A restart finds everything that was acknowledged. While the disk fails, verbs raise `StoreError` and nothing that
    they were to do has happened; reads of open records, transitions to running and claims go on. Wall-clock times on
    the disk are made from the monotonic clock since the start, so a jump of the wall clock changes nothing.
    """

    suspends = True
    name = "sqlite"
    is_durable = True

    def __init__(
        self,
        path: Path | str,
        result_cache_bytes: int,
        *,
        clock: Clock = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        self._result_cache_bytes = result_cache_bytes
        self._writer = Writer(self.path)
        self._wall_minus_clock = wall_clock() - clock()
        self._clock = clock
        self._open = OpenRecords()
        self._numbers: dict[str, int] = {}  # of open records
        self._next_number = 1
        self._tools: dict[bytes, int] = {}
        self._stored_tools: set[int] = set()
        self._creating: dict[str, asyncio.Future[None]] = {}
        self._changing: set[str] = set()
        self._seen: set[int] = set()
        self._trimming = False

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        await self._writer.start()
        await self._writer.read(self._load)

    async def close(self) -> None:
        await self._writer.stop()

    @property
    def failure(self) -> str | None:
        return self._writer.failure

    @property
    def size_bytes(self) -> int:
        total = 0
        for suffix in ("", "-wal"):
            part = self.path.with_name(self.path.name + suffix)
            total += part.stat().st_size if part.exists() else 0
        return total

    def _load(self, connection: sqlite3.Connection) -> None:
        """In the thread, before anything else runs: counts, names, and the open records."""
        tally = self._open.tally
        for phase, status, count in connection.execute("SELECT phase, status, count(*) FROM records GROUP BY 1, 2"):
            tally.by_phase[Phase(phase)] += count
            tally.by_status[RolloutStatus(status)] += count
        sizes = "SELECT sum(length(s.body)) FROM results s JOIN records r USING (number) WHERE r.phase "
        tally.held_bytes = connection.execute(sizes + "= 'delivered' AND r.result_held").fetchone()[0] or 0
        tally.owed_bytes = connection.execute(sizes + "<> 'delivered'").fetchone()[0] or 0
        for rollout_id, key in connection.execute("SELECT id, key FROM records"):
            self._see(rollout_id, key)
        connection.execute(_DROP_UNUSED_TOOLS)
        self._tools = {body: number for number, body in connection.execute("SELECT number, body FROM tools")}
        self._stored_tools = set(self._tools.values())
        self._next_number = (connection.execute("SELECT max(number) FROM records").fetchone()[0] or 0) + 1
        now = self._clock()
        for row in connection.execute(_SELECT + " WHERE r.expires_at IS NULL ORDER BY r.number"):
            record = self._record(row)
            self._numbers[record.rollout_id] = row[0]
            self._open.add(record, counted=True)
            if record.phase is Phase.DELIVERING:
                self._open.postpone(record, now)

    def _see(self, rollout_id: str, key: str | None) -> None:
        """Note that the names are taken: eight bytes each answer "surely new" without asking the disk."""
        self._seen.add(hash(rollout_id))
        if key is not None and key != rollout_id:
            self._seen.add(hash(key))

    def _number_of(self, tools: bytes) -> int:
        """Under which number the tool list is kept: most rollouts of an agent share one."""
        number = self._tools.get(tools)
        if number is None:
            number = self._tools[tools] = max(self._stored_tools.union(self._tools.values()), default=0) + 1
        return number

    def _record(self, row: Any) -> Record:
        *columns, tools, result, checkpoint = row
        return record_of(columns, tools, result, checkpoint, lambda at: at - self._wall_minus_clock)

    def _row(self, record: Record, number: int) -> Any:
        return row_of(record, number, self._number_of(record.tools), lambda at: at + self._wall_minus_clock)

    # ------------------------------------------------------------ verbs

    async def create(self, record: Record) -> Record:
        while (other := self._creating.get(record.rollout_id) or self._creating.get(record.key)) is not None:
            await asyncio.shield(other)
        gate = asyncio.get_running_loop().create_future()
        self._creating[record.rollout_id] = self._creating[record.key] = gate
        try:
            known = await self.get(record.rollout_id, record.key)
            if known is not None:
                return known
            number, self._next_number = self._next_number, self._next_number + 1
            tools: tuple[tuple[int, bytes], ...] = ()
            tools_number = self._number_of(record.tools)
            if tools_number not in self._stored_tools:
                tools = ((tools_number, record.tools),)

            def committed() -> None:
                self._stored_tools.add(tools_number)
                self._see(record.rollout_id, record.key)
                self._numbers[record.rollout_id] = number
                self._open.add(record)

            await self._writer.write(Write(records=(self._row(record, number),), tools=tools), committed)
            return record
        finally:
            del self._creating[record.rollout_id]
            self._creating.pop(record.key, None)
            gate.set_result(None)

    async def get(self, rollout_id: str, key: str | None = None) -> Record | None:
        record = self._open.find(rollout_id, key)
        if record is not None:
            return record
        if hash(rollout_id) not in self._seen and (key is None or hash(key) not in self._seen):
            return None
        return await self._writer.read(lambda connection: self._select(connection, rollout_id, key))

    def _select(self, connection: sqlite3.Connection, rollout_id: str, key: str | None) -> Record | None:
        found = connection.execute(_SELECT + " WHERE r.id = ?", (rollout_id,)).fetchone()
        if found is None and key is not None:
            sql = _SELECT + " WHERE r.key = ? OR (r.id = ? AND r.key IS NULL)"
            found = connection.execute(sql, (key, key)).fetchone()
        return None if found is None else self._record(found)

    async def move(self, rollout_id: str, move: Move) -> Record | None:
        record = self._open.get(rollout_id)
        if record is None or not record.is_live or rollout_id in self._changing:
            return None
        if isinstance(move, Started):
            if record.phase is not Phase.QUEUED:
                return None
            self._open.start(record, move)  # in memory only: after a crash, queued and running are treated alike
            return record
        number = self._numbers[rollout_id]
        if isinstance(move, Checkpointed):
            await self._writer.write(Write(checkpoints=((number, move.messages),)))
            record.checkpoint = move.messages
            return record
        if isinstance(move, Restarted):
            restarted = msgspec.structs.replace(record, run=move.run, phase=Phase.QUEUED, started_at=None)
            row = self._row(restarted, number)
            await self._writer.write(Write(records=(row,)), lambda: self._open.restart(record, move))
            return record
        return await self._finish(record, number, move)

    async def _finish(self, record: Record, number: int, move: Finished) -> Record:
        ended = msgspec.structs.replace(record)
        apply_finish(ended, move)
        write = Write(records=(self._row(ended, number),), results=((number, move.result),), checkpoints_gone=(number,))
        self._changing.add(record.rollout_id)
        try:
            await self._writer.write(write, lambda: self._open.finish(record, move))
        finally:
            self._changing.discard(record.rollout_id)
        return record

    async def claim(self, now: float, limit: int) -> Due:
        return self._open.claim(now, limit)

    async def settle(self, rollout_id: str, settlement: Settlement) -> Record | None:
        record = self._open.get(rollout_id)
        if record is None or record.phase is not Phase.DELIVERING or rollout_id in self._changing:
            return None
        number = self._numbers[rollout_id]
        if isinstance(settlement, Postponed):
            record.attempts, record.last_error = settlement.attempts, settlement.error
            self._open.postpone(record, settlement.due)
            self._writer.post(Write(records=(self._row(record, number),)))  # good to know, not owed to anybody
            return record
        phase = Phase.DELIVERED if isinstance(settlement, Delivered) else Phase.UNDELIVERED
        settled = msgspec.structs.replace(record)
        apply_settlement(settled, settlement, phase)

        def committed() -> None:
            self._open.settle(record, settlement, phase)
            del self._numbers[rollout_id]
            if phase is Phase.DELIVERED:
                self._hold(len(record.result or b""))

        self._changing.add(rollout_id)
        try:
            await self._writer.write(Write(records=(self._row(settled, number),)), committed)
        finally:
            self._changing.discard(rollout_id)
        return record

    def _hold(self, size: int) -> None:
        tally = self._open.tally
        tally.owed_bytes -= size
        tally.held_bytes += size
        if tally.held_bytes > self._result_cache_bytes and not self._trimming:
            self._trimming = True
            task = asyncio.ensure_future(self._writer.read(self._trim))
            task.add_done_callback(self._trimmed)

    def _trim(self, connection: sqlite3.Connection) -> int:
        """Drop the messages of the oldest delivered results; the bytes that this frees."""
        freed = 0
        oldest = connection.execute(
            "SELECT number, body FROM results JOIN records USING (number) WHERE phase = 'delivered' AND result_held "
            "ORDER BY expires_at LIMIT ?",
            (_TRIM,),
        ).fetchall()
        for number, body in oldest:
            if self._open.tally.held_bytes - freed <= self._result_cache_bytes:
                break
            connection.execute("UPDATE results SET body = ? WHERE number = ?", (without_messages(body), number))
            connection.execute("UPDATE records SET result_held = 0 WHERE number = ?", (number,))
            freed += len(body)
        return freed

    def _trimmed(self, task: asyncio.Future[int]) -> None:
        self._trimming = False
        if not task.cancelled() and task.exception() is None:
            self._open.tally.held_bytes -= task.result()

    def scan(self, prefix: str = "", *, live: bool = False) -> Iterator[Record]:
        return with_prefix(self._open.live() if live else self._open.all(), prefix)

    async def expire(self, now: float, limit: int) -> int:
        gone = await self._writer.read(lambda connection: self._delete_expired(connection, now, limit))
        tally = self._open.tally
        for rollout_id, key, phase, status, held, size in gone:
            self._seen.discard(hash(rollout_id))
            if key is not None:
                self._seen.discard(hash(key))
            tally.by_phase[Phase(phase)] -= 1
            tally.by_status[RolloutStatus(status)] -= 1
            if phase == Phase.UNDELIVERED:
                tally.owed_bytes -= size
            elif held:
                tally.held_bytes -= size
        return len(gone)

    def _delete_expired(self, connection: sqlite3.Connection, now: float, limit: int) -> list[Any]:
        gone = connection.execute(
            "SELECT id, key, phase, status, result_held, coalesce(length(body), 0), number FROM records "
            "LEFT JOIN results USING (number) WHERE expires_at <= ? ORDER BY expires_at LIMIT ?",
            (now + self._wall_minus_clock, limit),
        ).fetchall()
        numbers = [(row[6],) for row in gone]
        if numbers:
            connection.executemany("DELETE FROM results WHERE number = ?", numbers)
            connection.executemany("DELETE FROM records WHERE number = ?", numbers)
            connection.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
        return [row[:6] for row in gone]

    def tally(self) -> Tally:
        return self._open.tally
