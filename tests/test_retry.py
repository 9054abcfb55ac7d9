"""When to try again: what is repeated, how long the pauses are, and that a deadline is never overslept."""

from __future__ import annotations

import asyncio
import email.utils
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import (
    BadCompletion,
    RolloutError,
    TrainerRefused,
    TrainerTimeout,
    TrainerUnavailable,
    TrainerUnreachable,
)
from rollout.retry import RETRY_AFTER_LIMIT_SECONDS, RetryPolicy, parse_retry_after, with_retries
from rollout.testing import FakeClock

NOW = 1_800_000_000.0
AT_ONCE = RetryPolicy(retries=3, base_delay_seconds=0.0, max_delay_seconds=0.0)


class Script:
    """An attempt that fails as the script says, then returns "done"."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"


# ---------------------------------------------------------------- pauses


@given(
    st.integers(1, 10_000),
    st.floats(0.01, 60),
    st.floats(0.01, 300),
)
def test_a_pause_lies_between_half_its_ceiling_and_the_ceiling(failures: int, base: float, longest: float) -> None:
    policy = RetryPolicy(retries=3, base_delay_seconds=base, max_delay_seconds=longest)

    ceiling = min(longest, base * 2.0 ** min(failures - 1, 60))

    assert ceiling / 2 <= policy.pause(failures) <= ceiling


def test_pauses_differ_so_that_many_do_not_come_back_together() -> None:
    policy = RetryPolicy(retries=3, base_delay_seconds=1.0, max_delay_seconds=30.0)

    assert len({policy.pause(1) for _ in range(50)}) > 40


@given(st.integers(1, 100), st.floats(allow_nan=False))
def test_what_the_peer_asks_for_wins_within_bounds(failures: int, asked: float) -> None:
    policy = RetryPolicy(retries=3, base_delay_seconds=1.0, max_delay_seconds=2.0)

    assert policy.pause(failures, asked) == min(max(asked, 0.0), RETRY_AFTER_LIMIT_SECONDS)


# ---------------------------------------------------------------- Retry-After


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("0", 0.0),
        (" 7 ", 7.0),
        ("1.5", 1.5),
        ("299", 299.0),
        ("301", 300.0),
        ("99999999999999999999", 300.0),
        ("soon", None),
        ("nan", None),
        ("7 seconds", None),
        ("٣", None),
        (email.utils.formatdate(NOW + 20, usegmt=True), 20.0),
        (email.utils.formatdate(NOW - 20, usegmt=True), 0.0),
        (email.utils.formatdate(NOW + 2000, usegmt=True), 300.0),
        ("Sun, 06 Nov 9994 08:49:37 GMT", 300.0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 0.0),
        ("Sun Nov  6 08:49:37 1994", 0.0),
        ("Sun, 99 Nov 1994 08:49:37 GMT", None),
    ],
)
def test_a_retry_after_header_is_a_number_or_a_date(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header, lambda: NOW) == seconds


@given(st.text() | st.integers().map(str) | st.floats().map(str) | st.datetimes().map(email.utils.format_datetime))
def test_any_header_is_some_seconds_or_nothing(header: str) -> None:
    seconds = parse_retry_after(header, lambda: NOW)

    assert seconds is None or 0.0 <= seconds <= RETRY_AFTER_LIMIT_SECONDS


# ---------------------------------------------------------------- with_retries


async def test_what_works_is_done_once() -> None:
    attempt = Script()

    assert await with_retries(attempt, AT_ONCE) == "done"

    assert attempt.calls == 1


@pytest.mark.parametrize(
    "failure",
    [TrainerUnreachable("gone"), TrainerTimeout("slow"), TrainerUnavailable("busy", 503, 0.0)],
    ids=lambda failure: type(failure).__name__,
)
async def test_what_may_help_is_tried_again(failure: RolloutError) -> None:
    attempt = Script(failure, failure, failure)

    assert await with_retries(attempt, AT_ONCE) == "done"

    assert attempt.calls == 4


@pytest.mark.parametrize(
    "failure",
    [TrainerRefused("no", 404), BadCompletion("what"), KeyError("ours"), asyncio.CancelledError()],
    ids=lambda failure: type(failure).__name__,
)
async def test_what_cannot_help_is_not_tried_again(failure: BaseException) -> None:
    attempt = Script(failure)

    with pytest.raises(type(failure)) as raised:
        await with_retries(attempt, AT_ONCE)

    assert raised.value is failure
    assert attempt.calls == 1
    assert "attempts" not in str(failure)


@pytest.mark.parametrize(
    ("retries", "text"), [(0, "gone"), (1, "gone (after 2 attempts)"), (3, "gone (after 4 attempts)")]
)
async def test_the_last_error_says_how_often_it_was_tried(retries: int, text: str) -> None:
    policy = RetryPolicy(retries=retries, base_delay_seconds=0.0, max_delay_seconds=0.0)
    attempt = Script(*(TrainerUnavailable("gone", 500) for _ in range(9)))

    with pytest.raises(TrainerUnavailable) as raised:
        await with_retries(attempt, policy)

    assert attempt.calls == retries + 1
    assert str(raised.value) == text
    assert raised.value.status == 500


async def test_a_pause_that_would_end_past_the_deadline_is_not_begun() -> None:
    clock = FakeClock(100.0)
    attempt = Script(TrainerUnavailable("busy", 503, 50.0))

    with pytest.raises(TrainerUnavailable):
        await with_retries(attempt, AT_ONCE, deadline=150.0, clock=clock)

    assert attempt.calls == 1


async def test_a_pause_that_ends_before_the_deadline_is_made() -> None:
    clock = FakeClock(100.0)
    attempt = Script(TrainerUnavailable("busy", 503, 0.001))

    assert await with_retries(attempt, AT_ONCE, deadline=100.1, clock=clock) == "done"


async def test_a_connection_that_had_gone_stale_is_tried_again_without_a_pause_but_once() -> None:
    slow = RetryPolicy(retries=3, base_delay_seconds=60.0, max_delay_seconds=60.0)
    pauses: list[float] = []

    def on_retry(error: RolloutError, failures: int, pause: float) -> None:
        pauses.append(pause)
        if pause:
            raise InterruptedError  # seen enough: nobody waits a minute here

    stale = TrainerUnreachable("closed")
    stale.stale_connection = True
    with pytest.raises(InterruptedError):
        await with_retries(Script(stale, stale), slow, on_retry=on_retry)

    assert pauses[0] == 0.0
    assert 30.0 <= pauses[1] <= 60.0


async def test_retries_are_told_with_the_error_and_the_count() -> None:
    told: list[Any] = []
    failures = [TrainerUnreachable("one"), TrainerUnavailable("two", 500)]

    await with_retries(Script(*failures), AT_ONCE, on_retry=lambda *args: told.append(args))

    assert told == [(failures[0], 1, 0.0), (failures[1], 2, 0.0)]
