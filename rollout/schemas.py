"""The messages of the protocol: the single source of truth for what is on the wire, and for `/openapi.json`.

Unknown fields are ignored on input, absent optional fields are left out on output, `null` for an optional field is as
if absent. Decoders are built once, here.
"""

from __future__ import annotations

import enum
import functools
import threading
from typing import Annotated, Any, NamedTuple, cast

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from yarl import URL

from rollout.errors import InvalidJSON, InvalidRequest
from rollout.wire import JSON, check_body, check_numbers, encode_strict

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


# ---------------------------------------------------------------- addresses


class Endpoints(NamedTuple):
    """Where one rollout's callbacks go."""

    chat: URL
    completed: URL


def parse_url(text: str, field: str, *, base: bool) -> URL:
    """An http(s) URL that a callback may go to, or `InvalidRequest` naming the field, never the value.

    `base`: something will be appended, so a query is refused too. Userinfo would end up in logs, a fragment never
    reaches a server: both are refused.
    """
    problem: str | None = None
    if len(text) > 8192 or any(c <= " " or c == "\x7f" or c == "\\" for c in text):
        problem = "is longer than 8192 characters or holds blanks, control characters or a backslash"
    else:
        try:
            url = URL(text)
            port = url.port
            host = url.host
        except ValueError:
            raise InvalidRequest(f"not a valid URL - at `$.{field}`") from None
        if url.scheme not in ("http", "https"):
            problem = "must start with http:// or https://"
        elif not host or len(host) > 253:
            problem = "names no host, or one of more than 253 characters"
        elif not port:
            problem = "names port 0"
        elif "@" in text.split("://", 1)[-1].split("/", 1)[0]:
            problem = "must not carry a user or password"
        elif "#" in text:
            problem = "must not have a fragment"
        elif base and "?" in text:
            problem = "must not have a query"
        else:
            return url
    raise InvalidRequest(f"the URL {problem} - at `$.{field}`")


@functools.lru_cache(maxsize=4096)
def _base_endpoints(server_url: str) -> Endpoints:
    url = parse_url(server_url, "server_url", base=True)
    base = str(url).rstrip("/")
    return Endpoints(URL(base + "/v1/chat/completions"), URL(base + "/v1/rollout/completed"))


@functools.lru_cache(maxsize=4096)
def _full_url(text: str, field: str) -> URL:
    return parse_url(text, field, base=False)


@functools.lru_cache(maxsize=4096)
def callback_url(text: str) -> URL:
    """A URL that was checked before, as the client takes it."""
    return URL(text)


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


class ReceivedRequest(RolloutRequest, kw_only=True):
    """A request off the wire. `metadata` stays JSON text until somebody reads it, and is decoded once, then.

    The trick: the field is deleted after construction, so the first access misses and lands in `__getattr__`.
    Decoding 100 KB of metadata that no agent looks at would cost more than the whole rest of `/init`.
    """

    metadata_text: bytes = b"{}"

    def __getattr__(self, name: str) -> Any:
        if name != "metadata":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.metadata = value = cast("dict[str, Any]", msgspec.json.decode(self.metadata_text))
        self.metadata_text = b""
        return value

    # What reads the fields in C finds the deleted one missing: it is decoded first.

    def __eq__(self, other: object) -> bool:
        _ = self.metadata, getattr(other, "metadata", None)
        return super().__eq__(other)

    def __copy__(self) -> ReceivedRequest:
        _ = self.metadata
        return cast("ReceivedRequest", super().__copy__())  # type: ignore[misc]

    def __reduce__(self) -> Any:
        _ = self.metadata
        return super().__reduce__()


_Name = Annotated[str, Meta(min_length=1, max_length=MAX_ID_LENGTH)]
_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(gt=0)]


