"""Valid bodies of the protocol as plain dicts, for tests to start from and bend."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable
from typing import Any

from msgspec import UNSET, UnsetType

from rollout.wire import JSON, encode_strict

_PROCESS = uuid.uuid4().hex[:8]
_numbers = itertools.count(1)


def make_request(**overrides: JSON) -> dict[str, Any]:
    """A valid RolloutRequest. Each has a `rollout_id` that is new in any process; nothing listens at its `server_url`.

    `overrides` add or replace fields; `msgspec.UNSET` leaves one out.
    """
    request = {
        "rollout_id": f"rollout-{_PROCESS}-{next(_numbers)}",
        "server_url": "http://127.0.0.1:1",
        "messages": [{"role": "user", "content": "What is 2 + 2?"}],
        "completion_params": {"temperature": 0.7, "max_tokens": 256},
        **overrides,
    }
    return {field: value for field, value in request.items() if value is not UNSET}


def make_tool_call(name: str, arguments: JSON = None, id: str | None = "call_1") -> dict[str, Any]:
    """One entry of `tool_calls`; arguments that are not text yet become JSON text, no id leaves the field out."""
    text = arguments if isinstance(arguments, str) else encode_strict({} if arguments is None else arguments).decode()
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": text}}
    return call if id is None else {"id": id, **call}


def make_completion(
    content: str | None = "ok",
    *,
    tool_calls: Iterable[dict[str, Any]] | None = None,
    finish_reason: str | None = None,
    usage: dict[str, Any] | UnsetType | None = UNSET,
    **overrides: JSON,
) -> dict[str, Any]:
    """A chat completion with one choice, as the trainer answers it.

    The finish reason follows from the tool calls; `usage` is 10 prompt and 5 completion tokens, None leaves it out.
    `overrides` add or replace top-level fields (`token_ids`, `logprobs`, `choices`, ...).
    """
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if tool_calls is not None:
        message["tool_calls"] = list(tool_calls)
    if finish_reason is None:
        finish_reason = "stop" if tool_calls is None else "tool_calls"
    completion = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "default",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }
    if usage is UNSET:
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    if usage is not None:
        completion["usage"] = usage
    return completion | overrides
