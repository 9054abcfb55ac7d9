"""Every store there is, and the structs that their tests build. A new store is one more line in `STORES`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from rollout.requests import InitRequest, parse_init
from rollout.schemas import RolloutStatus
from rollout.state.memory import MemoryStore
from rollout.state.sqlite import SqliteStore
from rollout.state.store import Callback, Finished, Record, Store
from rollout.testing import make_request
from rollout.wire import JSON, canonical_digest, digest, encode_strict

MakeStore: TypeAlias = Callable[[int, Path], Store]
"""Builds a store that holds so many bytes of delivered results; a folder for what it has to keep on disk."""

STORES: list[tuple[str, MakeStore]] = [
    ("memory", lambda result_cache_bytes, folder: MemoryStore(result_cache_bytes)),
    ("sqlite", lambda result_cache_bytes, folder: make_sqlite(folder / "state.db", result_cache_bytes)),
]
IDS = [name for name, _ in STORES]
FACTORIES = [factory for _, factory in STORES]


def make_sqlite(path: Path, result_cache_bytes: int = 1 << 20, **options: Any) -> SqliteStore:
    """A store in a file. Its wall clock is ahead by a round number, so that times come back from the file exactly."""
    return SqliteStore(
        path, result_cache_bytes, **{"clock": lambda: 0.0, "wall_clock": lambda: 2.0**20, "wait_seconds": 0, **options}
    )


def make_init(**fields: JSON) -> InitRequest:
    """A checked request with these fields in place of its own."""
    return parse_init(encode_strict(make_request(**fields)), 1 << 20)


def make_record(rollout_id: str, key: str | None = None, tools: bytes = b"[]") -> Record:
    """A new record, as the registry would create it."""
    request = make_init(rollout_id=rollout_id, idempotency_key=key)
    return Record(
        rollout_id=rollout_id,
        key=request.key,
        digest=digest(request.messages),
        tools=tools,
        created_at=1.0,
        request=request,
    )


def make_result(rollout_id: str, filling: int = 0) -> bytes:
    """A terminal result whose messages hold so many further bytes."""
    return encode_strict(
        {
            "rollout_id": rollout_id,
            "status": "COMPLETED",
            "final_messages": [{"role": "assistant", "content": "x" * filling}],
            "metrics": None,
            "extra_fields": {"a": 1},
            "reward": 0.5,
        }
    )


def make_finished(rollout_id: str, filling: int = 0, status: RolloutStatus = RolloutStatus.COMPLETED) -> Finished:
    """The move to the end."""
    return Finished(
        at=3.0,
        status=status,
        result=make_result(rollout_id, filling),
        canonical=canonical_digest(b"[]"),
        callback=Callback(url="http://trainer/v1/rollout/completed", api_key="key"),
        turn=2,
        give_up=500.0,
    )
