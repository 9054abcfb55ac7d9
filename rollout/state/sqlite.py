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

import msgspec
from msgspec import Struct

from rollout.retry import Clock
from rollout.schemas import Phase, RolloutStatus
from rollout.state.memory import without_messages
from rollout.state.open_records import OpenRecords, apply_finish, apply_settlement, with_prefix
from rollout.state.sqlite_file import WAIT_SECONDS
from rollout.state.sqlite_schema import COLUMNS, SELECT, Row, record_of, row_of
from rollout.state.sqlite_writer import PROBE_SECONDS, Then, Write, Writer
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
from rollout.state.tool_lists import ToolLists

_DROP_UNUSED_TOOLS = "DELETE FROM tools WHERE number NOT IN (SELECT tools FROM records)"
_NUMBER, _TOOLS = COLUMNS.index("number"), COLUMNS.index("tools")
_TRIM = 64
_VACUUM_PAGES = 4096
_SPARE_PAGES = 256
_SPARE_SHARE = 8


class _Place(Struct, frozen=True, gc=False):
    """Where a record is in the file."""

    number: int
    tools: int


class _Forgotten(Struct, frozen=True, gc=False):
    """What has to be known of a record that was deleted."""

    rollout_id: str
    key: str | None
    phase: str
    status: str
    is_held: int
    size_bytes: int
    tools: int
    number: int


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
        wait_seconds: float = WAIT_SECONDS,
        probe_seconds: float = PROBE_SECONDS,
    ) -> None:
        self.path = Path(path)
        self._result_cache_bytes = result_cache_bytes
        self._writer = Writer(self.path, wait_seconds=wait_seconds, probe_seconds=probe_seconds)
        self._wall_minus_clock = wall_clock() - clock()
        self._clock = clock
        self._open = OpenRecords()
        self._places: dict[str, _Place] = {}  # of open records
        self._next_number = 1
        self._tools = ToolLists()
        self._creating: dict[str, asyncio.Future[None]] = {}
        self._changing: set[str] = set()
        self._checkpointed: set[str] = set()
        self._ids: set[int] = set()
        self._keys: set[int] = set()  # only keys that are not the id itself
        self._trimming = self._trims_on = False

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        try:
            await self._writer.start()
            await self._writer.read(self._load)
        except BaseException:
            await self._writer.stop()
            raise
        self._trim_if_full()

    async def close(self) -> None:
        await self._writer.stop()

    @property
    def failure(self) -> str | None:
        return self._writer.failure

    @property
    def size_bytes(self) -> int:
        return self._writer.size_bytes

    @property
    def commits(self) -> int:
        return self._writer.commits

    def _load(self, connection: sqlite3.Connection) -> None:
        """In the thread, before anything else runs: counts, names, and the open records."""
        tally = self._open.tally
        for phase, status, count in connection.execute("SELECT phase, status, count(*) FROM records GROUP BY 1, 2"):
            tally.by_phase[Phase(phase)] += count
            tally.by_status[RolloutStatus(status)] += count
        sizes = "SELECT coalesce(sum(length(s.body)), 0) FROM results s JOIN records r USING (number) WHERE r.phase "
        tally.held_bytes = connection.execute(sizes + "= 'delivered' AND r.result_held").fetchone()[0]
        tally.owed_bytes = connection.execute(sizes + "<> 'delivered'").fetchone()[0]
        for rollout_id, key in connection.execute("SELECT id, key FROM records"):
            self._see(rollout_id, key)
        connection.execute(_DROP_UNUSED_TOOLS)
        uses = "SELECT t.number, t.body, count(*) FROM tools t JOIN records r ON r.tools = t.number GROUP BY t.number"
        self._tools.load(connection.execute(uses))
        self._next_number = connection.execute("SELECT coalesce(max(number), 0) + 1 FROM records").fetchone()[0]
        now = self._clock()
        for row in connection.execute(f"{SELECT} WHERE r.expires_at IS NULL ORDER BY r.number"):
            record = self._record(row)
            self._places[record.rollout_id] = _Place(row[_NUMBER], row[_TOOLS])
            self._open.add(record, counted=True)
            if record.checkpoint is not None:
                self._checkpointed.add(record.rollout_id)
            if record.phase is Phase.DELIVERING:
                self._open.postpone(record, now)

    def _see(self, rollout_id: str, key: str | None) -> None:
        """Note that the names are taken: a few bytes each answer "surely new" without asking the disk."""
        self._ids.add(hash(rollout_id))
        if key is not None and key != rollout_id:
            self._keys.add(hash(key))

    def _has_seen(self, rollout_id: str, key: str | None) -> bool:
        if hash(rollout_id) in self._ids:
            return True
        return key is not None and (hash(key) in self._keys or hash(key) in self._ids)

    def _record(self, row: Row) -> Record:
        return record_of(row, lambda at: at - self._wall_minus_clock)

    def _row(self, record: Record, place: _Place) -> Row:
        return row_of(record, place.number, place.tools, lambda at: at + self._wall_minus_clock)

    # ------------------------------------------------------------ create, get

    async def create(self, record: Record) -> Record:
        names = {record.rollout_id, record.key}
        while others := [self._creating[name] for name in names if name in self._creating]:
            await asyncio.wait(others)
        gate = asyncio.get_running_loop().create_future()
        self._creating.update(dict.fromkeys(names, gate))
        try:
            known = await self.get(record.rollout_id, record.key)
        except BaseException:
            self._open_gate(names, gate)
            raise
        if known is not None:
            self._open_gate(names, gate)
            return known
        await self._insert(record, lambda: self._open_gate(names, gate))
        return record

    def _open_gate(self, names: set[str], gate: asyncio.Future[None]) -> None:
        for name in names:
            del self._creating[name]
        gate.set_result(None)

    async def _insert(self, record: Record, ended: Callable[[], None]) -> None:
        """Write the record; `ended` is called when that is over, also if the caller has gone away by then."""
        place = _Place(self._next_number, self._tools.take(record.tools))
        self._next_number += 1

        def committed(_: None) -> None:
            self._tools.note_stored(place.tools)
            self._see(record.rollout_id, record.key)
            self._places[record.rollout_id] = place
            self._open.add(record)

        def over(is_committed: bool) -> None:
            if not is_committed:
                self._let_go_of_tools([place.tools])
            ended()

        tools = () if self._tools.is_stored(place.tools) else ((place.tools, record.tools),)
        await self._writer.write(Write(records=(self._row(record, place),), tools=tools), committed, over)

    def _let_go_of_tools(self, numbers: list[int]) -> None:
        unused = tuple(number for number in numbers if self._tools.release(number))
        if unused:
            self._writer.post(Write(tools_gone=unused))

    async def get(self, rollout_id: str, key: str | None = None) -> Record | None:
        record = self._open.get(rollout_id)
        if record is not None or not self._has_seen(rollout_id, key):
            return record
        if hash(rollout_id) not in self._ids:
            record = self._open.find(rollout_id, key)
            if record is not None:
                return record
        return await self._writer.read(lambda connection: self._select(connection, rollout_id, key))

    def _select(self, connection: sqlite3.Connection, rollout_id: str, key: str | None) -> Record | None:
        found = connection.execute(f"{SELECT} WHERE r.id = ?", (rollout_id,)).fetchone()
        if found is None and key is not None:
            sql = f"{SELECT} WHERE r.key = ? OR (r.id = ? AND r.key IS NULL)"
            found = connection.execute(sql, (key, key)).fetchone()
        return None if found is None else self._record(found)

    # ------------------------------------------------------------ move, claim, settle

    async def move(self, rollout_id: str, move: Move) -> Record | None:
        record = self._open.get(rollout_id)
        if record is None or not record.is_live or rollout_id in self._changing:
            return None
        place = self._places[rollout_id]
        if isinstance(move, Started):
            if record.phase is not Phase.QUEUED:
                return None
            self._open.start(record, move)  # in memory only: after a crash, queued and running are treated alike
        elif isinstance(move, Checkpointed):
            self._checkpointed.add(rollout_id)  # from now on there may be one on the disk
            checkpoint = Write(checkpoints=((place.number, move.messages),))
            await self._writer.write(checkpoint, lambda _: setattr(record, "checkpoint", move.messages))
        elif isinstance(move, Restarted):
            restarted = msgspec.structs.replace(record, run=move.run, phase=Phase.QUEUED, started_at=None)
            await self._change(
                record, Write(records=(self._row(restarted, place),)), lambda _: self._open.restart(record, move)
            )
        else:
            await self._finish(record, place, move)
        return record

    async def _finish(self, record: Record, place: _Place, move: Finished) -> None:
        ended = msgspec.structs.replace(record)
        apply_finish(ended, move)
        number = place.number
        write = Write(
            records=(self._row(ended, place),),
            results=((number, move.result),),
            checkpoints_gone=(number,) if record.rollout_id in self._checkpointed else (),
        )
        await self._change(record, write, lambda _: self._note_finished(record, move))

    def _note_finished(self, record: Record, move: Finished) -> None:
        self._checkpointed.discard(record.rollout_id)
        self._open.finish(record, move)

    async def _change(self, record: Record, write: Write, then: Then) -> None:
        """Write a transition. Until that is done, also if the caller goes away, the record takes no other one."""
        self._changing.add(record.rollout_id)
        await self._writer.write(write, then, lambda _: self._changing.discard(record.rollout_id))

    async def claim(self, now: float, limit: int) -> Due:
        return self._open.claim(now, limit)

    async def settle(self, rollout_id: str, settlement: Settlement) -> Record | None:
        record = self._open.get(rollout_id)
        if record is None or record.phase is not Phase.DELIVERING or rollout_id in self._changing:
            return None
        place = self._places[rollout_id]
        if isinstance(settlement, Postponed):
            record.attempts, record.last_error = settlement.attempts, settlement.error
            self._open.postpone(record, settlement.due)
            self._writer.post(Write(records=(self._row(record, place),)))  # good to know, not owed to anybody
            return record
        phase = Phase.DELIVERED if isinstance(settlement, Delivered) else Phase.UNDELIVERED
        settled = msgspec.structs.replace(record)
        apply_settlement(settled, settlement, phase)

        def committed(_: None) -> None:
            self._open.settle(record, settlement, phase)
            del self._places[rollout_id]
            if phase is Phase.DELIVERED:
                self._hold(len(record.result or b""))

        await self._change(record, Write(records=(self._row(settled, place),)), committed)
        return record

    # ------------------------------------------------------------ the result cache

    def _hold(self, size: int) -> None:
        tally = self._open.tally
        tally.owed_bytes -= size
        tally.held_bytes += size
        self._trim_if_full()

    def _trim_if_full(self) -> None:
        if self._open.tally.held_bytes > self._result_cache_bytes and not self._trimming:
            self._trimming = True
            self._writer.run(self._trim, self._note_trimmed, self._trimmed)

    def _trim(self, connection: sqlite3.Connection) -> int:
        """Drop the messages of the oldest delivered results; the bytes that this frees."""
        too_much = self._open.tally.held_bytes - self._result_cache_bytes
        oldest = connection.execute(
            "SELECT number, body FROM records JOIN results USING (number) WHERE phase = 'delivered' AND result_held "
            "ORDER BY expires_at, number LIMIT ?",
            (_TRIM,),
        ).fetchall()
        freed = 0
        for number, body in oldest:
            if freed >= too_much:
                break
            connection.execute("UPDATE results SET body = ? WHERE number = ?", (without_messages(body), number))
            connection.execute("UPDATE records SET result_held = 0 WHERE number = ?", (number,))
            freed += len(body)
        return freed

    def _note_trimmed(self, freed: int) -> None:
        self._open.tally.held_bytes -= freed
        self._trims_on = freed > 0

    def _trimmed(self, is_committed: bool) -> None:
        self._trimming = False
        if is_committed and self._trims_on:
            self._trim_if_full()

    # ------------------------------------------------------------ scan, expire, tally

    def scan(self, prefix: str = "", *, live: bool = False) -> Iterator[Record]:
        return with_prefix(self._open.live() if live else self._open.all(), prefix)

    async def expire(self, now: float, limit: int) -> int:
        expired = now + self._wall_minus_clock
        gone = await self._writer.read(lambda connection: _delete_expired(connection, expired, limit), self._forget)
        return len(gone)

    def _forget(self, gone: list[_Forgotten]) -> None:
        tally = self._open.tally
        for record in gone:
            self._ids.discard(hash(record.rollout_id))
            if record.key is not None:
                self._keys.discard(hash(record.key))
            tally.by_phase[Phase(record.phase)] -= 1
            tally.by_status[RolloutStatus(record.status)] -= 1
            if record.phase == Phase.UNDELIVERED:
                tally.owed_bytes -= record.size_bytes
            elif record.is_held:
                tally.held_bytes -= record.size_bytes
        self._let_go_of_tools([record.tools for record in gone])

    def tally(self) -> Tally:
        return self._open.tally


def _delete_expired(connection: sqlite3.Connection, expired: float, limit: int) -> list[_Forgotten]:
    """Delete records that have expired, earliest first, and give free pages back."""
    rows = connection.execute(
        "SELECT id, key, phase, status, result_held, coalesce(length(body), 0), tools, number FROM records "
        "LEFT JOIN results USING (number) WHERE expires_at <= ? ORDER BY expires_at, number LIMIT ?",
        (expired, limit),
    ).fetchall()
    gone = [_Forgotten(*row) for row in rows]
    numbers = [(record.number,) for record in gone]
    connection.executemany("DELETE FROM results WHERE number = ?", numbers)
    connection.executemany("DELETE FROM records WHERE number = ?", numbers)
    _give_pages_back(connection)
    return gone


def _give_pages_back(connection: sqlite3.Connection) -> None:
    """Shrink the file by what is free, but for a reserve that constant load would fill again at once."""
    free = connection.execute("PRAGMA freelist_count").fetchone()[0]
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    for _ in range(min(free - max(_SPARE_PAGES, pages // _SPARE_SHARE), _VACUUM_PAGES)):
        connection.execute("PRAGMA incremental_vacuum(1)")  # one by one: the module stops after the first step
