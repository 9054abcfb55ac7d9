"""Who forgets: in small slices, so that a million expired records never hold the loop."""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType

from rollout.metrics import Metrics
from rollout.state.registry import Registry

logger = logging.getLogger(__name__)

_SLICE = 250
"""Records forgotten without giving way: about 0.5 ms."""


class Sweeper:
    """Forgets expired records every so many seconds. An async context manager that owns its task.

    A sweep that fails is logged and the next one comes all the same.
    """

    def __init__(self, registry: Registry, metrics: Metrics, *, interval_seconds: float) -> None:
        self._registry = registry
        self._metrics = metrics
        self._interval_seconds = interval_seconds
        self._stopping = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Sweeper:
        self.task = asyncio.create_task(self._run(), name="rollout-sweeper")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self.task is not None:
            await asyncio.wait([self.task])

    async def sweep(self) -> int:
        """Forget everything that has expired by now, giving way between slices; how many records that was."""
        registry, gone = self._registry, 0
        now = registry.clock()
        while not self._stopping.is_set():
            slice_gone = await registry.store.expire(now, _SLICE)
            gone += slice_gone
            if slice_gone < _SLICE:
                break
            await asyncio.sleep(0)
        return gone

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(self._interval_seconds):
                    await self._stopping.wait()
            except TimeoutError:
                await self._sweep_once()

    async def _sweep_once(self) -> None:
        began = time.perf_counter()
        try:
            gone = await self.sweep()
        except Exception:
            logger.exception("a sweep failed")
            return
        self._metrics.sweeps.inc()
        if gone:
            self._metrics.records_swept.inc(gone)
            logger.info("forgot %d expired records in %.0f ms", gone, (time.perf_counter() - began) * 1e3)
