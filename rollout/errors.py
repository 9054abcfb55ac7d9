"""Every error that this package raises on purpose, as one tree.

Three branches: what an HTTP caller is told (`RequestError`), what an agent meets while it runs
(`LLMError`, `LimitReached`, `ToolError`), and what a person who starts the service is told
(`SettingsError`, `AgentLoadError`). Arguments go to `super().__init__` by position, so each survives pickling.
"""

from __future__ import annotations


class RolloutError(Exception):
    """The root. `retryable` says whether the very same thing, asked again later, may succeed."""

    retryable = False

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


# ---------------------------------------------------------------- what an HTTP caller is told


class RequestError(RolloutError):
    """A request that is answered with `status` and `{"code", "detail"}`; `detail` is safe to show to anybody."""

    status = 500
    code = "internal_error"

    def __init__(self, detail: str, *args: object) -> None:
        super().__init__(detail, *args)
        self.detail = detail

    @property
    def headers(self) -> dict[str, str]:
        """Headers that the answer carries beside the body."""
        return {}


class InvalidJSON(RequestError):
    """The body is not JSON, or nests too deep to be taken for it."""

    status, code = 400, "invalid_json"


class Unauthorized(RequestError):
    """No key or a wrong one."""

    status, code = 401, "unauthorized"

    @property
    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class NotFound(RequestError):
    """No such path, or no such rollout (any more)."""

    status, code = 404, "not_found"


class MethodNotAllowed(RequestError):
    """The path exists, the method does not; `allow` goes out as the Allow header."""

    status, code = 405, "method_not_allowed"

    def __init__(self, detail: str, allow: str = "") -> None:
        super().__init__(detail, allow)
        self.allow = allow

    @property
    def headers(self) -> dict[str, str]:
        return {"Allow": self.allow} if self.allow else {}


class RequestTimeout(RequestError):
    """The client fell silent in the middle of its request."""

    status, code = 408, "request_timeout"


class Conflict(RequestError):
    """The id or the key is in use for something else; `code` says which of the three."""

    status = 409

    def __init__(self, detail: str, code: str) -> None:
        super().__init__(detail, code)
        self.code = code


class ResultDropped(RequestError):
    """The rollout is known, its result is no longer held."""

    status, code = 410, "result_dropped"


class BodyTooLarge(RequestError):
    """The body is above the limit, counted after decompression."""

    status, code = 413, "body_too_large"


class UnsupportedMediaType(RequestError):
    """A Content-Type that is not JSON, or a Content-Encoding that is not known."""

    status, code = 415, "unsupported_media_type"


class InvalidRequest(RequestError):
    """Valid JSON that does not fit the schema or a limit."""

    status, code = 422, "invalid_request"


class HostNotAllowed(InvalidRequest):
    """A URL names a host that the allow-list does not."""

    code = "host_not_allowed"


class RequestRejected(InvalidRequest):
    """Raised by an agent's `get_tools()` to say that this request is wrong; the text reaches the trainer as a 422."""

    code = "request_rejected"


class GetToolsFailed(RequestError):
    """`get_tools()` raised, took too long, or returned something that is not a list of tools."""

    code = "get_tools_failed"


class ServiceUnavailable(RequestError):
    """Nothing was accepted; the same request may succeed after `retry_after_seconds`."""

    status = 503
    retryable = True

    def __init__(self, detail: str, code: str, retry_after_seconds: float = 1) -> None:
        super().__init__(detail, code, retry_after_seconds)
        self.code, self.retry_after_seconds = code, retry_after_seconds

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(max(1, round(self.retry_after_seconds)))}


class StoreError(RolloutError):
    """The store could not remember something; nothing was acknowledged."""

    retryable = True


# ---------------------------------------------------------------- what an agent meets while it runs


class TrainerError(RolloutError):
    """The trainer could not be asked, or its answer cannot be used."""


class LLMError(TrainerError):
    """An LLM call failed for good, retries included. If the agent lets it pass, the rollout ends as "llm_error"."""


class TrainerUnreachable(LLMError):
    """No connection, a broken one, or no answer in time."""

    retryable = True
    stale_connection = False
    """Closed by the peer before a byte of the answer came, as idle connections are: worth one more try at once."""


class TrainerTimeout(TrainerUnreachable):
    """The call took longer than `CLIENT_TIMEOUT_SECONDS`."""


class TrainerUnavailable(LLMError):
    """The trainer answered 408, 425, 429 or 5xx; the same request may succeed later."""

    retryable = True

    def __init__(self, message: str, status: int, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, status, retry_after_seconds)
        self.status, self.retry_after_seconds = status, retry_after_seconds


class TrainerRefused(LLMError):
    """The trainer answered another 4xx, or a redirect: asking again the same way would end the same way."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status)
        self.status = status


class BadCompletion(LLMError):
    """A 2xx answer without a usable choice: an error body, a stream, plain text, nothing at all."""


class HistoryRewritten(LLMError):
    """`STRICT_HISTORY` is on and the messages are not a continuation of those sent before."""


class LimitReached(RolloutError):
    """A budget of the rollout is used up. If the agent lets it pass, the rollout ends COMPLETED with this reason."""

    finish_reason = "stop"


class TurnLimitReached(LimitReached):
    """`max_turns` LLM calls have been made."""

    finish_reason = "max_turns"


class TokenLimitReached(LimitReached):
    """The conversation holds `max_tokens_total` tokens or more."""

    finish_reason = "max_tokens"


class ToolError(RolloutError):
    """A tool call that could not be carried out."""


class ToolArgumentError(ToolError):
    """The arguments of a tool call are not a JSON object, or do not fit the tool."""

    def __init__(self, message: str, tool_call_id: str | None = None, tool_name: str | None = None) -> None:
        super().__init__(message, tool_call_id, tool_name)
        self.tool_call_id, self.tool_name = tool_call_id, tool_name


class ToolExecutionError(ToolError):
    """A tool raised; also for a tool's own use: its text is what the model reads."""

    def __init__(self, message: str, tool_call_id: str | None = None, tool_name: str | None = None) -> None:
        super().__init__(message, tool_call_id, tool_name)
        self.tool_call_id, self.tool_name = tool_call_id, tool_name


# ---------------------------------------------------------------- what a person at the door is told


class SettingsError(RolloutError):
    """One or more settings are wrong; the text has one line for each."""


class AgentLoadError(RolloutError):
    """`module:attribute` does not lead to an agent loop; the text says what to fix."""


class AgentLoopNotFoundError(RolloutError):
    """No agent loop is registered under the name."""

    def __init__(self, name: str, available: list[str] | None = None) -> None:
        known = ", ".join(sorted(available)) if available else "none"
        super().__init__(f"agent loop {name!r} is not registered; registered: {known}", name, available)
        self.name, self.available = name, available

    def __reduce__(self) -> tuple[type[AgentLoopNotFoundError], tuple[str, list[str] | None]]:
        return (type(self), (self.name, self.available))


class MissingExtra(RolloutError):
    """An optional library is needed; the text names the `pip install`."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs an optional library: pip install 'rollout[{extra}]' "
            f"(from a checkout: pip install '.[{extra}]')",
            feature,
            extra,
        )
        self.feature, self.extra = feature, extra

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return (type(self), (self.feature, self.extra))


# ---------------------------------------------------------------- the names that the reference has for them

OsmosisRolloutError = RolloutError
OsmosisTransportError = TrainerUnreachable
OsmosisServerError = TrainerUnavailable
OsmosisValidationError = TrainerRefused
OsmosisTimeoutError = TrainerTimeout