class InitRequest(Struct, kw_only=True, frozen=True, gc=False):
    """A checked RolloutRequest as the service keeps it: the parts that are passed on stay JSON text.

    Immutable, and apart from every object that user code gets: `view()` makes those.
    """

    rollout_id: _Name
    messages: Raw
    completion_params: Raw
    server_url: str | None = None
    tool_server_url: str | None = None
    max_turns: _Count | None = None
    max_tokens_total: _Count | None = None
    metadata: Raw = Raw(b"{}")
    api_key: str | None = None
    idempotency_key: str | None = None
    chat_completions_url: str | None = None
    completion_callback_url: str | None = None
    llm_api_key: str | None = None
    timeout_seconds: _Seconds | None = None

    @property
    def key(self) -> str:
        """What makes two requests the same one: the idempotency key, or else the id."""
        return self.idempotency_key or self.rollout_id

    def endpoints(self) -> Endpoints:
        """Where the callbacks go. Never raises after `parse_init()`; cached by URL."""
        if self.chat_completions_url is None or self.completion_callback_url is None:
            made = _base_endpoints(cast("str", self.server_url))
            if self.chat_completions_url is None and self.completion_callback_url is None:
                return made
        chat = (
            made.chat
            if self.chat_completions_url is None
            else _full_url(self.chat_completions_url, "chat_completions_url")
        )
        if self.completion_callback_url is None:
            return Endpoints(chat, made.completed)
        return Endpoints(chat, _full_url(self.completion_callback_url, "completion_callback_url"))

    def tool_endpoint(self) -> URL | None:
        """Where the agent's tools are served, if the request says so."""
        return None if self.tool_server_url is None else _full_url(self.tool_server_url, "tool_server_url")

    def view(self) -> RolloutRequest:
        """A new RolloutRequest that shares nothing mutable with this one or with any other view."""
        request = ReceivedRequest(
            rollout_id=self.rollout_id,
            server_url=self.server_url or "",
            messages=_decode_messages(self.messages),
            completion_params=_decode_object(self.completion_params),
            tool_server_url=self.tool_server_url,
            max_turns=10 if self.max_turns is None else self.max_turns,
            max_tokens_total=8192 if self.max_tokens_total is None else self.max_tokens_total,
            metadata_text=bytes(self.metadata),
            api_key=self.api_key,
            idempotency_key=self.idempotency_key,
            chat_completions_url=self.chat_completions_url,
            completion_callback_url=self.completion_callback_url,
            llm_api_key=self.llm_api_key,
            timeout_seconds=self.timeout_seconds,
        )
        del request.metadata
        return request

    def __repr__(self) -> str:
        return f"InitRequest(rollout_id={self.rollout_id!r})"


class _Object(Struct):
    """Any JSON object: every field is skipped, so checking a list of them builds nothing."""


_decode_init = msgspec.json.Decoder(InitRequest).decode
_decode_messages = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_skip = msgspec.json.Decoder(Raw).decode

_KINDS = {"{": "object", "[": "array", '"': "str", "t": "bool", "f": "bool", "n": "null"}


def kind_of(text: Raw) -> str:
    """What kind of JSON value the text holds, by its first character."""
    return _KINDS.get(chr(memoryview(text)[0]), "number")


def parse_init(body: bytes, metadata_limit_bytes: int) -> InitRequest:
    """The request in the body; `InvalidJSON` (400) or `InvalidRequest` (422) naming the field, never a value.

    What is not JSON is a 400 even where the part before it does not fit the schema.
    """
    try:
        request = _decode_init(body)
    except msgspec.ValidationError as exc:
        _must_be_json(body)
        raise InvalidRequest(str(exc)) from None
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidJSON("the body nests too deep" if isinstance(exc, RecursionError) else str(exc)) from None
    check_body(body)
    return _check_init(request, metadata_limit_bytes)


def _must_be_json(body: bytes) -> None:
    check_body(body)
    try:
        _skip(body)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidJSON(str(exc)) from None


