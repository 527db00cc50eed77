"""Spans whose context rides in messages, and logs that carry it."""

import io
import json
import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torpor_services import logs, telemetry


@pytest.fixture
def exported():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.use_provider(provider)
    yield exporter.get_finished_spans
    telemetry.use_provider(None)


def test_a_child_in_another_process_joins_by_the_traceparent_alone(exported):
    with telemetry.span("watch event") as parent:
        carried = parent.traceparent
    with telemetry.span("reconcile", parent=carried, attributes={"operator": "a/b"}):
        pass
    event, reconcile = exported()
    assert reconcile.context.trace_id == event.context.trace_id
    assert reconcile.parent.span_id == event.context.span_id
    assert reconcile.attributes["operator"] == "a/b"


def test_coalesced_changes_become_links(exported):
    parents = []
    for _ in range(3):
        with telemetry.span("watch event") as span:
            parents.append(span.traceparent)
    with telemetry.span("reconcile", parent=parents[-1], links=parents[:-1]):
        pass
    assert len(exported()[-1].links) == 2


def test_a_wait_that_is_over_is_recorded_with_its_times(exported):
    telemetry.record("queue wait", 1_000, 2_500)
    (span,) = exported()
    assert (span.start_time, span.end_time) == (1_000, 2_500)


def test_an_exception_marks_the_span_failed_and_goes_on(exported):
    with pytest.raises(KeyError):
        with telemetry.span("write"):
            raise KeyError("secret value")
    assert exported()[0].status.description == "KeyError"


@pytest.mark.parametrize("bad", ["", "x", "00-zz-1-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_an_invalid_parent_is_as_none(exported, bad):
    with telemetry.span("a", parent=bad):
        pass
    assert exported()[0].parent is None


def test_off_means_no_span_and_an_empty_traceparent():
    with telemetry.span("a") as span:
        assert span.traceparent == ""
    assert telemetry.record("a", 1, 2) == ""
    assert not telemetry.configure("cache", environ={})


def test_a_log_line_is_one_json_object_with_its_fields():
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        logs.configure("host", stream=stream)
        logging.getLogger("torpor_host").warning("unloaded %s", "x", extra={"operator": "a/b"})
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("torpor_host").exception("failed\nbadly")
    finally:
        root.handlers[:], root.level = before
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["message"], first["operator"], first["level"]) == ("unloaded x", "a/b", "warning")
    assert "ValueError: no" in second["exception"]
