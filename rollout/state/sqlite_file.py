"""Opening the state file: alone for a service, read-only for whoever only looks."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from rollout.errors import StoreError
from rollout.state.sqlite_schema import VERSION, prepare, version_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_SECONDS = 3.0
"""How long to wait for a process that has the file and may be about to end."""

_OLDEST_SQLITE = (3, 37, 0)  # STRICT tables
_CACHE_KIB = 8192
_WAL_LIMIT_BYTES = 64 * 1024 * 1024
_BELONGINGS = ("", "-wal", "-journal")
_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",
    f"cache_size = -{_CACHE_KIB}",
    f"journal_size_limit = {_WAL_LIMIT_BYTES}",
    "trusted_schema = OFF",
)


def size_of(path: Path) -> int:
    """Bytes on the disk, with the write-ahead log."""
    total = 0
    for suffix in ("", "-wal"):
        with contextlib.suppress(OSError):
            total += os.stat(f"{path}{suffix}").st_size
    return total


def open_file(path: Path, *, wait_seconds: float = WAIT_SECONDS) -> sqlite3.Connection:
    """A connection that owns the file alone; a new file is made if there is none, readable by its owner only.

    `StoreError` if it is in use, newer than this program, or not ours: such a file is left as it was. A damaged file
    is set aside under a name that says so, and a new one is begun: never silently.
    """
    with contextlib.suppress(FileExistsError):
        _create(path)
    try:
        return _connect(path, wait_seconds)
    except sqlite3.DatabaseError as exc:
        aside = _set_aside(path)
        logger.error("%s is damaged (%s): it is now %s, and a NEW, EMPTY state file is begun", path, exc, aside)
    _create(path)
    return _connect(path, wait_seconds)


def reopen_file(path: Path, *, wait_seconds: float = WAIT_SECONDS) -> sqlite3.Connection:
    """As `open_file()`, for a file that must be there and sound: it makes no file and sets none aside."""
    try:
        return _connect(path, wait_seconds)
    except sqlite3.DatabaseError as exc:
        raise StoreError(_damage(path, exc)) from None


@contextlib.contextmanager
def reading(path: Path, *, wait_seconds: float = 0.0) -> Iterator[sqlite3.Connection]:
    """A connection that cannot change the file. `StoreError` as `open_file()`, and for one of an older version.

    While it is open no service gets the file, and none had it before: so it is the only connection.
    """
    new = [part for part in (Path(f"{path}-shm"), Path(f"{path}-wal")) if not part.exists()]
    connection = _open(path, "ro", wait_seconds)
    try:
        if _checked(path, connection, version_of) != VERSION:
            raise StoreError(f"{path} is empty or of an older version: start a service on it to bring it up to date")
        yield connection
        _remove_leftovers(new)
    except sqlite3.DatabaseError as exc:
        raise StoreError(_damage(path, exc)) from None
    finally:
        connection.close()


def _damage(path: Path, exc: sqlite3.DatabaseError) -> str:
    if getattr(exc, "sqlite_errorname", "") == "SQLITE_NOTADB":
        return f"{path} is not a state file, or its beginning is damaged"
    return f"{path} is damaged: {exc}"


def _remove_leftovers(parts: list[Path]) -> None:
    """What SQLite makes for a reader and leaves behind. Called while nobody else can have the file."""
    for part in parts:
        if part.name.endswith("-shm") or (part.exists() and not part.stat().st_size):
            part.unlink(missing_ok=True)


def _create(path: Path) -> None:
    # Never opened by us when it exists: closing a file drops every lock that this process has on it.
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        raise
    except OSError as exc:
        raise StoreError(f"{path} cannot be made: {exc.strerror}") from None


def _open(path: Path, mode: str, wait_seconds: float) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise StoreError(f"state in a file needs SQLite 3.37 or newer, this Python has {sqlite3.sqlite_version}")
    if not path.is_file():
        raise StoreError(f"{path} is not there" if not path.exists() else f"{path} is not a file")
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=wait_seconds,
        isolation_level=None,
        cached_statements=32,
    )


def _connect(path: Path, wait_seconds: float) -> sqlite3.Connection:
    connection = _open(path, "rw", wait_seconds)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # before WAL: no shared memory, and nobody else gets in
        _checked(path, connection, _make_ready)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_ready(connection: sqlite3.Connection) -> None:
    version = version_of(connection)  # first: a file that is not ours, or damaged, stays as it is
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise sqlite3.DatabaseError(problem)
    if version is None:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # a write, which a full disk need not suffer at a start
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}").fetchall()
    prepare(connection, version)


def _checked(path: Path, connection: sqlite3.Connection, check: Callable[[sqlite3.Connection], T]) -> T:
    """What the check returns; its errors say which file it was. Damage stays a `sqlite3.DatabaseError`."""
    try:
        return check(connection)
    except StoreError as exc:
        raise StoreError(f"{path}: {exc}") from None
    except sqlite3.OperationalError as exc:
        if exc.sqlite_errorname.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise StoreError(f"{path} is in use by another process: one file, one service") from None
        raise StoreError(f"{path} cannot be opened: {exc}") from None


def _set_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}-again")
    for suffix in _BELONGINGS:
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    return aside
