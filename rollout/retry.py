"""When to try again, and how long to wait first.

What may be repeated is written on the error (`retryable`); this module only counts and waits. The pause grows
exponentially with jitter, so that a thousand rollouts that failed together do not come back together; what the peer
asks for in `Retry-After` wins, up to five minutes (RFC 9110, 10.2.3).
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec import Struct

from rollout.errors import RolloutError

RETRY_AFTER_LIMIT_SECONDS = 300.0

Clock = Callable[[], float]
"""A monotonic clock in seconds."""

T = TypeVar("T")

_SECONDS = re.compile(r"[0-9]{1,20}(?:\.[0-9]{0,20})?", re.ASCII)


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """`retries` further tries after the first; pauses between `base` and `max` seconds, doubled each time."""

    retries: int
    base_delay_seconds: float
    max_delay_seconds: float

    def pause(self, failures: int, retry_after_seconds: float | None = None) -> float:
        """Seconds to wait after the given number of failures (1 = the first one failed)."""
        if retry_after_seconds is not None:
            return min(max(retry_after_seconds, 0.0), RETRY_AFTER_LIMIT_SECONDS)
        ceiling = min(self.max_delay_seconds, self.base_delay_seconds * 2.0 ** min(failures - 1, 60))
        return ceiling * (0.5 + 0.5 * random.random())  # noqa: S311 - jitter, not a secret


def parse_retry_after(value: str | None, wall_clock: Callable[[], float] = time.time) -> float | None:
    """Seconds that a Retry-After header asks for: a number or an HTTP date; never negative, None if it says nothing.

    What Python would take for a float ("nan", "inf", "1_0", "-5") but HTTP does not, says nothing.
    """
    if value is None:
        return None
    text = value.strip()
    if _SECONDS.fullmatch(text):
        seconds = float(text)
    else:
        try:
            date = email.utils.parsedate_to_datetime(text)
            if date.tzinfo is None:
                date = date.replace(tzinfo=datetime.UTC)  # the asctime form has no zone and means GMT
            seconds = date.timestamp() - wall_clock()
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(seconds, 0.0), RETRY_AFTER_LIMIT_SECONDS)


async def with_retries(
    attempt: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    *,
    deadline: float | None = None,
    clock: Clock = time.monotonic,
    on_retry: Callable[[RolloutError, int, float], None] | None = None,
) -> T:
    """What `attempt()` returns, tried again while its error says that this may help and the policy allows.

    Raises the last error, with the number of attempts in its text. Gives up at once when the pause would end past
    `deadline` (on `clock`): the truth now is worth more than a timeout later. A connection that was closed before a
    byte of the answer came is tried again without a pause, once: it had been idle and the peer let go of it.
    """
    failures = 0
    while True:
        try:
            return await attempt()
        except RolloutError as exc:
            failures += 1
            last = exc
        pause = policy.pause(failures, getattr(last, "retry_after_seconds", None))
        if failures == 1 and getattr(last, "stale_connection", False):
            pause = 0.0
        gives_up = not last.retryable or failures > policy.retries
        if gives_up or (deadline is not None and clock() + pause >= deadline):
            if failures > 1:
                last.args = (f"{last} (after {failures} attempts)", *last.args[1:])
            raise last
        if on_retry is not None:
            on_retry(last, failures, pause)
        await asyncio.sleep(pause)
