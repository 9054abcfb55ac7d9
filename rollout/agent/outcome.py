"""From whatever an agent returned to the bytes of the one terminal result."""

from __future__ import annotations

import decimal
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from rollout.agent.loop import RolloutResult
from rollout.schemas import ErrorCategory, RolloutMetrics, RolloutResponse, RolloutStatus
from rollout.wire import encode_checked, encode_strict, is_json, plain

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
    reached: Callable[[], Raw],
    category: ErrorCategory | None = None,
    retryable: bool | None = None,
) -> Outcome:
    """The outcome of a result, however odd its fields are. Never raises: a result is never lost to encoding.

    What JSON cannot hold is converted where it has a plain meaning, else named in `error_message`. A reward that is no
    finite number turns the result into an ERROR, because a silent null would be taken for "not rewarded"; so do a
    status that is none and messages that are no list.
    """
    problems: list[str] = []
    status = _status(result.status, problems)
    reward = _reward(result.reward, problems)
    final = _listed(result.final_messages, problems)
    if problems:
        status, category = RolloutStatus.ERROR, ErrorCategory.VALIDATION_ERROR
    messages = _messages(final, reached, status, problems)
    extra = _extra(extra_fields, result.extra_fields, problems)
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
    return _sealed(
        RolloutResponse(
            rollout_id=rollout_id,
            status=status,
            final_messages=messages,  # type: ignore[arg-type]  # JSON text stands for what it encodes
            metrics=metrics,
            extra_fields=Raw(extra),  # type: ignore[arg-type]
            finish_reason=_finish_reason(result.finish_reason, status),
            error_message=message,
            reward=reward,
            error_category=category,
            retryable=retryable,
        )
    )


def _finish_reason(given: Any, status: RolloutStatus) -> str | None:
    reason = _text(given)
    return "error" if status is RolloutStatus.ERROR and reason in (None, "stop") else reason


def _sealed(response: RolloutResponse) -> Outcome:
    return Outcome(
        status=response.status,
        finish_reason=response.finish_reason,
        error_message=response.error_message,
        error_category=response.error_category,
        body=encode_strict(response),
    )


def _status(status: Any, problems: list[str]) -> RolloutStatus:
    try:
        found = RolloutStatus(status)
    except Exception:  # an object that cannot even be shown is no status either
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
    try:
        number = _single(reward)
    except BaseException as exc:  # SystemExit, too, is what an object of the agent may raise
        problems.append(f"reward is a {type(reward).__name__} that is no single number ({type(exc).__name__})")
        return None
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


def _single(reward: Any) -> Any:
    """The one number that a NumPy scalar, a tensor, a Decimal or a Fraction stands for; all else as it is."""
    if isinstance(reward, (int, float)):
        return reward
    item = getattr(reward, "item", None)
    if callable(item):
        return item()
    return float(reward) if isinstance(reward, (decimal.Decimal, numbers.Real)) else reward


def _listed(messages: Any, problems: list[str]) -> Sequence[Any] | Raw:
    """The final messages, none if they are no list."""
    if messages is None or isinstance(messages, Raw):
        return messages or []
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
        return messages
    problems.append(f"final_messages is {_shown(messages)}, not a list")
    return []


def _messages(
    messages: Sequence[Any] | Raw, reached: Callable[[], Raw], status: RolloutStatus, problems: list[str]
) -> Raw:
    if status is RolloutStatus.ERROR and not messages:
        return _known(reached)
    text, lost = encode_checked(messages, "final_messages")
    problems += lost
    return Raw(text) if text.lstrip().startswith(b"[") else _known(reached)


def _known(reached: Callable[[], Raw]) -> Raw:
    """The messages reached; none where the agent has put into them what is no JSON."""
    messages = reached()
    return messages if is_json(bytes(messages)) else Raw(b"[]")


def _extra(own: Mapping[str, Any], given: Any, problems: list[str]) -> bytes:
    """The agent's extra fields over those of the context, as JSON."""
    if given is not None and not isinstance(given, Mapping):
        problems.append(f"extra_fields is {_shown(given)}, not an object")
        given = None
    fields = own
    try:
        if given:
            fields = {**own, **given}
    except Exception as exc:  # a mapping of the agent's own making
        problems.append(f"extra_fields is a {type(given).__name__} that cannot be read ({type(exc).__name__})")
    if not fields:
        return b"{}"
    text, lost = encode_checked(fields, "extra_fields")
    problems += lost
    return text


def _metrics(given: Any, measured: RolloutMetrics, problems: list[str]) -> Any:
    """The measured metrics, or what the agent put in their place, field by field where it can be read."""
    own: Any = measured
    if not _are_numbers(measured):  # the agent has them in its hands
        fields = plain(msgspec.structs.asdict(measured), "metrics", problems)
        own = _merged(msgspec.to_builtins(RolloutMetrics()), fields, problems)
    if given is None or given is measured:
        return own
    if isinstance(given, (RolloutMetrics, Mapping)):
        fields = plain(given, "metrics", problems)
        return _merged(msgspec.to_builtins(own), fields, problems) if isinstance(fields, dict) else own
    problems.append(f"metrics is {_shown(given)}, not an object")
    return own


def _are_numbers(m: RolloutMetrics) -> bool:
    """Whether every field holds a finite number: one that does not spoils the sum."""
    try:
        latencies = m.total_latency_ms + m.llm_latency_ms + m.tool_latency_ms
        counts = m.num_llm_calls + m.num_tool_calls + m.prompt_tokens + m.response_tokens + m.max_context_tokens
        total = latencies + counts
        return type(total) in (int, float) and math.isfinite(total)
    except Exception:
        return False


def _merged(measured: dict[str, Any], given: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The agent's numbers over the measured ones; fields that the protocol has not are the agent's own affair."""
    for name, value in given.items():
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        kind = type(measured.get(name))
        if value is None:
            continue
        if kind not in (int, float):
            measured[name] = value
        elif isinstance(number, bool) or not isinstance(number, (int, kind)):
            problems.append(f"metrics.{name} is {_shown(value)}, not {'a whole' if kind is int else 'a'} number")
        else:
            measured[name] = kind(number)
    return measured


def _text(value: Any) -> str | None:
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else str(value.value if hasattr(value, "value") else value)
    except BaseException:
        text = f"<{type(value).__name__}>"
    return text[:_TEXT_LIMIT].encode("utf-8", "replace").decode()


def _shown(value: object) -> str:
    """A value in a message: short, and of what is no plain value only the type."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        shown = repr(value)
        return shown if len(shown) <= 80 else shown[:80] + "..."
    return f"a {type(value).__name__}"
