"""A record as its RolloutState: what is stored once, in the result, is read from there."""

from __future__ import annotations

import datetime

import msgspec
from msgspec import Struct

from rollout.schemas import ErrorCategory, RolloutMetrics, RolloutState
from rollout.state.store import Record


class _Summary(Struct):
    """The part of a RolloutResponse that a state repeats; the messages are skipped."""

    finish_reason: str | None = None
    error_message: str | None = None
    error_category: ErrorCategory | None = None
    reward: float | int | None = None
    metrics: RolloutMetrics | None = None


_decode_summary = msgspec.json.Decoder(_Summary).decode
_UNKNOWN = _Summary()


def timestamp(at: float | None) -> str | None:
    """RFC 3339, UTC, milliseconds."""
    if at is None:
        return None
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def state_of(record: Record, turn: int) -> RolloutState:
    """What is known of a rollout now."""
    summary = _UNKNOWN if record.result is None else _summary_of(record.result)
    return RolloutState(
        rollout_id=record.rollout_id,
        status=record.status,
        phase=record.phase,
        created_at=timestamp(record.created_at) or "",
        started_at=timestamp(record.started_at),
        finished_at=timestamp(record.finished_at),
        delivered_at=timestamp(record.delivered_at),
        finish_reason=summary.finish_reason,
        error_message=summary.error_message,
        error_category=summary.error_category,
        reward=summary.reward,
        metrics=summary.metrics,
        turn=turn,
        run=record.run if record.run > 1 else None,
        delivery_attempts=record.attempts,
        last_delivery_error=record.last_error,
    )


def _summary_of(result: bytes) -> _Summary:
    try:
        return _read_summary(result)
    except msgspec.DecodeError:  # no JSON at all: the rest of the state is known nevertheless
        return _UNKNOWN


def _read_summary(result: bytes) -> _Summary:
    try:
        return _decode_summary(result)
    except msgspec.ValidationError:  # an agent put metrics of its own shape there
        fields = msgspec.json.decode(result)
        return _Summary(
            finish_reason=fields.get("finish_reason"),
            error_message=fields.get("error_message"),
            reward=fields.get("reward"),
        )
