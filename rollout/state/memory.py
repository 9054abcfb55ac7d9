"""The store in memory: dictionaries, a heap of due deliveries, a queue of what will expire. No verb ever waits."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

import msgspec

from rollout.schemas import Phase
from rollout.state.store import (
    Delivered,
    Due,
    Finished,
    Move,
    Postponed,
    Record,
    Settlement,
    Started,
    Store,
    Tally,
)
from rollout.wire import encode_strict


def without_messages(result: bytes) -> bytes:
    """What is kept of a result when its messages are dropped: enough to say how the rollout ended."""
    fields = msgspec.json.decode(result, type=dict[str, msgspec.Raw])
    fields["final_messages"] = fields["extra_fields"] = msgspec.Raw(b"null")
    return encode_strict(fields)


class MemoryStore(Store):
    """State for as long as the process lives.

    Results that are delivered are held up to `result_cache_bytes`, then dropped, oldest first; those that never
    reached the trainer are not. Records expire in the order in which they ended, since all are kept equally long:
    so finding the next to forget costs nothing, however many there are.
    """

    suspends = False
    name = "memory"

    def __init__(self, result_cache_bytes: int) -> None:
        self._result_cache_bytes = result_cache_bytes
        self._records: dict[str, Record] = {}
        self._ids_by_key: dict[str, str] = {}  # only keys that are not the id itself
        self._live: dict[str, Record] = {}
        self._due: list[tuple[float, str]] = []
        self._expiring: deque[Record] = deque()
        self._held: deque[Record] = deque()
        self._tally = Tally.empty()

    async def open(self) -> None:
        """Nothing to make ready."""

    async def close(self) -> None:
        """Nothing to let go of: what is known stays readable."""

    async def create(self, record: Record) -> Record:
        known = self._find(record.rollout_id, record.key)
        if known is not None:
            return known
        self._records[record.rollout_id] = self._live[record.rollout_id] = record
        if record.key != record.rollout_id:
            self._ids_by_key[record.key] = record.rollout_id
        self._tally.by_phase[record.phase] += 1
        self._tally.by_status[record.status] += 1
        return record

    async def get(self, rollout_id: str, key: str | None = None) -> Record | None:
        return self._find(rollout_id, key)

    def _find(self, rollout_id: str, key: str | None) -> Record | None:
        record = self._records.get(rollout_id)
        if record is None and key is not None:
            holder = self._ids_by_key.get(key)
            if holder is not None:
                return self._records[holder]
            # A key and an id share one space: a rollout without a key of its own has its id for one.
            other = self._records.get(key)
            if other is not None and other.key == key:
                return other
        return record

    async def move(self, rollout_id: str, move: Move) -> Record | None:
        record = self._live.get(rollout_id)
        if record is None:
            return None
        if isinstance(move, Started):
            if record.phase is not Phase.QUEUED:
                return None
            record.started_at = move.at
            self._set_phase(record, Phase.RUNNING)
            return record
        self._finish(record, move)
        return record

    def _finish(self, record: Record, move: Finished) -> None:
        del self._live[record.rollout_id]
        record.finished_at = move.at
        record.result, record.canonical, record.callback = move.result, move.canonical, move.callback
        record.turn, record.give_up = move.turn, move.give_up
        record.request = None
        self._tally.owed_bytes += len(move.result)
        self._tally.by_status[record.status] -= 1
        self._tally.by_status[move.status] += 1
        record.status = move.status
        self._set_phase(record, Phase.DELIVERING)

    def _set_phase(self, record: Record, phase: Phase) -> None:
        self._tally.by_phase[record.phase] -= 1
        self._tally.by_phase[phase] += 1
        record.phase = phase

    async def claim(self, now: float, limit: int) -> Due:
        found: list[Record] = []
        while self._due and self._due[0][0] <= now and len(found) < limit:
            due, rollout_id = heapq.heappop(self._due)
            record = self._records.get(rollout_id)
            if record is not None and record.due == due:
                record.due = None
                found.append(record)
        return Due(records=found, next_due=self._due[0][0] if self._due else None)

    async def settle(self, rollout_id: str, settlement: Settlement) -> Record | None:
        record = self._records.get(rollout_id)
        if record is None or record.phase is not Phase.DELIVERING:
            return None
        record.attempts = settlement.attempts
        if isinstance(settlement, Postponed):
            record.last_error, record.due = settlement.error, settlement.due
            heapq.heappush(self._due, (settlement.due, rollout_id))
            return record
        if isinstance(settlement, Delivered):
            record.delivered_at, record.last_error = settlement.at, None
            self._set_phase(record, Phase.DELIVERED)
        else:
            record.last_error = settlement.error
            self._set_phase(record, Phase.UNDELIVERED)
        record.callback = record.give_up = record.due = None
        record.expires = settlement.expires
        self._expiring.append(record)
        if isinstance(settlement, Delivered):
            self._hold(record)
        return record

    def _hold(self, record: Record) -> None:
        """Count a delivered result against the cache; make room if need be."""
        size = len(record.result or b"")
        self._tally.owed_bytes -= size
        self._tally.held_bytes += size
        self._held.append(record)
        while self._tally.held_bytes > self._result_cache_bytes and self._held:
            oldest = self._held.popleft()
            if oldest.result is not None and oldest.result_held:
                self._tally.held_bytes -= len(oldest.result)
                oldest.result, oldest.result_held = without_messages(oldest.result), False

    def scan(self, prefix: str = "", *, live: bool = False) -> Iterator[Record]:
        for record in list((self._live if live else self._records).values()):
            if record.rollout_id.startswith(prefix):
                yield record

    async def expire(self, now: float, limit: int) -> int:
        gone = 0
        while gone < limit and self._expiring:
            record = self._expiring[0]
            if record.expires is None or record.expires > now:
                break
            self._expiring.popleft()
            gone += 1
            self._forget(record)
        return gone

    def _forget(self, record: Record) -> None:
        del self._records[record.rollout_id]
        if record.key != record.rollout_id:
            del self._ids_by_key[record.key]
        self._tally.by_phase[record.phase] -= 1
        self._tally.by_status[record.status] -= 1
        if record.result_held and record.result is not None:
            if record.phase is Phase.DELIVERED:
                self._tally.held_bytes -= len(record.result)
            else:
                self._tally.owed_bytes -= len(record.result)
            record.result = None
        while self._held and not (self._held[0].result_held and self._held[0].result is not None):
            self._held.popleft()

    def tally(self) -> Tally:
        return self._tally
