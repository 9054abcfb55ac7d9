"""One LLM call as text: how the request is written, what the answer means, how the history may grow."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import Raw

from rollout.errors import BadCompletion, TrainerRefused, TrainerUnavailable
from rollout.retry import parse_retry_after
from rollout.schemas import COMPLETION_DEFAULTS, CompletionsChoice, MessageDict, decode_completion
from rollout.wire import (
    JSON,
    MAX_SLOW_NUMBERS,
    canonical_digest,
    encode,
    encode_strict,
    holds_too_many_containers,
    is_json,
    is_slow_to_decode,
    nests_deeper,
)

logger = logging.getLogger(__name__)

EXCERPT_CHARACTERS = 1000
"""How much of a trainer's text an error repeats."""

_LONGEST_ERROR_BODY = 1 << 20
_SHORTEST_SECRET = 4

RETRIED_STATUSES = frozenset({408, 425, 429})

_NOT_SENT = frozenset({"stream", "stream_options", "messages", "rollout_id"})


class SentMessages(list[MessageDict]):
    """The messages of one call with their JSON, so that the client that speaks HTTP need not encode them again."""

    __slots__ = ("text",)

    def __init__(self, messages: Sequence[MessageDict], text: bytes) -> None:
        super().__init__(messages)
        self.text = text


class CompletionsResult:
    """The answer of one LLM call. `message` is the assistant message exactly as it came."""

    __slots__ = ("_answer", "_choice", "message")

    def __init__(self, answer: Any, choice: CompletionsChoice) -> None:
        self._answer = answer
        self._choice = choice
        self.message: MessageDict = choice.message

    @classmethod
    def from_body(cls, body: bytes, secrets: Collection[str] = ()) -> CompletionsResult:
        """The result in the body of a 2xx answer; `BadCompletion` naming the cause if there is no usable choice.

        What the error repeats of the answer is without the `secrets`.
        """
        if is_slow_to_decode(body):
            raise BadCompletion(
                f"the trainer's answer holds more than {MAX_SLOW_NUMBERS} numbers with such exponents as 1e300"
            )
        if holds_too_many_containers(body):
            raise BadCompletion("the trainer's answer holds too many objects and arrays")
        try:
            answer = decode_completion(body)
        except msgspec.ValidationError as exc:
            said = excerpt(body, secrets)
            raise BadCompletion(f"the trainer's answer is no chat completion ({exc}): {said}") from None
        except (msgspec.DecodeError, RecursionError):
            answer = decode_leniently(body, secrets)
        if nests_deeper(body):
            raise BadCompletion("the trainer's answer nests too deep")
        usable = [c for c in answer.choices or () if isinstance(c.message, dict)]
        if not usable:
            raise BadCompletion(f"{without(secrets, _why_unusable(answer))}: {excerpt(body, secrets)}")
        return cls(answer, next((c for c in usable if c.index == 0), usable[0]))

    @property
    def finish_reason(self) -> str | None:
        """Why this turn ended, in the trainer's words; None where it did not say."""
        reason = self._choice.finish_reason
        return reason if reason is None or isinstance(reason, str) else str(reason)

    @property
    def content(self) -> Any:
        """The message's `content` as it came: text, a list of parts, or None."""
        return self.message.get("content")

    @property
    def tool_calls(self) -> list[Any]:
        """The calls to carry out now, whatever the finish reason says; empty if there are none."""
        calls = self.message.get("tool_calls")
        return calls if isinstance(calls, list) else []

    @property
    def has_tool_calls(self) -> bool:
        """Whether there is a call to carry out."""
        return bool(self.tool_calls)

    @property
    def usage(self) -> dict[str, Any]:
        """The trainer's `usage` object as it came; empty where it sent none."""
        usage = self._answer.usage
        return usage if isinstance(usage, dict) else {}

    @property
    def token_ids(self) -> list[int] | None:
        """Token ids of the answer: from the top level, else from the choice; None if absent or null."""
        return cast("list[int] | None", _first(self._answer.token_ids, self._choice.token_ids))

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """Token ids of the prompt; None if absent or null."""
        return cast("list[int] | None", _first(self._answer.prompt_token_ids))

    @property
    def logprobs(self) -> Any:
        """Log probabilities as they came: from the top level, else from the choice; None if they hold nothing."""
        found = _first(self._answer.logprobs, self._choice.logprobs)
        if isinstance(found, dict) and not any(v is not None for v in found.values()):
            return None
        return found

    @property
    def model(self) -> Any:
        """The model that the trainer says has answered."""
        return self._answer.model

    def __repr__(self) -> str:
        return f"CompletionsResult(finish_reason={self.finish_reason!r}, tool_calls={len(self.tool_calls)})"


def decode_leniently(body: bytes, secrets: Collection[str] = ()) -> Any:
    """The answer once more, with lone surrogates replaced; `BadCompletion` if that was not what was wrong.

    Models cut an emoji in half now and then; Python's trainers escape the half as it is, and a strict decoder refuses
    the whole answer. U+FFFD stands for the half then.
    """
    import json  # here only: the strict decoder is the one that counts

    from rollout.wire import plain

    try:
        value = json.loads(body, parse_constant=_no_constant)
        return decode_completion(encode_strict(plain(value)))
    except (ValueError, RecursionError):
        raise BadCompletion(f"the trainer's answer is not JSON: {excerpt(body, secrets) or 'empty'}") from None


def _no_constant(name: str) -> JSON:
    raise ValueError(name)


