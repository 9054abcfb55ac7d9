"""Runs one rollout: whatever the agent does becomes one `Outcome`."""

from __future__ import annotations

import asyncio
import enum
import inspect
import logging
from collections.abc import Callable
from typing import Any, cast

from msgspec import Raw

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutResult
from rollout.agent.outcome import Outcome, outcome_of
from rollout.errors import LimitReached, LLMError
from rollout.schemas import ErrorCategory, RolloutMetrics, RolloutStatus
from rollout.tracing import Attributes, Span

logger = logging.getLogger(__name__)

_MOST_TURNS = 2**31


class Cause(enum.Enum):
    """Why a rollout is ended from outside: finish reason, error category, and the text for the trainer."""

    CANCELLED = ("cancelled", ErrorCategory.CANCELLED, "the rollout was cancelled")
    TIMEOUT = ("timeout", ErrorCategory.TIMEOUT, "the rollout ran past its deadline")
    SHUTDOWN = ("shutdown", ErrorCategory.INTERRUPTED, "the service was shut down before the rollout had ended")
    INTERRUPTED = ("interrupted", ErrorCategory.INTERRUPTED, "the service died before the rollout had ended")

    @property
    def finish_reason(self) -> str:
        """The finish reason on the wire."""
        return self.value[0]


def _nothing() -> Raw:
    return Raw(b"[]")


def ended_before(rollout_id: str, cause: Cause, reached: Raw) -> Outcome:
    """The outcome of a rollout that is not running here, with the messages that are known of it."""
    finish_reason, category, text = cause.value
    result = RolloutResult(status=RolloutStatus.ERROR, finish_reason=finish_reason, error_message=text)
    return outcome_of(
        rollout_id, result, measured=RolloutMetrics(), extra_fields={}, reached=lambda: reached, category=category
    )


def ended_from_outside(rollout_id: str, cause: Cause, ctx: RolloutContext | None = None) -> Outcome:
    """The outcome of a rollout that somebody else ended, with what it had reached. At any moment, also mid-run."""
    finish_reason, category, text = cause.value
    return _failed(rollout_id, text, ctx, finish_reason=finish_reason, category=category)


def _failed(
    rollout_id: str,
    error_message: str,
    ctx: RolloutContext | None,
    *,
    finish_reason: str = "error",
    category: ErrorCategory | None = None,
    retryable: bool | None = None,
) -> Outcome:
    """The outcome of a rollout that ended as ERROR, with what it had reached. Never raises: an agent that has broken
    its context loses what it had reached, and nothing else.
    """
    result = RolloutResult(
        status=RolloutStatus.ERROR, final_messages=[], finish_reason=finish_reason, error_message=error_message
    )
    try:
        return _outcome(rollout_id, result, ctx, category=category, retryable=retryable)
    except BaseException:
        logger.exception("rollout %r: the agent has broken its context; what had been reached is lost", rollout_id)
        return _outcome(rollout_id, result, None, category=category, retryable=retryable)


def _outcome(
    rollout_id: str,
    result: RolloutResult,
    ctx: RolloutContext | None,
    *,
    category: ErrorCategory | None = None,
    retryable: bool | None = None,
) -> Outcome:
    return outcome_of(
        rollout_id,
        result,
        measured=RolloutMetrics() if ctx is None else ctx.measured(),
        extra_fields={} if ctx is None else ctx.extra_fields,
        reached=_nothing if ctx is None else ctx.history.reached,
        category=category,
        retryable=retryable,
    )


