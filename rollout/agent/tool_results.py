"""The text that a model reads as a tool's answer, whatever the tool gave back or raised."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import msgspec

from rollout.errors import ToolError
from rollout.schemas import ToolResponse
from rollout.wire import JSON, encode, plain

ERROR_PREFIX = "Error: "
_ERROR_LIMIT = 4000
"""Characters of an exception's text that the model gets to read."""


def serialize_tool_result(result: object) -> str:
    """The result as text: a str as it is, None as "", everything else as JSON, with a note on what JSON cannot hold.

    Dates and UUIDs are text without quotes, bytes are read as UTF-8; an exception is its text; a generator or a
    coroutine is an error. Lone surrogates, which nothing could send, become U+FFFD. Never raises and
    never shows an object's address.
    """
    if result is None:
        return ""
    if isinstance(result, str):
        return str(plain(result))
    if isinstance(result, (bytes, bytearray, memoryview)):
        return bytes(result).decode("utf-8", "replace")
    if isinstance(result, BaseException):
        return describe_error(result)
    if isinstance(result, ToolResponse) and not result.image and not result.video:
        return str(plain(result.text or ""))
    if isinstance(result, Iterator) or inspect.isawaitable(result) or inspect.isasyncgen(result):
        kind = type(result).__name__
        return f"{ERROR_PREFIX}the tool returned a {kind}, which has no text; return a list or a str"
    encoded, problems = encode(result)
    text = msgspec.json.decode(encoded) if encoded.startswith(b'"') else encoded.decode()
    return f"{text}\n(note: {'; '.join(problems)})" if problems else str(text)


def describe_error(error: BaseException) -> str:
    """What was raised, in one short text; never raises, even where the exception's own `__str__` does."""
    kind = type(error).__name__
    try:
        text = str(error).strip()
    except BaseException:  # even SystemExit: this text is all that is wanted of it
        return kind
    text = text if len(text) <= _ERROR_LIMIT else f"{text[:_ERROR_LIMIT]}... ({len(text)} characters)"
    if isinstance(error, ToolError):
        return str(plain(text)) or kind
    return str(plain(f"{kind}: {text}")) if text else kind


def create_tool_result(tool_call_id: str, content: str) -> dict[str, JSON]:
    """The message that answers a tool call."""
    return {"role": "tool", "content": content, "tool_call_id": tool_call_id}


def create_tool_error_result(tool_call_id: str, error_message: str) -> dict[str, JSON]:
    """The message that tells the model its tool call failed; the content starts with "Error: "."""
    return create_tool_result(tool_call_id, f"{ERROR_PREFIX}{error_message}")
