"""In: from a checked request to a record and a job, with the agent's `get_tools()` in between.

User code runs outside every lock, under a deadline, and in a task that no disconnect can cut off. Whatever comes out
of it, everybody who waits for this admission gets the same answer or the same error.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

from rollout.agent.runner import Cause
from rollout.agent.tools import tools_text
from rollout.errors import (
    GetToolsFailed,
    InvalidRequest,
    RequestError,
    RequestRejected,
    ServiceUnavailable,
    StoreError,
)
from rollout.executors.base import Executor, Job
from rollout.hosts import AllowedHosts
from rollout.metrics import Metrics
from rollout.requests import InitRequest, Received
from rollout.schemas import RolloutRequest
from rollout.state.registry import Admission, Registry, init_answer
from rollout.tracing import TraceContext

logger = logging.getLogger(__name__)

GET_TOOLS_SECONDS = 60.0
"""How long `get_tools()` may take before the init is answered with an error."""

_LEAST_GRACE_SECONDS = 1.0


class Admissions:
    """Decides inits, one for each request, whoever asks and how often. Belongs to one event loop.

    Where nothing can wait (the state is in memory, `get_tools()` is a plain function) an init is decided in its
    caller's own task, in one go; otherwise in a task that this object owns.
    """

    def __init__(
        self,
        agent: Any,
        registry: Registry,
        executor: Executor,
        metrics: Metrics,
        *,
        hosts: AllowedHosts,
        timeout_seconds: float,
    ) -> None:
        self._agent = agent
        self._registry = registry
        self._executor = executor
        self._metrics = metrics
        self._hosts = hosts
        self._timeout_seconds = timeout_seconds
        self._clock = registry.clock
        self._inline = not registry.store.suspends and not inspect.iscoroutinefunction(agent.get_tools)
        self._tasks: dict[asyncio.Task[None], Admission] = {}
        self._asking: set[asyncio.Task[Any]] = set()
        self._ending = False

    async def init(self, received: Received, trace: TraceContext | None) -> bytes:
        """Accept a rollout, or recognise one; the body of the 202. Raises `RequestError`.

        A caller that goes away takes nothing with it: whoever leads the admission, it is carried to its end.
        """
        if not self._hosts.allows_everything:
            await self._check_hosts(received.request)
        admission, leads = self._registry.enter(received.request)
        if leads:
            if self._inline:
                await self._lead(admission, received.view, trace)
            else:
                self._own(admission, self._lead(admission, received.view, trace))
        else:
            self._metrics.inits.inc("duplicate", "")
        return await admission.wait()

    async def finish(self, grace_seconds: float) -> None:
        """Decide every admission that has begun. To be called when the registry admits nothing more.

        What still waits for `get_tools()` could only be refused after it: it is refused now. Who swallows the
        cancellation has the grace, then its callers are answered without it.
        """
        self._ending = True
        for task in self._asking:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(grace_seconds, _LEAST_GRACE_SECONDS))
        for admission in self._tasks.values():
            self._fail(admission, _draining())

    async def tools_again(self, request: InitRequest) -> Any:
        """What `get_tools()` returns for a request that was accepted before. Raises `RequestError`."""
        tools = self._call_get_tools(request)
        return await self._awaited(request, tools) if inspect.isawaitable(tools) else tools

    async def _check_hosts(self, request: InitRequest) -> None:
        endpoints = request.endpoints()
        base = request.server_url is not None
        await self._hosts.check(endpoints.chat, "server_url" if base else "chat_completions_url")
        await self._hosts.check(endpoints.completed, "server_url" if base else "completion_callback_url")
        tools = request.tool_endpoint()
        if tools is not None:
            await self._hosts.check(tools, "tool_server_url")

    def _own(self, admission: Admission, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = admission
        task.add_done_callback(self._tasks.pop)

    # ------------------------------------------------------------ one admission

    async def _lead(self, admission: Admission, view: RolloutRequest, trace: TraceContext | None) -> None:
        """Decide an admission, up to the point where `get_tools()` makes us wait."""
        try:
            record = await self._registry.known(admission)
            if record is not None:
                self._metrics.inits.inc("duplicate", "")
                self._conclude(admission, init_answer(record))
                return
            self._registry.check_room()
            tools = self._call_get_tools(admission.request)
        except BaseException as exc:
            self._fail(admission, exc)
            return
        if not inspect.isawaitable(tools):
            await self._accept(admission, view, trace, tools)
        elif self._inline:
            self._inline = False  # an async get_tools() in disguise
            self._own(admission, self._accept_later(admission, view, trace, tools))
        else:
            await self._accept_later(admission, view, trace, tools)

    def _call_get_tools(self, request: InitRequest) -> Any:
        try:
            return self._agent.get_tools(request.unread())
        except InvalidRequest as exc:
            raise RequestRejected(str(exc)) from exc
        except BaseException as exc:
            raise _get_tools_failed(request, exc) from exc

    async def _awaited(self, request: InitRequest, tools: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            async with asyncio.timeout(GET_TOOLS_SECONDS):
                return await tools
        except InvalidRequest as exc:
            raise RequestRejected(str(exc)) from exc
        except BaseException as exc:
            if self._ending and isinstance(exc, asyncio.CancelledError):
                raise _draining() from None
            raise _get_tools_failed(request, exc) from exc
        finally:
            self._asking.discard(task)

    async def _accept_later(
        self, admission: Admission, view: RolloutRequest, trace: TraceContext | None, tools: Awaitable[Any]
    ) -> None:
        try:
            found = await self._awaited(admission.request, tools)
        except RequestError as exc:
            self._fail(admission, exc)
        else:
            await self._accept(admission, view, trace, found)

    async def _accept(self, admission: Admission, view: RolloutRequest, trace: TraceContext | None, tools: Any) -> None:
        request = admission.request
        try:
            record = await self._registry.admit(admission, _tools_text(tools))
        except BaseException as exc:
            self._fail(admission, exc)
            return
        accepted = self._clock()
        self._executor.submit(
            Job(
                request=request,
                # What waits is kept as text only: decoded, a conversation takes several times the room.
                view=view if self._executor.has_room else None,
                tools=tools,
                accepted=accepted,
                deadline=self._deadline(request, accepted),
                trace=trace,
            )
        )
        if admission.cancelled:
            self._executor.cancel(request.rollout_id, Cause.CANCELLED)
        self._metrics.inits.inc("accepted", "")
        self._conclude(admission, init_answer(record))

    def _deadline(self, request: InitRequest, accepted: float) -> float | None:
        seconds = self._timeout_seconds if request.timeout_seconds is None else request.timeout_seconds
        return accepted + seconds if seconds > 0 else None

    def _conclude(self, admission: Admission, answer: bytes | None, error: RequestError | None = None) -> None:
        self._registry.leave(admission)
        admission.resolve(answer, error)

    def _fail(self, admission: Admission, exc: BaseException) -> None:
        """Nothing is remembered: all who wait get the same error, the next try starts afresh."""
        if isinstance(exc, StoreError):
            exc = ServiceUnavailable(f"the store cannot remember the rollout now: {exc}", "store_failed", 5)
        if not isinstance(exc, RequestError):
            logger.error("rollout %r: admission failed", admission.request.rollout_id, exc_info=exc)
            exc = RequestError("the service failed while it admitted the rollout; its log says how")
        self._conclude(admission, None, exc)


def _draining() -> ServiceUnavailable:
    return ServiceUnavailable("the service is shutting down", "draining", 5)


def _get_tools_failed(request: InitRequest, exc: BaseException) -> GetToolsFailed:
    logger.error("rollout %r: get_tools() failed", request.rollout_id, exc_info=exc)
    took = isinstance(exc, TimeoutError)
    what = f"took more than {GET_TOOLS_SECONDS:g} s" if took else f"raised {type(exc).__name__}"
    return GetToolsFailed(f"the agent's get_tools() {what}; the service's log has the traceback")


def _tools_text(tools: Any) -> bytes:
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise GetToolsFailed(f"the agent's get_tools() returned {type(tools).__name__}, not a list of tools")
    try:
        text, problems = tools_text(tools)
    except TypeError as exc:
        raise GetToolsFailed(f"the agent's get_tools() returned a list with something that is no tool: {exc}") from None
    if problems:
        raise GetToolsFailed(f"the agent's tools cannot be sent: {'; '.join(problems)[:1000]}")
    return text
