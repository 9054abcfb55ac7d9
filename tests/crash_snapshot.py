"""What a power failure would leave of the service's files, and whether it holds all that was acknowledged.

The service is stopped between two instructions and its two files are copied: that is what the operating system has.
What the disk has may be less. With `synchronous = FULL` SQLite ends every transaction with an fsync of the log and
begins the next one after it, so of all that the log holds only the last transaction can be missing, or torn. Hence:

* whatever follows the last transaction in the log may be cut off at any byte: all that was acknowledged stays;
* the last transaction itself may be cut or torn in the middle: all that was acknowledged before it was begun stays.

From outside nobody sees which acknowledgement belongs to which transaction. So the second promise is held against what
had been acknowledged before an init was sent that was then accepted: its transaction is the last one or one before.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import struct
from pathlib import Path
from typing import NamedTuple

from crash_load import Ledger
from crash_stage import Life

from rollout.state.sqlite_file import open_file
from rollout.testing import MockTrainer

_HEADER_BYTES = 32
_FRAME_HEADER = struct.Struct(">II8sII")
_SECTOR_BYTES = 512


class Acknowledged(NamedTuple):
    """What has left the service: ids that were answered 202, and terminal results that its trainer has seen."""

    accepted: frozenset[str]
    results: dict[str, bytes]


class Snapshot(NamedTuple):
    """The two files at one instant, and what must be in them."""

    folder: Path
    early: Acknowledged
    """Acknowledged before the last transaction was begun."""
    late: Acknowledged
    """Acknowledged at the instant itself."""


class _Log(NamedTuple):
    """Where in a write-ahead log the last transaction lies."""

    begin: int
    end: int


def acknowledged(ledger: Ledger, trainer: MockTrainer) -> Acknowledged:
    """Everything up to now."""
    results = {request.rollout_id or "": request.body for request in trainer.completions()}
    return Acknowledged(frozenset(ledger.accepted), results)


async def take_snapshot(life: Life, database: Path, folder: Path, ledger: Ledger, trainer: MockTrainer) -> Snapshot:
    """Copy the files of a service under load."""
    early, sent = acknowledged(ledger, trainer), ledger.sent
    await ledger.wait_until(lambda: ledger.newest_commit > sent)
    with life.frozen():
        late = acknowledged(ledger, trainer)
        copy_files(database, folder)
    return Snapshot(folder, early, late)


def copy_files(database: Path, folder: Path) -> None:
    """Copy a database that nobody writes to just now, and its log, into a new folder."""
    folder.mkdir()
    for part in (database, _log_of(database)):
        shutil.copy(part, folder / part.name)


async def missing_from(snapshot: Snapshot, name: str, chance: random.Random) -> list[str]:
    """What was acknowledged and is not in the files, after every way in which the power may have failed."""
    return await asyncio.to_thread(_missing_from, snapshot, name, chance)


def _missing_from(snapshot: Snapshot, name: str, chance: random.Random) -> list[str]:
    log = _log_of(snapshot.folder / name).read_bytes()
    last = _last_transaction(log)
    tail_cut = log[: chance.randint(last.end, len(log))]
    tail_torn = log[: last.end] + chance.randbytes(len(log) - last.end)
    cut = log[: chance.randint(last.begin, last.end)]
    cases = {
        "as the system has it": (log, snapshot.late),
        "tail cut": (tail_cut, snapshot.late),
        "tail torn": (tail_torn, snapshot.late),
        "last transaction cut": (cut, snapshot.early),
        "last transaction torn": (_torn(log, last, chance), snapshot.early),
    }
    missing = []
    for number, (what, (content, promised)) in enumerate(cases.items()):
        folder = snapshot.folder / str(number)
        folder.mkdir()
        shutil.copy(snapshot.folder / name, folder / name)
        _log_of(folder / name).write_bytes(content)
        missing += [f"{what}: {problem}" for problem in _compare(folder / name, promised)]
    shutil.rmtree(snapshot.folder)
    return missing


def _torn(log: bytes, last: _Log, chance: random.Random) -> bytes:
    """Any of the sectors that the last transaction touched may have stayed as it was before: here, blank."""
    content = bytearray(log)
    for start in range(last.begin, last.end, _SECTOR_BYTES):
        if chance.random() < 0.5:
            size = min(_SECTOR_BYTES, last.end - start)
            content[start : start + size] = bytes(size)
    return bytes(content)


def _last_transaction(log: bytes) -> _Log:
    """From the end of the last transaction but one to the end of the last; frames of an older round do not count."""
    if len(log) < _HEADER_BYTES:
        return _Log(len(log), len(log))
    page_bytes, salt = struct.unpack_from(">8xI4x8s", log)
    begin = end = _HEADER_BYTES
    frame_bytes = _FRAME_HEADER.size + page_bytes
    for start in range(_HEADER_BYTES, len(log) - frame_bytes + 1, frame_bytes):
        _page, pages_after_commit, frame_salt, _, _ = _FRAME_HEADER.unpack_from(log, start)
        if frame_salt != salt:
            break
        if pages_after_commit:
            begin, end = end, start + frame_bytes
    return _Log(begin, end)


def _compare(database: Path, promised: Acknowledged) -> list[str]:
    connection = open_file(database)  # as a service would: it checks the pages, and sets aside what is damaged
    try:
        held = dict(connection.execute("SELECT id, status FROM records"))
        results = dict(connection.execute("SELECT id, body FROM records JOIN results USING (number)"))
        problems = _integrity(connection)
    finally:
        connection.close()
    problems += [f"{rollout_id} was accepted" for rollout_id in promised.accepted - held.keys()]
    for rollout_id, body in promised.results.items():
        if held.get(rollout_id) == "STARTED" or results.get(rollout_id) != body:
            problems.append(f"the result of {rollout_id} was delivered")
    return problems


def _integrity(connection: sqlite3.Connection) -> list[str]:
    return [said for (said,) in connection.execute("PRAGMA integrity_check") if said != "ok"]


def _log_of(database: Path) -> Path:
    return database.with_name(f"{database.name}-wal")
