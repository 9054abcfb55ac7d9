"""The store in memory: dictionaries and a queue of what will expire. No verb ever waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from rollout.schemas import Phase
from rollout.state.open_records import OpenRecords, with_prefix
from rollout.state.store import (
    Checkpointed,
    Delivered,
    Due,
    Move,
    Postponed,
    Record,
    Restarted,
    Settlement,
    Started,
    Store,
    Tally,
)
from rollout.wire import encode_strict


def without_messages(result: bytes) -> bytes:
    """What is kept of a result when its messages are dropped: enough to say how the rollout ended."""
    try:
        fields = msgspec.json.decode(result, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return b"{}"  # not JSON: there is nothing to be said, and the cache has to shrink all the same
    fields["final_messages"] = fields["extra_fields"] = msgspec.Raw(b"null")
    return encode_strict(fields)


class MemoryStore(Store):
    """State for as long as the process lives.

    Results that are delivered are held up to `result_cache_bytes`, then dropped, oldest first; those that never
    reached the trainer are not. Records expire in the order in which they were settled, since all are kept equally
    long: so finding the next to forget costs nothing, however many there are.
    """

    suspends = False
    name = "memory"

    def __init__(self, result_cache_bytes: int) -> None:
        self._result_cache_bytes = result_cache_bytes
        self._open = OpenRecords()
        self._settled: dict[str, Record] = {}
        self._settled_keys: dict[str, str] = {}  # only keys that are not the id itself
        self._expiring: deque[Record] = deque()
        self._held: deque[Record] = deque()

    async def open(self) -> None:
        """Nothing to make ready."""

    async def close(self) -> None:
        """Nothing to let go of: what is known stays readable."""

    async def create(self, record: Record) -> Record:
        known = self._find(record.rollout_id, record.key)
        if known is None:
            self._open.add(record)
            return record
        return known

    async def get(self, rollout_id: str, key: str | None = None) -> Record | None:
        return self._find(rollout_id, key)

    def _find(self, rollout_id: str, key: str | None) -> Record | None:
        record = self._open.get(rollout_id) or self._settled.get(rollout_id)
        if record is not None or key is None:
            return record
        record = self._open.find(rollout_id, key)
        if record is not None:
            return record
        holder = self._settled_keys.get(key)
        if holder is not None:
            return self._settled[holder]
        other = self._settled.get(key)
        return other if other is not None and other.key == key else None

    async def move(self, rollout_id: str, move: Move) -> Record | None:
        record = self._open.get(rollout_id)
        if record is None or not record.is_live:
            return None
        if isinstance(move, Started):
            if record.phase is not Phase.QUEUED:
                return None
            self._open.start(record, move)
        elif isinstance(move, Checkpointed):
            record.checkpoint = move.messages
        elif isinstance(move, Restarted):
            self._open.restart(record, move)
        else:
            self._open.finish(record, move)
        return record

    async def claim(self, now: float, limit: int) -> Due:
        return self._open.claim(now, limit)

    async def settle(self, rollout_id: str, settlement: Settlement) -> Record | None:
        record = self._open.get(rollout_id)
        if record is None or record.phase is not Phase.DELIVERING:
            return None
        if isinstance(settlement, Postponed):
            record.attempts, record.last_error = settlement.attempts, settlement.error
            self._open.postpone(record, settlement.due)
            return record
        delivered = isinstance(settlement, Delivered)
        self._open.settle(record, settlement, Phase.DELIVERED if delivered else Phase.UNDELIVERED)
        self._settled[rollout_id] = record
        if record.key != rollout_id:
            self._settled_keys[record.key] = rollout_id
        self._expiring.append(record)
        if delivered:
            self._hold(record)
        return record

    def _hold(self, record: Record) -> None:
        """Count a delivered result against the cache; make room if need be."""
        tally = self._open.tally
        size = len(record.result or b"")
        tally.owed_bytes -= size
        tally.held_bytes += size
        self._held.append(record)
        while tally.held_bytes > self._result_cache_bytes and self._held:
            oldest = self._held.popleft()
            if oldest.result is not None and oldest.result_held:
                tally.held_bytes -= len(oldest.result)
                oldest.result, oldest.result_held = without_messages(oldest.result), False

    def scan(self, prefix: str = "", *, live: bool = False) -> Iterator[Record]:
        records = self._open.live() if live else self._open.all()
        return with_prefix(records, prefix)

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
        del self._settled[record.rollout_id]
        if record.key != record.rollout_id:
            del self._settled_keys[record.key]
        tally = self._open.tally
        tally.by_phase[record.phase] -= 1
        tally.by_status[record.status] -= 1
        if record.result_held and record.result is not None:
            if record.phase is Phase.DELIVERED:
                tally.held_bytes -= len(record.result)
            else:
                tally.owed_bytes -= len(record.result)
            record.result = None
        while self._held and not (self._held[0].result_held and self._held[0].result is not None):
            self._held.popleft()

    def tally(self) -> Tally:
        return self._open.tally
