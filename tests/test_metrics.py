"""The instruments, what Prometheus is shown of them, and the lag of the event loop."""

from __future__ import annotations

import asyncio
import bisect
import logging
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from rollout.errors import BadCompletion, MissingExtra, TrainerRefused, TrainerTimeout, TrainerUnavailable
from rollout.metrics import (
    FINISH_REASONS,
    Counter,
    Histogram,
    LabelledCounter,
    LabelledGauge,
    LoopLagMonitor,
    Metrics,
    llm_outcome,
    render,
)
from rollout.schemas import Phase, RolloutStatus


def shown(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of the rendered text, by name and labels, as a Prometheus server reads it."""
    families = text_string_to_metric_families(render(metrics).decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_counter_is_shown_with_its_total() -> None:
    metrics = Metrics()
    metrics.llm_retries.inc()
    metrics.llm_retries.inc(2)
    assert shown(metrics)["rollout_llm_retries_total", frozenset()] == 3


def test_finished_rollouts_are_counted_by_status_and_reason() -> None:
    metrics = Metrics()
    metrics.finished.inc(RolloutStatus.COMPLETED, "stop")
    metrics.finished.inc("COMPLETED", "stop")
    metrics.finished.inc("ERROR", "timeout")
    labels = frozenset({("status", "COMPLETED"), ("finish_reason", "stop")})
    assert shown(metrics)["rollout_finished_total", labels] == 2
    assert metrics.finished.value("ERROR", "timeout") == 1


@given(st.lists(st.text(), max_size=50))
def test_reasons_of_agents_never_make_more_series_than_are_known(reasons: list[str]) -> None:
    metrics = Metrics()
    for reason in reasons:
        metrics.finished.inc("COMPLETED", reason)
    series = list(metrics.finished.samples())
    assert len(series) <= len(FINISH_REASONS) + 1
    assert sum(sample.value for sample in series) == len(reasons)
    assert {sample.labels["finish_reason"] for sample in series} <= {*FINISH_REASONS, "other"}


def test_single_label_counters_are_shown_at_zero_before_their_first_event() -> None:
    assert shown(Metrics())["rollout_deliveries_total", frozenset({("outcome", "undelivered")})] == 0


def test_child_counter_that_was_kept_counts_into_its_family() -> None:
    family = LabelledCounter("things", "Things", {"kind": ("a", "b")})
    kept = family.labels("a")
    kept.inc(4)
    assert family.value("a") == 4
    assert family.labels("a") is kept


def test_wrong_number_of_labels_is_refused() -> None:
    with pytest.raises(ValueError):
        LabelledCounter("things", "Things", {"kind": ("a",)}).inc("a", "b")


def test_gauges_show_what_was_set_or_what_their_function_returns() -> None:
    metrics = Metrics()
    waiting = ["a", "b"]
    metrics.slots_limit.set(100)
    metrics.queue_depth.set_function(lambda: len(waiting))
    waiting.append("c")
    samples = shown(metrics)
    assert samples["rollout_slots_limit", frozenset()] == 100
    assert samples["rollout_queue_depth", frozenset()] == 3


def test_records_are_shown_by_status_and_phase_once_there_is_a_function() -> None:
    metrics = Metrics()
    assert not any(name == "rollout_records" for name, _ in shown(metrics))
    metrics.records_by_status.set_function(lambda: {(RolloutStatus.STARTED,): 2, ("ERROR",): 1})
    metrics.records_by_phase.set_function(lambda: {(Phase.QUEUED,): 2})
    samples = shown(metrics)
    assert samples["rollout_records", frozenset({("status", "STARTED")})] == 2
    assert samples["rollout_records", frozenset({("status", "ERROR")})] == 1
    assert samples["rollout_records_in_phase", frozenset({("phase", "queued")})] == 2


def test_labelled_gauge_without_a_function_shows_nothing() -> None:
    assert list(LabelledGauge("things", "Things", ("kind",)).samples()) == []


@given(st.lists(st.floats(0, 1e6), max_size=40), st.sets(st.floats(0.001, 1e4), min_size=1, max_size=8))
def test_histogram_counts_each_duration_once_and_buckets_add_up(durations: list[float], bounds: set[float]) -> None:
    histogram = Histogram("h", "H", sorted(bounds))
    for duration in durations:
        histogram.observe(duration)
    buckets = {s.labels["le"]: s.value for s in histogram.samples() if s.suffix == "_bucket"}
    ordered = sorted(durations)
    assert buckets.pop("+Inf") == histogram.count == len(durations)
    assert all(count == bisect.bisect_right(ordered, float(bound)) for bound, count in buckets.items())
    assert histogram.sum == pytest.approx(sum(durations))


def test_histogram_reads_as_one_in_prometheus() -> None:
    metrics = Metrics()
    metrics.llm_seconds.observe(0.25)
    metrics.llm_seconds.observe(9999)
    samples = shown(metrics)
    assert samples["rollout_llm_call_duration_seconds_bucket", frozenset({("le", "0.25")})] == 1
    assert samples["rollout_llm_call_duration_seconds_bucket", frozenset({("le", "300.0")})] == 1
    assert samples["rollout_llm_call_duration_seconds_bucket", frozenset({("le", "+Inf")})] == 2
    assert samples["rollout_llm_call_duration_seconds_sum", frozenset()] == 9999.25


def test_every_name_follows_the_conventions_and_none_is_used_twice() -> None:
    instruments = list(Metrics().instruments())
    names = [instrument.name for instrument in instruments]
    assert len(set(names)) == len(names)
    assert all(name.startswith("rollout_") for name in names)
    assert all(i.name.endswith("_seconds") for i in instruments if isinstance(i, Histogram))
    assert not any(i.name.endswith("_total") for i in instruments if isinstance(i, Counter))


def test_two_services_do_not_share_numbers() -> None:
    first, second = Metrics(), Metrics()
    first.sweeps.inc()
    assert second.sweeps.value == 0


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (TrainerTimeout("slow"), "timeout"),
        (TrainerUnavailable("busy", 503), "unavailable"),
        (TrainerRefused("no", 400), "refused"),
        (BadCompletion("empty"), "bad_completion"),
        (asyncio.CancelledError(), "cancelled"),
        (RuntimeError("?"), "other"),
    ],
)
def test_llm_outcome_is_a_known_word(error: BaseException | None, outcome: str) -> None:
    metrics = Metrics()
    metrics.llm_calls.inc(llm_outcome(error))
    assert metrics.llm_calls.value(outcome) == 1


def test_missing_library_names_its_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtra, match=r"pip install 'rollout\[metrics\]'"):
        render(Metrics())


async def lag_observed(metrics: Metrics, times: int = 1) -> None:
    """Return when the monitor has measured so many times."""
    async with asyncio.timeout(5):
        while metrics.loop_lag_seconds.count < times:  # noqa: ASYNC110  # the monitor announces nothing
            await asyncio.sleep(0)


async def test_blocked_loop_is_measured_and_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    with caplog.at_level(logging.WARNING, "rollout.metrics"):
        async with LoopLagMonitor(metrics, every_seconds=0.001, warn_seconds=0.2):
            time.sleep(0.25)  # noqa: ASYNC251  # the very thing that is to be noticed
            await lag_observed(metrics)
    assert metrics.loop_lag_max.value >= 0.2
    assert metrics.loop_lag_seconds.sum >= 0.2
    assert [r.getMessage().startswith("the event loop was blocked for 0.2") for r in caplog.records] == [True]


async def test_idle_loop_is_measured_again_and_again_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    async with LoopLagMonitor(metrics, every_seconds=0.001, warn_seconds=60):
        await lag_observed(metrics, times=3)
    assert not caplog.records


async def test_monitor_that_was_left_measures_nothing_more() -> None:
    metrics = Metrics()
    monitor = LoopLagMonitor(metrics, every_seconds=0)
    async with monitor:
        await lag_observed(metrics)
    count = metrics.loop_lag_seconds.count
    for _ in range(20):
        await asyncio.sleep(0)
    assert metrics.loop_lag_seconds.count == count
    await monitor.__aexit__(None, None, None)
