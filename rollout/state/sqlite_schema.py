"""The tables of the SQLite store, how a record becomes a row, and how an older file is brought up to date."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollout.errors import StoreError
from rollout.requests import InitRequest
from rollout.schemas import Phase, RolloutStatus
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
CREATE INDEX records_open ON records (number) WHERE expires_at IS NULL;
CREATE INDEX records_held ON records (expires_at) WHERE phase = 'delivered' AND result_held;
CREATE TABLE results (number INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TABLE checkpoints (number INTEGER PRIMARY KEY, messages BLOB NOT NULL) STRICT;
"""

Migration = Callable[[sqlite3.Connection], None]

MIGRATIONS: dict[int, Migration] = {}
"""`MIGRATIONS[n]` brings a file of version n to n + 1, inside the transaction that notes the new version."""

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

SELECT = (
    f"SELECT {','.join('r.' + c for c in COLUMNS)}, t.body, s.body, c.messages FROM records r "  # noqa: S608
    "LEFT JOIN tools t ON t.number = r.tools LEFT JOIN results s ON s.number = r.number "
    "LEFT JOIN checkpoints c ON c.number = r.number"
)
"""Whole records; what `record_of()` reads."""

Row = Sequence[Any]

_decode_request = msgspec.json.Decoder(InitRequest).decode
_decode_callback = msgspec.json.Decoder(Callback).decode


def upsert_sql(rows: int) -> str:
    """One statement that writes so many records: a step of SQLite is a hand-over of the interpreter lock."""
    return _UPSERT.format(rows=",".join([_ROW] * rows))


def insert_bodies_sql(table: str, rows: int) -> str:
    """One statement that writes so many bodies into `results` or `checkpoints`."""
    return f"INSERT OR REPLACE INTO {table} VALUES {','.join(['(?,?)'] * rows)}"  # noqa: S608


def delete_sql(table: str) -> str:
    """The statement that deletes what a table has under one number."""
    return f"DELETE FROM {table} WHERE number = ?"  # noqa: S608


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
        None if record.last_error is None else record.last_error.encode("utf-8", "replace").decode(),
        None if record.give_up is None else to_wall(record.give_up),
        None if record.expires is None else to_wall(record.expires),
    )


def record_of(row: Row, to_clock: Callable[[float], float]) -> Record:
    """The record in a row of `SELECT`. `ValueError` names one that cannot be read."""
    *columns, tools, result, checkpoint = row
    named: dict[str, Any] = dict(zip(COLUMNS, columns, strict=True))  # pyright: ignore[reportAssignmentType]
    del named["number"]
    rollout_id = named.pop("id")
    expires_at, give_up_at = named.pop("expires_at"), named.pop("give_up_at")
    try:
        named["phase"], named["status"] = Phase(named["phase"]), RolloutStatus(named["status"])
        for column, decode in (("request", _decode_request), ("callback", _decode_callback)):
            named[column] = None if named[column] is None else decode(named[column])
    except ValueError as exc:
        raise ValueError(f"the record of {rollout_id!r} cannot be read: {exc}") from exc
    named["key"] = rollout_id if named["key"] is None else named["key"]
    named["result_held"] = bool(named["result_held"])
    named["tools"] = tools
    return Record(
        rollout_id=rollout_id,
        give_up=None if give_up_at is None else to_clock(give_up_at),
        expires=None if expires_at is None else to_clock(expires_at),
        result=result,
        checkpoint=checkpoint,
        **named,
    )


def version_of(connection: sqlite3.Connection) -> int | None:
    """The version of the tables; None if there are none yet. `StoreError` for a file that is newer or not ours."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not tables and application in (0, APPLICATION_ID):
        return None
    if application != APPLICATION_ID:
        raise StoreError("the file is an SQLite database of another program")
    if version > VERSION:
        raise StoreError(f"the file is of version {version}, this program knows versions up to {VERSION}: upgrade it")
    return version


def prepare(connection: sqlite3.Connection, version: int | None) -> None:
    """Make the tables, or bring those of an older version up to date: wholly, or not at all."""
    if version != VERSION:
        connection.execute("BEGIN IMMEDIATE")
        try:
            if version is None:
                _make_tables(connection)
            else:
                _migrate(connection, version)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            touch(connection)
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
    if {column[1] for column in connection.execute("PRAGMA table_info(records)")} != set(COLUMNS):
        raise StoreError("the tables in the file are not those that this version makes")


def _make_tables(connection: sqlite3.Connection) -> None:
    for statement in _TABLES.split(";"):
        connection.execute(statement)


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    for step in range(version, VERSION):
        MIGRATIONS[step](connection)


def touch(connection: sqlite3.Connection) -> None:
    """Write the version that the file has: a write that changes nothing once it is up to date."""
    connection.execute(f"PRAGMA user_version = {VERSION}")
