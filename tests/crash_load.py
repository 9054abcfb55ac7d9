"""Who asks for rollouts while the service is killed, and the ledger of what it was answered."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout
from crash_stage import dice

from rollout.testing import ReadResponse, make_request, post_init

_KINDS = {"plain": 44, "tool": 30, "long": 12, "invalid": 4, "refused": 4, "leaver": 6}
"""What the rollouts are like, and how often. A leaver does not ask again when its init gets no answer."""

_ANSWER_SECONDS = 10.0
_PAUSE_SECONDS = 0.03
_REPEATED_SHARE = 0.1
_KEYED_SHARE = 0.2


@dataclasses.dataclass
class Ledger:
    """What the client knows: every init ends as accepted, rejected or unanswered, and never as two of them."""

    turns: dict[str, int] = dataclasses.field(default_factory=dict)
    """By id, how many turns it was asked to take."""
    accepted: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """By id, the body of the first 202."""
    rejected: dict[str, int] = dataclasses.field(default_factory=dict)
    """By id, the status of the refusal."""
    unanswered: set[str] = dataclasses.field(default_factory=set)
    """Asked once, killed before the answer came, not asked again."""
    asked_again: int = 0
    """Inits that were sent again because no answer had come."""
    differing: list[str] = dataclasses.field(default_factory=list)
    """A repeated init that was not answered like the first."""
    newest_commit: int = 0
    """The latest request, by the order of sending, that is known to have written a new record."""
    sent: int = 0
    _watchers: set[asyncio.Event] = dataclasses.field(default_factory=set)

    def note(self, rollout_id: str, answer: ReadResponse) -> None:
        """Write down an answer."""
        if rollout_id in self.accepted:
            if (answer.status, answer.body) != (202, self.accepted[rollout_id]):
                self.differing.append(f"{rollout_id}: {answer.status} {answer.body!r}")
        elif answer.status == 202:
            self.accepted[rollout_id] = answer.body
        else:
            self.rejected[rollout_id] = answer.status
        for watcher in self._watchers:
            watcher.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds; it is asked again after every answer."""
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        try:
            while not condition():
                watcher.clear()
                await watcher.wait()
        finally:
            self._watchers.discard(watcher)


class Load:
    """Callers that ask for one rollout after the other, whatever becomes of the service."""

    def __init__(self, seed: int, trainer_url: str, ledger: Ledger) -> None:
        self.ledger = ledger
        self._seed = seed
        self._trainer_url = trainer_url
        self._numbers = itertools.count(1)
        self._stopping = False
        self.ended = asyncio.Event()
        """Every init that was begun has come to its end."""
        self._service: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def service_up(self, url: str) -> None:
        """The service listens there."""
        self._service.set_result(url)

    def service_down(self) -> None:
        """The service is gone: callers wait for the next."""
        if self._service.done():
            self._service = asyncio.get_running_loop().create_future()

    async def run(self, callers: int) -> None:
        """Ask until `stop()`; every init begun is brought to its end."""
        async with (
            ClientSession(timeout=ClientTimeout(total=_ANSWER_SECONDS)) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(callers):
                group.create_task(self._call(session))
        self.ended.set()

    def stop(self) -> None:
        """Begin no further init."""
        self._stopping = True

    async def _call(self, session: ClientSession) -> None:
        while not self._stopping:
            number = next(self._numbers)
            chance = dice(self._seed, "request", number)
            kind = chance.choices(list(_KINDS), list(_KINDS.values()))[0]
            request = self._request(f"{kind}-{number}", kind, chance)
            await self._carry_out(session, request, gives_up=kind == "leaver")
            if chance.random() < _REPEATED_SHARE and request["rollout_id"] in self.ledger.accepted:
                await self._carry_out(session, request, gives_up=True)
            await asyncio.sleep(chance.uniform(0, 2 * _PAUSE_SECONDS))  # the load is steady, not as fast as can be

    def _request(self, rollout_id: str, kind: str, chance: Any) -> dict[str, Any]:
        turns = self.ledger.turns[rollout_id] = chance.randint(1, 5)
        request = make_request(
            rollout_id=rollout_id,
            server_url=self._trainer_url,
            messages=[{"role": "user", "content": f"question of {rollout_id}"}],
            metadata={"turns": turns, "refuse": kind == "refused"},
        )
        if chance.random() < _KEYED_SHARE:
            request["idempotency_key"] = f"key of {rollout_id}"
        if kind == "invalid":
            request["max_turns"] = 0
        return request

    async def _carry_out(self, session: ClientSession, request: dict[str, Any], *, gives_up: bool) -> None:
        """Send the init, and again as often as no answer comes."""
        rollout_id = request["rollout_id"]
        for attempt in itertools.count(1):
            url = await asyncio.shield(self._service)
            is_new = attempt == 1 and rollout_id not in self.ledger.accepted
            self.ledger.sent += 1
            order = self.ledger.sent
            try:
                answer = await post_init(session, request, path=f"{url}/v1/rollout/init")
            except (ClientError, OSError, TimeoutError):
                if gives_up:
                    if is_new:
                        self.ledger.unanswered.add(rollout_id)
                    return
                self.ledger.asked_again += 1
                await self._next_service(url)
                continue
            if is_new and answer.status == 202:
                self.ledger.newest_commit = max(self.ledger.newest_commit, order)
            self.ledger.note(rollout_id, answer)
            return

    async def _next_service(self, url: str) -> None:
        """Return when the service is another one than that, or may be."""
        if self._service.done() and self._service.result() == url:
            await asyncio.sleep(_PAUSE_SECONDS)  # it may be dying, or may just have been slow
