"""Who decides: may this init come in, is it a duplicate, which terminal result is the first.

The lock guards the admissions in progress, the room and the drain flag: dictionary work only, never an await, never
user code, so every method that takes it may be called from any thread. Records belong to the store.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

from rollout.errors import Conflict, RequestError, ServiceUnavailable
from rollout.requests import InitRequest
from rollout.retry import Clock
from rollout.schemas import RolloutStatus
from rollout.state.store import Callback, Finished, Record, Started, Store
from rollout.tracing import TraceContext
from rollout.wire import canonical_digest, digest, encode_strict

_TOOL_LISTS = 1024


class Admission:
    """An init that is being decided. One caller leads, the others wait for what it finds.

    Waiters await a future that carries no exception, so a failure that nobody waits for leaves no trace in the log.
    """

    __slots__ = ("_answered", "answer", "cancelled", "digest", "error", "request")

    def __init__(self, request: InitRequest, messages_digest: bytes) -> None:
        self.request = request
        self.digest = messages_digest
        self.cancelled = False
        """A cancel has come before the answer: the rollout will end at once."""
        self.answer: bytes | None = None
        self.error: RequestError | None = None
        self._answered: asyncio.Future[None] | None = None

    def resolve(self, answer: bytes | None, error: RequestError | None = None) -> None:
        """Give all callers the same answer or the same error. The first call counts."""
        if self.answer is not None or self.error is not None:
            return
        self.answer, self.error = answer, error
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    async def wait(self) -> bytes:
        """The answer, when it is there. Any number of callers; one that is cancelled disturbs nobody."""
        if self.answer is None and self.error is None:
            if self._answered is None:
                self._answered = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._answered)
        if self.error is not None:
            raise self.error.with_traceback(None)
        assert self.answer is not None
        return self.answer


class Registry:
    """Admission, idempotency, transitions and counts over a `Store`."""

    def __init__(
        self,
        store: Store,
        *,
        capacity: int,
        owed_limit_bytes: int,
        ttl_seconds: float,
        horizon_seconds: float,
        clock: Clock = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.clock = clock
        self.wall_clock = wall_clock
        self._capacity = capacity
        self._owed_limit_bytes = owed_limit_bytes
        self._ttl_seconds = ttl_seconds
        self._horizon_seconds = horizon_seconds
        self._lock = threading.Lock()
        self._by_key: dict[str, Admission] = {}
        self._by_id: dict[str, Admission] = {}
        self._creating = 0
        self._draining = False
        self._tools: dict[bytes, bytes] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    # ------------------------------------------------------------ admission

    def enter(self, request: InitRequest) -> tuple[Admission, bool]:
        """Join the admission of the same request, or lead a new one (True). Raises `Conflict`.

        Between this and `leave()` no other admission of the same id or key exists, so lookups in between hold.
        """
        messages_digest = digest(request.messages)
        with self._lock:
            other = self._by_key.get(request.key) or self._by_id.get(request.rollout_id)
            if other is None:
                admission = Admission(request, messages_digest)
                self._by_key[request.key] = self._by_id[request.rollout_id] = admission
                return admission, True
        _check_identity(other.request.rollout_id, other.request.key, request)
        if other.digest != messages_digest:
            _check_messages(canonical_digest(bytes(other.request.messages)), request)
        return other, False

    def leave(self, admission: Admission) -> None:
        """The admission is decided. Only its leader calls this, once."""
        with self._lock:
            self._by_key.pop(admission.request.key, None)
            self._by_id.pop(admission.request.rollout_id, None)

    async def known(self, admission: Admission) -> Record | None:
        """The record that this request already has; None if it is new. Raises `Conflict`."""
        request = admission.request
        record = await self.store.get(request.rollout_id, request.key)
        if record is None:
            return None
        _check_identity(record.rollout_id, record.key, request)
        if record.digest != admission.digest:
            _check_messages(_canonical_of(record), request)
        return record

    def check_room(self) -> None:
        """Raise `ServiceUnavailable` (draining, results_full, queue_full) if no new rollout may come in now."""
        with self._lock:
            self._check_room()

    def _check_room(self) -> None:
        if self._draining:
            raise ServiceUnavailable("the service is shutting down", "draining", 5)
        tally = self.store.tally()
        if tally.owed_bytes >= self._owed_limit_bytes:
            raise ServiceUnavailable(
                f"{tally.owed_bytes} bytes of results wait for their trainers, the limit is {self._owed_limit_bytes}",
                "results_full",
                10,
            )
        if tally.live + self._creating >= self._capacity:
            raise ServiceUnavailable(
                f"{self._capacity} rollouts are running or queued: the queue is full", "queue_full"
            )

    async def admit(self, admission: Admission, tools: bytes) -> Record:
        """Create the record if there is room. When it returns, the rollout is accepted."""
        request = admission.request
        with self._lock:
            self._check_room()
            self._creating += 1
            if len(self._tools) > _TOOL_LISTS:
                self._tools.clear()
            tools = self._tools.setdefault(tools, tools)
        try:
            return await self.store.create(
                Record(
                    rollout_id=request.rollout_id,
                    key=request.key,
                    digest=admission.digest,
                    tools=tools,
                    created_at=self.wall_clock(),
                    request=request,
                )
            )
        finally:
            with self._lock:
                self._creating -= 1

    def begin_drain(self) -> None:
        """From now on nothing new is admitted."""
        with self._lock:
            self._draining = True

    @property
    def draining(self) -> bool:
        """Whether `begin_drain()` was called."""
        return self._draining

    def cancel_admission(self, rollout_id: str) -> bool:
        """Mark an init that is not answered yet as cancelled; whether there was one."""
        with self._lock:
            admission = self._by_id.get(rollout_id)
            if admission is None:
                return False
            admission.cancelled = True
            return True

    def admitting(self, prefix: str = "") -> list[str]:
        """Ids of the inits that are not answered yet."""
        with self._lock:
            return [rollout_id for rollout_id in self._by_id if rollout_id.startswith(prefix)]

    # ------------------------------------------------------------ transitions

    async def get(self, rollout_id: str) -> Record | None:
        """The record of the id."""
        return await self.store.get(rollout_id)

    async def start(self, rollout_id: str) -> Record | None:
        """Queued to running; None if it has ended meanwhile."""
        return await self.store.move(rollout_id, Started(at=self.wall_clock()))

    async def finish(
        self, rollout_id: str, status: RolloutStatus, result: bytes, turn: int = 0, trace: TraceContext | None = None
    ) -> Record | None:
        """To delivering, with the result that is owed from now on; None if another terminal result was first."""
        record = await self.store.get(rollout_id)
        if record is None or record.request is None:
            return None
        request = record.request
        callback = Callback(url=str(request.endpoints().completed), api_key=request.api_key, trace=trace)
        finished = await self.store.move(
            rollout_id,
            Finished(
                at=self.wall_clock(),
                status=status,
                result=result,
                canonical=canonical_digest(bytes(request.messages)),
                callback=callback,
                turn=turn,
                give_up=self.clock() + self._horizon_seconds,
            ),
        )
        if finished is not None:
            self._wake(rollout_id)
        return finished

    def expiry(self) -> float:
        """When a record that is settled now may be forgotten."""
        return self.clock() + self._ttl_seconds

    def live(self, prefix: str = "") -> Iterator[Record]:
        """Records that have not ended."""
        return self.store.scan(prefix, live=True)

    # ------------------------------------------------------------ waiting for the end

    async def wait_end(self, rollout_id: str, seconds: float) -> None:
        """Return when the rollout ends, or after so many seconds, or when the service stops."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(rollout_id, [])
        waiters.append(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            pass
        finally:
            waiters.remove(waiter)
            if not waiters and self._waiters.get(rollout_id) is waiters:
                del self._waiters[rollout_id]

    def _wake(self, rollout_id: str) -> None:
        for waiter in self._waiters.get(rollout_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    def wake_all(self) -> None:
        """End every wait: the service stops."""
        for rollout_id in list(self._waiters):
            self._wake(rollout_id)


def init_answer(record: Record) -> bytes:
    """The body of the 202, the same for the first call and for every duplicate."""
    return b'{"rollout_id":' + encode_strict(record.rollout_id) + b',"tools":' + record.tools + b"}"


def _canonical_of(record: Record) -> bytes | None:
    if record.request is not None:
        return canonical_digest(bytes(record.request.messages))
    return record.canonical


def _check_identity(rollout_id: str, key: str, request: InitRequest) -> None:
    if rollout_id != request.rollout_id:
        raise Conflict(f"the key {request.key!r} belongs to another rollout_id", "key_in_use")
    if key != request.key:
        raise Conflict(f"the rollout_id {rollout_id!r} is in use under another key", "id_in_use")


def _check_messages(canonical: bytes | None, request: InitRequest) -> None:
    if canonical != canonical_digest(bytes(request.messages)):
        raise Conflict(f"the rollout_id {request.rollout_id!r} is known with other messages", "body_differs")
