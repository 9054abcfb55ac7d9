"""One timer for many deadlines: on time, in order, and forgotten when they are nobody's any more."""

from __future__ import annotations

import asyncio
import time

from rollout.executors.deadlines import Deadlines


class Board:
    """Names with the deadlines that are theirs now, and those that were called."""

    def __init__(self) -> None:
        self.current: dict[str, float] = {}
        self.called: list[str] = []
        self.all_called = asyncio.Event()
        self.deadlines = Deadlines(asyncio.get_running_loop(), time.monotonic, self.current.get, self._expire)

    def _expire(self, name: str) -> None:
        self.called.append(name)
        del self.current[name]
        if not self.current:
            self.all_called.set()

    def add(self, name: str, seconds: float) -> None:
        self.current[name] = time.monotonic() + seconds
        self.deadlines.add(name, self.current[name])

    async def wait(self) -> None:
        async with asyncio.timeout(5):
            await self.all_called.wait()


async def test_deadlines_are_called_in_their_order_not_in_that_of_coming() -> None:
    board = Board()
    for name, seconds in (("late", 0.03), ("early", 0.01), ("middle", 0.02), ("past", -1.0)):
        board.add(name, seconds)

    await board.wait()

    assert board.called == ["past", "early", "middle", "late"]


async def test_a_deadline_that_is_no_longer_the_names_is_not_called() -> None:
    board = Board()
    board.add("again", 0.01)
    board.add("gone", 0.01)
    del board.current["gone"]
    board.add("again", 0.03)  # the name has come back with another deadline
    later = board.current["again"]

    await board.wait()

    assert board.called == ["again"]
    assert time.monotonic() >= later


async def test_what_has_ended_does_not_pile_up_until_its_deadline() -> None:
    board = Board()
    for number in range(10_000):
        board.add(f"ended-{number}", 3600.0)
        del board.current[f"ended-{number}"]
    board.add("alive", 0.01)

    assert len(board.deadlines) < 3000
    await board.wait()
    assert board.called == ["alive"]


async def test_after_the_stop_nothing_is_called() -> None:
    board = Board()
    board.add("one", 0.0)
    board.deadlines.stop()

    await asyncio.sleep(0.01)

    assert board.called == []
    assert len(board.deadlines) == 0
