"""The hinge of the house: the only file that knows the whole machine.

Requests come in through the admissions, results go out through `_ended()`; the two meet in the record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from rollout.agent.context import Checkpoints, RolloutContext
from rollout.agent.runner import Cause, RolloutRun
from rollout.errors import NotFound, ResultDropped, ServiceUnavailable, StoreError
from rollout.executors.base import Ended, Executor, Job
from rollout.executors.local import LocalExecutor
from rollout.hosts import AllowedHosts
from rollout.logs import counted
from rollout.metrics import LoopLagMonitor, Metrics
from rollout.requests import callback_url
from rollout.retry import Clock, RetryPolicy
from rollout.schemas import CancelRequest, Phase, RolloutState
from rollout.server.admissions import Admissions
from rollout.server.recovery import Recovery
from rollout.server.reports import Reports
from rollout.server.states import state_of
from rollout.server.watcher import Watcher
from rollout.settings import RolloutSettings
from rollout.state.checkpoints import StoredCheckpoints
from rollout.state.outbox import Outbox
from rollout.state.registry import Registry
from rollout.state.store import Record, Store
from rollout.state.sweeper import Sweeper
from rollout.traces import TraceWriter
from rollout.tracing import Tracer
from rollout.trainer import Trainer, TrainerSession, bearer, idempotency_header

logger = logging.getLogger(__name__)

_STORE_PAUSE_SECONDS = 0.25
_LONGEST_STORE_PAUSE_SECONDS = 4.0
_CANCELS_IN_ONE_GO = 1000

FLUSH_SECONDS = 10.0
"""How long a shutdown waits for deliveries in flight after the last rollout has ended."""


class Result(Struct, frozen=True):
    """What `/result` answers: the final body, or else the state so far."""

    body: bytes | None
    state: RolloutState | None = None


class Service:
    """One agent served. `start()` first, `stop()` last, on one event loop; the HTTP front door sits on top.

    Everything that runs in the background belongs to this object and ends with it.
    """

    def __init__(
        self,
        agent: Any,
        settings: RolloutSettings,
        store: Store,
        *,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
        executor: Executor | None = None,
        clock: Clock = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        server, client = settings.server, settings.client
        self.agent = agent
        self.agent_name = str(getattr(agent, "name", type(agent).__name__))
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics() if metrics is None else metrics
        self.registry = self._make_registry(store, clock, wall_clock)
        self.trainer = Trainer(client, self.metrics, clock=clock)
        self.executor = executor or self._make_executor()
        self.outbox = self._make_outbox()
        self.sweeper = Sweeper(self.registry, self.metrics, interval_seconds=server.cleanup_interval_seconds)
        self.admissions = Admissions(
            agent,
            self.registry,
            self.executor,
            self.metrics,
            hosts=AllowedHosts.parse(client.allowed_hosts),
            timeout_seconds=server.rollout_timeout_seconds,
        )
        self.reports = Reports(self.agent_name, settings, self.registry, self.executor, self.outbox, self.sweeper)
        self.reports.feed(self.metrics)
        self.init = self.admissions.init
        self._tracer = Tracer.create() if tracer is None else tracer
        self._traces = TraceWriter(server.debug_dir) if server.debug_dir else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._owned = contextlib.AsyncExitStack()
        self._running = False
        self._unwritten = 0
        self._all_written = asyncio.Event()
        self._all_written.set()

    def _make_registry(self, store: Store, clock: Clock, wall_clock: Callable[[], float]) -> Registry:
        server = self.settings.server
        return Registry(
            store,
            capacity=server.max_concurrent_rollouts + server.max_queued_rollouts,
            owed_limit_bytes=server.result_cache_bytes,
            ttl_seconds=server.record_ttl_seconds,
            horizon_seconds=server.delivery_horizon_seconds,
            clock=clock,
            wall_clock=wall_clock,
        )

    def _make_executor(self) -> LocalExecutor:
        server = self.settings.server
        return LocalExecutor(
            self._prepare,
            limit=server.max_concurrent_rollouts,
            cancel_grace_seconds=server.cancel_grace_seconds,
            metrics=self.metrics,
            clock=self.clock,
        )

    def _make_outbox(self) -> Outbox:
        client = self.settings.client
        policy = RetryPolicy(
            retries=client.complete_rollout_retries,
            base_delay_seconds=client.retry_base_delay,
            max_delay_seconds=client.retry_max_delay,
        )
        return Outbox(self.registry, self._send, policy, self.metrics)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the store and the client session, start the background tasks. Whatever fails, nothing stays open."""
        try:
            await self._start()
        except BaseException:
            self._running = self.reports.is_running = False
            await self._owned.aclose()
            raise

    async def _start(self) -> None:
        enter = self._owned.enter_async_context
        await self.registry.store.open()
        self._owned.push_async_callback(self.registry.store.close)
        await enter(self.trainer)
        if self._traces is not None:
            await enter(self._traces)
        await enter(LoopLagMonitor(self.metrics))
        await enter(self.outbox)
        await enter(self.sweeper)
        await self.executor.start(self._starting, self._ended)
        self._owned.push_async_callback(self.executor.stop)
        self._owned.push_async_callback(self._end_tasks)
        self._running = self.reports.is_running = True
        await self._recover()

    async def _recover(self) -> None:
        resumes = self.settings.server.resume_rollouts or bool(getattr(self.agent, "resumable", False))
        recovery = Recovery(
            self.registry,
            resumes=resumes,
            timeout_seconds=self.settings.server.rollout_timeout_seconds,
            get_tools=self.admissions.tools_again,
            submit=self.executor.submit,
            end=self._ended,
        )
        await recovery.run()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    async def stop(self, grace_seconds: float | None = None) -> None:
        """Refuse what is new, give the running rollouts their grace, deliver, and let go. May be called twice."""
        if not self._running:
            return
        self._running = self.reports.is_running = False
        grace = self.settings.server.shutdown_grace_seconds if grace_seconds is None else grace_seconds
        self.registry.begin_drain()
        live = self.registry.store.tally().live
        if live:
            logger.info("draining: %s to end, %g s for that", counted(live, "rollout"), grace)
        try:
            await self.admissions.finish(grace)
            await self.executor.drain(grace)
            await self._wait_until_written()
            await self.outbox.flush(FLUSH_SECONDS)
            self.registry.wake_all()
            self._say_what_is_left()
        finally:
            await self._owned.aclose()

    def _say_what_is_left(self) -> None:
        tally = self.registry.store.tally()
        left = tally.records - tally.by_phase[Phase.DELIVERED]
        if not left:
            logger.info("stopped: every result was delivered")
            return
        was = "was" if left == 1 else "were"
        level = logging.INFO if self.registry.store.is_durable else logging.ERROR
        logger.log(
            level, "stopped: %s %s not delivered, and %s", counted(left, "result"), was, self.fate_of_the_undelivered
        )

    @property
    def fate_of_the_undelivered(self) -> str:
        """What becomes of results that have not been delivered when the process ends, for people."""
        if not self.registry.store.is_durable:
            return "lost: the state is in memory"
        url = self.settings.server.state_url
        return f"kept in {url.removeprefix('sqlite:///') if url.startswith('sqlite:') else 'the store'}"

    async def _wait_until_written(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._all_written.wait()
        except TimeoutError:
            count = counted(self._unwritten, "result")
            logger.error("%s could not be stored; a restart reports such rollouts as interrupted", count)

    # ------------------------------------------------------------ running

    async def _starting(self, job: Job) -> bool:
        record = await self.registry.start(job.rollout_id)
        if record is None:
            return False
        logger.info("rollout %r started", job.rollout_id)
        return True

    def _prepare(self, job: Job) -> RolloutRun:
        request = job.request
        span = self._tracer.rollout_span(job.rollout_id, self.agent_name, job.trace)
        trace = self._traces.open_trace(job.rollout_id) if self._traces is not None else None
        session = TrainerSession(
            self.trainer,
            request.endpoints().chat,
            rollout_id=job.rollout_id,
            key=request.api_key if request.llm_api_key is None else request.llm_api_key,
            secrets=request.secrets(),
            deadline=job.deadline,
            span=span,
            run=job.run,
        )
        view = request.view() if job.view is None else job.view
        if trace is not None:
            trace.write("started", request=request)
        ctx = RolloutContext(
            view,
            session,
            tools=job.tools,
            strict_history=self.settings.client.strict_history,
            deadline=job.deadline,
            clock=self.clock,
            observer=Watcher(self.metrics, trace),
            span=span,
            run=job.run,
            checkpoint=job.checkpoint,
            checkpoints=self._checkpoints_of(job),
        )
        return RolloutRun(self.agent, ctx)

    def _checkpoints_of(self, job: Job) -> Checkpoints | None:
        store = self.registry.store
        if not store.is_durable:
            return None
        return StoredCheckpoints(
            store, job.rollout_id, every_turn=self.settings.server.checkpoint_turns, clock=self.clock
        )

    # ------------------------------------------------------------ out

    async def _ended(self, ended: Ended) -> None:
        """See to it that the terminal result is written and paid out.

        The caller's task has run an agent, which may have left behind what cancels it: a timer, a child. So where
        writing has to wait, that and the delivery are a task of our own. In memory nothing comes in between, and a
        delivery that is cut off stays due: there the caller's task will do.
        """
        self._unwritten += 1
        self._all_written.clear()
        if not self.registry.store.suspends:
            await self._pay_out(ended)
            return
        task = asyncio.create_task(self._pay_out(ended), name="rollout-result")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pay_out(self, ended: Ended) -> None:
        """Write the terminal result, then deliver it. The first result wins."""
        job = ended.job
        try:
            record = await self._write_end(ended)
        finally:
            self._unwritten -= 1
            if not self._unwritten:
                self._all_written.set()
        if record is None:
            self.metrics.late_results.inc()
            logger.warning("rollout %r: a second terminal result is dropped", job.rollout_id)
            return
        self._note_end(ended)
        await self.outbox.deliver(record)

    async def _write_end(self, ended: Ended) -> Record | None:
        """The record with its terminal result; None if it had one. A store that fails is waited for, in memory."""
        outcome, rollout_id = ended.outcome, ended.job.rollout_id
        pause = _STORE_PAUSE_SECONDS
        while True:
            try:
                return await self.registry.finish(rollout_id, outcome.status, outcome.body, ended.turn, ended.trace)
            except StoreError as exc:
                if pause == _STORE_PAUSE_SECONDS:  # once: a disk may stay full for long, and many may wait
                    logger.error("rollout %r: its result waits in memory for the store: %s", rollout_id, exc)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_STORE_PAUSE_SECONDS)

    def _note_end(self, ended: Ended) -> None:
        outcome, job = ended.outcome, ended.job
        seconds = self.clock() - job.accepted
        self.metrics.rollout_seconds.observe(seconds)
        self.metrics.finished.inc(outcome.status.value, outcome.finish_reason or "")
        logger.info(
            "rollout %r ended: %s (%s) after %d turns, %.3f s%s",
            job.rollout_id,
            outcome.status.value,
            outcome.finish_reason,
            ended.turn,
            seconds,
            f": {outcome.error_message}" if outcome.error_message else "",
        )
        if self._traces is not None:
            self._traces.open_trace(job.rollout_id).write("ended", result=outcome.body.decode())

    async def _send(self, record: Record) -> None:
        callback = record.callback
        assert callback is not None
        assert record.result is not None
        with self._tracer.delivery_span(record.rollout_id, callback.trace) as span:
            headers = {
                **bearer(callback.api_key),
                "Idempotency-Key": idempotency_header(record.rollout_id),
                **span.headers(),
            }
            secrets = () if callback.api_key is None else (callback.api_key,)
            await self.trainer.deliver(callback_url(callback.url), record.result, headers, secrets)

    # ------------------------------------------------------------ questions

    def health(self) -> dict[str, Any]:
        """The body of `/health`, also for an application that the service is mounted in."""
        return self.reports.health()

    async def state(self, rollout_id: str) -> RolloutState:
        """What is known of a rollout; `NotFound`."""
        return self._state_of(await self._known(rollout_id))

    def _state_of(self, record: Record) -> RolloutState:
        return state_of(record, self.executor.turn(record.rollout_id) if record.is_live else record.turn)

    async def _known(self, rollout_id: str) -> Record:
        record = await self.registry.get(rollout_id)
        if record is None:
            raise NotFound(f"no rollout {rollout_id!r}: never accepted here, or forgotten")
        return record

    async def result(self, rollout_id: str, wait_seconds: float = 0) -> Result:
        """The final result, waited for up to so many seconds; else the state. `NotFound`, `ResultDropped`."""
        record = await self._known(rollout_id)
        if record.is_live and wait_seconds > 0 and self._running:
            await self.registry.wait_end(rollout_id, wait_seconds)
            record = await self._known(rollout_id)
        if record.is_live:
            return Result(None, self._state_of(record))
        if not record.result_held:
            raise ResultDropped(f"the result of {rollout_id!r} was delivered and is no longer held")
        return Result(record.result)

    async def cancel(self, request: CancelRequest) -> dict[str, str]:
        """End rollouts; what became of each. Idempotent. `ServiceUnavailable` when the service has stopped."""
        try:
            if isinstance(request.ids, list):
                return await self._cancel_all(dict.fromkeys(request.ids))
            prefix = request.prefix if isinstance(request.prefix, str) else ""
            live = [record.rollout_id for record in self.registry.live(prefix)]
            dispositions = await self._cancel_all(dict.fromkeys(live + self.registry.admitting(prefix)))
            return {k: v for k, v in dispositions.items() if v not in ("finished", "not_found")}
        except StoreError:
            if self._running:
                raise
            raise ServiceUnavailable("the service is shutting down", "draining", 5) from None

    async def _cancel_all(self, rollout_ids: Iterable[str]) -> dict[str, str]:
        dispositions: dict[str, str] = {}
        for count, rollout_id in enumerate(rollout_ids, 1):
            dispositions[rollout_id] = await self._cancel_one(rollout_id)
            if not count % _CANCELS_IN_ONE_GO:
                await asyncio.sleep(0)  # where the state is in memory nothing else lets others in
        return dispositions

    async def _cancel_one(self, rollout_id: str) -> str:
        where = self.executor.cancel(rollout_id, Cause.CANCELLED)
        if where is None:
            record = await self.registry.get(rollout_id)
            if record is not None and not record.is_live:  # before the admissions: one may be of a duplicate
                return "finished"
            if self.registry.cancel_admission(rollout_id):
                return "cancelled_queued"
            where = self.executor.cancel(rollout_id, Cause.CANCELLED)  # it may have come in while the store was asked
            if where is None:
                return "not_found" if record is None else "finished"
        logger.info("rollout %r cancelled while %s", rollout_id, where)
        return f"cancelled_{where}"
