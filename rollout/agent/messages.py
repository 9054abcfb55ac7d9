"""Reading chat messages as they really come: content missing, null, text or a list of parts. Nothing here raises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rollout.wire import JSON

_TEXT_PARTS = {"text", "input_text", "output_text"}


def get_message_content(message: Any) -> str:
    """The text of a message: its content, or the text parts of it joined; "" where there is none.

    Parts without a type count by their `text`. Thinking, refusals, images and other parts are not text.
    """
    content = _field(message, "content")
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        return "".join(_part_text(part) for part in content)
    return _part_text(content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = _field(part, "type")
    text = _field(part, "text") if kind is None or (isinstance(kind, str) and kind in _TEXT_PARTS) else None
    return text if isinstance(text, str) else ""


def get_message_role(message: Any) -> str:
    """The role of a message; "unknown" where it has none."""
    role = _field(message, "role")
    return role if isinstance(role, str) and role else "unknown"


def is_assistant_message(message: Any) -> bool:
    """Whether the model wrote it."""
    return get_message_role(message) == "assistant"


def is_tool_message(message: Any) -> bool:
    """Whether it answers a tool call."""
    return get_message_role(message) == "tool"


def is_user_message(message: Any) -> bool:
    """Whether it comes from the user."""
    return get_message_role(message) == "user"


def count_messages_by_role(messages: Any) -> dict[str, int]:
    """How many messages there are of each role."""
    return dict(Counter(get_message_role(message) for message in _items(messages)))


def parse_message(message: Any) -> dict[str, JSON]:
    """The common fields of a message: `role`, `content` as text, `tool_calls` (a list) and `tool_call_id`."""
    calls = _field(message, "tool_calls")
    return {
        "role": get_message_role(message),
        "content": get_message_content(message),
        "tool_calls": list(calls) if isinstance(calls, (list, tuple)) else [],
        "tool_call_id": _field(message, "tool_call_id"),
    }


def normalize_stop(stop: Any) -> list[str] | None:
    """Stop sequences as a list: one string is a list of one, never its letters; what is no string is left out."""
    if isinstance(stop, str):
        return [stop]
    if isinstance(stop, (list, tuple, set, frozenset)):
        return [item for item in stop if isinstance(item, str)]
    return None


def _field(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _items(messages: Any) -> Iterable[Any]:
    return messages if isinstance(messages, (list, tuple)) else ()
