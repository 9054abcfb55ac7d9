"""The outbox: when a result is tried again, when it is given up, and that nobody waits for anybody else's trainer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from stores import make_init, make_result

from rollout.errors import StoreError, TrainerError, TrainerRefused, TrainerUnavailable, TrainerUnreachable
from rollout.metrics import Metrics
from rollout.retry import Clock, RetryPolicy
from rollout.schemas import Phase, RolloutStatus
from rollout.state import outbox as outbox_module
from rollout.state.memory import MemoryStore
from rollout.state.outbox import Outbox, origin_of
from rollout.state.registry import Registry
from rollout.state.store import Due, Postponed, Record, Settlement, Store
from rollout.testing import FakeClock

TTL_SECONDS = 1000.0
REFUSED = TrainerRefused("the trainer answered 404", 404)
DOWN = TrainerUnreachable("no connection")


class Fallible(MemoryStore):
    """A store whose verbs of the outbox fail while it is told to."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.fails = False
        self.failed = asyncio.Event()

    def _check(self) -> None:
        if self.fails:
            self.failed.set()
            raise StoreError("disk full")

    async def claim(self, now: float, limit: int) -> Due:
        self._check()
        return await super().claim(now, limit)

    async def settle(self, rollout_id: str, settlement: Settlement) -> Record | None:
        self._check()
        return await super().settle(rollout_id, settlement)


class Sender:
    """A trainer in one function: plays its script, then acknowledges; remembers what it was sent."""

    def __init__(self, *script: BaseException | None) -> None:
        self.script = list(script)
        self.sent: list[tuple[str, bytes | None]] = []
        self.acknowledged: Counter[str] = Counter()
        self.changed = asyncio.Event()

    async def __call__(self, record: Record) -> None:
        self.sent.append((record.rollout_id, record.result))
        self.changed.set()
        failure = self.script.pop(0) if self.script else None
        if failure is not None:
            raise failure
        self.acknowledged[record.rollout_id] += 1


class Gate:
    """A trainer that hangs until it is let go; others are answered at once."""

    def __init__(self, hanging: str) -> None:
        self.hanging = hanging
        self.opened = asyncio.Event()
        self.inside = self.peak = 0
        self.acknowledged: list[str] = []
        self.changed = asyncio.Event()

    async def __call__(self, record: Record) -> None:
        self.changed.set()
        if origin_of(record) == self.hanging:
            self.inside += 1
            self.peak = max(self.peak, self.inside)
            try:
                await self.opened.wait()
            finally:
                self.inside -= 1
        self.acknowledged.append(record.rollout_id)


class Desk:
    """A registry, its store and an outbox, for one test."""

    def __init__(
        self,
        send: Callable[[Record], Awaitable[None]],
        *,
        clock: Clock,
        store: Store | None = None,
        policy: RetryPolicy | None = None,
        horizon_seconds: float = 3600.0,
    ) -> None:
        self.store = MemoryStore(1 << 20) if store is None else store
        self.clock = clock
        self.metrics = Metrics()
        self.registry = Registry(
            self.store,
            capacity=10_000,
            owed_limit_bytes=1 << 30,
            ttl_seconds=TTL_SECONDS,
            horizon_seconds=horizon_seconds,
            clock=clock,
        )
        policy = policy or RetryPolicy(retries=2, base_delay_seconds=1.0, max_delay_seconds=30.0)
        self.outbox = Outbox(self.registry, send, policy, self.metrics)

    async def owe(self, rollout_id: str, server_url: str = "http://trainer:81") -> Record:
        """A rollout that has ended; the caller has to deliver it."""
        admission, _ = self.registry.enter(make_init(rollout_id=rollout_id, server_url=server_url))
        await self.registry.admit(admission, b"[]")
        self.registry.leave(admission)
        record = await self.registry.finish(rollout_id, RolloutStatus.COMPLETED, make_result(rollout_id))
        assert record is not None
        return record

    async def owe_later(self, rollout_id: str, server_url: str = "http://trainer:81") -> Record:
        """A rollout whose first attempt is over: the background has to deliver it."""
        record = await self.owe(rollout_id, server_url)
        await self.store.settle(rollout_id, Postponed(attempts=0, error="", due=self.clock()))
        return record

    def outcomes(self) -> tuple[float, float, float]:
        """How many attempts were delivered, retried, given up."""
        count = self.metrics.deliveries.value
        return count("delivered"), count("retried"), count("undelivered")


