"""What an agent has in its hands while it runs: the request, the LLM, its tools, its budgets."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from rollout.agent.limits import Limits
from rollout.agent.loop import RolloutResult
from rollout.agent.tool_calls import run_tool_calls
from rollout.completions import CompletionsResult, History, SentMessages, usage_tokens
from rollout.errors import HistoryRewritten, LimitReached, RolloutError
from rollout.retry import Clock
from rollout.schemas import MessageDict, RolloutMetrics, RolloutRequest, RolloutStatus
from rollout.tracing import Span

logger = logging.getLogger(__name__)

__all__ = ["CompletionsResult", "LLMClient", "Observer", "RolloutContext"]


class LLMClient(Protocol):
    """Whoever answers the LLM calls of one rollout: the trainer, another endpoint, a script."""

    async def chat_completions(self, messages: list[MessageDict], /, **params: Any) -> CompletionsResult:
        """One answer to the messages; raises an `LLMError` if there is none."""
        ...


class Observer:
    """Told what happens in a rollout, for metrics and traces. Every method may be overridden; none may raise."""

    __slots__ = ()
    is_tracing = False
    """Whether `event()` is to be called for every turn."""

    def llm_called(self, seconds: float, error: BaseException | None) -> None:
        """An LLM call has ended."""

    def tool_called(self, name: str, seconds: float, error: str | None) -> None:
        """A tool call has ended."""

    def history_rewritten(self) -> None:
        """The messages sent are no continuation of those before."""

    def event(self, name: str, data: dict[str, Any]) -> None:
        """The agent, or the context for it, has something for the trace."""


class Checkpoints(Protocol):
    """Who keeps the messages of a running rollout safe."""

    every_turn: bool

    async def save(self, messages: bytes) -> bool:
        """Keep JSON of the messages in place of what was kept before; whether it was done. Does not raise."""
        ...


_SILENT = Observer()
_NO_SPAN = Span()
_SHOWN = 5
_PAUSE_WHEN_ENDED_SECONDS = 1.0  # what was left behind may be a loop that swallows every error


class RolloutContext:
    """One rollout as its agent sees it. Belongs to the task that runs the agent; not thread-safe."""

    def __init__(
        self,
        request: RolloutRequest,
        llm: LLMClient,
        *,
        tools: Sequence[Any] = (),
        strict_history: bool = False,
        deadline: float | None = None,
        clock: Clock = time.monotonic,
        observer: Observer = _SILENT,
        span: Span = _NO_SPAN,
        run: int = 1,
        checkpoint: bytes | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.request = request
        """The agent's own copy: changing it harms nobody."""
        self.llm = llm
        self.tools = tools
        """The very tools that `get_tools()` returned."""
        self.run = run
        """Which run of this rollout it is: 1, and more after a restart that runs it again."""
        self.checkpointed: list[MessageDict] | None = None if checkpoint is None else msgspec.json.decode(checkpoint)
        """The messages that the run before had put in safety; None in a first run."""
        self._rollout_id = request.rollout_id
        self._checkpoints = checkpoints
        self._limits = Limits(request.max_turns, request.max_tokens_total)
        self._history = History()
        self._metrics = RolloutMetrics()
        self._extra_fields: dict[str, Any] = {}
        self._span = span
        self._strict_history = strict_history
        self._deadline = deadline
        self._clock = clock
        self._observer = observer
        self._started = clock()
        self._ended = False
        self._has_warned = False

    @property
    def rollout_id(self) -> str:
        """The id of this rollout."""
        return self._rollout_id

    # What a result is made of may be changed, but not replaced: without it there would be no result.

    @property
    def limits(self) -> Limits:
        """The budgets."""
        return self._limits

    @property
    def history(self) -> History:
        """What was sent last, and its answer."""
        return self._history

    @property
    def metrics(self) -> RolloutMetrics:
        """What has been measured."""
        return self._metrics

    @property
    def extra_fields(self) -> dict[str, Any]:
        """What the context itself has to report beside the agent's own extra fields."""
        return self._extra_fields

    @property
    def span(self) -> Span:
        """Open while the agent runs; spans that the agent makes itself nest in it."""
        return self._span

    @property
    def turn(self) -> int:
        """LLM calls made so far."""
        return self._limits.turns

    @property
    def remaining_turns(self) -> int:
        """LLM calls that may still be made."""
        return self._limits.remaining_turns

    @property
    def remaining_tokens(self) -> int:
        """Tokens that the conversation may still grow by, as far as the trainer's `usage` told."""
        return self._limits.remaining_tokens

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds until the deadline; None if there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    # ------------------------------------------------------------ the LLM

    async def chat(self, messages: Sequence[MessageDict] | None = None, /, **params: Any) -> CompletionsResult:
        """Ask the LLM for the next message. `params` go out exactly as given, over the defaults of CompletionsRequest.

        Whatever names `params` has, a trainer chose some of them: `messages` among them counts only where none are
        given by position, and `rollout_id` never does.

        The messages, a list of objects (else `TypeError`), must continue those of the call before. What JSON cannot
        hold goes out as null or as the name of its type; the log says so once. Raises `LimitReached` when a budget is
        used up (let it pass, and the rollout ends COMPLETED with what has been reached), `LLMError` when the trainer
        cannot answer, `HistoryRewritten` under `STRICT_HISTORY`, `RolloutError` once the rollout has ended.
        """
        given = params.pop("messages", None)
        params.pop("rollout_id", None)
        if messages is None:
            messages = given
        if messages is None:
            raise TypeError("chat() needs messages")
        if self._ended:
            await asyncio.sleep(_PAUSE_WHEN_ENDED_SECONDS)
            raise RolloutError("the rollout has ended: its agent has no further LLM calls")
        try:
            self._limits.check()
        except LimitReached:
            await asyncio.sleep(0)  # an agent that catches this in an endless loop shall not starve the others
            raise
        text = self._text_of(messages)
        if not self._history.continues(text):
            await self._rewritten()
        self._history.record(text)
        self._limits.turns += 1
        self._metrics.num_llm_calls += 1
        began = self._clock()
        failure: BaseException | None = None
        try:
            result = await self.llm.chat_completions(SentMessages(messages, text), **params)
        except BaseException as exc:
            failure = exc
            raise
        finally:
            seconds = self._clock() - began
            self._metrics.llm_latency_ms += seconds * 1e3
            self._observer.llm_called(seconds, failure)
        self._answered(result, params)
        if self._checkpoints is not None and self._checkpoints.every_turn:
            await self._checkpoints.save(bytes(self._history.reached()))
        return result

    def _text_of(self, messages: Sequence[MessageDict]) -> bytes:
        text, lost = self._history.text_of(messages)
        if lost and not self._has_warned:
            self._has_warned = True
            logger.warning("rollout %r: messages that JSON cannot hold: %s", self._rollout_id, "; ".join(lost[:_SHOWN]))
        return text

    async def _rewritten(self) -> None:
        self._history.rewrites += 1
        self._extra_fields["history_rewrites"] = self._history.rewrites
        self._observer.history_rewritten()
        logger.warning("rollout %r: the messages of turn %d rewrite the history", self.rollout_id, self.turn + 1)
        if self._strict_history:
            await asyncio.sleep(0)
            raise HistoryRewritten(f"the messages of turn {self.turn + 1} do not continue those sent before")

    def _answered(self, result: CompletionsResult, params: dict[str, Any]) -> None:
        self._history.answer = result.message
        usage = result.usage
        metrics = self._metrics
        if usage:
            prompt, response = usage_tokens(usage, "prompt_tokens"), usage_tokens(usage, "completion_tokens")
            metrics.prompt_tokens += prompt
            metrics.response_tokens += response
            metrics.max_context_tokens = max(metrics.max_context_tokens, prompt + response)
            self._limits.count(prompt, response)
        if self._observer.is_tracing:
            turn = {"turn": self.turn, "sent": msgspec.Raw(self._history.sent or b"[]"), "answer": result.message}
            self._observer.event("chat", {**turn, "finish_reason": result.finish_reason, "usage": usage})
        if result.finish_reason == "length":
            self._extra_fields["truncated_turns"] = self._extra_fields.get("truncated_turns", 0) + 1
        if params.get("return_token_ids") and result.token_ids is not None:
            # Asked for by the trainer, so it reaches the trainer whatever the agent does with it.
            self._extra_fields.setdefault("token_ids", []).append(result.token_ids)

    async def checkpoint(self, messages: Sequence[MessageDict]) -> bool:
        """Put the messages in safety, so that they are reported if this process dies; whether that was done.

        Costs a write to the disk, so at most one a second is made and none above 8 MiB: the others return False at
        once, as all do while the state is kept in memory only. Never raises for what the disk does.
        """
        if self._checkpoints is None:
            return False
        return await self._checkpoints.save(self._text_of(messages))

    # ------------------------------------------------------------ tools

    async def call_tools(self, tool_calls: Sequence[Any]) -> list[MessageDict]:
        """Run the calls of one turn, side by side, and return their tool messages in the order of the calls.

        Never raises for what a tool or a model did wrong: that becomes a message the model can read.
        """
        began = self._clock()
        try:
            return await run_tool_calls(self.tools, tool_calls, ctx=self, on_done=self._tool_done, span=self._span)
        finally:
            self._metrics.tool_latency_ms += (self._clock() - began) * 1e3

    def _tool_done(self, name: str, latency_ms: float, error: str | None) -> None:
        self._metrics.num_tool_calls += 1
        self._observer.tool_called(name, latency_ms / 1e3, error)

    def record_tool_call(self, latency_ms: float = 0.0) -> None:
        """Count a tool call that the agent made itself, beside `call_tools()`."""
        latency_ms = float(latency_ms)
        if not 0 <= latency_ms < math.inf:
            latency_ms = 0.0  # no duration: what is measured in sums must stay a number
        self._metrics.num_tool_calls += 1
        self._metrics.tool_latency_ms += latency_ms
        self._observer.tool_called("", latency_ms / 1e3, None)

    def log_event(self, event: str, **data: Any) -> None:
        """Put an event into this rollout's trace file, if there is one (`SERVER_DEBUG_DIR`), and into the debug log."""
        self._observer.event(event, data)
        logger.debug("rollout %r: event %r", self.rollout_id, event)

    # ------------------------------------------------------------ the end

    def complete(
        self,
        final_messages: Sequence[MessageDict],
        finish_reason: str = "stop",
        reward: Any = None,
        extra_fields: dict[str, Any] | None = None,
    ) -> RolloutResult:
        """The result of a rollout that went well. Only what `run()` returns counts, so calling it twice is harmless."""
        return RolloutResult(
            status=RolloutStatus.COMPLETED,
            final_messages=list(final_messages),
            finish_reason=finish_reason,
            reward=reward,
            metrics=self.measured(),
            extra_fields={} if extra_fields is None else dict(extra_fields),
        )

    def error(
        self,
        error_message: str,
        final_messages: Sequence[MessageDict] | None = None,
        extra_fields: dict[str, Any] | None = None,
    ) -> RolloutResult:
        """The result of a rollout that the agent gives up. Without messages, those reached so far are reported."""
        return RolloutResult(
            status=RolloutStatus.ERROR,
            final_messages=[] if final_messages is None else list(final_messages),
            finish_reason="error",
            error_message=error_message,
            metrics=self.measured(),
            extra_fields={} if extra_fields is None else dict(extra_fields),
        )

    def close(self) -> None:
        """The rollout has its result: what still holds this context, a task left behind, gets no more LLM calls."""
        self._ended = True

    def measured(self) -> RolloutMetrics:
        """The metrics up to now."""
        self._metrics.total_latency_ms = (self._clock() - self._started) * 1e3
        return self._metrics
