"""The registry over every store, against a model that is simple enough to be believed: any verbs in any order."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from disks import copy_state
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stores import FACTORIES, IDS, MakeStore, make_result

from rollout.errors import Conflict, ServiceUnavailable
from rollout.requests import InitRequest, parse_init
from rollout.schemas import Phase, RolloutStatus
from rollout.state.registry import Admission, Registry, init_answer
from rollout.state.store import Delivered, GivenUp, Postponed, Record
from rollout.testing import FakeClock, make_request
from rollout.wire import encode_strict

CAPACITY = 4
CACHE_BYTES = 900
OWED_LIMIT_BYTES = 2500
TTL_SECONDS = 100.0
HORIZON_SECONDS = 50.0

NAMES = st.sampled_from(["a", "b", "k", "x"])
KEYS = st.none() | NAMES
MESSAGES = [b'[{"n":1,"m":[]}]', b'[{"m": [], "n": 1.0}]', b'[{"n":2}]']
VALUES = [0, 0, 1]
"""Which of the messages are the same JSON value: the second is the first, spelled another way."""


@dataclasses.dataclass
class Known:
    """What the model knows of one record."""

    rollout_id: str
    key: str
    value: int
    phase: Phase = Phase.QUEUED
    status: RolloutStatus = RolloutStatus.STARTED
    result: bytes = b""
    held: bool = True
    claimed: bool = False
    due: float | None = None
    expires: float | None = None
    attempts: int = 0

    @property
    def live(self) -> bool:
        return self.status is RolloutStatus.STARTED


@dataclasses.dataclass
class Pending:
    """An admission that is being decided."""

    admission: Admission
    rollout_id: str
    key: str
    value: int
    cancelled: bool = False


class RegistryMachine(RuleBasedStateMachine):
    """Every rule does one thing to the registry and to the model, and compares what comes back."""

    pending = Bundle("pending")
    make_store: MakeStore

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory()
        self.clock = FakeClock()
        self.records: dict[str, Known] = {}
        self.admissions: dict[str, Pending] = {}
        self.held: list[Known] = []
        self.draining = False

    def run(self, awaitable: Any) -> Any:
        return self._loop.run_until_complete(awaitable)

    @initialize()
    def begin(self) -> None:
        self._open_store(Path(self._folder.name) / "x")

    def _open_store(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self.store = self.make_store(CACHE_BYTES, self.folder)
        self.registry = Registry(
            self.store,
            capacity=CAPACITY,
            owed_limit_bytes=OWED_LIMIT_BYTES,
            ttl_seconds=TTL_SECONDS,
            horizon_seconds=HORIZON_SECONDS,
            clock=self.clock,
            wall_clock=lambda: 0.0,
        )
        self.run(self.store.open())

    def teardown(self) -> None:
        self.run(self.store.close())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._folder.cleanup()

    # ------------------------------------------------------------ admission

    @rule(target=pending, rollout_id=NAMES, key=KEYS, spelling=st.integers(0, 2))
    def enter(self, rollout_id: str, key: str | None, spelling: int) -> Any:
        request = self._request(rollout_id, key, spelling)
        expected = self._conflicts(self.admissions.values(), request, VALUES[spelling])
        try:
            admission, leads = self.registry.enter(request)
        except Conflict as exc:
            assert exc.code in expected  # noqa: PT017
            return multiple()
        assert not expected
        assert leads is (rollout_id not in self.admissions)
        if not leads:
            assert admission is self.admissions[rollout_id].admission
            return multiple()
        entered = Pending(admission, rollout_id, request.key, VALUES[spelling])
        self.admissions[rollout_id] = entered
        return entered

    def _request(self, rollout_id: str, key: str | None, spelling: int) -> InitRequest:
        body = encode_strict(make_request(rollout_id=rollout_id, idempotency_key=key, messages=["@"]))
        return parse_init(body.replace(b'["@"]', MESSAGES[spelling]), 1000)

    def _conflicts(self, others: Any, request: InitRequest, value: int) -> set[str]:
        """Codes of all that stands against the request among the others: none if it is one of them, or new."""
        found = set()
        for other in others:
            if other.key == request.key and other.rollout_id != request.rollout_id:
                found.add("key_in_use")
            if other.rollout_id == request.rollout_id and other.key != request.key:
                found.add("id_in_use")
            if (other.rollout_id, other.key) == (request.rollout_id, request.key) and other.value != value:
                found.add("body_differs")
        return found

    @rule(entered=consumes(pending), fails=st.booleans())
    def decide(self, entered: Pending, fails: bool) -> None:
        admission, request = entered.admission, entered.admission.request
        del self.admissions[entered.rollout_id]
        assert admission.cancelled is entered.cancelled
        try:
            record = self._find_or_admit(entered, fails)
        except (Conflict, ServiceUnavailable) as exc:
            admission.resolve(None, exc)
        else:
            admission.resolve(init_answer(record) if record is not None else b"")
        finally:
            self.registry.leave(admission)
        assert request.rollout_id not in self.registry.admitting()

    def _find_or_admit(self, entered: Pending, fails: bool) -> Record | None:
        admission = entered.admission
        expected = self._conflicts(self.records.values(), admission.request, entered.value)
        try:
            record: Record | None = self.run(self.registry.known(admission))
        except Conflict as exc:
            assert exc.code in expected  # noqa: PT017
            raise
        assert not expected
        assert (record is not None) is (entered.rollout_id in self.records)
        if record is not None or fails:
            return record
        codes = self._refusals()
        try:
            record = self.run(self.registry.admit(admission, b'[{"type":"function"}]'))
        except ServiceUnavailable as exc:
            assert exc.code in codes  # noqa: PT017
            raise
        assert not codes
        self.records[entered.rollout_id] = Known(entered.rollout_id, entered.key, entered.value)
        return record

    def _refusals(self) -> set[str]:
        owed = sum(len(r.result) for r in self.records.values() if r.phase in (Phase.DELIVERING, Phase.UNDELIVERED))
        live = sum(r.live for r in self.records.values())
        found = {"draining": self.draining, "results_full": owed >= OWED_LIMIT_BYTES, "queue_full": live >= CAPACITY}
        return {code for code, refuses in found.items() if refuses}

    @precondition(lambda self: self.store.is_durable and not self.admissions)
    @rule()
    def die_and_start_again(self) -> None:
        """A process that is killed: what was acknowledged is in the file, what was claimed is due, nothing runs."""
        self.run(self.store.expire(0.0, 0))  # what is only good to know, and so not waited for, is written before this
        folder = self.folder.with_name(f"{self.folder.name}x")
        copy_state(self.folder / "state.db", folder / "state.db")
        self.run(self.store.close())
        self._open_store(folder)
        for known in self.records.values():
            if known.phase is Phase.RUNNING:
                known.phase = Phase.QUEUED
            if known.phase is Phase.DELIVERING:
                known.due, known.claimed = 0.0, False
        self.draining = False

    @rule(rollout_id=NAMES)
    def cancel_admission(self, rollout_id: str) -> None:
        entered = self.admissions.get(rollout_id)

        assert self.registry.cancel_admission(rollout_id) is (entered is not None)

        if entered is not None:
            entered.cancelled = True

    @precondition(lambda self: not self.draining and len(self.records) > 2)
    @rule()
    def drain(self) -> None:
        self.registry.begin_drain()
        self.draining = True

    # ------------------------------------------------------------ the life of a record

    @rule(rollout_id=NAMES)
    def start(self, rollout_id: str) -> None:
        known = self.records.get(rollout_id)
        may_start = known is not None and known.phase is Phase.QUEUED

        assert (self.run(self.registry.start(rollout_id)) is not None) is may_start

        if known is not None and may_start:
            known.phase = Phase.RUNNING

    @rule(rollout_id=NAMES, filling=st.sampled_from([0, 300, 800]), ends_well=st.booleans())
    def finish(self, rollout_id: str, filling: int, ends_well: bool) -> None:
        known = self.records.get(rollout_id)
        may_finish = known is not None and known.live
        status = RolloutStatus.COMPLETED if ends_well else RolloutStatus.ERROR
        result = make_result(rollout_id, filling)

        record = self.run(self.registry.finish(rollout_id, status, result, 3))

        assert (record is not None) is may_finish
        if known is not None and may_finish:
            assert record.give_up == self.clock() + HORIZON_SECONDS
            known.phase, known.status, known.result, known.claimed = Phase.DELIVERING, status, result, True

    @rule(rollout_id=NAMES)
    def settle_delivered(self, rollout_id: str) -> None:
        known = self._owned(rollout_id)
        if known is None:
            return
        settlement = Delivered(at=0.0, attempts=known.attempts + 1, expires=self.registry.expiry())
        assert self.run(self.store.settle(rollout_id, settlement)) is not None
        self._settled(known, Phase.DELIVERED)
        self.held.append(known)
        while sum(len(r.result) for r in self.held) > CACHE_BYTES:
            self.held.pop(0).held = False

    @rule(rollout_id=NAMES)
    def settle_given_up(self, rollout_id: str) -> None:
        known = self._owned(rollout_id)
        if known is None:
            return
        settlement = GivenUp(attempts=known.attempts + 1, error="no", expires=self.registry.expiry())
        assert self.run(self.store.settle(rollout_id, settlement)) is not None
        self._settled(known, Phase.UNDELIVERED)

    @rule(rollout_id=NAMES, pause=st.integers(0, 200))
    def settle_postponed(self, rollout_id: str, pause: int) -> None:
        known = self._owned(rollout_id)
        if known is None:
            return
        due = self.clock() + pause
        assert self.run(self.store.settle(rollout_id, Postponed(attempts=known.attempts + 1, error="x", due=due)))
        known.attempts, known.due, known.claimed = known.attempts + 1, due, False

    def _owned(self, rollout_id: str) -> Known | None:
        """The record, if somebody makes an attempt to deliver it; only they settle."""
        known = self.records.get(rollout_id)
        return known if known is not None and known.claimed else None

    def _settled(self, known: Known, phase: Phase) -> None:
        known.phase, known.claimed, known.attempts = phase, False, known.attempts + 1
        known.expires = self.clock() + TTL_SECONDS

    @rule(rollout_id=NAMES)
    def settle_what_is_not_being_delivered(self, rollout_id: str) -> None:
        known = self.records.get(rollout_id)
        if known is None or known.phase is not Phase.DELIVERING:
            assert self.run(self.store.settle(rollout_id, Delivered(at=0.0, attempts=9, expires=0.0))) is None

    @rule(limit=st.integers(1, 3))
    def claim(self, limit: int) -> None:
        waiting = [(r.due, r.rollout_id) for r in self.records.values() if r.due is not None]
        due_now = sorted(due for due, _ in waiting if due <= self.clock())

        found = self.run(self.store.claim(self.clock(), limit))

        ids = [record.rollout_id for record in found.records]
        assert [self.records[rollout_id].due for rollout_id in ids] == due_now[:limit]
        for rollout_id in ids:
            self.records[rollout_id].due, self.records[rollout_id].claimed = None, True
        left = [r.due for r in self.records.values() if r.due is not None]
        assert found.next_due == min(left, default=None)

    # ------------------------------------------------------------ time

    @rule(seconds=st.sampled_from([0.5, 30.0, TTL_SECONDS / 2, TTL_SECONDS, TTL_SECONDS * 10]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(limit=st.integers(1, 5))
    def expire(self, limit: int) -> None:
        now = self.clock()
        expired = sorted(r.expires for r in self.records.values() if r.expires is not None and r.expires <= now)

        assert self.run(self.store.expire(now, limit)) == min(limit, len(expired))

        gone = [known for name, known in self.records.items() if self.run(self.store.get(name)) is None]
        assert sorted(r.expires or 0.0 for r in gone) == expired[:limit]
        for known in gone:
            del self.records[known.rollout_id]
        self.held = [r for r in self.held if r.rollout_id in self.records and self.records[r.rollout_id] is r]

    # ------------------------------------------------------------ what is always true

    @invariant()
    def every_record_is_as_the_model_has_it(self) -> None:
        for known in self.records.values():
            record = self.run(self.registry.get(known.rollout_id))
            assert (record.key, record.phase, record.status) == (known.key, known.phase, known.status)
            assert (record.attempts, record.expires) == (known.attempts, known.expires)
            assert record.result_held is known.held
            if known.result and known.held:
                assert record.result == known.result
            by_key = self.run(self.store.get("nobody", known.key))
            assert by_key.rollout_id == known.rollout_id

    @invariant()
    def the_tally_counts_what_is_there(self) -> None:
        tally = self.store.tally()
        assert Counter(tally.by_phase) == Counter(r.phase for r in self.records.values())
        assert Counter(tally.by_status) == Counter(r.status for r in self.records.values())
        assert (tally.records, tally.live) == (len(self.records), sum(r.live for r in self.records.values()))
        assert tally.held_bytes == sum(len(r.result) for r in self.held) <= CACHE_BYTES
        assert tally.owed_bytes == sum(
            len(r.result) for r in self.records.values() if r.phase in (Phase.DELIVERING, Phase.UNDELIVERED)
        )

    @invariant()
    def scans_find_what_is_there(self) -> None:
        open_ones = sorted(r.rollout_id for r in self.records.values() if r.expires is None)
        assert sorted(record.rollout_id for record in self.store.scan()) == open_ones
        live = sorted(r.rollout_id for r in self.records.values() if r.live)
        assert sorted(record.rollout_id for record in self.registry.live()) == live
        assert sorted(self.registry.admitting()) == sorted(self.admissions)


def check(make_store: MakeStore, examples: int, steps: int) -> None:
    machine = type("Machine", (RegistryMachine,), {"make_store": staticmethod(make_store)})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None),
    )


@pytest.mark.parametrize("make_store", FACTORIES, ids=IDS)
def test_any_verbs_in_any_order_do_what_the_model_does(make_store: MakeStore) -> None:
    check(make_store, examples=10, steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("make_store", FACTORIES, ids=IDS)
def test_many_verbs_in_any_order_do_what_the_model_does(make_store: MakeStore) -> None:
    check(make_store, examples=400, steps=60)
