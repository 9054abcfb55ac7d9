"""Which lists of tools the state file holds: most rollouts of an agent share one."""

from __future__ import annotations

from collections.abc import Iterable

from rollout.wire import digest


class ToolLists:
    """Numbers of the lists, and how many records name each. Dictionary work only, on the event loop.

    A list is known by a digest of its text, so that many large ones cost no memory here.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._uses: dict[int, int] = {}
        self._stored: set[int] = set()
        self._next = 1

    def load(self, rows: Iterable[tuple[int, bytes, int]]) -> None:
        """What the file holds: number, text, and by how many records it is named."""
        for number, text, uses in rows:
            self._add(digest(text), number, uses)
            self._stored.add(number)

    def _add(self, name: bytes, number: int, uses: int) -> None:
        self._numbers[name], self._digests[number], self._uses[number] = number, name, uses
        self._next = max(self._next, number + 1)

    def take(self, text: bytes) -> int:
        """The number of a list for one more record that names it."""
        name = digest(text)
        number = self._numbers.get(name)
        if number is None:
            self._add(name, number := self._next, 0)
        self._uses[number] += 1
        return number

    def release(self, number: int) -> bool:
        """One record less names the list; True when it was the last and the file holds the list: it may be deleted."""
        self._uses[number] -= 1
        if self._uses[number]:
            return False
        del self._uses[number], self._numbers[self._digests.pop(number)]
        is_stored = number in self._stored
        self._stored.discard(number)
        return is_stored

    def is_stored(self, number: int) -> bool:
        """Whether the file is known to hold the list."""
        return number in self._stored

    def note_stored(self, number: int) -> None:
        """The file holds it now."""
        self._stored.add(number)
