"""The demo's receiver of spans."""

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from torpor_cli.demo.spans import receiving, tree


async def test_spans_that_come_by_otlp_are_told_as_a_tree():
    import asyncio

    async with receiving() as (receiver, address):
        provider = TracerProvider(resource=Resource.create({"service.name": "torpor-host"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"http://{address}", insecure=True)))
        tracer = provider.get_tracer("test")
        with tracer.start_as_current_span("alone"):
            pass
        with tracer.start_as_current_span("watch event"), tracer.start_as_current_span("reconcile"):
            pass
        await asyncio.to_thread(provider.shutdown)
    lines = list(tree(receiver.fullest_trace()))
    told = [line.split(" ms ")[2] for line in lines]
    assert [text.split() for text in told] == [["host", "watch", "event"], ["host", "reconcile"]]
    assert told[1].index("reconcile") == told[0].index("watch event") + 2


def test_no_trace_is_no_line():
    assert list(tree([])) == []


async def test_who_waits_for_spans_that_do_not_come_is_told_what_came():
    async with receiving() as (receiver, _):
        with pytest.raises(TimeoutError, match="0 spans"):
            await receiver.until(bool, timeout_s=0.01)
