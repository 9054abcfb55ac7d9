"""Numbers about one service: cheap to keep, and rendered for Prometheus only when somebody asks.

Everything here is written on the thread of the event loop and takes no lock; an increment costs about 0.1 us, an
observation about 0.3 us. prometheus-client does the rendering, is optional, and is imported by the first `render()`.
The numbers belong to a `Metrics` object, never to the process, so two services in one process do not mix.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

from rollout.errors import (
    BadCompletion,
    HistoryRewritten,
    MissingExtra,
    TrainerRefused,
    TrainerTimeout,
    TrainerUnavailable,
    TrainerUnreachable,
)
from rollout.schemas import RolloutStatus

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""What `/metrics` answers with."""

OTHER = "other"
"""The label value of whatever is not a known value, so that agents and callers cannot make series without end."""

FINISH_REASONS = ("stop", "max_turns", "max_tokens", "error", "timeout", "cancelled", "shutdown", "interrupted")

INIT_REJECTIONS = (
    "invalid_json",
    "key_in_use",
    "id_in_use",
    "body_differs",
    "request_timeout",
    "body_too_large",
    "unsupported_media_type",
    "invalid_request",
    "request_rejected",
    "host_not_allowed",
    "internal_error",
    "get_tools_failed",
    "queue_full",
    "draining",
    "results_full",
    "store_failed",
)

_FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_CALLS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LONG = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)

_LLM_OUTCOMES: dict[type[BaseException], str] = {
    TrainerUnreachable: "unreachable",
    TrainerTimeout: "timeout",
    TrainerUnavailable: "unavailable",
    TrainerRefused: "refused",
    BadCompletion: "bad_completion",
    HistoryRewritten: "history_rewritten",
    asyncio.CancelledError: "cancelled",
}


def llm_outcome(error: BaseException | None) -> str:
    """The `outcome` of `Metrics.llm_calls` for a call that ended with the error, or well (`None`)."""
    return "ok" if error is None else _LLM_OUTCOMES.get(type(error), OTHER)


# ---------------------------------------------------------------- the instruments


class Sample(NamedTuple):
    """One line of the rendered text: the metric's name with the suffix, the labels, the value."""

    suffix: str
    labels: dict[str, str]
    value: float


class Instrument:
    """A named thing that is measured. `name` is as Prometheus shows it, without the suffix that its kind adds."""

    kind: ClassVar[str]
    __slots__ = ("documentation", "name")

    def __init__(self, name: str, documentation: str) -> None:
        self.name, self.documentation = name, documentation

    def samples(self) -> Iterator[Sample]:
        """What is to be shown now."""
        raise NotImplementedError


class Counter(Instrument):
    """A number that only grows."""

    kind = "counter"
    __slots__ = ("value",)

    def __init__(self, name: str, documentation: str) -> None:
        super().__init__(name, documentation)
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Add the amount, which is not negative."""
        self.value += amount

    def samples(self) -> Iterator[Sample]:
        yield Sample("_total", {}, self.value)


class LabelledCounter(Instrument):
    """A family of counters, one for each combination of known label values; any other value counts as "other".

    The family is bounded by construction. With a single label every known value is shown from the start, at 0: a
    series that appears with its first event hides that event from `rate()`.
    """

    kind = "counter"
    __slots__ = ("_children", "_known")

    def __init__(self, name: str, documentation: str, labels: Mapping[str, Sequence[str]]) -> None:
        super().__init__(name, documentation)
        self._known = {label: frozenset(values) for label, values in labels.items()}
        self._children: dict[tuple[str, ...], Counter] = {}
        if len(labels) == 1:
            for value in next(iter(labels.values())):
                self.labels(value)

    def labels(self, *values: str) -> Counter:
        """The counter of these values, in the order of the labels; keep it where the same values come again."""
        child = self._children.get(values)
        if child is not None:
            return child
        folded = tuple(_fold(value, known) for value, known in zip(values, self._known.values(), strict=True))
        return self._children.setdefault(folded, Counter(self.name, self.documentation))

    def inc(self, *values: str, amount: float = 1) -> None:
        """Add to the counter of these values."""
        self.labels(*values).value += amount

    def value(self, *values: str) -> float:
        """What the counter of these values stands at."""
        return self.labels(*values).value

    def samples(self) -> Iterator[Sample]:
        for values, child in self._children.items():
            yield Sample("_total", dict(zip(self._known, values, strict=True)), child.value)


def _fold(value: str, known: frozenset[str]) -> str:
    plain = value.value if isinstance(value, enum.Enum) else value
    return plain if plain in known else OTHER


class Gauge(Instrument):
    """A number that goes up and down: set, or read from a function whenever it is shown."""

    kind = "gauge"
    __slots__ = ("_read", "_value")

    def __init__(self, name: str, documentation: str) -> None:
        super().__init__(name, documentation)
        self._value: float = 0
        self._read: Callable[[], float] | None = None

    @property
    def value(self) -> float:
        """The number as it is now."""
        return self._value if self._read is None else self._read()

    def set(self, value: float) -> None:
        """Remember this number."""
        self._value = value

    def set_function(self, read: Callable[[], float]) -> None:
        """From now on the number is what the function returns; it is called on the loop's thread and must not block."""
        self._read = read

    def samples(self) -> Iterator[Sample]:
        yield Sample("", {}, self.value)


