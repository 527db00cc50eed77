"""A receiver of spans by OTLP over gRPC, which keeps the last few thousand, and one trace told as a tree."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

SPANS_MAX = 50_000


@dataclass(frozen=True, slots=True)
class Span:
    """One span as it was exported; times in nanoseconds since the epoch, `parent_id` empty for a root."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    service: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    failed: bool


class SpanReceiver(collector_grpc.TraceServiceServicer):
    """Keeps what is exported to it, the oldest forgotten first."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=SPANS_MAX)
        self._grown = asyncio.Condition()

    async def Export(  # noqa: N802 - the contract's name
        self, request: collector.ExportTraceServiceRequest, context: object
    ) -> collector.ExportTraceServiceResponse:
        async with self._grown:
            for resource_spans in request.resource_spans:
                names = _attributes(resource_spans.resource.attributes)
                service = str(names.get("service.name", "")).removeprefix("torpor-")
                for scope_spans in resource_spans.scope_spans:
                    self.spans.extend(_read(service, span) for span in scope_spans.spans)
            self._grown.notify_all()
        return collector.ExportTraceServiceResponse()

    async def until(self, condition: Callable[[Sequence[Span]], bool], *, timeout_s: float = 15.0) -> Sequence[Span]:
        """What has come once it is enough. Raises TimeoutError that lists the names of what came."""
        try:
            async with asyncio.timeout(timeout_s), self._grown:
                while not condition(self.spans):
                    await self._grown.wait()
        except TimeoutError as exc:
            names = sorted({f"{span.service}: {span.name}" for span in self.spans})
            raise TimeoutError(f"after {timeout_s} s: {len(self.spans)} spans, of {names}") from exc
        return list(self.spans)

    def fullest_trace(self) -> list[Span]:
        """The trace that shows most: all services on the way, then most kinds of spans, then the shortest."""
        traces: dict[bytes, list[Span]] = defaultdict(list)
        for span in self.spans:
            traces[span.trace_id].append(span)

        def shows(spans: list[Span]) -> tuple[int, int, int]:
            return len({s.service for s in spans}), len({s.name for s in spans}), -len(spans)

        return max(traces.values(), key=shows, default=[])


@asynccontextmanager
async def receiving() -> AsyncIterator[tuple[SpanReceiver, str]]:
    """A receiver on loopback, and its address."""
    receiver = SpanReceiver()
    server = grpc.aio.server()
    collector_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield receiver, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def tree(spans: list[Span]) -> Iterator[str]:
    """The spans of one trace as lines: offset and duration in ms, service, name, indented below their parents."""
    if not spans:
        return
    children: dict[bytes, list[Span]] = defaultdict(list)
    known = {span.span_id for span in spans}
    roots = []
    for span in sorted(spans, key=lambda s: s.start_ns):
        if span.parent_id in known:
            children[span.parent_id].append(span)
        else:
            roots.append(span)
    start_ns = min(span.start_ns for span in spans)
    stack = [(root, 0) for root in reversed(roots)]
    while stack:
        span, depth = stack.pop()
        offset, took = (span.start_ns - start_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
        detail = span.attributes.get("http.target") or span.attributes.get("path") or ""
        yield f"{offset:9.2f} ms {took:8.2f} ms  {span.service:9} {'  ' * depth}{span.name} {detail}".rstrip()
        stack += [(child, depth + 1) for child in reversed(children[span.span_id])]


def _read(service: str, span: trace_pb2.Span) -> Span:
    return Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        service=service,
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _attributes(pairs: Sequence[common_pb2.KeyValue]) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}