def _check_init(request: InitRequest, metadata_limit_bytes: int) -> InitRequest:
    if not request.rollout_id.strip():
        raise InvalidRequest("must not be blank - at `$.rollout_id`")
    metadata = _checked_object(request.metadata, "metadata", optional=True)
    size = len(memoryview(metadata))
    if size > metadata_limit_bytes:
        raise InvalidRequest(f"{size} bytes of JSON, more than the limit of {metadata_limit_bytes} - at `$.metadata`")
    check_numbers(bytes(metadata))
    try:
        _decode_messages(request.messages)
    except msgspec.ValidationError as exc:
        raise (
            InvalidRequest(str(exc).replace("`$", "`$.messages"))
            if "`$" in str(exc)
            else InvalidRequest(f"{exc} - at `$.messages`")
        ) from None
    try:
        _decode_object(_checked_object(request.completion_params, "completion_params"))
    except msgspec.ValidationError as exc:
        raise InvalidRequest(str(exc).replace("`$", "`$.completion_params")) from None
    changed = _checked_texts(request)
    if metadata is not request.metadata:
        changed["metadata"] = metadata
    return msgspec.structs.replace(request, **changed) if changed else request


def _checked_object(raw: Raw, field: str, *, optional: bool = False) -> Raw:
    kind = kind_of(raw)
    if kind == "null" and optional:
        return Raw(b"{}")
    if kind != "object":
        raise InvalidRequest(f"Expected `object`, got `{kind}` - at `$.{field}`")
    return raw


def _checked_texts(request: InitRequest) -> dict[str, Any]:
    """Check URLs, keys and the idempotency key; what has to be put in their place."""
    changed: dict[str, Any] = {}
    key = request.idempotency_key
    if key is not None:
        if not key.strip():
            changed["idempotency_key"] = None
        elif len(key) > MAX_ID_LENGTH:
            raise InvalidRequest(f"longer than {MAX_ID_LENGTH} characters - at `$.idempotency_key`")
    for field in ("api_key", "llm_api_key"):
        secret = getattr(request, field)
        if secret is not None:
            bare = secret.strip()
            if not bare.isascii() or not bare.isprintable():
                raise InvalidRequest(f"holds characters that no HTTP header can carry - at `$.{field}`")
            if bare != secret or not bare:
                changed[field] = bare or None
    if request.server_url is None and (request.chat_completions_url is None or request.completion_callback_url is None):
        raise InvalidRequest(
            "Object missing required field `server_url`, or else `chat_completions_url` and `completion_callback_url`"
        )
    if request.server_url is not None:
        _base_endpoints(request.server_url)
    request.endpoints()
    if request.tool_server_url is not None:
        if not request.tool_server_url.strip():
            changed["tool_server_url"] = None
        else:
            _full_url(request.tool_server_url, "tool_server_url")
    if request.timeout_seconds is not None and request.timeout_seconds == float("inf"):
        raise InvalidRequest("must be finite - at `$.timeout_seconds`")
    return changed


class CancelRequest(Struct, kw_only=True, frozen=True):
    """Body of `/cancel`: exactly one of the three."""

    ids: list[str] | UnsetType = UNSET
    prefix: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET
    all: bool | UnsetType = UNSET


_decode_cancel = msgspec.json.Decoder(CancelRequest).decode


def parse_cancel(body: bytes) -> CancelRequest:
    """The cancel request in the body; `InvalidJSON` or `InvalidRequest`."""
    try:
        request = _decode_cancel(body)
    except msgspec.ValidationError as exc:
        _must_be_json(body)
        raise InvalidRequest(str(exc)) from None
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidJSON(str(exc)) from None
    check_body(body)
    if sum(getattr(request, f) is not UNSET for f in ("ids", "prefix", "all")) != 1 or request.all is False:
        raise InvalidRequest('exactly one of {"ids": [...]}, {"prefix": "..."} and {"all": true} is needed')
    return request


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