async def until(holds: Callable[[], bool]) -> None:
    """Return once it holds; give way to everybody else meanwhile."""
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - nothing here has an event to wait for
            await asyncio.sleep(0)


FAST = RetryPolicy(retries=2, base_delay_seconds=0.001, max_delay_seconds=0.002)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


# ---------------------------------------------------------------- one attempt


async def test_an_acknowledged_result_is_delivered(clock: FakeClock) -> None:
    send = Sender()
    desk = Desk(send, clock=clock)
    record = await desk.owe("a")

    await desk.outbox.deliver(record)

    assert (record.phase, record.attempts, record.last_error) == (Phase.DELIVERED, 1, None)
    assert record.expires == clock() + TTL_SECONDS
    assert send.sent == [("a", make_result("a"))]
    assert desk.outcomes() == (1, 0, 0)
    assert desk.metrics.delivery_seconds.count == 1


async def test_a_refused_result_is_given_up_at_once(clock: FakeClock) -> None:
    desk = Desk(Sender(REFUSED), clock=clock)
    record = await desk.owe("a")

    await desk.outbox.deliver(record)

    assert (record.phase, record.attempts, record.last_error) == (Phase.UNDELIVERED, 1, "the trainer answered 404")
    assert record.expires == clock() + TTL_SECONDS
    assert record.result == make_result("a")
    assert desk.outcomes() == (0, 0, 1)


async def test_pauses_grow_from_the_retries_to_a_minute(clock: FakeClock) -> None:
    desk = Desk(Sender(*[DOWN] * 12), clock=clock, horizon_seconds=1e6)
    record = await desk.owe("a")

    for longest in (1, 2, 4, 8, 16, 32, 60, 60, 60, 60):
        await desk.outbox.deliver(record)
        assert record.due is not None
        assert longest / 2 <= record.due - clock() <= longest
        clock.advance(record.due - clock())
        assert (await desk.store.claim(clock(), 1)).records == [record]

    assert (record.attempts, record.last_error, record.phase) == (10, "no connection", Phase.DELIVERING)


@pytest.mark.parametrize(("asked", "given"), [(7.0, 7.0), (0.0, 0.0), (299.0, 299.0), (1e9, 300.0)])
async def test_the_trainers_own_pause_wins(clock: FakeClock, asked: float, given: float) -> None:
    desk = Desk(Sender(TrainerUnavailable("busy", 503, asked)), clock=clock)
    record = await desk.owe("a")

    await desk.outbox.deliver(record)

    assert record.due == clock() + given


async def test_a_connection_that_had_gone_stale_is_tried_again_at_once_and_once(clock: FakeClock) -> None:
    stale = TrainerUnreachable("closed")
    stale.stale_connection = True
    desk = Desk(Sender(stale, stale), clock=clock)
    record = await desk.owe("a")

    await desk.outbox.deliver(record)
    first_due = record.due
    await desk.outbox.deliver(record)

    assert first_due == clock()
    assert record.due is not None
    assert record.due > clock()