class RolloutRun:
    """One run of an agent for one request.

    `stop_cause` is set, before its task is cancelled, by whoever ends the run from outside; from then on the outcome
    is that cause, whatever `run()` returns or raises.
    """

    __slots__ = ("_agent", "_rollout_id", "ctx", "stop_cause")

    def __init__(self, agent: Any, ctx: RolloutContext) -> None:
        self._agent = agent
        self._rollout_id = ctx.rollout_id
        self.ctx = ctx
        self.stop_cause: Cause | None = None

    async def run(self) -> Outcome:
        """Await the agent. Never raises, not even what ends a process: one rollout's failure touches no other."""
        task = asyncio.current_task()
        try:
            with self.ctx.span as span:
                returned = self._agent.run(self.ctx)
                if inspect.isawaitable(returned):
                    returned = await returned
                _note_end(span, returned)
        except BaseException as exc:
            if isinstance(exc, GeneratorExit) and not _is_current(task):
                raise  # the interpreter is closing this very coroutine
            outcome = self._read(self._of_exception, exc)
        else:
            outcome = self._read(self._of_return, returned)
        self.ctx.close()
        await _settle_cancellation()
        return outcome if self.stop_cause is None else self.stopped()

    def stopped(self) -> Outcome:
        """The outcome now, of a run that was told to end, whether it has or not. The agent has no say from here on."""
        self.ctx.close()
        return ended_from_outside(self._rollout_id, self.stop_cause or Cause.INTERRUPTED, self.ctx)

    @property
    def turn(self) -> int:
        """LLM calls made so far."""
        turn = getattr(self.ctx, "turn", 0)
        return turn if isinstance(turn, int) and 0 <= turn < _MOST_TURNS else 0  # the agent has its limits in its hands

    def _read(self, read: Callable[[Any], Outcome], given: object) -> Outcome:
        """What the agent returned or raised as an outcome, even where its objects fail when they are looked at."""
        try:
            return read(given)
        except BaseException as exc:
            logger.exception("rollout %r: the agent's result cannot be read", self._rollout_id)
            text = f"the result of run() cannot be read: {_said(exc)}"
            return _failed(self._rollout_id, text, self.ctx, category=ErrorCategory.VALIDATION_ERROR)

    def _of_return(self, returned: object) -> Outcome:
        if isinstance(returned, RolloutResult):
            return _outcome(self._rollout_id, returned, self.ctx)
        kind = type(returned).__name__
        text = f"run() returned {kind}, not a RolloutResult; end with `return ctx.complete(messages)`"
        return _failed(self._rollout_id, text, self.ctx)

    def _of_exception(self, exc: BaseException) -> Outcome:
        if isinstance(exc, LimitReached):
            reached = cast("list[dict[str, Any]]", self.ctx.history.reached())
            result = RolloutResult(final_messages=reached, finish_reason=exc.finish_reason)
            return _outcome(self._rollout_id, result, self.ctx)
        if isinstance(exc, LLMError):
            logger.warning("rollout %r: %s", self._rollout_id, exc)
            category, retryable = ErrorCategory.LLM_ERROR, exc.retryable
            return _failed(self._rollout_id, str(exc), self.ctx, category=category, retryable=retryable)
        if self.stop_cause is None:
            logger.error("rollout %r: the agent raised %s", self._rollout_id, type(exc).__name__, exc_info=exc)
        return _failed(self._rollout_id, _said(exc), self.ctx)


def _note_end(span: Span, returned: object) -> None:
    if isinstance(returned, RolloutResult) and isinstance(returned.status, str):
        span.set(Attributes.ROLLOUT_STATUS, str(returned.status))
        if isinstance(returned.finish_reason, str):
            span.set(Attributes.ROLLOUT_FINISH_REASON, str(returned.finish_reason))
        if returned.status == RolloutStatus.ERROR:
            span.fail("agent_error")


def _said(exc: BaseException) -> str:
    if isinstance(exc, asyncio.CancelledError):
        return "the agent raised CancelledError although nobody had cancelled the rollout"
    try:
        text = str(exc)
    except BaseException:  # whatever an exception of the agent raises when it is asked for its text
        text = "(its text could not be read)"
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def _is_current(task: asyncio.Task[Any] | None) -> bool:
    """Whether the task is being run by its loop, as opposed to being thrown away."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:
        return False


async def _settle_cancellation() -> None:
    """Use up cancellations that the agent has left behind on this task, so that they do not hit what comes after it."""
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        return
    while task.uncancel():
        pass
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        task.uncancel()
