"""The records that are not settled yet: queued, running, delivering. What every store keeps in memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from rollout.schemas import Phase, RolloutStatus
from rollout.state.store import Due, Finished, Record, Restarted, Settlement, Started, Tally


class OpenRecords:
    """Open records by id and by key, the deliveries that are due, and the counts of all records.

    No verb waits, none checks what it is told: the store has. A key and an id share one space, because a rollout
    without a key of its own has its id for one.
    """

    def __init__(self) -> None:
        self.tally = Tally.empty()
        self._by_id: dict[str, Record] = {}
        self._ids_by_key: dict[str, str] = {}  # only keys that are not the id itself
        self._live: dict[str, Record] = {}
        self._due: list[tuple[float, str]] = []

    def get(self, rollout_id: str) -> Record | None:
        """The open record of that id."""
        return self._by_id.get(rollout_id)

    def find(self, rollout_id: str, key: str | None) -> Record | None:
        """The open record of that id, or else the one under that key."""
        record = self._by_id.get(rollout_id)
        if record is not None or key is None:
            return record
        holder = self._ids_by_key.get(key)
        if holder is not None:
            return self._by_id[holder]
        other = self._by_id.get(key)
        return other if other is not None and other.key == key else None

    def live(self) -> list[Record]:
        """Those that have not ended."""
        return list(self._live.values())

    def all(self) -> list[Record]:
        """All of them."""
        return list(self._by_id.values())

    def add(self, record: Record, *, counted: bool = False) -> None:
        """Take in a record; `counted`: the tally has it already."""
        self._by_id[record.rollout_id] = record
        if record.key != record.rollout_id:
            self._ids_by_key[record.key] = record.rollout_id
        if record.is_live:
            self._live[record.rollout_id] = record
        if not counted:
            self.tally.by_phase[record.phase] += 1
            self.tally.by_status[record.status] += 1

    def start(self, record: Record, move: Started) -> None:
        """Queued to running."""
        record.started_at = move.at
        self._set_phase(record, Phase.RUNNING)

    def restart(self, record: Record, move: Restarted) -> None:
        """Back to queued."""
        record.run, record.started_at = move.run, None
        self._set_phase(record, Phase.QUEUED)

    def finish(self, record: Record, move: Finished) -> None:
        """To delivering, as claimed by the caller."""
        del self._live[record.rollout_id]
        self._set_status(record, move.status)
        self._set_phase(record, Phase.DELIVERING)
        apply_finish(record, move)
        self.tally.owed_bytes += len(move.result)

    def postpone(self, record: Record, due: float) -> None:
        """The delivery is to be tried again then."""
        record.due = due
        heapq.heappush(self._due, (due, record.rollout_id))

    def settle(self, record: Record, settlement: Settlement, phase: Phase) -> None:
        """To delivered or undelivered: the record is open no more."""
        del self._by_id[record.rollout_id]
        if record.key != record.rollout_id:
            del self._ids_by_key[record.key]
        self._set_phase(record, phase)
        apply_settlement(record, settlement, phase)

    def claim(self, now: float, limit: int) -> Due:
        """Deliveries that are due, earliest first; each is given out once until it is postponed again."""
        found: list[Record] = []
        while self._due and self._due[0][0] <= now and len(found) < limit:
            due, rollout_id = heapq.heappop(self._due)
            record = self._by_id.get(rollout_id)
            if record is not None and record.due == due:
                record.due = None
                found.append(record)
        return Due(records=found, next_due=self._due[0][0] if self._due else None)

    def _set_phase(self, record: Record, phase: Phase) -> None:
        self.tally.by_phase[record.phase] -= 1
        self.tally.by_phase[phase] += 1
        record.phase = phase

    def _set_status(self, record: Record, status: RolloutStatus) -> None:
        self.tally.by_status[record.status] -= 1
        self.tally.by_status[status] += 1
        record.status = status


def apply_finish(record: Record, move: Finished) -> None:
    """What the end changes in a record."""
    record.status, record.phase = move.status, Phase.DELIVERING
    record.finished_at = move.at
    record.result, record.canonical, record.callback = move.result, move.canonical, move.callback
    record.turn, record.give_up = move.turn, move.give_up
    record.request = record.checkpoint = None


def apply_settlement(record: Record, settlement: Settlement, phase: Phase) -> None:
    """What the end of its delivery changes in a record."""
    record.phase, record.attempts = phase, settlement.attempts
    record.delivered_at = getattr(settlement, "at", None)
    record.last_error = getattr(settlement, "error", None)
    record.give_up = record.due = None
    if phase is Phase.DELIVERED:
        record.callback = None
    record.expires = getattr(settlement, "expires", None)


def with_prefix(records: list[Record], prefix: str) -> Iterator[Record]:
    """Those whose id starts with the prefix."""
    return (record for record in records if record.rollout_id.startswith(prefix))
