"""Stand-ins for what an agent or a background task talks to: a model with a script, a clock that is turned by hand."""

from __future__ import annotations

import asyncio
import copy
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from rollout.completions import CompletionsResult, error_of
from rollout.testing.faults import Reply
from rollout.testing.script import as_answer
from rollout.wire import JSON


class ScriptedCall(NamedTuple):
    """What one call of a `ScriptedLLM` was given; the messages are a copy."""

    messages: list[dict[str, Any]]
    params: dict[str, Any]


ScriptedAnswer: TypeAlias = Reply | str | int | Mapping[str, Any] | BaseException
"""A reply (`text("4")`, `tool_calls([...])`), short for one, or an exception to raise."""


class ScriptedLLM:
    """An LLM client that gives these answers one after the other; asked once more, it fails, or `repeat_last` is set.

    An answer may be a function of `(messages, params)`. A reply that is no 2xx raises what the trainer's client would.
    """

    def __init__(
        self,
        answers: Sequence[ScriptedAnswer | Callable[[list[dict[str, Any]], dict[str, Any]], ScriptedAnswer]],
        *,
        repeat_last: bool = False,
    ) -> None:
        self.calls: list[ScriptedCall] = []
        self.overrun: AssertionError | None = None
        """Raised by the call that the script had no answer for; kept, because an agent may have caught it."""
        self._answers = list(answers)
        self._repeat_last = repeat_last

    async def chat_completions(self, messages: list[dict[str, Any]], /, **params: JSON) -> CompletionsResult:
        """The next answer of the script."""
        call = ScriptedCall(copy.deepcopy(messages), params)
        self.calls.append(call)
        answer = self._next()
        if callable(answer):
            answer = cast("ScriptedAnswer", answer(*call))
        if isinstance(answer, BaseException):
            raise answer
        reply = as_answer(answer, Reply())
        if not isinstance(reply, Reply):
            raise TypeError(f"{answer!r} needs a connection to play on; a ScriptedLLM has none, a MockTrainer has")
        if not 200 <= reply.status < 300:
            raise error_of(reply.status, reply.body, dict(reply.headers).get("Retry-After"), "chat completions")
        return CompletionsResult.from_body(reply.body)

    def _next(self) -> Any:
        position = len(self.calls) - 1
        if position < len(self._answers):
            return self._answers[position]
        if self._repeat_last and self._answers:
            return self._answers[-1]
        self.overrun = AssertionError(f"the script has {len(self._answers)} answers, and call {position + 1} was made")
        raise self.overrun


class FakeClock:
    """A monotonic clock that stands still until it is told to advance; belongs to one loop.

    Hand over the clock itself where a `time.monotonic` is wanted, and `clock.sleep` where an `asyncio.sleep` is.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._slept = asyncio.Event()

    def __call__(self) -> float:
        return self._now

    @property
    def sleepers(self) -> int:
        """How many sleep."""
        return sum(not future.done() for _, _, future in self._sleepers)

    def advance(self, seconds: float) -> None:
        """Move on, and wake everybody whose time has come, earliest first. They run when the caller next awaits."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back, got {seconds!r}")
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)

    async def sleep(self, seconds: float) -> None:
        """Return once the clock has been advanced by so much."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        self._slept.set()
        await future

    async def wait_for_sleepers(self, count: int = 1, timeout: float = 5) -> None:
        """Return once so many sleep: then it makes sense to advance."""
        async with asyncio.timeout(timeout):
            while self.sleepers < count:
                self._slept.clear()
                await self._slept.wait()
