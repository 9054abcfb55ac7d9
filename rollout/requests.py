"""What comes in, checked: the request of `/init` and of `/cancel`, and the addresses they may name."""

from __future__ import annotations

import functools
from typing import Annotated, Any, NamedTuple, cast

import msgspec
from msgspec import UNSET, Meta, Raw, Struct
from yarl import URL

from rollout.errors import InvalidJSON, InvalidRequest
from rollout.schemas import MAX_ID_LENGTH, CancelRequest, RolloutRequest
from rollout.wire import (
    MAX_CONTAINERS,
    MAX_SLOW_NUMBERS,
    check_body,
    holds_too_many_containers,
    is_slow_to_decode,
)

MAX_MESSAGES = 100_000
"""How many messages an init may hold."""

MAX_CANCELLED_IDS = 100_000
"""How many ids one cancel may name."""

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


# ---------------------------------------------------------------- init


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
        chat, completed = self.chat_completions_url, self.completion_callback_url
        if chat is not None and completed is not None:
            return Endpoints(_full_url(chat, "chat_completions_url"), _full_url(completed, "completion_callback_url"))
        made = _base_endpoints(cast("str", self.server_url))
        if chat is not None:
            return Endpoints(_full_url(chat, "chat_completions_url"), made.completed)
        if completed is not None:
            return Endpoints(made.chat, _full_url(completed, "completion_callback_url"))
        return made

    def tool_endpoint(self) -> URL | None:
        """Where the agent's tools are served, if the request says so."""
        return None if self.tool_server_url is None else _full_url(self.tool_server_url, "tool_server_url")

    def secrets(self) -> tuple[str, ...]:
        """The keys of the trainer, which no text of ours may repeat."""
        return tuple(key for key in (self.api_key, self.llm_api_key) if key is not None)

    def view(self) -> RolloutRequest:
        """A new RolloutRequest that shares nothing mutable with this one or with any other view."""
        return self._view(_decode_messages(self.messages), _decode_object(self.completion_params))

    def unread(self) -> RolloutRequest:
        """As `view()`, decoded when it is first looked into."""
        nothing: Any = None
        request = UnreadRequest(source=self, **self._fields(nothing, nothing, nothing))
        for field in _DECODED:
            delattr(request, field)
        return request

    def _view(self, messages: list[dict[str, Any]], completion_params: dict[str, Any]) -> RolloutRequest:
        return RolloutRequest(**self._fields(messages, completion_params, _decode_object(self.metadata)))

    def _fields(
        self, messages: list[dict[str, Any]], completion_params: dict[str, Any], metadata: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "rollout_id": self.rollout_id,
            "server_url": self.server_url or "",
            "messages": messages,
            "completion_params": completion_params,
            "tool_server_url": self.tool_server_url,
            "max_turns": 10 if self.max_turns is None else self.max_turns,
            "max_tokens_total": 8192 if self.max_tokens_total is None else self.max_tokens_total,
            "metadata": metadata,
            "api_key": self.api_key,
            "idempotency_key": self.idempotency_key,
            "chat_completions_url": self.chat_completions_url,
            "completion_callback_url": self.completion_callback_url,
            "llm_api_key": self.llm_api_key,
            "timeout_seconds": self.timeout_seconds,
        }

    def __repr__(self) -> str:
        return f"InitRequest(rollout_id={self.rollout_id!r})"


_decode_init = msgspec.json.Decoder(InitRequest).decode
_decode_messages = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_skip = msgspec.json.Decoder(Raw).decode
_NULL = ord("n")  # the first letter of null, and of nothing else in JSON


class UnreadRequest(RolloutRequest, kw_only=True):
    """The view that `get_tools()` gets: its own, and decoded only if it is looked into.

    Most agents offer the same tools for every request. The trick: the fields are deleted after construction, so the
    first access misses and lands in `__getattr__`, which fills them all. What reads the fields in C (encoding a
    request that nobody has looked into) finds them missing.
    """

    source: InitRequest

    def __getattr__(self, name: str) -> Any:
        if name not in _DECODED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        view = self.source.view()
        for field in _DECODED:
            setattr(self, field, getattr(view, field))
        return getattr(self, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RolloutRequest) and self.source.view() == other

    def __copy__(self) -> RolloutRequest:
        return self.source.view()

    def __reduce__(self) -> Any:
        return self.source.view().__reduce__()


_DECODED = ("messages", "completion_params", "metadata")


class Received(NamedTuple):
    """A request in both its forms: as the service keeps it, and as the agent sees it."""

    request: InitRequest
    view: RolloutRequest


def parse_init(body: bytes, metadata_limit_bytes: int) -> InitRequest:
    """The request in the body, as the service keeps it; see `receive()`."""
    return receive(body, metadata_limit_bytes).request


def receive(body: bytes, metadata_limit_bytes: int) -> Received:
    """The request in the body; `InvalidJSON` (400) or `InvalidRequest` (422) naming the field, never a value.

    What is not JSON is a 400 even where the part before it does not fit the schema. Everything is decoded once, here:
    that is also what finds numbers out of range, and the agent's view comes with it.
    """
    try:
        request = _decode_init(body)
    except msgspec.ValidationError as exc:
        _must_be_json(body)
        raise InvalidRequest(str(exc)) from None
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidJSON("the body nests too deep" if isinstance(exc, RecursionError) else str(exc)) from None
    check_body(body)
    request = _checked(request, metadata_limit_bytes)
    _check_cost(body)
    view = _view_of(request)
    if len(view.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"{len(view.messages)} messages, the limit is {MAX_MESSAGES} - at `$.messages`")
    return Received(request, view)


def _check_cost(body: bytes) -> None:
    """Refuse what would hold up every other request while it is decoded. Up to here, nothing has been."""
    if is_slow_to_decode(body):
        raise InvalidRequest(f"the body holds more than {MAX_SLOW_NUMBERS} numbers with such exponents as 1e300")
    if holds_too_many_containers(body):
        raise InvalidRequest(f"the body holds more than {MAX_CONTAINERS} objects and arrays")


def _must_be_json(body: bytes) -> None:
    check_body(body)
    try:
        _skip(body)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidJSON(str(exc)) from None


def _checked(request: InitRequest, metadata_limit_bytes: int) -> InitRequest:
    if not request.rollout_id.strip():
        raise InvalidRequest("must not be blank - at `$.rollout_id`")
    changed = _checked_texts(request)
    if memoryview(request.metadata)[0] == _NULL:
        changed["metadata"] = Raw(b"{}")
    size = len(memoryview(request.metadata))
    if size > metadata_limit_bytes:
        raise InvalidRequest(f"{size} bytes of JSON, more than the limit of {metadata_limit_bytes} - at `$.metadata`")
    return msgspec.structs.replace(request, **changed) if changed else request


def _view_of(request: InitRequest) -> RolloutRequest:
    field = "messages"
    try:
        messages = _decode_messages(request.messages)
        field = "completion_params"
        params = _decode_object(request.completion_params)
        field = "metadata"
        return request._view(messages, params)
    except msgspec.ValidationError as exc:
        text = str(exc)
        if "`$" in text:
            raise InvalidRequest(text.replace("`$", f"`$.{field}", 1)) from None
        raise InvalidRequest(f"{text} - at `$.{field}`") from None


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


# ---------------------------------------------------------------- cancel

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
    if isinstance(request.ids, list) and len(request.ids) > MAX_CANCELLED_IDS:
        raise InvalidRequest(f"{len(request.ids)} ids, the limit is {MAX_CANCELLED_IDS} - at `$.ids`")
    return request