class LabelledGauge(Instrument):
    """Gauges by label values, read together from one function; nothing is shown before there is one."""

    kind = "gauge"
    __slots__ = ("_labels", "_read")

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        super().__init__(name, documentation)
        self._labels = tuple(labels)
        self._read: Callable[[], Mapping[tuple[str, ...], float]] | None = None

    def set_function(self, read: Callable[[], Mapping[tuple[str, ...], float]]) -> None:
        """The function returns all numbers by label values; the caller keeps those values bounded."""
        self._read = read

    def samples(self) -> Iterator[Sample]:
        for values, number in ({} if self._read is None else self._read()).items():
            plain = (value.value if isinstance(value, enum.Enum) else value for value in values)
            yield Sample("", dict(zip(self._labels, plain, strict=True)), number)


class Histogram(Instrument):
    """How often a duration in seconds fell between fixed bounds."""

    kind = "histogram"
    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        super().__init__(name, documentation)
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum: float = 0.0

    @property
    def count(self) -> int:
        """How many durations were observed."""
        return sum(self._counts)

    def observe(self, seconds: float) -> None:
        """Count the duration; a bound belongs to the bucket below it."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds

    def samples(self) -> Iterator[Sample]:
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        for name, total in zip(names, itertools.accumulate(self._counts), strict=True):
            yield Sample("_bucket", {"le": name}, total)
        yield Sample("_count", {}, self.count)
        yield Sample("_sum", {}, self.sum)


# ---------------------------------------------------------------- what a service measures


class Metrics:
    """The instruments of one service. Gauges that mirror the service get their functions from it."""

    def __init__(self) -> None:
        self._count()
        self._time()
        self._gauge()

    def _count(self) -> None:
        self.inits = LabelledCounter(
            "rollout_inits",
            "Init requests by outcome; of rejected ones, the error code",
            {"outcome": ("accepted", "duplicate", "rejected"), "code": ("", *INIT_REJECTIONS)},
        )
        self.finished = LabelledCounter(
            "rollout_finished",
            "Rollouts with a terminal result; reasons of the agent's own count as other",
            {"status": (RolloutStatus.COMPLETED.value, RolloutStatus.ERROR.value), "finish_reason": FINISH_REASONS},
        )
        self.llm_calls = LabelledCounter(
            "rollout_llm_calls",
            "LLM calls by how they ended, retries included",
            {"outcome": ("ok", *_LLM_OUTCOMES.values())},
        )
        self.llm_retries = Counter("rollout_llm_retries", "LLM calls that were sent once more")
        self.deliveries = LabelledCounter(
            "rollout_deliveries", "Attempts to deliver a result", {"outcome": ("delivered", "retried", "undelivered")}
        )
        self.sweeps = Counter("rollout_sweeps", "Turns of the sweeper")
        self.records_swept = Counter("rollout_records_swept", "Records forgotten after their time to live")
        self.history_rewrites = Counter(
            "rollout_history_rewrites", "LLM turns whose messages did not continue those before"
        )
        self.late_results = Counter("rollout_late_results_dropped", "Results that came after the terminal one")

    def _time(self) -> None:
        self.init_seconds = Histogram("rollout_init_duration_seconds", "From an init request to its answer", _FAST)
        self.queue_seconds = Histogram("rollout_queue_wait_seconds", "From acceptance to a slot", _LONG)
        self.llm_seconds = Histogram("rollout_llm_call_duration_seconds", "One LLM call, retries included", _CALLS)
        self.tool_seconds = Histogram("rollout_tool_call_duration_seconds", "One tool call", _CALLS)
        self.delivery_seconds = Histogram(
            "rollout_delivery_duration_seconds", "One attempt to deliver a result", _CALLS
        )
        self.rollout_seconds = Histogram("rollout_duration_seconds", "From acceptance to the terminal result", _LONG)
        self.loop_lag_seconds = Histogram(
            "rollout_event_loop_lag_seconds", "How late the event loop ran a timer", _FAST
        )

    def _gauge(self) -> None:
        self.loop_lag_max = Gauge("rollout_event_loop_lag_max_seconds", "The longest lag since the start")
        self.queue_depth = Gauge("rollout_queue_depth", "Rollouts that wait for a slot")
        self.slots_in_use = Gauge("rollout_slots_in_use", "Rollouts that hold a slot")
        self.slots_limit = Gauge("rollout_slots_limit", "How many rollouts may hold a slot")
        self.records_by_status = LabelledGauge("rollout_records", "Records held, by status", ("status",))
        self.records_by_phase = LabelledGauge("rollout_records_in_phase", "Records held, by phase", ("phase",))
        self.store_bytes = Gauge("rollout_store_bytes", "What the state takes on the disk")
        self.store_failing = Gauge("rollout_store_failing", "1 while the state cannot be written, else 0")
        self.store_commits = Gauge("rollout_store_commits", "Transactions made durable since the start")

    def instruments(self) -> Iterator[Instrument]:
        """Everything that is measured."""
        yield from vars(self).values()


class _Collector:
    """What prometheus-client asks for the metrics; it keeps no copy of them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        from prometheus_client import Metric

        for instrument in self._metrics.instruments():
            family = Metric(instrument.name, instrument.documentation, instrument.kind)
            for suffix, labels, value in instrument.samples():
                family.add_sample(instrument.name + suffix, labels, value)
            yield family


