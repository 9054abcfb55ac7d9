"""The sweeper: everything that has expired goes, in slices, and nothing that happens on the way ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from stores import make_finished, make_record

from rollout.agent.loop import RolloutAgentLoop
from rollout.metrics import Metrics
from rollout.server.service import Service
from rollout.settings import RolloutServerSettings, RolloutSettings
from rollout.state.memory import MemoryStore
from rollout.state.registry import Registry
from rollout.state.store import Delivered
from rollout.state.sweeper import Sweeper
from rollout.testing import FakeClock

SLICE_LIMIT = 500
"""Records that a sweep may forget without giving way: at 2 us each well below 5 ms."""


class Counting(MemoryStore):
    """A store that has very many expired records, of which it only keeps the number."""

    def __init__(self, expired: int = 0) -> None:
        super().__init__(1 << 20)
        self.expired = expired
        self.slices: list[int] = []
        self.limits: set[int] = set()
        self.failures: list[BaseException] = []
        self.swept = asyncio.Event()

    async def expire(self, now: float, limit: int) -> int:
        self.swept.set()
        if self.failures:
            raise self.failures.pop(0)
        gone = min(limit, self.expired)
        self.expired -= gone
        self.limits.add(limit)
        self.slices.append(gone)
        return gone


def make_sweeper(
    store: MemoryStore,
    *,
    clock: FakeClock | None = None,
    metrics: Metrics | None = None,
    interval_seconds: float = 0.005,
) -> Sweeper:
    registry = Registry(
        store,
        capacity=10,
        owed_limit_bytes=1 << 20,
        ttl_seconds=60,
        horizon_seconds=60,
        clock=FakeClock() if clock is None else clock,
    )
    return Sweeper(registry, Metrics() if metrics is None else metrics, interval_seconds=interval_seconds)


async def count_turns(turns: list[int]) -> None:
    """Count how often the loop comes round."""
    while True:
        turns[0] += 1
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def a_neighbour() -> AsyncIterator[list[int]]:
    """Another task on the loop, and how many turns it got."""
    turns = [0]
    task = asyncio.create_task(count_turns(turns))
    yield turns
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_million_records_go_in_slices_and_the_others_get_their_turns_in_between() -> None:
    store = Counting(expired=1_000_000)
    async with a_neighbour() as turns:
        gone = await make_sweeper(store).sweep()

    assert (gone, store.expired) == (1_000_000, 0)
    assert max(store.limits) <= SLICE_LIMIT
    assert turns[0] >= len(store.slices) - 1


async def test_what_expires_during_a_sweep_waits_for_the_next() -> None:
    clock, store = FakeClock(), MemoryStore(1 << 20)
    for i in range(3):
        await store.create(make_record(f"r{i}"))
        await store.move(f"r{i}", make_finished(f"r{i}"))
        await store.settle(f"r{i}", Delivered(at=1.0, attempts=1, expires=clock() + 10.0 * i))
    sweeper = make_sweeper(store, clock=clock)

    first = await sweeper.sweep()
    clock.advance(10.0)

    assert first == 1
    assert await sweeper.sweep() == 1
    assert store.tally().records == 1


async def test_the_background_sweeps_again_and_again_and_counts() -> None:
    store = Counting(expired=700)
    metrics = Metrics()
    sweeper = make_sweeper(store, metrics=metrics)
    async with asyncio.timeout(5), sweeper:
        while metrics.sweeps.value < 2:
            store.swept.clear()
            await store.swept.wait()

    assert metrics.records_swept.value == 700
    assert sweeper.task is not None
    assert sweeper.task.done()


async def test_a_sweep_that_fails_is_logged_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    store = Counting(expired=5)
    store.failures = [RuntimeError("disk on fire"), RuntimeError("disk still on fire")]
    async with asyncio.timeout(5), make_sweeper(store):
        while store.expired:
            store.swept.clear()
            await store.swept.wait()

    assert caplog.text.count("a sweep failed") == 2
    assert "disk still on fire" in caplog.text


async def test_leaving_ends_a_long_sweep_between_two_slices() -> None:
    store = Counting(expired=10**9)
    async with asyncio.timeout(5), make_sweeper(store):
        await store.swept.wait()

    assert store.expired > 0


async def test_leaving_does_not_wait_for_the_interval() -> None:
    async with asyncio.timeout(1), make_sweeper(MemoryStore(1), interval_seconds=3600):
        pass


class Idle(RolloutAgentLoop):
    name = "idle"

    async def run(self, ctx: Any) -> Any:
        return ctx.complete([])


@pytest.mark.parametrize("part", ["sweeper", "outbox"])
async def test_health_says_so_when_a_background_task_has_died(part: str) -> None:
    service = Service(Idle(), RolloutSettings(server=RolloutServerSettings(port=0)), MemoryStore(1 << 20))
    await service.start()
    assert service.health()["status"] == "healthy"

    task = getattr(service, part).task
    task.cancel()
    await asyncio.wait([task])

    assert service.health()["status"] == "unhealthy"
    assert service.health()["reason"] == f"the {part} has died"
    await service.stop(0)
