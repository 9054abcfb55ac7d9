"""Progress of running rollouts in a durable store: bounded in size and in rate."""

from __future__ import annotations

import logging

from rollout.errors import StoreError
from rollout.retry import Clock
from rollout.state.store import Checkpointed, Store

logger = logging.getLogger(__name__)

LARGEST_BYTES = 8 * 1024 * 1024
PAUSE_SECONDS = 1.0


class StoredCheckpoints:
    """The checkpoints of one rollout; the newest replaces the one before."""

    def __init__(self, store: Store, rollout_id: str, *, every_turn: bool, clock: Clock) -> None:
        self.every_turn = every_turn
        self._store = store
        self._rollout_id = rollout_id
        self._clock = clock
        self._next = clock()

    async def save(self, messages: bytes) -> bool:
        """Store the messages unless they are too large or too soon after the last; whether they are stored."""
        if len(messages) > LARGEST_BYTES or self._clock() < self._next:
            return False
        self._next = self._clock() + PAUSE_SECONDS
        try:
            return await self._store.move(self._rollout_id, Checkpointed(messages=messages)) is not None
        except StoreError as exc:
            logger.warning("rollout %r: a checkpoint could not be stored: %s", self._rollout_id, exc)
            return False
