"""The messages of the protocol: the single source of truth for what is on the wire, and for `/openapi.json`.

Unknown fields are ignored on input, absent optional fields are left out on output, `null` for an optional field is as
if absent. Decoders are built once, here.
"""

from __future__ import annotations

import enum
import threading
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from rollout.wire import JSON, encode_strict

DEFAULT_MAX_METADATA_SIZE_BYTES = 1_048_576
MAX_ID_LENGTH = 256

MessageDict = dict[str, Any]
SamplingParamsDict = dict[str, Any]


# ---------------------------------------------------------------- tools


class OpenAIFunctionPropertySchema(Struct, kw_only=True, omit_defaults=True):
    """A JSON Schema of one property. Only what is set goes out; what is missing here can be given as a dict."""

    type: str | list[str] | UnsetType = UNSET
    description: str | None = None
    enum: list[Any] | None = None
    items: Any = UNSET
    properties: dict[str, Any] | UnsetType = UNSET
    required: list[str] | UnsetType = UNSET
    additional_properties: Any = msgspec.field(default=UNSET, name="additionalProperties")
    any_of: list[Any] | UnsetType = msgspec.field(default=UNSET, name="anyOf")
    one_of: list[Any] | UnsetType = msgspec.field(default=UNSET, name="oneOf")
    all_of: list[Any] | UnsetType = msgspec.field(default=UNSET, name="allOf")
    ref: str | UnsetType = msgspec.field(default=UNSET, name="$ref")
    const: Any = UNSET
    default: Any = UNSET
    title: str | UnsetType = UNSET
    examples: list[Any] | UnsetType = UNSET
    format: str | UnsetType = UNSET
    pattern: str | UnsetType = UNSET
    minimum: float | int | UnsetType = UNSET
    maximum: float | int | UnsetType = UNSET
    min_length: int | UnsetType = msgspec.field(default=UNSET, name="minLength")
    max_length: int | UnsetType = msgspec.field(default=UNSET, name="maxLength")
    min_items: int | UnsetType = msgspec.field(default=UNSET, name="minItems")
    max_items: int | UnsetType = msgspec.field(default=UNSET, name="maxItems")
    unique_items: bool | UnsetType = msgspec.field(default=UNSET, name="uniqueItems")
    nullable: bool | UnsetType = UNSET


class OpenAIFunctionParametersSchema(Struct, kw_only=True, omit_defaults=True):
    """The parameters of a function as a JSON Schema object."""

    type: str
    properties: dict[str, Any]
    """Each an `OpenAIFunctionPropertySchema` or any JSON Schema as a dict."""
    required: list[str] = msgspec.field(default_factory=list)
    additional_properties: Any = msgspec.field(default=UNSET, name="additionalProperties")
    defs: dict[str, Any] | UnsetType = msgspec.field(default=UNSET, name="$defs")


