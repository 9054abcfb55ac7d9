"""The hinge of the house: the only file that knows the whole machine.

Requests come in through `init()`, results go out through `_ended()`; the two meet in the record.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct

from rollout._version import __version__
from rollout.agent.context import Checkpoints, Observer, RolloutContext
from rollout.agent.runner import Cause, RolloutRun
from rollout.agent.tools import tools_to_wire
from rollout.errors import (
    GetToolsFailed,
    InvalidRequest,
    NotFound,
    RequestError,
    RequestRejected,
    ResultDropped,
    ServiceUnavailable,
    StoreError,
)
from rollout.executors.base import Capacity, Ended, Executor, Job
from rollout.executors.local import LocalExecutor
from rollout.hosts import AllowedHosts
from rollout.metrics import LoopLagMonitor, Metrics, llm_outcome
from rollout.retry import Clock, RetryPolicy
from rollout.schemas import CancelRequest, InitRequest, Phase, RolloutState, callback_url
from rollout.server.recovery import Recovery
from rollout.server.states import state_of
from rollout.settings import RolloutSettings
from rollout.state.checkpoints import StoredCheckpoints
from rollout.state.outbox import Outbox
from rollout.state.registry import Admission, Registry, init_answer
from rollout.state.store import Record, Store, Tally
from rollout.state.sweeper import Sweeper
from rollout.traces import Trace, TraceWriter
from rollout.tracing import TraceContext, Tracer
from rollout.trainer import Trainer, TrainerSession, bearer, idempotency_header
from rollout.wire import encode

logger = logging.getLogger(__name__)

GET_TOOLS_SECONDS = 60.0
"""How long `get_tools()` may take before the init is answered with an error."""

_STORE_PAUSE_SECONDS = 0.25
_LONGEST_STORE_PAUSE_SECONDS = 4.0

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
        self.registry = Registry(
            store,
            capacity=server.max_concurrent_rollouts + server.max_queued_rollouts,
            owed_limit_bytes=server.result_cache_bytes,
            ttl_seconds=server.record_ttl_seconds,
            horizon_seconds=server.delivery_horizon_seconds,
            clock=clock,
            wall_clock=wall_clock,
        )
        self.trainer = Trainer(client, self.metrics, clock=clock)
        self.executor = executor or LocalExecutor(
            self._prepare,
            limit=server.max_concurrent_rollouts,
            cancel_grace_seconds=server.cancel_grace_seconds,
            metrics=self.metrics,
            clock=clock,
        )
        self.outbox = Outbox(
            self.registry,
            self._send,
            RetryPolicy(
                retries=client.complete_rollout_retries,
                base_delay_seconds=client.retry_base_delay,
                max_delay_seconds=client.retry_max_delay,
            ),
            self.metrics,
            horizon_seconds=server.delivery_horizon_seconds,
        )
        self.sweeper = Sweeper(self.registry, self.metrics, interval_seconds=server.cleanup_interval_seconds)
        self._hosts = AllowedHosts.parse(client.allowed_hosts)
        self._tracer = Tracer.create() if tracer is None else tracer
        self._traces = TraceWriter(server.debug_dir) if server.debug_dir else None
        self._timeout_seconds = server.rollout_timeout_seconds
        self._admits_inline = not store.suspends and not inspect.iscoroutinefunction(agent.get_tools)
        self._tasks: set[asyncio.Task[None]] = set()
        self._owned = contextlib.AsyncExitStack()
        self._started = clock()
        self._running = False
        self._unwritten = 0
        self._all_written = asyncio.Event()
        self._all_written.set()
        self._set_gauges()

    def _set_gauges(self) -> None:
        capacity = self.executor.capacity
        self.metrics.queue_depth.set_function(lambda: capacity().queued)
        self.metrics.slots_in_use.set_function(lambda: capacity().running)
        self.metrics.slots_limit.set_function(lambda: capacity().limit)
        self.metrics.records.set_function(lambda: _records_by(self.registry.store.tally()))

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the store and the client session, start the background tasks."""
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
        self._started = self.clock()
        self._running = True
        await self._recover()

    async def _recover(self) -> None:
        resumes = self.settings.server.resume_rollouts or bool(getattr(self.agent, "resumable", False))
        recovery = Recovery(
            self.registry,
            resumes=resumes,
            timeout_seconds=self._timeout_seconds,
            get_tools=self._tools_again,
            submit=self.executor.submit,
            end=self._ended_before,
        )
        await recovery.run()

    async def _tools_again(self, request: InitRequest) -> Any:
        tools = self._call_get_tools(request)
        if inspect.isawaitable(tools):
            async with asyncio.timeout(GET_TOOLS_SECONDS):
                return await tools
        return tools

    async def _ended_before(self, ended: Ended) -> None:
        self._own(self._ended(ended))  # its trainer may be slow, the start is not

    async def stop(self, grace_seconds: float | None = None) -> None:
        """Refuse what is new, give the running rollouts their grace, deliver, and let go. May be called twice."""
        if not self._running:
            return
        self._running = False
        grace = self.settings.server.shutdown_grace_seconds if grace_seconds is None else grace_seconds
        self.registry.begin_drain()
        live = self.registry.store.tally().live
        if live:
            logger.info("draining: %d rollouts have %g s to end", live, grace)
        try:
            await self.executor.drain(grace)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=GET_TOOLS_SECONDS)
            await self._wait_until_written()
            await self.outbox.flush(FLUSH_SECONDS)
            self.registry.wake_all()
        finally:
            await self._owned.aclose()

    async def _wait_until_written(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._all_written.wait()
        except TimeoutError:
            logger.error("%d results could not be stored; a restart reports them as interrupted", self._unwritten)

    # ------------------------------------------------------------ in

    async def init(self, request: InitRequest, trace: TraceContext | None = None) -> bytes:
        """Accept a rollout, or recognise one; the body of the 202. Raises `RequestError`.

        A caller that goes away takes nothing with it: whoever leads the admission, it is carried to its end.
        """
        if not self._hosts.allows_everything:
            await self._check_hosts(request)
        admission, leads = self.registry.enter(request)
        if not leads:
            self.metrics.inits.inc("duplicate", "")
            return await admission.wait()
        if self._admits_inline:
            await self._lead(admission, trace)  # nothing in it waits, so nothing can cut it off
        else:
            self._own(self._lead(admission, trace))
        return await admission.wait()

    async def _check_hosts(self, request: InitRequest) -> None:
        endpoints = request.endpoints()
        base = request.server_url is not None
        await self._hosts.check(endpoints.chat, "server_url" if base else "chat_completions_url")
        await self._hosts.check(endpoints.completed, "server_url" if base else "completion_callback_url")
        tools = request.tool_endpoint()
        if tools is not None:
            await self._hosts.check(tools, "tool_server_url")

    def _own(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _lead(self, admission: Admission, trace: TraceContext | None) -> None:
        """Decide an admission, up to the point where `get_tools()` makes us wait."""
        try:
            record = await self.registry.known(admission)
            if record is not None:
                self.metrics.inits.inc("duplicate", "")
                self._conclude(admission, init_answer(record))
                return
            self.registry.check_room()
            tools = self._call_get_tools(admission.request)
        except BaseException as exc:
            self._fail(admission, exc)
            return
        if not inspect.isawaitable(tools):
            await self._accept(admission, trace, tools)
        elif self._admits_inline:
            self._admits_inline = False  # an async get_tools() in disguise
            self._own(self._accept_later(admission, trace, tools))
        else:
            await self._accept_later(admission, trace, tools)

    def _call_get_tools(self, request: InitRequest) -> Any:
        try:
            return self.agent.get_tools(request.view())
        except InvalidRequest as exc:
            raise RequestRejected(str(exc)) from exc
        except BaseException as exc:
            raise _get_tools_raised(request, exc) from exc

    async def _accept_later(self, admission: Admission, trace: TraceContext | None, tools: Awaitable[Any]) -> None:
        try:
            async with asyncio.timeout(GET_TOOLS_SECONDS):
                found = await tools
        except InvalidRequest as exc:
            self._fail(admission, RequestRejected(str(exc)))
        except TimeoutError as exc:
            self._fail(admission, _get_tools_raised(admission.request, exc))
        except BaseException as exc:
            self._fail(admission, _get_tools_raised(admission.request, exc))
        else:
            await self._accept(admission, trace, found)

    async def _accept(self, admission: Admission, trace: TraceContext | None, tools: Any) -> None:
        request = admission.request
        try:
            text = _tools_text(tools)
            record = await self.registry.admit(admission, text)
        except BaseException as exc:
            self._fail(admission, exc)
            return
        accepted = self.clock()
        job = Job(
            request=request, tools=tools, accepted=accepted, deadline=self._deadline(request, accepted), trace=trace
        )
        self.executor.submit(job)
        if admission.cancelled:
            self.executor.cancel(job.rollout_id, Cause.CANCELLED)
        self.metrics.inits.inc("accepted", "")
        self._conclude(admission, init_answer(record))

    def _deadline(self, request: InitRequest, accepted: float) -> float | None:
        seconds = self._timeout_seconds if request.timeout_seconds is None else request.timeout_seconds
        return accepted + seconds if seconds > 0 else None

    def _conclude(self, admission: Admission, answer: bytes | None, error: RequestError | None = None) -> None:
        self.registry.leave(admission)
        admission.resolve(answer, error)

    def _fail(self, admission: Admission, exc: BaseException) -> None:
        """Nothing is remembered: all who wait get the same error, the next try starts afresh."""
        if isinstance(exc, StoreError):
            exc = ServiceUnavailable(f"the store cannot remember the rollout now: {exc}", "store_failed", 5)
        if not isinstance(exc, RequestError):
            logger.error("rollout %r: admission failed", admission.request.rollout_id, exc_info=exc)
            exc = RequestError("the service failed while it admitted the rollout; its log says how")
        self._conclude(admission, None, exc)

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
            deadline=job.deadline,
            span=span,
            run=job.run,
        )
        view = request.view()
        if trace is not None:
            trace.write("started", request=request)
        ctx = RolloutContext(
            view,
            session,
            tools=job.tools,
            strict_history=self.settings.client.strict_history,
            deadline=job.deadline,
            clock=self.clock,
            observer=_Watcher(self.metrics, trace),
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
        """Write the terminal result, then pay it out. The first result wins."""
        job = ended.job
        self._unwritten += 1
        self._all_written.clear()
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
            await self.trainer.deliver(callback_url(callback.url), record.result, headers)

    # ------------------------------------------------------------ questions

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
        """End rollouts; what became of each. Idempotent."""
        if isinstance(request.ids, list):
            return {rollout_id: await self._cancel_one(rollout_id) for rollout_id in dict.fromkeys(request.ids)}
        prefix = request.prefix if isinstance(request.prefix, str) else ""
        found = dict.fromkeys([r.rollout_id for r in self.registry.live(prefix)] + self.registry.admitting(prefix))
        dispositions = {rollout_id: await self._cancel_one(rollout_id) for rollout_id in found}
        return {k: v for k, v in dispositions.items() if v not in ("finished", "not_found")}

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

    # ------------------------------------------------------------ health

    def problem(self) -> str | None:
        """Why this service is not healthy; None if it is."""
        for name, task in (("sweeper", self.sweeper.task), ("outbox", self.outbox.task)):
            if self._running and task is not None and task.done():
                return f"the {name} has died"
        failure = self.registry.store.failure or self.outbox.failure
        if failure is not None:
            return f"the store fails: {failure}"
        return None

    def health(self) -> dict[str, Any]:
        """The body of `/health`: counts that are kept anyway, so it costs the same with a million records."""
        problem = self.problem()
        tally = self.registry.store.tally()
        status = "unhealthy" if problem else "draining" if self.registry.draining else "healthy"
        body: dict[str, Any] = {
            "status": status,
            "agent_loop": self.agent_name,
            "active_rollouts": tally.live,
            "completed_rollouts": tally.records - tally.live,
            "undelivered_rollouts": tally.by_phase[Phase.UNDELIVERED],
            "uptime_seconds": round(self.clock() - self._started, 3),
            "version": __version__,
        }
        if problem:
            body["reason"] = problem
        return body

    def status(self) -> dict[str, Any]:
        """The body of `/status`."""
        tally = self.registry.store.tally()
        capacity: Capacity = self.executor.capacity()
        server = self.settings.server
        return {
            "agent": self.agent_name,
            "version": __version__,
            "uptime_seconds": round(self.clock() - self._started, 3),
            "draining": self.registry.draining,
            "rollouts": {"by_state": tally.by_status, "by_phase": tally.by_phase, "records": tally.records},
            "slots": {"running": capacity.running, "queued": capacity.queued},
            "limits": {
                "max_concurrent_rollouts": server.max_concurrent_rollouts,
                "max_queued_rollouts": server.max_queued_rollouts,
                "rollout_timeout_seconds": server.rollout_timeout_seconds,
                "record_ttl_seconds": server.record_ttl_seconds,
                "max_body_bytes": server.max_body_bytes,
                "max_metadata_size_bytes": self.settings.metadata_limit_bytes,
                "result_cache_bytes": server.result_cache_bytes,
            },
            "store": {
                "kind": self.registry.store.name,
                "size_bytes": self.registry.store.size_bytes,
                "failure": self.registry.store.failure,
                "owed_bytes": tally.owed_bytes,
                "held_bytes": tally.held_bytes,
            },
        }


class _Watcher(Observer):
    """Carries what happens in one rollout to the metrics, the record and the trace file."""

    __slots__ = ("_metrics", "_trace")

    def __init__(self, metrics: Metrics, trace: Trace | None) -> None:
        self._metrics = metrics
        self._trace = trace

    def llm_called(self, seconds: float, error: BaseException | None) -> None:
        self._metrics.llm_seconds.observe(seconds)
        self._metrics.llm_calls.inc(llm_outcome(error))

    def tool_called(self, name: str, seconds: float, error: str | None) -> None:
        self._metrics.tool_seconds.observe(seconds)
        if self._trace is not None:
            self._trace.write("tool", name=name, seconds=seconds, error=error)

    def history_rewritten(self) -> None:
        self._metrics.history_rewrites.inc()

    def event(self, name: str, data: dict[str, Any]) -> None:
        if self._trace is not None:
            self._trace.write(name, **data)


def _records_by(tally: Tally) -> dict[tuple[str, ...], float]:
    return {("", phase.value): count for phase, count in tally.by_phase.items()}


def _get_tools_raised(request: InitRequest, exc: BaseException) -> GetToolsFailed:
    logger.error("rollout %r: get_tools() failed", request.rollout_id, exc_info=exc)
    what = (
        f"took more than {GET_TOOLS_SECONDS:g} s" if isinstance(exc, TimeoutError) else f"raised {type(exc).__name__}"
    )
    return GetToolsFailed(f"the agent's get_tools() {what}; the service's log has the traceback")


def _tools_text(tools: Any) -> bytes:
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise GetToolsFailed(f"the agent's get_tools() returned {type(tools).__name__}, not a list of tools")
    try:
        wire = tools_to_wire(tools)
    except TypeError as exc:
        raise GetToolsFailed(f"the agent's get_tools() returned a list with something that is no tool: {exc}") from None
    text, problems = encode(wire, "tools")
    if problems:
        raise GetToolsFailed(f"the agent's tools cannot be sent: {'; '.join(problems)[:1000]}")
    return text