async def test_the_last_attempt_is_made_at_the_horizon_and_the_rest_is_loud(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(Sender(*[DOWN] * 100), clock=clock, horizon_seconds=100.0)
    record = await desk.owe("a")
    end = clock() + 100.0

    while record.phase is Phase.DELIVERING:
        await desk.outbox.deliver(record)
        last, record_due = clock(), record.due
        clock.advance(0.0 if record_due is None else record_due - clock())
        await desk.store.claim(clock(), 1)

    assert last == end
    assert (record.phase, record.expires) == (Phase.UNDELIVERED, end + TTL_SECONDS)
    assert f"UNDELIVERED after {record.attempts} attempts" in caplog.text


async def test_the_retries_are_made_even_without_a_horizon(clock: FakeClock) -> None:
    desk = Desk(Sender(DOWN, DOWN, DOWN), clock=clock, horizon_seconds=0.0)
    record = await desk.owe("a")

    phases = []
    for _ in range(3):
        await desk.outbox.deliver(record)
        phases.append(record.phase)

    assert phases == [Phase.DELIVERING, Phase.DELIVERING, Phase.UNDELIVERED]


async def test_an_error_that_nobody_foresaw_loses_nothing(clock: FakeClock) -> None:
    desk = Desk(Sender(KeyError("what")), clock=clock)
    record = await desk.owe("a")

    await desk.outbox.deliver(record)

    assert (record.phase, record.last_error) == (Phase.DELIVERING, "KeyError: 'what'")
    assert record.due is not None


async def test_what_the_trainer_said_is_kept_in_short(clock: FakeClock) -> None:
    desk = Desk(Sender(TrainerError("x" * 10_000)), clock=clock)
    record = await desk.owe("a")

    await desk.outbox.deliver(record)

    assert record.last_error == "x" * 500


async def test_an_attempt_that_is_cut_off_stays_owed_and_does_not_count(clock: FakeClock) -> None:
    gate = Gate("http://trainer:81")
    desk = Desk(gate, clock=clock)
    record = await desk.owe("a")
    attempt = asyncio.create_task(desk.outbox.deliver(record))
    await gate.changed.wait()

    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt

    assert (record.phase, record.attempts, record.due) == (Phase.DELIVERING, 0, clock())


# ---------------------------------------------------------------- the background


@contextlib.asynccontextmanager
async def running(send: Any, **options: Any) -> AsyncIterator[Desk]:
    desk = Desk(send, clock=time.monotonic, **{"policy": FAST, **options})
    async with asyncio.timeout(5), desk.outbox:
        yield desk


async def test_the_background_tries_again_until_acknowledged_with_the_same_bytes() -> None:
    send = Sender(DOWN, DOWN, DOWN, DOWN)
    async with running(send) as desk:
        record = await desk.owe("a")
        await desk.outbox.deliver(record)

        await until(lambda: record.phase is Phase.DELIVERED)

    assert send.sent == [("a", make_result("a"))] * 5
    assert desk.outcomes() == (1, 4, 0)


async def test_a_result_that_is_due_sooner_does_not_wait_for_one_that_is_due_later() -> None:
    send = Sender(TrainerUnavailable("busy", 503, 300.0), DOWN)
    async with running(send) as desk:
        late, soon = await desk.owe("late"), await desk.owe("soon")
        await desk.outbox.deliver(late)
        await asyncio.sleep(0)
        await desk.outbox.deliver(soon)

        await until(lambda: soon.phase is Phase.DELIVERED)

    assert late.phase is Phase.DELIVERING


async def test_more_than_one_batch_is_due_at_once() -> None:
    send = Sender()
    desk = Desk(send, clock=time.monotonic, policy=FAST)
    for i in range(600):
        await desk.owe_later(f"r{i}")

    async with desk.outbox:
        await until(lambda: len(send.acknowledged) == 600)

    assert set(send.acknowledged.values()) == {1}


async def test_a_trainer_that_hangs_gets_64_at_a_time_and_holds_up_nobody_else() -> None:
    gate = Gate("http://hangs:82")
    desk = Desk(gate, clock=time.monotonic, policy=FAST)
    for i in range(200):
        await desk.owe_later(f"hanging{i}", "http://hangs:82")
    for i in range(100):
        await desk.owe_later(f"other{i}", "http://trainer:81")

    async with desk.outbox:
        await until(lambda: len(gate.acknowledged) == 100)
        assert gate.inside == 64
        gate.opened.set()
        await until(lambda: len(gate.acknowledged) == 300)

    assert gate.peak == 64
    assert len(set(gate.acknowledged)) == 300
    assert desk.store.tally().by_phase[Phase.DELIVERED] == 300


async def test_leaving_cuts_off_what_is_in_flight_and_it_stays_owed() -> None:
    gate = Gate("http://trainer:81")
    desk = Desk(gate, clock=time.monotonic, policy=FAST)
    records = [await desk.owe_later(f"r{i}") for i in range(70)]

    async with desk.outbox:
        await until(lambda: gate.inside == 64)

    assert gate.inside == 0
    assert {record.phase for record in records} == {Phase.DELIVERING}
    assert {record.attempts for record in records} == {0}


class Suspending(MemoryStore):
    """A store whose claim takes until it is let go."""

    suspends = True

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.entered, self.released = asyncio.Event(), asyncio.Event()

    async def claim(self, now: float, limit: int) -> Due:
        self.entered.set()
        await self.released.wait()
        return await super().claim(now, limit)


async def test_leaving_in_the_middle_of_a_claim_comes_to_an_end() -> None:
    store = Suspending()
    desk = Desk(Sender(), clock=time.monotonic, store=store)
    await desk.outbox.__aenter__()
    await store.entered.wait()

    leaving = asyncio.create_task(desk.outbox.__aexit__(None, None, None))
    await asyncio.sleep(0)
    store.released.set()

    async with asyncio.timeout(1):
        await leaving


# ---------------------------------------------------------------- a store that fails


async def test_an_acknowledgement_that_could_not_be_noted_is_noted_later_and_not_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_module, "STORE_PAUSE_SECONDS", 0.01)
    store, send = Fallible(), Sender()
    async with running(send, store=store) as desk:
        record = await desk.owe("a")
        store.fails = True
        await desk.outbox.deliver(record)
        assert (record.phase, desk.outbox.failure) == (Phase.DELIVERING, "disk full")

        store.fails = False
        await until(lambda: record.phase is Phase.DELIVERED)
        await until(lambda: desk.outbox.failure is None)

    assert send.acknowledged == {"a": 1}
    assert desk.outcomes() == (1, 0, 0)