def render(metrics: Metrics) -> bytes:
    """The metrics as Prometheus text of type `CONTENT_TYPE`; `MissingExtra` when prometheus-client is not installed."""
    try:
        from prometheus_client import generate_latest
    except ImportError:
        raise MissingExtra("/metrics", "metrics") from None
    return generate_latest(cast("CollectorRegistry", _Collector(metrics)))


# ---------------------------------------------------------------- the event loop


class LoopLagMonitor:
    """Measures how late the event loop runs a timer, from entering the context until leaving it.

    A chain of timers rather than a task: nothing to die, and a tick costs a few microseconds. A lag of `warn_seconds`
    or more is logged, once for each time the loop was blocked: some code holds it that should await or use a thread.
    """

    def __init__(self, metrics: Metrics, *, every_seconds: float = 0.25, warn_seconds: float = 1.0) -> None:
        self._lags, self._max = metrics.loop_lag_seconds, metrics.loop_lag_max
        self._every_seconds, self._warn_seconds = every_seconds, warn_seconds
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> LoopLagMonitor:
        self._schedule(asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self._every_seconds
        self._timer = loop.call_at(due, self._tick, loop, due)

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        lag_seconds = max(0.0, loop.time() - due)
        self._lags.observe(lag_seconds)
        if lag_seconds > self._max.value:
            self._max.set(lag_seconds)
        if lag_seconds >= self._warn_seconds:
            logger.warning("the event loop was blocked for %.2f s", lag_seconds)
        self._schedule(loop)