class OpenAIFunctionSchema(Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Any = msgspec.field(default_factory=lambda: {"type": "object", "properties": {}})
    """An `OpenAIFunctionParametersSchema` or any JSON Schema as a dict."""
    strict: bool = False


class OpenAIFunctionToolSchema(Struct, kw_only=True):
    """A tool definition as chat completions take it."""

    type: str = "function"
    function: OpenAIFunctionSchema


class OpenAIFunctionCallSchema(Struct, kw_only=True):
    """A call as the model wrote it: `arguments` is JSON text, or what the server made of it."""

    name: str
    arguments: Any = "{}"


class OpenAIFunctionParsedSchema(Struct, kw_only=True):
    """A call whose arguments have been parsed."""

    name: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class OpenAIFunctionToolCall(Struct, kw_only=True, omit_defaults=True):
    """One entry of an assistant message's `tool_calls`."""

    id: str | None = None
    type: str = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(Struct, kw_only=True, omit_defaults=True):
    """What a tool gives back beside its text, for agents that keep rewards or metrics by tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


# ---------------------------------------------------------------- the metadata limit of the process

_metadata_limit_lock = threading.Lock()
_metadata_limit_bytes = DEFAULT_MAX_METADATA_SIZE_BYTES


def get_max_metadata_size_bytes() -> int:
    """The process-wide limit of metadata, in bytes of JSON text; settings that name one override it. Thread-safe."""
    with _metadata_limit_lock:
        return _metadata_limit_bytes


def set_max_metadata_size_bytes(size_bytes: int) -> None:
    """Change the process-wide limit of metadata. `ValueError` unless positive. Thread-safe."""
    global _metadata_limit_bytes
    if type(size_bytes) is not int or size_bytes <= 0:
        raise ValueError(f"the metadata limit must be a positive number of bytes, got {size_bytes!r}")
    with _metadata_limit_lock:
        _metadata_limit_bytes = size_bytes


# ---------------------------------------------------------------- requests


class RolloutRequest(Struct, kw_only=True):
    """What a trainer POSTs to `/init`, as an agent sees it."""

    rollout_id: str
    server_url: str
    messages: list[MessageDict]
    completion_params: SamplingParamsDict
    tool_server_url: str | None = None
    max_turns: int = 10
    max_tokens_total: int = 8192
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    api_key: str | None = None
    idempotency_key: str | None = None
    chat_completions_url: str | None = None
    completion_callback_url: str | None = None
    llm_api_key: str | None = None
    timeout_seconds: float | None = None

    def __repr__(self) -> str:
        """Names the rollout, never its keys or content."""
        return f"RolloutRequest(rollout_id={self.rollout_id!r}, {len(self.messages)} messages)"


class CancelRequest(Struct, kw_only=True, frozen=True):
    """Body of `/cancel`: exactly one of the three."""

    ids: list[str] | UnsetType = UNSET
    prefix: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET
    all: bool | UnsetType = UNSET


# ---------------------------------------------------------------- answers


class InitResponse(Struct, kw_only=True):
    """Answer 202 of `/init`."""

    rollout_id: str
    tools: list[Any]
    """Each an OpenAIFunctionToolSchema, or the very dict that the agent gave."""


class RolloutStatus(enum.StrEnum):
    """Where a rollout stands; the last two are final."""

    STARTED = "STARTED"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"


class Phase(enum.StrEnum):
    """What is being done about a rollout; the last two are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DELIVERING = "delivering"
    DELIVERED = "delivered"
    UNDELIVERED = "undelivered"


class ErrorCategory(enum.StrEnum):
    """Who or what ended a rollout as ERROR."""

    AGENT_ERROR = "agent_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    LLM_ERROR = "llm_error"
    INTERRUPTED = "interrupted"
    VALIDATION_ERROR = "validation_error"


class RolloutMetrics(Struct, kw_only=True, gc=False):
    """What one rollout cost. Measured, never invented: tokens count what the trainer's `usage` said."""

    total_latency_ms: float = 0.0
    llm_latency_ms: float = 0.0
    tool_latency_ms: float = 0.0
    num_llm_calls: int = 0
    num_tool_calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    max_context_tokens: int = 0


class RolloutResponse(Struct, kw_only=True, omit_defaults=True):
    """The one terminal result, POSTed to `/v1/rollout/completed`."""

    rollout_id: str
    status: RolloutStatus
    final_messages: list[MessageDict]
    metrics: RolloutMetrics | None
    extra_fields: dict[str, Any]
    finish_reason: str | None = None
    error_message: str | None = None
    reward: float | None = None
    error_category: ErrorCategory | None = None
    retryable: bool | None = None


class RolloutState(Struct, kw_only=True, omit_defaults=True):
    """What is known of one rollout; times are RFC 3339 in UTC."""

    rollout_id: str
    status: RolloutStatus
    phase: Phase
    created_at: str
    started_at: str | None = None
    finished_at: str | None = None
    delivered_at: str | None = None
    finish_reason: str | None = None
    error_message: str | None = None
    error_category: ErrorCategory | None = None
    reward: float | None = None
    metrics: RolloutMetrics | None = None
    turn: int | None = None
    run: int | None = None
    """Which run of the agent this is, where a restart has run the rollout again."""
    delivery_attempts: int | None = None
    last_delivery_error: str | None = None


class CancelResponse(Struct, kw_only=True):
    """Answer of `/cancel`: what became of each rollout that was named or found."""

    dispositions: dict[str, str]


class ErrorResponse(Struct, kw_only=True):
    """Body of every answer that is not good."""

    code: str
    detail: str


# ---------------------------------------------------------------- completions


class CompletionsRequest(Struct, kw_only=True, omit_defaults=True):
    """What is POSTed to the trainer for every turn; further parameters stand beside these."""

    model: str = "default"
    messages: list[MessageDict]
    rollout_id: str
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 512
    stop: list[str] | None = None
    logprobs: bool = True


COMPLETION_DEFAULTS: dict[str, JSON] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "max_tokens": 512,
    "logprobs": True,
}


NULL = Raw(b"null")
"""Stands for what is missing: msgspec reads `Raw | None` as if only null were allowed."""


class CompletionsChoice(Struct, kw_only=True):
    """One choice; everything but the message may be missing."""

    message: Any = None
    index: Any = None
    finish_reason: Any = None
    logprobs: Raw = NULL
    token_ids: Raw = NULL


class CompletionsResponse(Struct, kw_only=True):
    """A chat completion as servers really send it: nothing that is not needed is required.

    `logprobs` and token ids stay JSON text until read: decoding those of one answer can cost as much as a whole turn.
    """

    choices: list[CompletionsChoice] | None = None
    id: Any = None
    object: Any = None
    created: Any = None
    model: Any = None
    usage: Any = None
    token_ids: Raw = NULL
    logprobs: Raw = NULL
    prompt_token_ids: Raw = NULL


CompletionUsage = dict[str, Any]

decode_completion = msgspec.json.Decoder(CompletionsResponse).decode


def error_body(code: str, detail: str) -> bytes:
    """JSON of an error answer; text that UTF-8 cannot carry is replaced."""
    clean = detail.encode("utf-8", "replace").decode()
    return encode_strict({"code": code, "detail": clean})