async def test_the_background_survives_a_store_that_fails_and_says_so_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_module, "STORE_PAUSE_SECONDS", 0.01)
    store, send = Fallible(), Sender()
    store.fails = True
    async with running(send, store=store) as desk:
        await store.failed.wait()
        await until(lambda: desk.outbox.failure == "disk full")

        store.fails = False
        await until(lambda: desk.outbox.failure is None)
        record = await desk.owe("a")
        await desk.outbox.deliver(record)

        assert desk.outbox.task is not None
        assert not desk.outbox.task.done()
    assert record.phase is Phase.DELIVERED


# ---------------------------------------------------------------- flush


async def test_a_flush_tries_what_is_due_much_later() -> None:
    send = Sender(TrainerUnavailable("busy", 503, 300.0))
    async with running(send) as desk:
        record = await desk.owe("a")
        await desk.outbox.deliver(record)

        await desk.outbox.flush(5.0)

    assert record.phase is Phase.DELIVERED


async def test_a_flush_makes_the_retries_and_not_more() -> None:
    send = Sender(*[TrainerUnavailable("busy", 503, 300.0)] * 100)
    async with running(send) as desk:
        record = await desk.owe("a")
        await desk.outbox.deliver(record)

        await desk.outbox.flush(5.0)

    assert len(send.sent) == 1 + FAST.retries
    assert record.phase is Phase.DELIVERING


async def test_a_flush_waits_for_what_is_in_flight_and_for_those_behind_it() -> None:
    gate = Gate("http://hangs:82")
    desk = Desk(gate, clock=time.monotonic, policy=FAST)
    for i in range(100):
        await desk.owe_later(f"r{i}", "http://hangs:82")

    async with desk.outbox:
        await until(lambda: gate.inside == 64)
        flushing = asyncio.create_task(desk.outbox.flush(5.0))
        await asyncio.sleep(0)
        gate.opened.set()
        await flushing

        assert sorted(gate.acknowledged) == sorted(f"r{i}" for i in range(100))


async def test_a_flush_ends_when_its_time_is_up_and_the_result_stays_owed(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("http://hangs:82")
    async with running(gate) as desk:
        record = await desk.owe_later("a", "http://hangs:82")

        await desk.outbox.flush(0.02)

    assert record.phase is Phase.DELIVERING
    assert "stopped waiting for deliveries" in caplog.text


async def test_a_flush_of_nothing_is_over_at_once() -> None:
    async with running(Sender()) as desk:
        await desk.outbox.flush(5.0)


@pytest.mark.parametrize(
    ("url", "origin"),
    [("http://a:1/x/y", "http://a:1"), ("https://[::1]:2", "https://[::1]:2"), ("http://a", "http://a")],
)
async def test_a_trainer_is_known_by_scheme_host_and_port(clock: FakeClock, url: str, origin: str) -> None:
    record = await Desk(Sender(), clock=clock).owe("a", url)

    assert origin_of(record) == origin
