"""What happens in one rollout, carried to the metrics and to its trace file."""

from __future__ import annotations

from typing import Any

from rollout.agent.context import Observer
from rollout.metrics import Metrics, llm_outcome
from rollout.traces import Trace


class Watcher(Observer):
    """The observer of one rollout."""

    __slots__ = ("_metrics", "_trace", "is_tracing")

    def __init__(self, metrics: Metrics, trace: Trace | None) -> None:
        self._metrics = metrics
        self._trace = trace
        self.is_tracing = trace is not None

    def llm_called(self, seconds: float, error: BaseException | None) -> None:
        self._metrics.llm_seconds.observe(seconds)
        self._metrics.llm_calls.inc(llm_outcome(error))
        if self._trace is not None and error is not None:
            self._trace.write("llm_call_failed", seconds=seconds, error=f"{type(error).__name__}: {error}")

    def tool_called(self, name: str, seconds: float, error: str | None) -> None:
        self._metrics.tool_seconds.observe(seconds)
        if self._trace is not None:
            self._trace.write("tool", name=name, seconds=seconds, error=error)

    def history_rewritten(self) -> None:
        self._metrics.history_rewrites.inc()

    def event(self, name: str, data: dict[str, Any]) -> None:
        if self._trace is not None:
            self._trace.write(name, **data)
