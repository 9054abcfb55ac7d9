"""Spans of OpenTelemetry, if the process has a tracer provider; else the caller's trace context, passed on unchanged.

The names of attributes are those of the GenAI semantic conventions and stand in `Attributes` alone. Attributes hold
ids, names and numbers: never message content, never a key. Errors are recorded by the name of their type.

    with tracer.rollout_span(rollout_id, agent_name, context) as span:
        with span.child("chat", "default") as chat:
            await post(url, headers=chat.headers())
            chat.set(Attributes.INPUT_TOKENS, 120)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Literal, Self, TypeAlias

from msgspec import Struct

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OTelSpan
    from opentelemetry.trace import Tracer as OTelTracer
    from opentelemetry.trace import TracerProvider

Operation: TypeAlias = Literal["chat", "execute_tool", "deliver_result"]
Value: TypeAlias = str | int | float | bool | list[str]

_MAX_NAME_LENGTH = 128  # a model may call a tool by any name


class Attributes:
    """Every attribute name in use. The GenAI conventions are still in development: when they move, only this moves."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    AGENT_NAME = "gen_ai.agent.name"
    CONVERSATION_ID = "gen_ai.conversation.id"
    REQUEST_MODEL = "gen_ai.request.model"
    RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    TOOL_NAME = "gen_ai.tool.name"
    TOOL_CALL_ID = "gen_ai.tool.call.id"
    ERROR_TYPE = "error.type"
    HTTP_STATUS = "http.response.status_code"
    RESEND_COUNT = "http.request.resend_count"
    ROLLOUT_STATUS = "rollout.status"
    ROLLOUT_FINISH_REASON = "rollout.finish_reason"


_TARGETS: dict[Operation, str | None] = {
    "chat": Attributes.REQUEST_MODEL,
    "execute_tool": Attributes.TOOL_NAME,
    "deliver_result": None,
}
"""Which attribute names the target of an operation."""


# ---------------------------------------------------------------- the context on the wire

