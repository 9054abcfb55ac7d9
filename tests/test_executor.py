"""The executor: every job is reported once, in whatever order it is cancelled, runs late or ends; slots never leak."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import make_init

from rollout.agent.context import RolloutContext
from rollout.agent.runner import Cause, RolloutRun
from rollout.executors.base import Capacity, Ended, Job
from rollout.executors.local import LocalExecutor
from rollout.metrics import Metrics
from rollout.testing import ScriptedLLM
from rollout.wire import JSON, decode

Behaviour = Callable[["Desk", RolloutContext], Any]


async def returns(desk: Desk, ctx: RolloutContext) -> Any:
    return ctx.complete([{"role": "assistant", "content": "done"}])


async def returns_later(desk: Desk, ctx: RolloutContext) -> Any:
    for _ in range(4):
        await asyncio.sleep(0)
    return ctx.complete([])


async def waits(desk: Desk, ctx: RolloutContext) -> Any:
    await desk.released.wait()
    return ctx.complete([])


async def raises(desk: Desk, ctx: RolloutContext) -> Any:
    await asyncio.sleep(0)
    raise SystemExit("the agent wants to leave")


async def cancels_itself(desk: Desk, ctx: RolloutContext) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def swallows_and_returns(desk: Desk, ctx: RolloutContext) -> Any:
    with contextlib.suppress(asyncio.CancelledError):
        await desk.released.wait()
    return ctx.complete([], reward=1.0)


async def never_ends(desk: Desk, ctx: RolloutContext) -> Any:
    while not desk.over.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await desk.over.wait()
    return ctx.complete([])


BEHAVIOURS: list[Behaviour] = [
    returns,
    returns_later,
    waits,
    raises,
    cancels_itself,
    swallows_and_returns,
    never_ends,
]


class Desk:
    """An executor, what it was asked and what it has reported."""

    def __init__(self, limit: int, grace_seconds: float = 0.005) -> None:
        self.metrics = Metrics()
        self.executor = LocalExecutor(
            self.prepare, limit=limit, cancel_grace_seconds=grace_seconds, metrics=self.metrics
        )
        self.limit = limit
        self.released = asyncio.Event()
        self.over = asyncio.Event()
        self.behaviours: dict[str, Behaviour] = {}
        self.submitted: list[str] = []
        self.started: list[str] = []
        self.reports: list[Ended] = []
        self.reported = asyncio.Event()
        self.refused: set[str] = set()
        self.starting: Callable[[Job], Any] | None = None
        self.most_running = 0

    async def on_start(self, job: Job) -> bool:
        self.started.append(job.rollout_id)
        self.most_running = max(self.most_running, self.executor.capacity().running)
        if self.starting is not None:
            await self.starting(job)
        return job.rollout_id not in self.refused

    async def on_end(self, ended: Ended) -> None:
        self.reports.append(ended)
        self.reported.set()

    def prepare(self, job: Job) -> RolloutRun:
        ctx = RolloutContext(job.request.view(), ScriptedLLM(["ok"], repeat_last=True))
        return RolloutRun(self, ctx)

    async def run(self, ctx: RolloutContext) -> Any:
        """The agent: each rollout does what the test says."""
        return await self.behaviours[ctx.rollout_id](self, ctx)

    def submit(self, rollout_id: str, behaviour: Behaviour = waits, seconds: float | None = None) -> Job:
        now = time.monotonic()
        job = Job(
            request=make_init(rollout_id=rollout_id),
            tools=[],
            accepted=now,
            deadline=None if seconds is None else now + seconds,
        )
        self.behaviours[rollout_id] = behaviour
        self.submitted.append(rollout_id)
        self.executor.submit(job)
        return job

    async def report_of(self, rollout_id: str) -> dict[str, JSON]:
        """The result that was reported of a rollout, waited for."""
        async with asyncio.timeout(5):
            while True:
                for ended in self.reports:
                    if ended.job.rollout_id == rollout_id:
                        return dict(decode(ended.outcome.body))
                self.reported.clear()
                await self.reported.wait()


@contextlib.asynccontextmanager
async def desk_of(limit: int, grace_seconds: float = 0.005) -> AsyncIterator[Desk]:
    desk = Desk(limit, grace_seconds)
    await desk.executor.start(desk.on_start, desk.on_end)
    try:
        yield desk
    finally:
        desk.over.set()
        desk.released.set()
        await desk.executor.stop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - nothing here has an event to wait for
            await asyncio.sleep(0)


# ---------------------------------------------------------------- any interleaving


class Step(NamedTuple):
    """One thing that is done to the executor."""

    do: str
    behaviour: Behaviour = returns
    seconds: float | None = None
    target: int = 0


SUBMITS = st.tuples(
    st.just("submit"),
    st.sampled_from(BEHAVIOURS),
    st.sampled_from([None, None, -1.0, 0.0, 0.002, 60.0]),
    st.sampled_from([0, 0, 0, 1]),
).map(Step._make)
CANCELS = st.integers(0, 9).map(lambda target: Step("cancel", target=target))
TURNS = st.integers(1, 6).map(lambda turns: Step("turn", target=turns))
STEPS = SUBMITS | CANCELS | TURNS | st.just(Step("release"))


async def play(limit: int, steps: list[Step]) -> None:
    async with desk_of(limit, grace_seconds=0.001) as desk:
        cancelled: dict[str, str] = {}
        for step in steps:
            await take(desk, step, cancelled)
            capacity = desk.executor.capacity()
            assert 0 <= capacity.running <= limit
            assert capacity.queued == 0 or capacity.running == limit

        async with asyncio.timeout(5):
            await desk.executor.drain(0)
        check(desk, cancelled)


async def take(desk: Desk, step: Step, cancelled: dict[str, str]) -> None:
    if step.do == "submit":
        rollout_id = f"r{len(desk.submitted)}"
        if step.target:
            desk.refused.add(rollout_id)
        desk.submit(rollout_id, step.behaviour, step.seconds)
    elif step.do == "cancel":
        where = desk.executor.cancel(f"r{step.target}", Cause.CANCELLED)
        if where is not None:
            cancelled.setdefault(f"r{step.target}", where)
    elif step.do == "release":
        desk.released.set()
    else:
        for _ in range(step.target):
            await asyncio.sleep(0)


def check(desk: Desk, cancelled: dict[str, str]) -> None:
    """Every job was reported once; they were started in their order; what was cancelled says so."""
    assert Counter(ended.job.rollout_id for ended in desk.reports) == Counter(desk.submitted)
    assert desk.started == [name for name in desk.submitted if name in set(desk.started)]
    assert desk.most_running <= desk.limit
    assert desk.executor.capacity() == Capacity(limit=desk.limit, running=0, queued=0)
    for ended in desk.reports:
        if ended.job.rollout_id in cancelled:
            assert ended.outcome.finish_reason in ("cancelled", "timeout")
        assert decode(ended.outcome.body)["rollout_id"] == ended.job.rollout_id


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.lists(STEPS, max_size=14))
def test_every_job_is_reported_once_whatever_happens_to_it(limit: int, steps: list[Step]) -> None:
    asyncio.run(play(limit, steps))


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(st.integers(1, 4), st.lists(STEPS, max_size=40))
def test_every_job_is_reported_once_in_long_stories_too(limit: int, steps: list[Step]) -> None:
    asyncio.run(play(limit, steps))


# ---------------------------------------------------------------- running and waiting


async def test_so_many_run_and_the_others_wait_in_their_order() -> None:
    async with desk_of(2) as desk:
        for i in range(6):
            desk.submit(f"r{i}")
        await until(lambda: len(desk.started) == 2)
        assert desk.executor.capacity() == Capacity(limit=2, running=2, queued=4)

        desk.released.set()
        await desk.executor.drain(5)

    assert desk.started == desk.submitted
    assert desk.most_running == 2
    assert {ended.outcome.status for ended in desk.reports} == {"COMPLETED"}


async def test_a_slot_is_free_before_the_end_is_reported() -> None:
    async with desk_of(1) as desk:
        held = asyncio.Event()

        async def on_end(ended: Ended) -> None:
            desk.reports.append(ended)
            await held.wait()

        await desk.executor.start(desk.on_start, on_end)
        desk.submit("a", returns)
        desk.submit("b", returns)

        await until(lambda: len(desk.reports) == 2)
        held.set()


async def test_the_queue_wait_is_measured() -> None:
    async with desk_of(1) as desk:
        desk.submit("a", returns)
        desk.submit("b", returns)
        await desk.executor.drain(5)

    assert desk.metrics.queue_seconds.count == 2


async def test_turns_are_told_while_the_agent_runs_and_in_the_report() -> None:
    async def chats(desk: Desk, ctx: RolloutContext) -> Any:
        await ctx.chat([])
        await ctx.chat([{"role": "user"}])
        return await waits(desk, ctx)

    async with desk_of(1) as desk:
        desk.submit("a", chats)
        desk.submit("queued")
        await until(lambda: desk.executor.turn("a") == 2)
        assert (desk.executor.turn("queued"), desk.executor.turn("nobody")) == (0, 0)
        desk.released.set()
        await desk.report_of("a")

    assert desk.reports[0].turn == 2
    assert desk.executor.turn("a") == 0


async def test_a_job_that_has_ended_meanwhile_does_not_run() -> None:
    async with desk_of(1) as desk:
        desk.refused.add("a")
        desk.submit("a", raises)

        assert (await desk.report_of("a"))["finish_reason"] == "cancelled"


# ---------------------------------------------------------------- cancelling


async def test_cancelling_a_queued_job_ends_it_at_once_and_frees_its_place() -> None:
    async with desk_of(1) as desk:
        desk.submit("running")
        desk.submit("queued")
        await until(lambda: desk.started == ["running"])

        assert desk.executor.cancel("queued", Cause.CANCELLED) == "queued"
        assert desk.executor.capacity().queued == 0
        assert desk.executor.cancel("queued", Cause.CANCELLED) is None
        report = await desk.report_of("queued")

    assert (report["status"], report["finish_reason"], report["error_category"]) == ("ERROR", "cancelled", "cancelled")
    assert "queued" not in desk.started


async def test_cancelled_jobs_do_not_pile_up_behind_a_long_one() -> None:
    async with desk_of(1) as desk:
        desk.submit("long")
        job = desk.submit("queued")
        references = sys.getrefcount(job)

        desk.executor.cancel("queued", Cause.CANCELLED)
        await desk.report_of("queued")
        desk.reports.clear()
        await asyncio.sleep(0)

        assert sys.getrefcount(job) < references


async def test_cancelling_a_running_job_cancels_its_task() -> None:
    async with desk_of(1) as desk:
        desk.submit("a")
        await until(lambda: desk.started == ["a"])

        assert desk.executor.cancel("a", Cause.CANCELLED) == "running"
        report = await desk.report_of("a")

        assert report["finish_reason"] == "cancelled"
        assert desk.executor.cancel("a", Cause.CANCELLED) is None


async def test_once_cancelled_it_is_cancelled_whatever_the_agent_returns() -> None:
    async with desk_of(1) as desk:
        desk.submit("a", swallows_and_returns)
        await until(lambda: desk.started == ["a"])

        desk.executor.cancel("a", Cause.CANCELLED)
        report = await desk.report_of("a")

    assert (report["status"], report["finish_reason"], report.get("reward")) == ("ERROR", "cancelled", None)


async def test_an_agent_that_swallows_its_cancellation_loses_its_slot_and_its_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with desk_of(1) as desk:
        desk.submit("stubborn", never_ends)
        desk.submit("next", returns)
        await until(lambda: desk.started == ["stubborn"])

        desk.executor.cancel("stubborn", Cause.CANCELLED)
        assert (await desk.report_of("stubborn"))["finish_reason"] == "cancelled"
        assert (await desk.report_of("next"))["status"] == "COMPLETED"

        desk.over.set()
        await until(lambda: desk.metrics.late_results.value == 1)

    assert len(desk.reports) == 2
    assert "did not end within 0.005 s" in caplog.text


async def test_the_first_cause_counts() -> None:
    async with desk_of(1) as desk:
        desk.submit("a", never_ends, seconds=0.001)
        await until(lambda: desk.started == ["a"])

        desk.executor.cancel("a", Cause.CANCELLED)
        report = await desk.report_of("a")

    assert report["finish_reason"] == "cancelled"


async def test_nobody_to_cancel_is_none() -> None:
    async with desk_of(1) as desk:
        assert desk.executor.cancel("nobody", Cause.CANCELLED) is None


@pytest.mark.parametrize("behaviour", [cancels_itself, raises], ids=lambda behaviour: behaviour.__name__)
async def test_what_an_agent_does_to_itself_is_its_own_error(behaviour: Behaviour) -> None:
    async with desk_of(1) as desk:
        desk.submit("a", behaviour)
        report = await desk.report_of("a")

    assert (report["status"], report["error_category"]) == ("ERROR", "agent_error")


async def test_a_cancellation_that_an_agent_left_behind_does_not_hit_the_report() -> None:
    async def leaves_one_behind(desk: Desk, ctx: RolloutContext) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return ctx.complete([])

    async with desk_of(1) as desk:
        desk.submit("a", leaves_one_behind)

        assert (await desk.report_of("a"))["status"] == "COMPLETED"


async def test_a_cancel_during_the_last_turn_of_a_run_still_counts() -> None:
    async def is_cancelled_while_it_returns(desk: Desk, ctx: RolloutContext) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # makes the runner wait for a turn of the loop
        asyncio.get_running_loop().call_soon(desk.executor.cancel, "a", Cause.CANCELLED)
        return ctx.complete([])

    async with desk_of(1) as desk:
        desk.submit("a", is_cancelled_while_it_returns)

        assert (await desk.report_of("a"))["finish_reason"] == "cancelled"


# ---------------------------------------------------------------- deadlines


@pytest.mark.parametrize("seconds", [-5.0, 0.0, 0.005])
async def test_a_running_job_ends_at_its_deadline(seconds: float) -> None:
    async with desk_of(1) as desk:
        desk.submit("a", waits, seconds)

        report = await desk.report_of("a")

    assert (report["finish_reason"], report["error_category"], report["retryable"]) == ("timeout", "timeout", True)


async def test_the_deadline_counts_while_a_job_waits() -> None:
    async with desk_of(1) as desk:
        desk.submit("long")
        desk.submit("queued", returns, 0.005)

        assert (await desk.report_of("queued"))["finish_reason"] == "timeout"
        assert desk.started == ["long"]


async def test_an_agent_that_blocked_the_loop_past_its_deadline_has_timed_out() -> None:
    async def blocks(desk: Desk, ctx: RolloutContext) -> Any:
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass
        return ctx.complete([], reward=1.0)

    async with desk_of(1) as desk:
        desk.submit("a", blocks, 0.01)

        assert (await desk.report_of("a"))["finish_reason"] == "timeout"


# ---------------------------------------------------------------- what goes wrong around an agent


async def test_a_start_that_fails_is_reported_and_frees_the_slot() -> None:
    async def fails(job: Job) -> None:
        raise OSError("no store")

    async with desk_of(1) as desk:
        desk.starting = fails
        desk.submit("a")
        desk.submit("b")

        reports = [await desk.report_of(name) for name in ("a", "b")]

    assert [report["finish_reason"] for report in reports] == ["interrupted"] * 2


async def test_a_context_that_cannot_be_built_is_reported_and_frees_the_slot() -> None:
    def cannot(job: Job) -> RolloutRun:
        raise OSError("no trace file")

    desk = Desk(1)
    executor = LocalExecutor(cannot, limit=1, cancel_grace_seconds=1, metrics=desk.metrics)
    desk.executor = executor
    await executor.start(desk.on_start, desk.on_end)
    desk.submit("a")

    assert (await desk.report_of("a"))["finish_reason"] == "interrupted"
    assert executor.capacity().running == 0
    await executor.stop()


async def test_a_cancel_while_a_job_is_being_started_is_reported_once() -> None:
    async with desk_of(1) as desk:
        entered = asyncio.Event()

        async def hangs(job: Job) -> None:
            entered.set()
            await desk.released.wait()

        desk.starting = hangs
        desk.submit("a")
        await entered.wait()

        assert desk.executor.cancel("a", Cause.CANCELLED) == "running"
        assert (await desk.report_of("a"))["finish_reason"] == "cancelled"
        await until(lambda: desk.executor.capacity().running == 0)

    assert len(desk.reports) == 1


# ---------------------------------------------------------------- the end


async def test_a_drain_waits_for_what_runs_and_what_waits() -> None:
    async with desk_of(1) as desk:
        for i in range(3):
            desk.submit(f"r{i}", returns_later)

        await desk.executor.drain(5)

        assert len(desk.reports) == 3
    assert {ended.outcome.status for ended in desk.reports} == {"COMPLETED"}


async def test_a_drain_ends_what_is_left_after_the_grace_as_shutdown() -> None:
    async with desk_of(1) as desk:
        desk.submit("running")
        desk.submit("queued")
        await until(lambda: desk.started == ["running"])

        await desk.executor.drain(0.005)

    assert [ended.outcome.finish_reason for ended in desk.reports] == ["shutdown"] * 2
    assert all(decode(ended.outcome.body)["retryable"] for ended in desk.reports)


async def test_a_drain_of_nothing_is_over_at_once() -> None:
    async with desk_of(1) as desk, asyncio.timeout(1):
        await desk.executor.drain(60)
