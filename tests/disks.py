"""A state file as a kill leaves it, and a disk that takes no more."""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = ("", "-wal")


def copy_state(path: Path, to: Path) -> Path:
    """The file and its log as they are on the disk at this moment: what a process that is killed now leaves behind."""
    to.parent.mkdir(parents=True, exist_ok=True)
    for suffix in SUFFIXES:
        part = path.with_name(path.name + suffix)
        if part.exists():
            shutil.copyfile(part, to.with_name(to.name + suffix))
    return to


@contextlib.contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """The log of the state file cannot grow any more: real errors of the operating system, without privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = path.with_name(path.name + "-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
