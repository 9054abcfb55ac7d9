"""The contract of a store, and the structs it speaks in.

A store remembers. It decides nothing but the compare-and-set of `move()` and the uniqueness of `create()`; who may be
admitted and what a duplicate is answered is the registry's business. Times named `*_at` on records are wall-clock
seconds for people; what expires or falls due is given in seconds of the process's monotonic clock.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import TypeAlias

from msgspec import Struct

from rollout.requests import InitRequest
from rollout.schemas import Phase, RolloutStatus
from rollout.tracing import TraceContext


class Callback(Struct, frozen=True, kw_only=True, gc=False):
    """Where a terminal result is owed, the key that goes with it, and the trace it belongs to."""

    url: str
    api_key: str | None = None
    trace: TraceContext | None = None

    def __repr__(self) -> str:
        return "Callback(...)"


class Record(Struct, kw_only=True, weakref=False):
    """What is kept of one rollout. Changed by its store only; everybody else reads."""

    rollout_id: str
    key: str
    digest: bytes
    """Of the text of the request's messages."""
    tools: bytes
    """JSON of the tools that `/init` was answered with; equal lists share one object."""
    created_at: float
    phase: Phase = Phase.QUEUED
    status: RolloutStatus = RolloutStatus.STARTED
    request: InitRequest | None = None
    """Until the end; then dropped."""
    canonical: bytes | None = None
    """Digest of the messages as a JSON value, taken when the request is dropped."""
    callback: Callback | None = None
    """From the end until the result is delivered; kept for one that is given up, so that it can be sent after all."""
    result: bytes | None = None
    """JSON of the RolloutResponse; when `result_held` is false without its messages and extra fields."""
    result_held: bool = True
    started_at: float | None = None
    finished_at: float | None = None
    delivered_at: float | None = None
    turn: int = 0
    run: int = 1
    """Which run of the agent this is: 1, and one more each time that a restart begins it anew."""
    checkpoint: bytes | None = None
    """JSON of the messages that the agent last put in safety, while the rollout lives."""
    attempts: int = 0
    last_error: str | None = None
    due: float | None = None
    """When the delivery is to be tried again."""
    give_up: float | None = None
    """When the delivery is given up."""
    expires: float | None = None
    """When the record may be forgotten; None while it lives."""

    @property
    def is_live(self) -> bool:
        """Queued or running."""
        return self.status is RolloutStatus.STARTED

    def __repr__(self) -> str:
        return f"Record({self.rollout_id!r}, {self.phase.value})"


class Started(Struct, frozen=True, kw_only=True, gc=False):
    """Move from queued to running."""

    at: float


class Restarted(Struct, frozen=True, kw_only=True, gc=False):
    """Back to queued, for one more run after the process that ran it died."""

    run: int


class Checkpointed(Struct, frozen=True, kw_only=True, gc=False):
    """The messages reached so far are to survive the process."""

    messages: bytes


class Finished(Struct, frozen=True, kw_only=True, gc=False):
    """Move from queued or running to delivering: the terminal result and the pending delivery in one step."""

    at: float
    status: RolloutStatus
    result: bytes
    canonical: bytes
    callback: Callback
    turn: int
    give_up: float


Move: TypeAlias = Started | Restarted | Checkpointed | Finished


class Delivered(Struct, frozen=True, kw_only=True, gc=False):
    """The trainer has acknowledged the result."""

    at: float
    attempts: int
    expires: float


class Postponed(Struct, frozen=True, kw_only=True, gc=False):
    """The attempt failed; the next one is due then."""

    attempts: int
    error: str
    due: float


class GivenUp(Struct, frozen=True, kw_only=True, gc=False):
    """No further attempt: the result stays where `/result` finds it."""

    attempts: int
    error: str
    expires: float


Settlement: TypeAlias = Delivered | Postponed | GivenUp


class Due(Struct, frozen=True, kw_only=True):
    """What `claim()` gives: deliveries to try now, and when the next one after these is due."""

    records: list[Record]
    next_due: float | None


class Tally(Struct, kw_only=True):
    """Counts, kept by the store as they change: asking costs nothing. Others read only."""

    by_phase: dict[Phase, int]
    by_status: dict[RolloutStatus, int]
    owed_bytes: int = 0
    """Of results that have not reached the trainer, be they still tried or given up."""
    held_bytes: int = 0
    """Of results that are delivered and still held."""

    @classmethod
    def empty(cls) -> Tally:
        """Nothing is known yet."""
        return cls(by_phase=dict.fromkeys(Phase, 0), by_status=dict.fromkeys(RolloutStatus, 0))

    @property
    def records(self) -> int:
        """All records."""
        return sum(self.by_phase.values())

    @property
    def live(self) -> int:
        """Rollouts that have not ended."""
        return self.by_status[RolloutStatus.STARTED]


class Store(abc.ABC):
    """Who remembers. All verbs are called on one event loop; each is atomic towards the others.

    A verb that returns has happened: in a durable store it survives the process. `StoreError` means that it has not
    happened and may be tried again.
    """

    suspends: bool = True
    """Whether a verb may give way to other tasks. Only a store in memory can say no."""
    name: str = ""
    """What `/status` calls it."""
    is_durable: bool = False
    """Whether what it knows survives the process."""

    @property
    def failure(self) -> str | None:
        """Why the store cannot remember anything at the moment; None when it can."""
        return None

    @property
    def size_bytes(self) -> int:
        """What it takes on the disk."""
        return 0

    @property
    def commits(self) -> int:
        """How many transactions it has made durable."""
        return 0

    @abc.abstractmethod
    async def open(self) -> None:
        """Make ready; called once, before any other verb."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of everything; the last call."""

    @abc.abstractmethod
    async def create(self, record: Record) -> Record:
        """Insert the record and return it; or, if its id or key is taken, return the record that holds it."""

    @abc.abstractmethod
    async def get(self, rollout_id: str, key: str | None = None) -> Record | None:
        """The record of that id, or else the one under that key."""

    @abc.abstractmethod
    async def move(self, rollout_id: str, move: Move) -> Record | None:
        """Change the phase if the record is in one that allows it; None if it is not: somebody else was first.

        A `Finished` record counts as claimed by the caller, who settles it.
        """

    @abc.abstractmethod
    async def claim(self, now: float, limit: int) -> Due:
        """Take up to `limit` deliveries that are due, earliest first; nobody else gets them until they are settled."""

    @abc.abstractmethod
    async def settle(self, rollout_id: str, settlement: Settlement) -> Record | None:
        """Write down how a delivery attempt went; None if there is no such delivery any more."""

    @abc.abstractmethod
    def scan(self, prefix: str = "", *, live: bool = False) -> Iterator[Record]:
        """Records that are not settled and whose id starts with `prefix`, in no order; with `live` only those that have
        not ended."""

    @abc.abstractmethod
    async def expire(self, now: float, limit: int) -> int:
        """Forget up to `limit` records that have expired, earliest first; how many it were."""

    @abc.abstractmethod
    def tally(self) -> Tally:
        """The counts, as they are at every moment: one object, updated in place."""
