"""The contract of an executor: it is handed jobs and two callbacks, and knows no store."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct

from rollout.agent.outcome import Outcome
from rollout.agent.runner import Cause
from rollout.requests import InitRequest
from rollout.schemas import RolloutRequest
from rollout.tracing import TraceContext


class Job(Struct, frozen=True, kw_only=True):
    """One rollout to run."""

    request: InitRequest
    view: RolloutRequest | None = None
    """The agent's own copy of the request; None: it is made when the run begins."""
    tools: Sequence[Any]
    """What `get_tools()` returned, for the agent's context."""
    accepted: float
    """When the rollout was accepted, on the monotonic clock."""
    deadline: float | None
    """When it must have ended, on the monotonic clock."""
    trace: TraceContext | None = None
    run: int = 1
    """1, and one more for each time that a restart runs the rollout again."""
    checkpoint: bytes | None = None
    """JSON of the messages that the run before had put in safety."""

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.request.rollout_id


class Capacity(Struct, frozen=True, kw_only=True):
    """How full an executor is."""

    limit: int
    running: int
    queued: int


class Ended(Struct, frozen=True, kw_only=True):
    """What an executor reports of a job, once."""

    job: Job
    outcome: Outcome
    turn: int
    trace: TraceContext | None = None
    """Where the rollout is in its trace, for the delivery."""


OnStart = Callable[[Job], Awaitable[bool]]
"""Called when a job gets its slot; False: it has ended meanwhile and must not run."""

OnEnd = Callable[[Ended], Awaitable[None]]
"""Called when a job has ended, exactly once for each job that was submitted, after its slot is free."""


class Executor(abc.ABC):
    """Runs at most so many jobs at once, the others first come first served.

    Every job that was submitted is reported to `on_end` exactly once, whatever happens to it: it ends, it is
    cancelled while it waits or runs, it passes its deadline, or it refuses to end.
    """

    @abc.abstractmethod
    async def start(self, on_start: OnStart, on_end: OnEnd) -> None:
        """Make ready; called once, first."""

    @abc.abstractmethod
    def submit(self, job: Job) -> None:
        """Take a job. It starts now or waits; its deadline counts in both."""

    @abc.abstractmethod
    def cancel(self, rollout_id: str, cause: Cause) -> str | None:
        """End a job from outside: "queued" or "running" says where it was caught, None that it is not here.

        A running job whose agent swallows the cancellation is reported as ended after the grace all the same, and
        loses its slot; whatever it returns later is dropped.
        """

    @abc.abstractmethod
    def turn(self, rollout_id: str) -> int:
        """LLM calls that a job has made so far."""

    @abc.abstractmethod
    def capacity(self) -> Capacity:
        """How full it is now."""

    @property
    @abc.abstractmethod
    def has_room(self) -> bool:
        """Whether a job that is submitted now starts at once."""

    @abc.abstractmethod
    async def drain(self, grace_seconds: float) -> None:
        """Give what was submitted so long to end, then end the rest as "shutdown"; returns when all is reported."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """Let go of everything; the last call. Runs that refused to end are left to die with the loop."""
