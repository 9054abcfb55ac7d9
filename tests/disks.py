"""A state file as a kill leaves it, and a disk that takes no more."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

SUFFIXES = ("", "-wal")
GENEROUS_SECONDS = 5


def copy_state(path: Path, to: Path) -> Path:
    """The file and its log as they are on the disk at this moment: what a process that is killed now leaves behind."""
    to.parent.mkdir(parents=True, exist_ok=True)
    for suffix in SUFFIXES:
        part = path.with_name(path.name + suffix)
        if part.exists():
            shutil.copyfile(part, to.with_name(to.name + suffix))
    return to


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No byte can be written to a file: real errors of the operating system, without privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def wait_until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; what it asks is changed by another thread, so there is no event to wait for."""
    async with asyncio.timeout(GENEROUS_SECONDS):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)
