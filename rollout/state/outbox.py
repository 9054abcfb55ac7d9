"""Who pays what is owed: terminal results go to their trainers until acknowledged, refused, or past the horizon."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from types import TracebackType

from rollout.errors import StoreError, TrainerError
from rollout.metrics import Metrics
from rollout.retry import RetryPolicy
from rollout.state.registry import Registry
from rollout.state.store import Delivered, GivenUp, Postponed, Record, Settlement

logger = logging.getLogger(__name__)

Send = Callable[[Record], Awaitable[None]]
"""Makes one attempt; returns when it is acknowledged, raises a `TrainerError` otherwise."""

STORE_PAUSE_SECONDS = 1.0
"""How long to leave a store alone that has failed."""

_BATCH = 256
_PER_TRAINER = 64
_GROWTH = 2.0
_LONGEST_PAUSE_SECONDS = 60.0
_ERROR_CHARACTERS = 500


class Outbox:
    """Delivers results. An async context manager: entering starts the background task, leaving stops it.

    The first attempt of a result is made by whoever calls `deliver()`; later ones come from the background, at most
    64 at a time to one trainer, so that a trainer that hangs holds up nobody else's results. The same bytes go out in
    every attempt. A result whose attempt is cut off (a shutdown) stays owed.
    """

    def __init__(self, registry: Registry, send: Send, policy: RetryPolicy, metrics: Metrics) -> None:
        self._registry = registry
        self._store = registry.store
        self._send = send
        self._policy = policy
        self._metrics = metrics
        self._clock = registry.clock
        self._stopping = False
        self._wake = asyncio.Event()
        self._next_due: float | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy: Counter[str] = Counter()
        self._waiting: dict[str, deque[Record]] = {}
        self._attempts: set[asyncio.Task[None]] = set()
        self._unsettled: list[tuple[Record, Settlement]] = []
        self.task: asyncio.Task[None] | None = None
        self.failure: str | None = None
        """Why the store could not be written at the last try; None when all is well."""

    async def __aenter__(self) -> Outbox:
        self.task = asyncio.create_task(self._run(), name="rollout-outbox")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._wake.set()
        if self.task is not None:
            await asyncio.wait([self.task])
        for attempt in list(self._attempts):
            attempt.cancel()
        await asyncio.gather(*self._attempts, return_exceptions=True)

    # ------------------------------------------------------------ one attempt

    async def deliver(self, record: Record) -> None:
        """Make one attempt for a claimed record and settle it. Never raises for what the trainer or the store does."""
        self._in_flight += 1
        self._idle.clear()
        settlement: Settlement | None = None
        began = self._clock()
        try:
            await self._send(record)
            settlement = Delivered(
                at=self._registry.wall_clock(), attempts=record.attempts + 1, expires=self._registry.expiry()
            )
        except TrainerError as exc:
            settlement = self._after_failure(record, exc)
        except asyncio.CancelledError:
            settlement = Postponed(attempts=record.attempts, error="cut off", due=self._clock())
            raise
        except Exception as exc:  # what we cannot explain must not lose a result
            logger.exception("rollout %r: delivery failed in an unexpected way", record.rollout_id)
            settlement = self._after_failure(record, TrainerErrorOf(exc))
        finally:
            self._metrics.delivery_seconds.observe(self._clock() - began)
            try:
                await self._settle(record, settlement)
            finally:
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.set()

    def _after_failure(self, record: Record, exc: TrainerError) -> Settlement:
        attempts = record.attempts + 1
        error = str(exc)[:_ERROR_CHARACTERS]
        now = self._clock()
        due = now + self._pause(attempts, exc)
        in_time = attempts <= self._policy.retries
        if not in_time and record.give_up is not None and now < record.give_up:
            due, in_time = min(due, record.give_up), True  # the last attempt is made at the horizon
        if exc.retryable and in_time:
            logger.warning("rollout %r: delivery attempt %d failed: %s", record.rollout_id, attempts, error)
            return Postponed(attempts=attempts, error=error, due=due)
        logger.error(
            "rollout %r: UNDELIVERED after %d attempts: %s; the result stays at /result/",
            record.rollout_id,
            attempts,
            error,
        )
        return GivenUp(attempts=attempts, error=error, expires=self._registry.expiry())

    def _pause(self, attempts: int, exc: TrainerError) -> float:
        """As every retry for the first ones; then growing from the longest of those to a minute."""
        if attempts == 1 and getattr(exc, "stale_connection", False):
            return 0.0
        retry_after_seconds = getattr(exc, "retry_after_seconds", None)
        if retry_after_seconds is not None or attempts <= self._policy.retries:
            return self._policy.pause(attempts, retry_after_seconds)
        beyond = attempts - self._policy.retries
        slow = RetryPolicy(
            retries=0,
            base_delay_seconds=self._policy.base_delay_seconds * _GROWTH ** min(self._policy.retries, 10),
            max_delay_seconds=max(_LONGEST_PAUSE_SECONDS, self._policy.max_delay_seconds),
        )
        return slow.pause(beyond)

    async def _settle(self, record: Record, settlement: Settlement | None) -> None:
        if settlement is None:
            return
        try:
            settled = await self._store.settle(record.rollout_id, settlement)
        except StoreError as exc:
            self.failure = str(exc)
            logger.error("rollout %r: the store could not note the delivery: %s", record.rollout_id, exc)
            self._unsettled.append((record, settlement))
            self._wake_by(self._clock() + STORE_PAUSE_SECONDS)
            return
        if isinstance(settlement, Postponed):
            self._metrics.deliveries.inc("retried")
            if settled is not None:
                self._wake_by(settlement.due)
        else:
            self._metrics.deliveries.inc("delivered" if isinstance(settlement, Delivered) else "undelivered")

    # ------------------------------------------------------------ the background

    def _wake_by(self, due: float) -> None:
        if self._next_due is None or due < self._next_due:
            self._next_due = due
            self._wake.set()

    async def _run(self) -> None:
        while not self._stopping:
            try:
                await self._start_due()
            except Exception as exc:
                self.failure = str(exc)
                logger.exception("the outbox could not look for due deliveries")
                self._next_due = self._clock() + STORE_PAUSE_SECONDS
            await self._sleep()

    async def _sleep(self) -> None:
        self._wake.clear()
        if self._stopping:
            return
        seconds = None if self._next_due is None else max(0.0, self._next_due - self._clock())
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _start_due(self) -> None:
        self._next_due = None
        unsettled, self._unsettled = self._unsettled, []
        for record, settlement in unsettled:
            await self._settle(record, settlement)
        due = await self._store.claim(self._clock(), _BATCH)
        if not self._unsettled:
            self.failure = None
        for record in due.records:
            self._start(record)
        if due.next_due is not None:
            self._wake_by(due.next_due)

    def _start(self, record: Record) -> None:
        trainer = origin_of(record)
        if self._busy[trainer] >= _PER_TRAINER:
            self._waiting.setdefault(trainer, deque()).append(record)
            return
        self._busy[trainer] += 1
        attempt = asyncio.create_task(self._attempt(record, trainer), name="rollout-delivery")
        self._attempts.add(attempt)
        attempt.add_done_callback(self._attempts.discard)

    async def _attempt(self, record: Record, trainer: str) -> None:
        try:
            await self.deliver(record)
        finally:
            self._busy[trainer] -= 1
            if not self._busy[trainer]:
                del self._busy[trainer]
            waiting = self._waiting.get(trainer)
            if waiting and not self._stopping:
                self._start(waiting.popleft())
            if not waiting:
                self._waiting.pop(trainer, None)

    async def flush(self, seconds: float) -> None:
        """Let the attempts in flight end, and try everything that is owed once more, for at most so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
                while True:
                    while self._attempts:  # also those that have waited for others to the same trainer
                        await asyncio.wait(self._attempts)
                    owed = (await self._store.claim(float("inf"), _BATCH)).records
                    if not owed:
                        break
                    await asyncio.gather(*(self.deliver(r) for r in owed if r.attempts <= self._policy.retries))
        except TimeoutError:
            logger.warning("stopped waiting for deliveries after %.0f s; see the undelivered results above", seconds)


class TrainerErrorOf(TrainerError):
    """A failure of ours during a delivery: the result stays owed."""

    retryable = True

    def __init__(self, exc: BaseException) -> None:
        super().__init__(f"{type(exc).__name__}: {exc}")


def origin_of(record: Record) -> str:
    """Scheme, host and port of a callback URL."""
    url = record.callback.url if record.callback is not None else ""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"
