"""Many deadlines on one timer: the loop's own heap compares its handles in Python, which at this rate shows."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from rollout.retry import Clock

_SPARE = 1024


class Deadlines:
    """Calls `expire(name)` once the clock has passed a deadline that still is the name's: `current(name)` tells.

    Nobody takes a deadline back: one that is no name's any more is dropped when its time comes, or when such entries
    are the greater part. Belongs to one event loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        current: Callable[[str], float | None],
        expire: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._current = current
        self._expire = expire
        self._heap: list[tuple[float, str]] = []
        self._bound = _SPARE
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        """Deadlines that are kept, those that are nobody's any more among them."""
        return len(self._heap)

    def add(self, name: str, deadline: float) -> None:
        """From now on the name has this deadline."""
        heapq.heappush(self._heap, (deadline, name))
        if len(self._heap) > self._bound:
            self._heap = [(deadline, name) for deadline, name in self._heap if self._current(name) == deadline]
            heapq.heapify(self._heap)
            self._bound = 2 * len(self._heap) + _SPARE
        if self._timer is None or deadline < self._timer_at:
            self._arm(deadline)

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(0.0, deadline - self._clock()), self._run)

    def _run(self) -> None:
        self._timer = None
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            deadline, name = heapq.heappop(self._heap)
            if self._current(name) == deadline:
                self._expire(name)
        if self._heap:
            self._arm(self._heap[0][0])

    def stop(self) -> None:
        """No further calls."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
