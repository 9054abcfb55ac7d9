"""The tables of the SQLite store, how a record becomes a row, and how an older file is brought up to date."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollout.errors import StoreError
from rollout.schemas import InitRequest, Phase, RolloutStatus
from rollout.state.store import Callback, Record
from rollout.wire import encode_strict

APPLICATION_ID = 0x526F6C6C  # "Roll": tells our files from other people's
VERSION = 1

_TABLES = """
CREATE TABLE tools (number INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TABLE records (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    key TEXT UNIQUE,                 -- NULL where it is the id itself
    digest BLOB NOT NULL,
    canonical BLOB,
    tools INTEGER NOT NULL,
    phase TEXT NOT NULL,
    status TEXT NOT NULL,
    request BLOB,                    -- until the rollout has ended
    callback BLOB,                   -- from then until its delivery is settled
    result_held INTEGER NOT NULL,
    created_at REAL NOT NULL,
    started_at REAL,
    finished_at REAL,
    delivered_at REAL,
    turn INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    run INTEGER NOT NULL,
    last_error TEXT,
    give_up_at REAL,
    expires_at REAL
) STRICT;
CREATE INDEX records_by_expiry ON records (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX records_open ON records (phase) WHERE expires_at IS NULL;
CREATE TABLE results (number INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TABLE checkpoints (number INTEGER PRIMARY KEY, messages BLOB NOT NULL) STRICT;
"""

MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (lambda connection: None,)
"""`MIGRATIONS[n]` brings a file of version n + 1 - 1 to n + 1; the first makes nothing, the tables begin at 1."""

COLUMNS = (
    "number",
    "id",
    "key",
    "digest",
    "canonical",
    "tools",
    "phase",
    "status",
    "request",
    "callback",
    "result_held",
    "created_at",
    "started_at",
    "finished_at",
    "delivered_at",
    "turn",
    "attempts",
    "run",
    "last_error",
    "give_up_at",
    "expires_at",
)
_CHANGING = COLUMNS[4:]
_ROW = f"({','.join('?' * len(COLUMNS))})"
_UPSERT = (
    f"INSERT INTO records ({','.join(COLUMNS)}) VALUES {{rows}} ON CONFLICT (number) DO UPDATE SET "  # noqa: S608
    + ",".join(f"{c}=excluded.{c}" for c in _CHANGING)
)

Row = Sequence[Any]

_decode_request = msgspec.json.Decoder(InitRequest).decode
_decode_callback = msgspec.json.Decoder(Callback).decode


def upsert_sql(rows: int) -> str:
    """One statement that writes so many records: a step of SQLite is a hand-over of the interpreter lock."""
    return _UPSERT.format(rows=",".join([_ROW] * rows))


def insert_bodies_sql(table: str, rows: int) -> str:
    """One statement that writes so many bodies into `results` or `checkpoints`."""
    return f"INSERT OR REPLACE INTO {table} VALUES {','.join(['(?,?)'] * rows)}"  # noqa: S608


def row_of(record: Record, number: int, tools: int, to_wall: Callable[[float], float]) -> Row:
    """The row of a record; times of the process's clock become wall-clock times, which outlive it."""
    return (
        number,
        record.rollout_id,
        None if record.key == record.rollout_id else record.key,
        record.digest,
        record.canonical,
        tools,
        record.phase.value,
        record.status.value,
        None if record.request is None else encode_strict(record.request),
        None if record.callback is None else encode_strict(record.callback),
        int(record.result_held),
        record.created_at,
        record.started_at,
        record.finished_at,
        record.delivered_at,
        record.turn,
        record.attempts,
        record.run,
        record.last_error,
        None if record.give_up is None else to_wall(record.give_up),
        None if record.expires is None else to_wall(record.expires),
    )


def record_of(
    row: Row, tools: bytes, result: bytes | None, checkpoint: bytes | None, to_clock: Callable[[float], float]
) -> Record:
    """The record in a row of `COLUMNS`."""
    named = dict(zip(COLUMNS, row, strict=True))
    return Record(
        rollout_id=named["id"],
        key=named["id"] if named["key"] is None else named["key"],
        digest=named["digest"],
        canonical=named["canonical"],
        tools=tools,
        phase=Phase(named["phase"]),
        status=RolloutStatus(named["status"]),
        request=None if named["request"] is None else _decode_request(named["request"]),
        callback=None if named["callback"] is None else _decode_callback(named["callback"]),
        result=result,
        result_held=bool(named["result_held"]),
        created_at=named["created_at"],
        started_at=named["started_at"],
        finished_at=named["finished_at"],
        delivered_at=named["delivered_at"],
        turn=named["turn"],
        attempts=named["attempts"],
        run=named["run"],
        last_error=named["last_error"],
        give_up=None if named["give_up_at"] is None else to_clock(named["give_up_at"]),
        expires=None if named["expires_at"] is None else to_clock(named["expires_at"]),
        checkpoint=checkpoint,
    )


def prepare(connection: sqlite3.Connection) -> None:
    """Make the tables in a new file, migrate an older one, refuse one that is newer or not ours (`StoreError`)."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application != APPLICATION_ID and tables:
        raise StoreError("the file is an SQLite database of another program")
    if version > VERSION:
        raise StoreError(f"the file is of version {version}, this program knows versions up to {VERSION}: upgrade it")
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not tables:
            for statement in _TABLES.split(";"):
                connection.execute(statement)
        for migrate in MIGRATIONS[version:VERSION] if tables else ():
            migrate(connection)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
