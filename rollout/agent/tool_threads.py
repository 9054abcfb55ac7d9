"""Threads for tools that block. Reused, as many as are needed, and never in the way of the process's end.

Not the loop's default pool: that has few threads and resolves host names, so a slow tool would stall everybody; and its
threads are waited for at exit, so a tool that hangs would keep the process alive. How many there are is bounded by who
calls: so many calls in one turn, so many rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

IDLE_SECONDS = 10.0
"""How long a thread waits for more work before it ends."""


class _Outcome(NamedTuple):
    """What a call leaves behind; an exception travels as a value, so that StopIteration can too."""

    value: Any
    error: BaseException | None


class ToolThreads:
    """A pool of daemon threads. One lock guards the number of those that wait and are not yet promised to a job."""

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    async def call(self, function: Callable[[], Any]) -> Any:
        """What the function returns or raises, called in a thread with the caller's context variables.

        When the caller is cancelled, the function runs on to its end, and what it returns is dropped.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Outcome] = loop.create_future()
        context = contextvars.copy_context()
        self._submit(lambda: context.run(_work, function, loop, done))
        outcome = await done
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            promised = self._idle > 0
            self._idle -= promised
        if not promised:
            threading.Thread(target=self._run, name="rollout tool", daemon=True).start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_seconds)
            except queue.Empty:
                with self._lock:
                    if self._idle:
                        self._idle -= 1
                        return
                continue  # promised to a job that is about to come
            job()
            del job
            with self._lock:
                self._idle += 1


def _work(function: Callable[[], Any], loop: asyncio.AbstractEventLoop, done: asyncio.Future[_Outcome]) -> None:
    try:
        outcome = _Outcome(function(), None)
    except BaseException as exc:
        outcome = _Outcome(None, exc)
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(_settle, done, outcome)


def _settle(done: asyncio.Future[_Outcome], outcome: _Outcome) -> None:
    if not done.done():
        done.set_result(outcome)