_TRACEPARENT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<rest>-[\x21-\x7e]{0,200})?"
)
_STATE_MEMBER = re.compile(
    r"[a-z0-9][a-z0-9_*/@-]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MAX_STATE_LENGTH, _MAX_STATE_MEMBERS = 512, 32


class TraceContext(Struct, frozen=True):
    """The place in a trace that a request belongs to, in the very text of its W3C headers."""

    traceparent: str
    tracestate: str | None = None

    def headers(self) -> dict[str, str]:
        """The headers that hand the context on."""
        if self.tracestate is None:
            return {"traceparent": self.traceparent}
        return {"traceparent": self.traceparent, "tracestate": self.tracestate}


def extract(headers: Mapping[str, str]) -> TraceContext | None:
    """The trace context in the headers of a request, if it is valid; an invalid `tracestate` alone is dropped."""
    parents = _values(headers, "traceparent")
    if len(parents) != 1 or not _is_traceparent(parents[0]):
        return None
    state = ",".join(_values(headers, "tracestate"))
    return TraceContext(parents[0], state if _is_tracestate(state) else None)


def _values(headers: Mapping[str, str], name: str) -> list[str]:
    """All values of a header: a multidict may hold several."""
    getall = getattr(headers, "getall", None)
    if getall is not None:
        return [value.strip(" \t") for value in getall(name, ())]
    return [headers[name].strip(" \t")] if name in headers else []


def _is_traceparent(text: str) -> bool:
    match = _TRACEPARENT.fullmatch(text)
    return match is not None and (match["version"] != "00" or match["rest"] is None)


def _is_tracestate(text: str) -> bool:
    if not text or len(text) > _MAX_STATE_LENGTH:
        return False
    members = [member.strip(" \t") for member in text.split(",")]
    return len(members) <= _MAX_STATE_MEMBERS and all(
        not member or _STATE_MEMBER.fullmatch(member) for member in members
    )


# ---------------------------------------------------------------- spans


class Span:
    """A piece of work, entered where it begins and left where it ends, within one task.

    This class is what stands in when nothing is traced: it does nothing but hand the caller's context on.
    """

    __slots__ = ("_context",)
    is_live: ClassVar[bool] = False
    """Whether anybody records it: what costs something to find out is not asked for otherwise."""

    def __init__(self, context: TraceContext | None = None) -> None:
        self._context = context

    @property
    def context(self) -> TraceContext | None:
        """Where this span is in its trace; keep it to continue the trace later with `Tracer.delivery_span()`."""
        return self._context

    def headers(self) -> dict[str, str]:
        """The headers that make the receiver's spans children of this one; empty if there is no trace."""
        context = self.context
        return {} if context is None else context.headers()

    def child(self, operation: Operation, target: str = "") -> Span:
        """A span inside this one; the target is the model of a chat or the name of a tool."""
        return self

    def set(self, attribute: str, value: Value) -> None:
        """Record an attribute, one of `Attributes`."""

    def fail(self, error_type: str) -> None:
        """Mark the span as failed without an exception passing through it, say for a result that is an ERROR."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the span; an exception that passes through is recorded by its type's name."""


class _LiveSpan(Span):
    """A span that a provider records. While entered it is the current one, so an agent's own spans nest in it."""

    __slots__ = ("_otel_context", "_span", "_token", "_tracer")
    is_live: ClassVar[bool] = True

    def __init__(
        self, tracer: OTelTracer, name: str, parent: Context, *, is_client: bool, attributes: dict[str, Value]
    ) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        super().__init__()
        kind = SpanKind.CLIENT if is_client else SpanKind.INTERNAL
        self._tracer = tracer
        self._span: OTelSpan = tracer.start_span(name, parent, kind, attributes)
        self._otel_context = set_span_in_context(self._span, parent)
        self._token: Token[Context] | None = None

    @property
    def context(self) -> TraceContext | None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, self._otel_context)
        traceparent = carrier.get("traceparent")  # a provider that is switched off makes spans without an identity
        return None if traceparent is None else TraceContext(traceparent, carrier.get("tracestate"))

    def child(self, operation: Operation, target: str = "") -> Span:
        name = target[:_MAX_NAME_LENGTH]
        attributes: dict[str, Value] = {Attributes.OPERATION: operation}
        attribute = _TARGETS[operation]
        if attribute is not None and name:
            attributes[attribute] = name
        return _LiveSpan(
            self._tracer,
            f"{operation} {name}".rstrip(),
            self._otel_context,
            is_client=operation != "execute_tool",
            attributes=attributes,
        )

    def set(self, attribute: str, value: Value) -> None:
        self._span.set_attribute(attribute, value)

    def fail(self, error_type: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attribute(Attributes.ERROR_TYPE, error_type)
        self._span.set_status(StatusCode.ERROR, error_type)

    def __enter__(self) -> Self:
        from opentelemetry.context import attach

        self._token = attach(self._otel_context)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        from opentelemetry.context import detach

        if exc_type is not None:
            self.fail(exc_type.__name__)
        if self._token is not None:
            detach(self._token)
        self._span.end()


class Tracer:
    """Opens the spans of a service; without a provider every span is a plain `Span` and costs next to nothing."""

    def __init__(self, tracer: OTelTracer | None = None) -> None:
        self._tracer = tracer

    @classmethod
    def create(cls, provider: TracerProvider | None = None) -> Tracer:
        """A tracer of the given provider, else of the process's own one as it is now.

        Set the provider before the service starts: one that is set later is not seen.
        """
        try:
            from opentelemetry import trace
        except ImportError:
            return cls()
        found = trace.get_tracer_provider() if provider is None else provider
        if isinstance(found, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
            return cls()
        return cls(found.get_tracer("rollout"))

    @property
    def is_active(self) -> bool:
        """Whether spans are made at all."""
        return self._tracer is not None

    def rollout_span(self, rollout_id: str, agent_name: str, context: TraceContext | None = None) -> Span:
        """The span of a whole rollout, inside the trace of the request that started it."""
        if self._tracer is None:
            return Span(context)
        attributes: dict[str, Value] = {
            Attributes.OPERATION: "invoke_agent",
            Attributes.AGENT_NAME: agent_name,
            Attributes.CONVERSATION_ID: rollout_id,
        }
        return _LiveSpan(
            self._tracer, f"invoke_agent {agent_name}", _parent(context), is_client=False, attributes=attributes
        )

    def delivery_span(self, rollout_id: str, context: TraceContext | None = None) -> Span:
        """The span of one attempt to deliver a result, which may come long after the rollout's own span has ended."""
        if self._tracer is None:
            return Span(context)
        attributes: dict[str, Value] = {Attributes.OPERATION: "deliver_result", Attributes.CONVERSATION_ID: rollout_id}
        return _LiveSpan(self._tracer, "deliver_result", _parent(context), is_client=True, attributes=attributes)


def _parent(context: TraceContext | None) -> Context:
    """The OpenTelemetry context under which a span begins; an empty one, never the caller's, if there is no trace."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if context is None:
        return Context()
    return TraceContextTextMapPropagator().extract(context.headers(), Context())
