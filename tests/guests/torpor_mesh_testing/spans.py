"""A collector of spans: what an OpenTelemetry Collector would receive over OTLP/gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

# Exported at once: the default of 5 s is for production.
EXPORT_EVERY_MS = 100


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """Times in nanoseconds since the epoch; `parent` is empty for a root."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`spans` grows as services export."""

    def __init__(self) -> None:
        self.address = ""
        self.spans: list[ReceivedSpan] = []
        self._grown = asyncio.Condition()

    @property
    def environment(self) -> dict[str, str]:
        """What services need to export to it."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{self.address}",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_EVERY_MS),
        }

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        async with self._grown:
            for resource in request.resource_spans:
                service = str(_attributes(resource.resource.attributes).get("service.name", ""))
                for scope in resource.scope_spans:
                    self.spans += [_read(service, span) for span in scope.spans]
            self._grown.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(
        self, condition: Callable[[Sequence[ReceivedSpan]], bool], *, timeout_s: float = 15.0
    ) -> Sequence[ReceivedSpan]:
        """Raises TimeoutError that lists the names of what came."""
        try:
            async with asyncio.timeout(timeout_s), self._grown:
                while not condition(self.spans):
                    await self._grown.wait()
        except TimeoutError as error:
            names = sorted({f"{span.service}: {span.name}" for span in self.spans})
            raise TimeoutError(f"after {timeout_s} s: {len(self.spans)} spans, of {names}") from error
        return list(self.spans)


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A collector on a free loopback port."""
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)


def _read(service: str, span: trace_pb2.Span) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _attributes(pairs: Sequence[common_pb2.KeyValue]) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}
