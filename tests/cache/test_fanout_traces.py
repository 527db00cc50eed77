"""A change's trace goes on through the fan-out to its subscribers."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torpor_cache.fanout import Feed
from torpor_cache.testing_informer import FakeInformer, LocalStream
from torpor_services import telemetry
from torpor_services.clock import ManualClock


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.use_provider(provider)
    yield exporter
    telemetry.use_provider(None)


def test_subscribers_go_on_from_the_fan_out_which_goes_on_from_the_change(spans):
    informer = FakeInformer()
    feed = Feed(informer, ManualClock())
    informer.attach(feed)
    streams = [LocalStream(feed) for _ in range(2)]
    for stream in streams:
        stream.subscribe(1)
        stream.take()
    change = telemetry.start("watch.event")
    informer.put("a", traceparent=change.traceparent)
    change.end()
    told = {r.event.traces[0].traceparent for stream in streams for r in stream.take()[1]}
    fan_out = [span for span in spans.get_finished_spans() if span.name == "cache.fan_out"]
    assert len(fan_out) == 1
    assert fan_out[0].parent.span_id == int(change.traceparent.split("-")[2], 16)
    assert {trace.split("-")[2] for trace in told} == {f"{fan_out[0].context.span_id:016x}"}
    assert fan_out[0].attributes["torpor.key"] == "ns/a"


def test_a_fan_out_that_a_newer_change_overtakes_is_ended_too(spans):
    informer = FakeInformer()
    feed = Feed(informer, ManualClock())
    informer.attach(feed)
    stream = LocalStream(feed)
    stream.subscribe(1)
    stream.take()
    for _ in range(3):
        informer.put("a")
    (event,) = stream.take()[1]
    assert len(event.event.traces) == 3
    assert len([span for span in spans.get_finished_spans() if span.name == "cache.fan_out"]) == 3