def _first(*found: Raw) -> Any:
    """The first of the values that is there and not null."""
    for raw in found:
        try:
            value = msgspec.json.decode(raw)
        except msgspec.DecodeError as exc:
            raise BadCompletion(f"a part of the trainer's answer cannot be read: {exc}") from None
        if value is not None:
            return value
    return None


def _why_unusable(answer: Any) -> str:
    if answer.choices is None:
        return "the trainer's answer has no choices"
    if not answer.choices:
        return "the trainer's answer has an empty list of choices"
    reason = answer.choices[0].finish_reason
    return f"the trainer's choice has no message (finish_reason {reason!r})"


def usage_tokens(usage: Mapping[str, Any], name: str) -> int:
    """A count out of `usage`; what is missing, null, negative or no number counts as 0."""
    value = usage.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53:
        return 0
    return int(value)


def without(secrets: Collection[str], text: str) -> str:
    """The text with *** in the place of each secret that is long enough to be one."""
    for secret in secrets:
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return text


def excerpt(body: bytes, secrets: Collection[str] = ()) -> str:
    """What the trainer wants to say, bounded: the message of an error body in a usual place, else the text.

    A trainer may repeat the key that it was sent: the `secrets` do not get past here.
    """
    text: JSON = None
    if len(body) <= _LONGEST_ERROR_BODY and not is_slow_to_decode(body):
        try:
            text = _error_text(msgspec.json.decode(body))
        except (ValueError, RecursionError):
            text = None
    if not isinstance(text, str) or not text:
        most = 4 * EXCERPT_CHARACTERS
        text = without(secrets, body[: most + sum(map(len, secrets))].decode("utf-8", "replace"))[:most]
    line = without(secrets, " ".join(text.split()))
    return line if len(line) <= EXCERPT_CHARACTERS else line[:EXCERPT_CHARACTERS] + "..."


def _error_text(value: JSON) -> str | None:
    if not isinstance(value, dict):
        return None
    error = value.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return f"{error['message']} ({error['code']})" if isinstance(error.get("code"), str) else str(error["message"])
    for found in (error, value.get("message"), value.get("detail")):
        if isinstance(found, str):
            return found
    return None


def error_of(
    status: int, body: bytes, retry_after: str | None, where: str, secrets: Collection[str] = ()
) -> TrainerUnavailable | TrainerRefused:
    """The typed error of an answer that is not 2xx; `where` names the call ("chat completions", "completed")."""
    said = excerpt(body, secrets)
    text = f"the trainer answered {status} to {where}" + (f": {said}" if said else "")
    if status in RETRIED_STATUSES or status >= 500:
        return TrainerUnavailable(text, status, parse_retry_after(retry_after))
    return TrainerRefused(text, status)


def encode_call(messages_text: bytes, rollout_id: str, params: Mapping[str, Any]) -> bytes:
    """The body of one CompletionsRequest: the parameters as given over the defaults, never a stream."""
    body = {"model": "default", **COMPLETION_DEFAULTS, **params}
    for name in _NOT_SENT & body.keys():
        del body[name]
    if isinstance(body.get("stop"), str):
        body["stop"] = [body["stop"]]
    head = b'{"messages":' + messages_text + b',"rollout_id":' + encode_strict(rollout_id) + b","
    text, lost = encode(body, "parameters")
    if lost:
        logger.warning("rollout %r: parameters that JSON cannot hold: %s", rollout_id, "; ".join(lost))
    return head + text[1:]


_decode_items = msgspec.json.Decoder(list[Raw]).decode


def _is_same(one: Raw, other: Raw) -> bool:
    """Whether two JSON texts are the same value; to Python, but not to JSON, true is 1."""
    text, other_text = bytes(one), bytes(other)
    return text == other_text or canonical_digest(text) == canonical_digest(other_text)


class History:
    """What has been sent and answered in one rollout, as JSON text: the append-only check and the partial result.

    The text is the proof: whatever an agent does to its message objects later, what was sent stays what it was.
    """

    __slots__ = ("answer", "rewrites", "sent")

    def __init__(self) -> None:
        self.sent: bytes | None = None
        self.answer: MessageDict | None = None
        self.rewrites = 0

    def text_of(self, messages: Sequence[MessageDict]) -> tuple[bytes, list[str]]:
        """JSON of the messages, made sendable where need be, and what that cost; `TypeError` where they are no list."""
        text, lost = encode(messages, "messages")
        if not text.startswith(b"["):
            raise TypeError(f"messages must be a list of objects, not {type(messages).__name__}")
        if Raw in map(type, messages) and not is_json(text):
            raise TypeError("messages holds a msgspec.Raw that is not JSON")
        return text, lost

    def continues(self, text: bytes) -> bool:
        """Whether the messages in `text` start with those sent before, as JSON values."""
        before = self.sent
        if before is None:
            return True
        if text.startswith(before[:-1]) and text[len(before) - 1 : len(before)] in (b",", b"]"):
            return True
        if before == b"[]":
            return True
        old, new = _decode_items(before), _decode_items(text)
        return len(old) <= len(new) and all(map(_is_same, old, new))

    def record(self, text: bytes) -> None:
        """These messages have been sent; no answer yet."""
        self.sent, self.answer = text, None

    def reached(self) -> Raw:
        """The last messages sent and their answer, as a JSON array."""
        if self.sent is None or not self.sent.startswith(b"["):
            return Raw(b"[]")
        if self.answer is None:
            return Raw(self.sent)
        answer = encode(self.answer)[0]
        return Raw(b"[" + answer + b"]" if self.sent == b"[]" else self.sent[:-1] + b"," + answer + b"]")
