"""Trace context on the wire, and the spans that a provider records."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from multidict import CIMultiDict
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from rollout.tracing import Attributes, Operation, TraceContext, Tracer, extract

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """Where the finished spans of `tracer` are."""
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    """A tracer whose spans are recorded."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracer.create(provider)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """The finished spans."""
    return {span.name: span for span in exporter.get_finished_spans()}


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    """Its attributes as a plain dict."""
    return dict(span.attributes or {})


# ---------------------------------------------------------------- headers


@pytest.mark.parametrize("headers", [{"traceparent": PARENT}, CIMultiDict({"Traceparent": f" {PARENT} "})])
def test_valid_traceparent_is_kept_as_it_came(headers: Any) -> None:
    assert extract(headers) == TraceContext(PARENT, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "0",
        PARENT + "-more",
        PARENT + "\n",
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"01-{TRACE_ID}-{SPAN_ID}-01-a\r\nX-Evil: 1",
        "01" + PARENT[2:] + "more",
    ],
)
def test_invalid_traceparent_is_dropped(text: str) -> None:
    assert extract({"traceparent": text, "tracestate": "a=b"}) is None


@given(st.text())
@example(PARENT + "\r\nA: b")
def test_no_text_is_handed_on_that_could_break_a_header(text: str) -> None:
    context = extract({"traceparent": text, "tracestate": text})
    assert context is None or all(value.isascii() and value.isprintable() for value in context.headers().values())


def test_traceparent_of_a_later_version_may_be_longer() -> None:
    later = f"01-{TRACE_ID}-{SPAN_ID}-01-what-comes"
    assert extract({"traceparent": later}) == TraceContext(later)


def test_two_traceparents_are_none() -> None:
    assert extract(CIMultiDict([("traceparent", PARENT), ("traceparent", PARENT)])) is None


def test_several_tracestates_are_joined_in_order() -> None:
    headers = CIMultiDict([("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b@c=2, ,d=3")])
    context = extract(headers)
    assert context is not None
    assert context.headers() == {"traceparent": PARENT, "tracestate": "a=1,b@c=2, ,d=3"}


@pytest.mark.parametrize("state", ["novalue", "A=1", "a=b=c", "a=\x07", "a=" + "x" * 600, ",".join(["a=1"] * 33)])
def test_invalid_tracestate_is_dropped_alone(state: str) -> None:
    assert extract({"traceparent": PARENT, "tracestate": state}) == TraceContext(PARENT, None)


def test_request_without_trace_headers_has_no_context() -> None:
    assert extract({"Accept": "*/*"}) is None


# ---------------------------------------------------------------- nothing to trace with


def test_without_the_library_the_context_is_passed_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    tracer = Tracer.create()
    context = TraceContext(PARENT, "a=b")
    with tracer.rollout_span("r1", "calculator", context) as span, span.child("chat", "default") as chat:
        chat.set(Attributes.INPUT_TOKENS, 7)
        chat.fail("TrainerRefused")
        assert chat.headers() == {"traceparent": PARENT, "tracestate": "a=b"}
        assert span.context == context
    assert not tracer.is_active
    assert tracer.delivery_span("r1", context).headers() == context.headers()


def test_without_a_context_no_header_is_sent() -> None:
    assert Tracer().rollout_span("r1", "calculator").headers() == {}


@pytest.mark.parametrize("provider", [None, trace.NoOpTracerProvider()], ids=["not set", "no-op"])
def test_process_without_a_provider_traces_nothing(provider: trace.TracerProvider | None) -> None:
    assert not Tracer.create(provider).is_active


def test_provider_that_is_switched_off_passes_the_context_through() -> None:
    tracer = Tracer(trace.NoOpTracer())
    with tracer.rollout_span("r1", "calculator", TraceContext(PARENT)) as span, span.child("chat") as chat:
        assert chat.headers() == {"traceparent": PARENT}
    with tracer.rollout_span("r1", "calculator") as span:
        assert span.headers() == {}
        assert span.context is None


# ---------------------------------------------------------------- spans


def test_rollout_span_continues_the_trace_of_its_request(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    with tracer.rollout_span("r1", "calculator", TraceContext(PARENT, "a=b")) as span:
        headers = span.headers()
    recorded = by_name(exporter)["invoke_agent calculator"]
    assert recorded.parent is not None
    assert f"{recorded.parent.span_id:016x}" == SPAN_ID
    assert headers == {"traceparent": f"00-{TRACE_ID}-{recorded.context.span_id:016x}-01", "tracestate": "a=b"}
    assert attributes_of(recorded) == {
        Attributes.OPERATION: "invoke_agent",
        Attributes.AGENT_NAME: "calculator",
        Attributes.CONVERSATION_ID: "r1",
    }


@pytest.mark.parametrize(
    ("operation", "target", "name", "kind", "attribute"),
    [
        ("chat", "default", "chat default", SpanKind.CLIENT, Attributes.REQUEST_MODEL),
        ("execute_tool", "add", "execute_tool add", SpanKind.INTERNAL, Attributes.TOOL_NAME),
        ("deliver_result", "", "deliver_result", SpanKind.CLIENT, None),
        ("chat", "", "chat", SpanKind.CLIENT, None),
    ],
)
def test_children_are_named_by_the_conventions(
    tracer: Tracer,
    exporter: InMemorySpanExporter,
    operation: Operation,
    target: str,
    name: str,
    kind: SpanKind,
    attribute: str | None,
) -> None:
    with tracer.rollout_span("r1", "calculator") as span, span.child(operation, target) as child:
        child.set(Attributes.RESEND_COUNT, 2)
        sent = child.headers()["traceparent"]
    recorded, parent = by_name(exporter)[name], by_name(exporter)["invoke_agent calculator"]
    expected = {Attributes.OPERATION: operation, Attributes.RESEND_COUNT: 2} | (
        {attribute: target} if attribute else {}
    )
    assert attributes_of(recorded) == expected
    assert recorded.kind is kind
    assert recorded.parent is not None
    assert recorded.parent.span_id == parent.context.span_id
    assert sent.split("-")[2] == f"{recorded.context.span_id:016x}"


def test_name_that_a_model_made_up_is_bounded(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    with tracer.rollout_span("r1", "calculator") as span, span.child("execute_tool", "x" * 10_000):
        pass
    assert "execute_tool " + "x" * 128 in by_name(exporter)


def test_error_is_recorded_by_type_and_never_by_text(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    with (
        pytest.raises(ValueError, match="sk-secret"),
        tracer.rollout_span("r1", "calculator") as span,
        span.child("chat"),
    ):
        raise ValueError("sk-secret")
    for recorded in exporter.get_finished_spans():
        assert recorded.status.status_code is StatusCode.ERROR
        assert attributes_of(recorded)[Attributes.ERROR_TYPE] == "ValueError"
        assert "sk-secret" not in recorded.to_json()


def test_result_that_is_an_error_marks_the_span(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    with tracer.rollout_span("r1", "calculator") as span:
        span.fail("timeout")
    recorded = by_name(exporter)["invoke_agent calculator"]
    assert (recorded.status.status_code, recorded.status.description) == (StatusCode.ERROR, "timeout")


def test_delivery_continues_the_rollout_long_after_its_end(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    with tracer.rollout_span("r1", "calculator") as span:
        kept = span.context
    with tracer.delivery_span("r1", kept) as delivery:
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[13]", delivery.headers()["traceparent"])
    spans = by_name(exporter)
    parent = spans["deliver_result"].parent
    assert parent is not None
    assert parent.span_id == spans["invoke_agent calculator"].context.span_id


def test_span_of_a_rollout_is_not_inside_the_span_that_happens_to_be_current(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    with tracer.rollout_span("r1", "first"), tracer.rollout_span("r2", "second"):
        pass
    assert by_name(exporter)["invoke_agent second"].parent is None


async def test_concurrent_rollouts_keep_their_spans_apart(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    both = asyncio.Barrier(2)

    async def run(name: str) -> None:
        with tracer.rollout_span(name, name) as span, span.child("chat", name):
            await both.wait()
            assert trace.get_current_span().get_span_context().trace_id == int(span.headers()["traceparent"][3:35], 16)

    await asyncio.gather(run("one"), run("two"))
    spans = by_name(exporter)
    for name in ("one", "two"):
        parent = spans[f"chat {name}"].parent
        assert parent is not None
        assert parent.span_id == spans[f"invoke_agent {name}"].context.span_id
    assert not trace.get_current_span().get_span_context().is_valid


def test_span_that_was_never_entered_can_be_left(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    tracer.delivery_span("r1").__exit__(None, None, None)
    assert "deliver_result" in by_name(exporter)
