"""What guests ask of the API, against a cache that answers as the test says, over real gRPC."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import msgspec
import pytest
from torpor.cache.v1 import cache_pb2, cache_pb2_grpc
from torpor_host.hostcalls import CallError, CallResponse, KubeRequest, TreeRequest
from torpor_host.in_flight import InFlight
from torpor_host.limits import Deadline
from torpor_host.operator_spec import OperatorId
from torpor_host.read_positions import ReadPositions
from torpor_host.requests import Actor, CacheRequests
from torpor_services.clock import ManualClock

SECRET = "/api/v1/namespaces/a/secrets/s"
ACTOR = Actor(OperatorId(("a", "op")), "host-0", 7, (), b"{}")


class ScriptedCache(cache_pb2_grpc.ResourceCacheServicer):
    """Answers each request by the next entry of `script`, the last one for ever."""

    def __init__(self) -> None:
        self.asked: list[cache_pb2.HttpRequest] = []
        self.script: list[Callable[[Any], Iterator[cache_pb2.HttpResponse]]] = []

    def Request(self, request: cache_pb2.HttpRequest, context: Any) -> Iterator[cache_pb2.HttpResponse]:
        self.asked.append(request)
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        yield from answer(context)

    def Tree(self, request: cache_pb2.TreeRequest, context: Any) -> cache_pb2.TreeResponse:
        return cache_pb2.TreeResponse(
            primary=b'{"a":1}',
            nodes=[cache_pb2.TreeNode(uid="u", owner_uid="o", object=b'{"b":2}')],
            kinds=[cache_pb2.TreeKind(state=cache_pb2.TreeKind.LIVE)],
        )


def answer(status: int = 200, body: bytes = b"{}", **head: Any) -> Callable[[Any], Iterator[cache_pb2.HttpResponse]]:
    def give(_: Any) -> Iterator[cache_pb2.HttpResponse]:
        yield cache_pb2.HttpResponse(head=cache_pb2.Head(status=status, content_type="application/json", **head))
        for start in range(0, len(body), 1 << 20):
            yield cache_pb2.HttpResponse(body=body[start : start + (1 << 20)])

    return give


def abort(code: grpc.StatusCode, text: str = "no", retry_ms: int | None = None) -> Callable[[Any], Iterator[Any]]:
    def give(context: Any) -> Iterator[Any]:
        if retry_ms is not None:
            context.set_trailing_metadata((("retry-after-ms", str(retry_ms)),))
        context.abort(code, text)
        yield

    return give


class OpenFence:
    def __init__(self) -> None:
        self.reason = ""
        self.reports: list[str] = []

    def refusal(self) -> str:
        return self.reason

    def report_fenced(self, reason: str) -> None:
        self.reports.append(reason)


class Bench:
    def __init__(self, target: str, cache: ScriptedCache) -> None:
        self.cache = cache
        self.channel = grpc.insecure_channel(target)
        self.fence = OpenFence()
        self.positions = ReadPositions()
        self.slept: list[float] = []
        self.requests = CacheRequests(self.channel, ManualClock(), sleep=lambda _, seconds: self.slept.append(seconds))

    def ask(self, method: str = "GET", path: str = SECRET, *, body: bytes = b"", seconds: float = 5.0) -> CallResponse:
        request = KubeRequest(method, path, "application/json", "", body)
        return self.requests.request(ACTOR, self.positions, self.fence, request, Deadline.after(seconds), "trace")


@pytest.fixture
def bench() -> Iterator[Bench]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    cache = ScriptedCache()
    cache_pb2_grpc.add_ResourceCacheServicer_to_server(cache, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    bench = Bench(f"127.0.0.1:{port}", cache)
    yield bench
    bench.channel.close()
    server.stop(0)


def test_a_request_carries_the_operator_its_epoch_and_the_trace(bench: Bench) -> None:
    bench.cache.script = [answer(body=b'{"x": 1}')]
    got = bench.ask()
    assert (got.status, got.body, got.error) == (200, b'{"x": 1}', None)
    caller = bench.cache.asked[0].caller
    assert (caller.namespace, caller.name, caller.host, caller.epoch) == ("a", "op", "host-0", 7)
    assert bench.cache.asked[0].trace.traceparent == "trace"


def test_an_operator_reads_its_own_writes(bench: Bench) -> None:
    written = cache_pb2.MinimumVersion(
        resource=cache_pb2.Resource(version="v1", resource="secrets"),
        position=cache_pb2.Position(history="h", resource_version="42"),
    )
    bench.cache.script = [answer(written=written), answer()]
    bench.ask("PUT", body=b"{}")
    bench.ask()
    assert [m.position.resource_version for m in bench.cache.asked[1].minimum] == ["42"]


def test_after_a_conflict_the_key_is_read_live_once(bench: Bench) -> None:
    bench.cache.script = [answer(409), answer(), answer()]
    bench.ask("PUT", body=b"{}")
    bench.ask()
    bench.ask()
    assert [request.live for request in bench.cache.asked] == [False, True, False]


def test_after_a_delete_the_key_is_read_live_until_the_watch_has_shown_it(bench: Bench) -> None:
    bench.cache.script = [answer(read_live=True), answer(404)]
    bench.ask("DELETE")
    bench.ask()
    bench.ask()
    bench.positions.deletion_seen("", "secrets", "a", "s")
    bench.ask()
    assert [request.live for request in bench.cache.asked] == [False, True, True, False]


def test_a_read_is_tried_again_as_late_as_the_cache_says(bench: Bench) -> None:
    bench.cache.script = [abort(grpc.StatusCode.UNAVAILABLE, retry_ms=120), answer()]
    assert bench.ask().status == 200
    assert bench.slept == [0.12]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_write_that_was_sent_is_never_sent_again(bench: Bench, method: str) -> None:
    bench.cache.script = [abort(grpc.StatusCode.UNAVAILABLE)]
    assert bench.ask(method, body=b"{}").error is CallError.UNAVAILABLE
    assert len(bench.cache.asked) == 1


def test_a_read_gives_up_at_its_deadline(bench: Bench) -> None:
    bench.cache.script = [abort(grpc.StatusCode.UNAVAILABLE, "not synced", retry_ms=4000)]
    got = bench.ask(seconds=1.0)
    assert (got.error, got.message) == (CallError.UNAVAILABLE, "not synced")


def test_an_answer_that_never_comes_ends_at_the_deadline(bench: Bench) -> None:
    def hang(context: Any) -> Iterator[Any]:
        while context.is_active():
            context.time_remaining()
            yield from itertools.islice(iter(()), 0)

    bench.cache.script = [hang]
    assert bench.ask(seconds=0.2).error is CallError.DEADLINE


def test_nothing_leaves_a_host_that_may_not_act(bench: Bench) -> None:
    bench.cache.script = [answer()]
    bench.fence.reason = "the Lease is lost"
    got = bench.ask()
    assert (got.error, got.message) == (CallError.FENCED, "the Lease is lost")
    assert bench.cache.asked == []


def test_another_epoch_fences_the_operator(bench: Bench) -> None:
    bench.cache.script = [abort(grpc.StatusCode.FAILED_PRECONDITION, "epoch 8 is confirmed")]
    assert bench.ask("PUT", body=b"{}").error is CallError.FENCED
    assert bench.fence.reports == ["epoch 8 is confirmed"]


def test_an_assignment_that_the_cache_has_not_seen_yet_is_waited_for(bench: Bench) -> None:
    bench.cache.script = [abort(grpc.StatusCode.PERMISSION_DENIED), answer(201)]
    assert bench.ask("POST", "/api/v1/namespaces/a/secrets", body=b"{}").status == 201
    assert bench.fence.reports == []


@pytest.mark.parametrize(
    ("method", "path", "error"),
    [
        ("GET", "/metrics", CallError.DENIED),
        ("GET", "/api/v1/../../healthz", CallError.INVALID),
        ("GET", "/api/v1/pods\r\nX: y", CallError.INVALID),
        ("CONNECT", "/api/v1/pods", CallError.INVALID),
        ("GET", "/api/v1/pods?watch=true", CallError.UNIMPLEMENTED),
        ("GET", "/api/v1/pods?limit=1&watch=1", CallError.UNIMPLEMENTED),
    ],
)
def test_what_is_no_request_is_refused_here(bench: Bench, method: str, path: str, error: CallError) -> None:
    bench.cache.script = [answer()]
    assert bench.ask(method, path).error is error
    assert bench.cache.asked == []


def test_an_endless_answer_is_cut(bench: Bench) -> None:
    def endless(_: Any) -> Iterator[cache_pb2.HttpResponse]:
        yield cache_pb2.HttpResponse(head=cache_pb2.Head(status=200))
        while True:
            yield cache_pb2.HttpResponse(body=bytes(2 << 20))

    bench.cache.script = [endless]
    assert bench.ask(seconds=20).error is CallError.TOO_LARGE


def test_a_tree_is_one_json_answer(bench: Bench) -> None:
    request = TreeRequest("example.com/v1/databases", "a", "db")
    got = bench.requests.tree(ACTOR, bench.positions, bench.fence, request, Deadline.after(5))
    decoded = msgspec.json.decode(got.body)
    assert decoded["primary"] == {"a": 1} and decoded["nodes"][0]["object"] == {"b": 2}
    assert decoded["kinds"][0]["state"] == "LIVE"
    bad = bench.requests.tree(ACTOR, bench.positions, bench.fence, TreeRequest("x", "", "y"), Deadline.after(5))
    assert bad.error is CallError.INVALID


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_who_stops_the_guest_ends_a_call_that_waits(bench: Bench, method: str) -> None:
    in_flight, asked, release = InFlight(), threading.Event(), threading.Event()

    def wait(context: Any) -> Iterator[Any]:
        asked.set()
        release.wait(30)
        yield cache_pb2.HttpResponse(head=cache_pb2.Head(status=200))

    bench.cache.script = [wait]
    got: list[CallResponse] = []

    def ask() -> None:
        request = KubeRequest(method, SECRET, "application/json", "", b"")
        arguments = (ACTOR, bench.positions, bench.fence, request, Deadline.after(30), "", in_flight)
        got.extend([bench.requests.request(*arguments), bench.requests.request(*arguments)])

    asking = threading.Thread(target=ask)
    asking.start()
    assert asked.wait(10)
    in_flight.stop()
    asking.join(10)
    release.set()
    assert [answer.error for answer in got] == [CallError.FENCED] * 2 and len(bench.cache.asked) == 1


def test_who_stops_the_guest_ends_a_tree_that_waits_too(bench: Bench) -> None:
    in_flight = InFlight()
    in_flight.stop()
    request = TreeRequest("v1/secrets", "a", "b")
    got = bench.requests.tree(ACTOR, bench.positions, bench.fence, request, Deadline.after(30), in_flight)
    assert got.error is CallError.FENCED
