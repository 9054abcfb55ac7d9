"""From whatever an agent returned to the bytes of the one terminal result."""

from __future__ import annotations

import decimal
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from rollout.agent.loop import RolloutResult
from rollout.schemas import ErrorCategory, RolloutMetrics, RolloutResponse, RolloutStatus
from rollout.wire import encode, encode_strict, plain

_TEXT_LIMIT = 4000
"""Characters of an error message or a finish reason: the rest of a 100 MB text helps nobody."""

RETRYABLE = frozenset({ErrorCategory.TIMEOUT, ErrorCategory.INTERRUPTED})


class Outcome(Struct, frozen=True, kw_only=True):
    """How a rollout ended. `body` is the RolloutResponse as every delivery attempt will carry it."""

    status: RolloutStatus
    finish_reason: str | None
    error_message: str | None
    error_category: ErrorCategory | None
    body: bytes


def outcome_of(
    rollout_id: str,
    result: RolloutResult,
    *,
    measured: RolloutMetrics,
    extra_fields: Mapping[str, Any],
    reached: Raw,
    category: ErrorCategory | None = None,
    retryable: bool | None = None,
) -> Outcome:
    """The outcome of a result, however odd its fields are. Never raises: a result is never lost to encoding.

    What JSON cannot hold is converted where it has a plain meaning, else named in `error_message`. A reward that is no
    finite number turns the result into an ERROR, because a silent null would be taken for "not rewarded".
    """
    problems: list[str] = []
    status = _status(result.status, problems)
    reward = _reward(result.reward, problems)
    if problems:
        status, category = RolloutStatus.ERROR, ErrorCategory.VALIDATION_ERROR
    messages = _messages(result.final_messages, reached, status, problems)
    extra, lost = encode({**extra_fields, **_mapping(result.extra_fields, problems)}, "extra_fields")
    problems += lost
    metrics = _metrics(result.metrics, measured, problems)
    message = _text(result.error_message)
    if problems:
        message = "; ".join([message, *problems] if message else problems)[:_TEXT_LIMIT]
    if status is RolloutStatus.ERROR:
        category = ErrorCategory.AGENT_ERROR if category is None else category
        retryable = category in RETRYABLE if retryable is None else retryable
        message = message or "the agent ended the rollout as an error and gave no reason"
    else:
        category = retryable = None
    finish_reason = _text(result.finish_reason)
    if status is RolloutStatus.ERROR and finish_reason in (None, "stop"):
        finish_reason = "error"
    response = RolloutResponse(
        rollout_id=rollout_id,
        status=status,
        final_messages=messages,  # type: ignore[arg-type]  # JSON text stands for what it encodes
        metrics=metrics,
        extra_fields=Raw(extra),  # type: ignore[arg-type]
        finish_reason=finish_reason,
        error_message=message,
        reward=reward,
        error_category=category,
        retryable=retryable,
    )
    return Outcome(
        status=status,
        finish_reason=finish_reason,
        error_message=message,
        error_category=category,
        body=encode_strict(response),
    )


def _status(status: object, problems: list[str]) -> RolloutStatus:
    try:
        found = RolloutStatus(status)
    except ValueError:
        problems.append(f"status is {_shown(status)}, not COMPLETED or ERROR")
        return RolloutStatus.ERROR
    if found is RolloutStatus.STARTED:
        problems.append("status is STARTED, which is no end")
        return RolloutStatus.ERROR
    return found


def _reward(reward: Any, problems: list[str]) -> float | int | None:
    """The reward as a JSON number; NumPy, Decimal and one-element tensors are numbers, bools and texts are not."""
    if reward is None:
        return None
    number = reward
    if not isinstance(number, (int, float)):
        item = getattr(number, "item", None)
        if callable(item):
            try:
                number = item()
            except Exception as exc:
                problems.append(f"reward is a {type(reward).__name__} that is no single number ({type(exc).__name__})")
                return None
        elif isinstance(number, (decimal.Decimal, numbers.Real)):
            number = float(number)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        problems.append(f"reward is {_shown(reward)}, not a number")
        return None
    if isinstance(number, int):
        if number.bit_length() > 1023:
            problems.append(f"reward is an integer of {number.bit_length()} bits")
            return None
        return int(number)
    if not math.isfinite(number):
        problems.append(f"reward is {number!r}, not a finite number")
        return None
    return float(number)


def _messages(messages: Any, reached: Raw, status: RolloutStatus, problems: list[str]) -> Raw:
    if status is RolloutStatus.ERROR and not isinstance(messages, Raw) and (messages is None or len(messages) == 0):
        return reached
    if isinstance(messages, Raw):
        return messages
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        problems.append(f"final_messages is {_shown(messages)}, not a list")
        return reached
    text, lost = encode(messages, "final_messages")
    problems += lost
    return Raw(text)


def _mapping(fields: Any, problems: list[str]) -> Mapping[str, Any]:
    if fields is None:
        return {}
    if isinstance(fields, Mapping):
        return fields
    problems.append(f"extra_fields is {_shown(fields)}, not an object")
    return {}


def _metrics(given: Any, measured: RolloutMetrics, problems: list[str]) -> Any:
    """The measured metrics, or what the agent put in their place, field by field where it can be read."""
    if given is None or given is measured:
        return measured
    if isinstance(given, (RolloutMetrics, Mapping)):
        fields = plain(given, "metrics", problems)
        base = msgspec.to_builtins(measured)
        return {**base, **{k: v for k, v in fields.items() if v is not None}}
    problems.append(f"metrics is {_shown(given)}, not an object")
    return measured


def _text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else str(value.value if hasattr(value, "value") else value)
    return text[:_TEXT_LIMIT].encode("utf-8", "replace").decode()


def _shown(value: object) -> str:
    """A value in a message: short, and of what is no plain value only the type."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        shown = repr(value)
        return shown if len(shown) <= 80 else shown[:80] + "..."
    return f"a {type(value).__name__}"
