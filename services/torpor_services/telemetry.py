"""Spans, with their context carried in our own messages.

Off unless OTEL_EXPORTER_OTLP_ENDPOINT is set: then the SDK and the OTLP exporter are imported (25 MB) and everything
else is as their environment variables say. While it is off a span costs one comparison and no allocation.

A trace of Torpor crosses three processes by streams that carry many operators at once, so the context of a change
travels as a W3C `traceparent` inside the messages and not in gRPC metadata.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

Attributes = Mapping[str, str | int | float | bool]


class Span:
    """One operation of a trace. `traceparent` is what its children are told; empty where telemetry is off."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: OtelSpan | None) -> None:
        self._span = span
        self.traceparent = _format(span) if span is not None else ""

    def set(self, key: str, value: str | int | float | bool) -> None:
        if self._span is not None:
            self._span.set_attribute(key, value)

    def fail(self, message: str) -> None:
        """Marks the span as failed."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, message))

    def end(self, unix_ns: int | None = None) -> None:
        if self._span is not None:
            self._span.end(unix_ns)


_NO_SPAN = Span(None)
_tracer: Tracer | None = None
_provider: TracerProvider | None = None


def configure(service: str, instance: str = "", environ: Mapping[str, str] = os.environ) -> bool:
    """Starts exporting spans if an OTLP endpoint is configured; says whether it is."""
    if not (environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return False
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes = {"service.name": f"torpor-{service}", "service.namespace": "torpor"}
    if instance:
        attributes["service.instance.id"] = instance
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    use_provider(provider)
    return True


def use_provider(provider: TracerProvider | None) -> None:
    """Spans go to this provider from now on; None turns telemetry off."""
    global _provider, _tracer
    _provider = provider
    _tracer = provider.get_tracer("torpor") if provider is not None else None


def shutdown() -> None:
    """Exports what is left; blocks for at most the exporter's own timeout."""
    if _provider is not None:
        _provider.shutdown()
    use_provider(None)


def enabled() -> bool:
    return _tracer is not None


def start(
    name: str,
    *,
    parent: str = "",
    links: Sequence[str] = (),
    attributes: Attributes | None = None,
    start_unix_ns: int | None = None,
) -> Span:
    """A span that the caller ends. `parent` and `links` are traceparents; an invalid one is as none."""
    if _tracer is None:
        return _NO_SPAN
    from opentelemetry.trace import Link

    contexts = [context for context in map(_span_context, links) if context is not None]
    span = _tracer.start_span(
        name,
        context=_context(parent),
        links=[Link(context) for context in contexts],
        attributes=attributes,
        start_time=start_unix_ns,
    )
    return Span(span)


@contextmanager
def span(
    name: str, *, parent: str = "", links: Sequence[str] = (), attributes: Attributes | None = None
) -> Iterator[Span]:
    """A span around a block; an exception marks it failed and goes on."""
    if _tracer is None:
        yield _NO_SPAN
        return
    started = start(name, parent=parent, links=links, attributes=attributes)
    try:
        yield started
    except BaseException as exc:
        started.fail(type(exc).__name__)
        raise
    finally:
        started.end()


def record(
    name: str, start_unix_ns: int, end_unix_ns: int, *, parent: str = "", attributes: Attributes | None = None
) -> str:
    """A span of something that is over already, such as a wait; returns its traceparent."""
    if _tracer is None:
        return ""
    finished = start(name, parent=parent, attributes=attributes, start_unix_ns=start_unix_ns)
    finished.end(end_unix_ns)
    return finished.traceparent


def current_traceparent() -> str:
    """Of the span that OpenTelemetry holds as current, for logs; empty if none."""
    if _tracer is None:
        return ""
    from opentelemetry import trace

    span = trace.get_current_span()
    return _format(span) if span.get_span_context().is_valid else ""


def _format(span: OtelSpan) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _span_context(traceparent: str):  # type: ignore[no-untyped-def]
    from opentelemetry.trace import SpanContext, TraceFlags

    parts = traceparent.split("-")
    if len(parts) != 4 or len(parts[1]) != 32 or len(parts[2]) != 16:
        return None
    try:
        context = SpanContext(int(parts[1], 16), int(parts[2], 16), True, TraceFlags(int(parts[3], 16)))
    except ValueError:
        return None
    return context if context.is_valid else None


def _context(traceparent: str) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    parent = _span_context(traceparent) if traceparent else None
    return Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())
