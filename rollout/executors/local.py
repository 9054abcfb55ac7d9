"""Agents run on the service's own event loop, one task for each rollout."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from rollout.agent.outcome import Outcome
from rollout.agent.runner import Cause, RolloutRun, ended_from_outside
from rollout.executors.base import Capacity, Ended, Executor, Job, OnEnd, OnStart
from rollout.executors.deadlines import Deadlines
from rollout.metrics import Metrics
from rollout.retry import Clock

logger = logging.getLogger(__name__)

Prepare = Callable[[Job], RolloutRun]
"""Builds the run of a job: its context, its LLM client."""


class _Slot:
    """One job here, from `submit()` until it is reported."""

    __slots__ = ("ended", "grace", "job", "run", "task")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.run: RolloutRun | None = None
        self.task: asyncio.Task[None] | None = None
        self.grace: asyncio.TimerHandle | None = None
        self.ended = False


class LocalExecutor(Executor):
    """The default executor. Used from its event loop only, so no lock: nothing here awaits between looking and acting.

    The task of a rollout goes on after its slot is free, to report the outcome: delivery costs no task of its own.
    """

    def __init__(
        self,
        prepare: Prepare,
        *,
        limit: int,
        cancel_grace_seconds: float,
        metrics: Metrics,
        clock: Clock = time.monotonic,
    ) -> None:
        self._prepare = prepare
        self._limit = limit
        self._cancel_grace_seconds = cancel_grace_seconds
        self._metrics = metrics
        self._clock = clock
        self._slots: dict[str, _Slot] = {}
        self._queue: OrderedDict[str, _Slot] = OrderedDict()
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._unreported = 0
        self._quiet = asyncio.Event()
        """All that was submitted has been reported, or its report has begun."""
        self._quiet.set()

    async def start(self, on_start: OnStart, on_end: OnEnd) -> None:
        self._on_start, self._on_end = on_start, on_end
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(self._loop, self._clock, self._deadline_of, self._expire)

    def _deadline_of(self, rollout_id: str) -> float | None:
        slot = self._slots.get(rollout_id)
        return None if slot is None else slot.job.deadline

    def _expire(self, rollout_id: str) -> None:
        self.cancel(rollout_id, Cause.TIMEOUT)

    def capacity(self) -> Capacity:
        return Capacity(limit=self._limit, running=self._running, queued=len(self._slots) - self._running)

    @property
    def has_room(self) -> bool:
        return self._running < self._limit

    def turn(self, rollout_id: str) -> int:
        slot = self._slots.get(rollout_id)
        return slot.run.turn if slot is not None and slot.run is not None else 0

    # ------------------------------------------------------------ in

    def submit(self, job: Job) -> None:
        slot = _Slot(job)
        self._slots[job.rollout_id] = slot
        self._unreported += 1
        self._quiet.clear()
        if job.deadline is not None:
            self._deadlines.add(job.rollout_id, job.deadline)
        if self._running < self._limit:
            self._launch(slot)
        else:
            self._queue[job.rollout_id] = slot

    def _launch(self, slot: _Slot) -> None:
        self._running += 1
        slot.task = self._own(self._drive(slot))

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _launch_next(self) -> None:
        while self._queue and self._running < self._limit:
            self._launch(self._queue.popitem(last=False)[1])

    # ------------------------------------------------------------ one run

    async def _drive(self, slot: _Slot) -> None:
        job = slot.job
        self._metrics.queue_seconds.observe(self._clock() - job.accepted)
        outcome: Outcome | None = None
        try:
            if await self._on_start(job):
                slot.run = self._prepare(job)
                outcome = await slot.run.run()
                if slot.run.stop_cause is None and job.deadline is not None and self._clock() >= job.deadline:
                    slot.run.stop_cause = Cause.TIMEOUT  # it blocked the loop, or the timer would have been first
                    outcome = slot.run.stopped()
        except BaseException as exc:
            # Not the agent's doing, RolloutRun.run() never raises: a bug of ours, or the loop is being torn down.
            logger.error("rollout %r: the executor failed", job.rollout_id, exc_info=exc)
            outcome = _stopped(slot)
        if not self._release(slot):
            logger.warning("rollout %r: a result that came after the terminal one is dropped", job.rollout_id)
            self._metrics.late_results.inc()
            return
        if outcome is None:
            outcome = ended_from_outside(job.rollout_id, Cause.CANCELLED)
        await self._report(slot, outcome)

    def _release(self, slot: _Slot) -> bool:
        """Free the slot; False if that has happened before. The first to get True reports."""
        if slot.ended:
            return False
        slot.ended = True
        if slot.grace is not None:
            slot.grace.cancel()
            slot.grace = None
        del self._slots[slot.job.rollout_id]
        if slot.task is None:
            del self._queue[slot.job.rollout_id]
        else:
            self._running -= 1
            self._launch_next()
        return True

    async def _report(self, slot: _Slot, outcome: Outcome) -> None:
        job, run = slot.job, slot.run
        self._unreported -= 1
        if not self._unreported:
            self._quiet.set()  # wakes nobody before on_end() has begun, in this very turn of the loop
        if run is None:
            await self._on_end(Ended(job=job, outcome=outcome, turn=0, trace=job.trace))
        else:
            await self._on_end(Ended(job=job, outcome=outcome, turn=run.turn, trace=run.ctx.span.context))

    # ------------------------------------------------------------ ended from outside

    def cancel(self, rollout_id: str, cause: Cause) -> str | None:
        slot = self._slots.get(rollout_id)
        if slot is None:
            return None
        if slot.task is None:
            self._release(slot)
            self._own(self._report(slot, ended_from_outside(rollout_id, cause)))
            return "queued"
        if slot.run is None:
            # Its task has not had its first turn yet: there is nothing to cancel, and nothing to wait for.
            slot.task.cancel()
            self._release(slot)
            self._own(self._report(slot, ended_from_outside(rollout_id, cause)))
            return "running"
        if slot.run.stop_cause is None:
            slot.run.stop_cause = cause
            slot.task.cancel()
            slot.grace = self._loop.call_later(self._cancel_grace_seconds, self._abandon, slot)
        return "running"

    def _abandon(self, slot: _Slot) -> None:
        """The agent had its grace and did not end."""
        if slot.run is None or slot.ended:
            return
        logger.error(
            "rollout %r: the agent did not end within %g s of being cancelled; it loses its slot, its task may leak",
            slot.job.rollout_id,
            self._cancel_grace_seconds,
        )
        outcome = _stopped(slot)
        if slot.task is not None:
            slot.task.cancel()  # once more: an LLM call that it made meanwhile is cut off
        if self._release(slot):
            self._own(self._report(slot, outcome))

    # ------------------------------------------------------------ the end

    async def drain(self, grace_seconds: float) -> None:
        try:
            async with asyncio.timeout(grace_seconds):
                await self._quiet.wait()
        except TimeoutError:
            for rollout_id in list(self._slots):
                self.cancel(rollout_id, Cause.SHUTDOWN)
        await self._quiet.wait()

    async def stop(self) -> None:
        self._deadlines.stop()
        for slot in list(self._slots.values()):
            self._release(slot)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)


def _stopped(slot: _Slot) -> Outcome:
    """The outcome now of a job that does not end by itself. Never raises, whatever has become of the run's context:
    a slot must never be held by what an agent did.
    """
    cause = Cause.INTERRUPTED
    if slot.run is not None:
        cause = slot.run.stop_cause or cause
        try:
            return slot.run.stopped()
        except BaseException:
            logger.exception("rollout %r: what it had reached cannot be read", slot.job.rollout_id)
    return ended_from_outside(slot.job.rollout_id, cause)
