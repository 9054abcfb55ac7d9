"""A look into a state file that no service has open, and the one repair that people need: deliver it after all."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from msgspec import Struct

from rollout.errors import StoreError
from rollout.schemas import Phase
from rollout.state.sqlite_file import reading, reopen_file, size_of
from rollout.state.sqlite_schema import SELECT, record_of
from rollout.state.store import Record

_OWED = "phase IN ('delivering', 'undelivered')"
_REDELIVER = (
    "UPDATE records SET phase = 'delivering', attempts = 0, give_up_at = ?, expires_at = NULL "
    "WHERE phase = 'undelivered' AND callback IS NOT NULL"
)


class Summary(Struct, frozen=True, kw_only=True):
    """What a state file holds."""

    size_bytes: int
    records: int
    by_phase: dict[str, int]
    by_status: dict[str, int]
    oldest_undelivered: Record | None
    """Of the results that have not reached their trainer, be they still tried or given up, the one that ended first."""


class StateReader:
    """A state file, open to be read; a context manager. Times of its records are wall-clock times.

    `StoreError` if a service has the file, if it is of another version, damaged, or not ours. Nothing is changed, and
    no service can start on the file meanwhile.
    """

    def __init__(self, path: Path, *, wait_seconds: float = 0.0) -> None:
        self._path = path
        self._reading = reading(path, wait_seconds=wait_seconds)

    def __enter__(self) -> StateReader:
        self._connection = self._reading.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.__exit__(kind, exc, trace)

    def summary(self) -> Summary:
        """Counts, the size, and the oldest result that is owed."""
        oldest = list(self._select(f"WHERE {_OWED} ORDER BY finished_at, r.number LIMIT 1", ()))
        return Summary(
            size_bytes=size_of(self._path),
            records=sum(self._count("phase").values()),
            by_phase=dict.fromkeys(Phase, 0) | self._count("phase"),
            by_status=self._count("status"),
            oldest_undelivered=oldest[0] if oldest else None,
        )

    def _count(self, column: str) -> dict[str, int]:
        sql = f"SELECT {column}, count(*) FROM records GROUP BY 1"  # noqa: S608
        with _damage_named(self._path):
            return dict(self._connection.execute(sql).fetchall())

    def records(self, *, undelivered: bool = False, limit: int = -1) -> Iterator[Record]:
        """Records in the order of their acceptance, read one by one; only those whose result is owed, if asked for."""
        return self._select(f"WHERE {_OWED if undelivered else 'true'} ORDER BY r.number LIMIT ?", (limit,))

    def get(self, rollout_id: str) -> Record | None:
        """The record of that id."""
        return next(self._select("WHERE r.id = ?", (rollout_id,)), None)

    def _select(self, condition: str, values: Sequence[object]) -> Iterator[Record]:
        with _damage_named(self._path):
            for row in self._connection.execute(f"{SELECT} {condition}", values):
                yield record_of(row, float)


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, ValueError) as exc:
        raise StoreError(f"{path} is damaged: {exc}") from exc


def redeliver(
    path: Path, rollout_ids: Sequence[str] | None, *, give_up_at: float, wait_seconds: float = 0.0
) -> list[str]:
    """Mark results that were given up as due again, these or all; the ids of those that were.

    The next service on the file delivers them, until the wall-clock time `give_up_at`. `StoreError` as for reading.
    """
    connection = reopen_file(path, wait_seconds=wait_seconds)
    try:
        connection.execute("BEGIN IMMEDIATE")
        if rollout_ids is None:
            found = connection.execute(f"{_REDELIVER} RETURNING id", (give_up_at,)).fetchall()
        else:
            found = []
            for rollout_id in rollout_ids:
                changed = connection.execute(f"{_REDELIVER} AND id = ? RETURNING id", (give_up_at, rollout_id))
                found += changed.fetchall()
        connection.execute("COMMIT")
    except sqlite3.Error as exc:
        raise StoreError(f"{path} cannot be changed: {exc}") from exc
    finally:
        connection.close()
    return [row[0] for row in found]
