"""What guests ask of the API, against a cache that answers as the test says, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent import futures
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec
import pytest
from torpor.cache.v1 import cache_pb2, cache_pb2_grpc
from torpor_host.config import WRITE_DEADLINE_S
from torpor_host.hostcalls import CallError, CallResponse, KubeRequest, TreeRequest
from torpor_host.in_flight import InFlight
from torpor_host.limits import Deadline
from torpor_host.operator_spec import OperatorId, ResourceRef
from torpor_host.read_ahead import ReadAhead
from torpor_host.read_positions import ReadPositions
from torpor_host.requests import Actor, CacheRequests
from torpor_host.timers import Timers
from torpor_host.work_queue import Cause, Key, Work, WorkQueue
from torpor_host.workers import Mailbox, Workers
from torpor_services.clock import ManualClock

T = TypeVar("T")
Script = Callable[[], Iterator[cache_pb2.HttpResponse]]
SECRET = "/api/v1/namespaces/a/secrets/s"
ACTOR = Actor(OperatorId(("a", "op")), "host-0", 7, (), b"{}")


class ScriptedCache(cache_pb2_grpc.ResourceCacheServicer):
    """Answers each request by the next entry of `script`, the last one for ever; each in a thread of its own."""

    def __init__(self) -> None:
        self.asked: list[cache_pb2.HttpRequest] = []
        self.cancelled: list[int] = []
        self.streams: list[Any] = []
        self.batches: list[int] = []
        self.not_after_ms: list[int] = []
        self.script: list[Script] = []

    def RequestStream(self, batches: Iterator[cache_pb2.RequestBatch], context: Any) -> Iterator[Any]:
        self.streams.append(context)
        answers: queue.SimpleQueue[cache_pb2.StreamedResponse | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(batches, answers), daemon=True).start()
        context.add_callback(lambda: answers.put(None))
        yield cache_pb2.ResponseBatch(now_ms=1000)
        while (answer := answers.get()) is not None:
            yield cache_pb2.ResponseBatch(responses=[answer])

    def _read(self, batches: Iterator[cache_pb2.RequestBatch], answers: queue.SimpleQueue[Any]) -> None:
        with contextlib.suppress(grpc.RpcError):  # the client is gone
            for batch in batches:
                self.batches.append(len(batch.requests))
                self.cancelled.extend(batch.cancelled)
                for message in batch.requests:
                    self.not_after_ms.append(message.not_after_ms)
                    self.asked.append(message.request)
                    script = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                    threading.Thread(target=self._answer, args=(script, message.id, answers), daemon=True).start()

    def _answer(self, script: Script, number: int, answers: queue.SimpleQueue[Any]) -> None:
        try:
            for response in script():
                while answers.qsize() > 8 and self.streams[-1].is_active():
                    time.sleep(0.001)
                if number in self.cancelled or not self.streams[-1].is_active():
                    return
                answers.put(cache_pb2.StreamedResponse(id=number, response=response))
            answers.put(cache_pb2.StreamedResponse(id=number, last=True))
        except Refused as exc:
            answers.put(cache_pb2.StreamedResponse(id=number, last=True, error=exc.error))

    def Tree(self, request: cache_pb2.TreeRequest, context: Any) -> cache_pb2.TreeResponse:
        return cache_pb2.TreeResponse(
            primary=b'{"a":1}',
            nodes=[cache_pb2.TreeNode(uid="u", owner_uid="o", object=b'{"b":2}')],
            kinds=[cache_pb2.TreeKind(state=cache_pb2.TreeKind.LIVE)],
        )


class Refused(Exception):
    def __init__(self, error: cache_pb2.RequestError) -> None:
        self.error = error


def answer(status: int = 200, body: bytes = b"{}", **head: Any) -> Script:
    def give() -> Iterator[cache_pb2.HttpResponse]:
        yield cache_pb2.HttpResponse(head=cache_pb2.Head(status=status, content_type="application/json", **head))
        for start in range(0, len(body), 1 << 20):
            yield cache_pb2.HttpResponse(body=body[start : start + (1 << 20)])

    return give


def abort(code: grpc.StatusCode, text: str = "no", retry_ms: int = 0) -> Script:
    def give() -> Iterator[cache_pb2.HttpResponse]:
        raise Refused(cache_pb2.RequestError(code=code.value[0], message=text, retry_after_ms=retry_ms))

    return give


def hangs_until(release: threading.Event) -> Script:
    def give() -> Iterator[cache_pb2.HttpResponse]:
        release.wait(30)
        yield cache_pb2.HttpResponse(head=cache_pb2.Head(status=200))

    return give


class OpenFence:
    def __init__(self) -> None:
        self.reason = ""
        self.reports: list[str] = []

    def refusal(self) -> str:
        return self.reason

    def report_fenced(self, reason: str) -> None:
        self.reports.append(reason)


class Loop:
    """An event loop on a thread of its own, as guests' threads see the host's."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(step, self.loop).result(10)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class Bench:
    def __init__(self, target: str, cache: ScriptedCache, loop: Loop) -> None:
        self.cache = cache
        self.fence = OpenFence()
        self.positions = ReadPositions()
        self.slept: list[float] = []
        self.first_read: str | None = None
        self.loop = loop
        self.requests = loop.run(self._open(target))

    async def _open(self, target: str) -> CacheRequests:
        self.channel = grpc.aio.insecure_channel(target)
        post = Mailbox(asyncio.get_running_loop()).post
        sleep = lambda _, seconds: self.slept.append(seconds)  # noqa: E731
        requests = CacheRequests(self.channel, ManualClock(), post, sleep=sleep)
        self._task = asyncio.create_task(requests.run())
        return requests

    def ask(self, method: str = "GET", path: str = SECRET, *, body: bytes = b"", seconds: float = 5.0) -> CallResponse:
        request = KubeRequest(method, path, "application/json", "", body)
        return self.requests.request(ACTOR, self.positions, self.fence, request, Deadline.after(seconds), "trace")

    def close(self) -> None:
        self.loop.run(self._close())

    async def _close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.channel.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def bench(loop: Loop) -> Iterator[Bench]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    cache = ScriptedCache()
    cache_pb2_grpc.add_ResourceCacheServicer_to_server(cache, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    bench = Bench(f"127.0.0.1:{port}", cache, loop)
    yield bench
    bench.close()
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
    release = threading.Event()
    bench.cache.script = [hangs_until(release), answer()]
    assert bench.ask(seconds=0.2).error is CallError.DEADLINE
    assert bench.ask().status == 200  # on the same stream
    release.set()
    assert (bench.cache.cancelled, len(bench.cache.streams)) == ([1], 1)


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
    def endless() -> Iterator[cache_pb2.HttpResponse]:
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

    def wait() -> Iterator[cache_pb2.HttpResponse]:
        asked.set()
        yield from hangs_until(release)()

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


def test_many_requests_share_one_stream_and_each_gets_its_own_answer(bench: Bench) -> None:
    bench.cache.script = [answer(status=200 + n, body=str(n).encode()) for n in range(40)] + [answer()]
    with futures.ThreadPoolExecutor(8) as pool:
        got = [future.result() for future in [pool.submit(bench.ask) for _ in range(40)]]
    assert sorted(int(each.body) for each in got) == list(range(40))
    assert all(each.status == 200 + int(each.body) for each in got)
    assert len(bench.cache.streams) == 1


def test_a_stream_that_breaks_fails_what_was_in_flight_and_the_next_request_opens_another(bench: Bench) -> None:
    asked, release = threading.Event(), threading.Event()

    def wait() -> Iterator[cache_pb2.HttpResponse]:
        asked.set()
        yield from hangs_until(release)()

    bench.cache.script = [wait, wait, answer()]
    with futures.ThreadPoolExecutor(2) as pool:
        write = pool.submit(bench.ask, "PUT", body=b"{}")
        assert asked.wait(10)
        read = pool.submit(bench.ask)
        while len(bench.cache.asked) < 2:
            pass
        bench.cache.streams[0].cancel()
        assert write.result(10).error is CallError.UNAVAILABLE  # whether it was made is not known
        assert read.result(10).status == 200  # asked again
    release.set()
    assert [request.method for request in bench.cache.asked] == ["PUT", "GET", "GET"]


def test_no_cache_at_all_is_unavailable_and_a_host_that_ends_asks_nothing(loop: Loop) -> None:
    bench = Bench("unix:/nowhere", ScriptedCache(), loop)
    got = bench.ask("PUT", body=b"{}")
    assert got.error is CallError.UNAVAILABLE and "/nowhere" in got.message
    bench.close()
    assert bench.ask("PUT", body=b"{}").error is CallError.UNAVAILABLE


def test_a_request_that_waits_gives_its_slot_back(bench: Bench) -> None:
    workers, asked, release = Workers("test", threads_max=2), threading.Event(), threading.Event()
    got: list[CallResponse] = []

    def wait() -> Iterator[cache_pb2.HttpResponse]:
        asked.set()
        yield from hangs_until(release)()

    def ask() -> None:
        request = KubeRequest("GET", SECRET, "", "", b"")
        arguments = (ACTOR, bench.positions, bench.fence, request, Deadline.after(10), "", InFlight(), workers)
        got.append(bench.requests.request(*arguments))

    bench.cache.script = [wait]
    workers.submit(ask)
    assert asked.wait(10)
    ran = threading.Event()
    workers.submit(ran.set)
    assert ran.wait(10) and not got
    release.set()
    assert workers.close(10) and got[0].status == 200


def ahead_of(bench: Bench, workers: Workers) -> tuple[ReadAhead, Work]:
    """A turn with one key, whose object has been asked for."""
    queue = WorkQueue(Timers(ManualClock()), threading.Lock(), bench)  # type: ignore[arg-type]
    queue.add(Key("a", "s"), Cause.WATCH, now_s=0.0, now_unix_ns=0)
    bench.first_read = "application/json"
    reader = bench.requests.reader(ACTOR, bench.positions, bench.fence, workers)
    ahead = ReadAhead(bench, ResourceRef.parse("v1/secrets", ""), reader, queue.peek, lambda: 0.0)
    ahead.fill()
    work = queue.take()
    assert work is not None
    ahead.begin(work)
    return ahead, work


def ask_with(bench: Bench, ahead: ReadAhead, workers: Workers, method: str = "GET") -> CallResponse:
    request = KubeRequest(method, SECRET, "application/json", "", b"")
    positions, deadline = bench.positions, Deadline.after(5)
    return bench.requests.request(
        ACTOR, positions, bench.fence, request, deadline, "trace", InFlight(), workers, read_ahead=ahead
    )


def on_a_worker(step: Callable[[Workers], T]) -> T:
    """What holds a slot must run where one is held."""
    workers, results = Workers("test", threads_max=1), list[T]()
    workers.submit(lambda: results.append(step(workers)))
    assert workers.close(20)
    return results[0]


def test_a_guest_gets_the_answer_that_was_asked_for_before_it_asked(bench: Bench) -> None:
    def turn(workers: Workers) -> tuple[CallResponse, CallResponse]:
        ahead, _ = ahead_of(bench, workers)
        return ask_with(bench, ahead, workers), ask_with(bench, ahead, workers)

    bench.cache.script = [answer(body=b"1"), answer(body=b"2")]
    first, second = on_a_worker(turn)
    assert (first.body, second.body) == (b"1", b"2")
    assert [request.path for request in bench.cache.asked] == [SECRET, SECRET]


def test_an_answer_from_before_a_write_is_not_the_guests(bench: Bench) -> None:
    def turn(workers: Workers) -> CallResponse:
        ahead, _ = ahead_of(bench, workers)
        bench.positions.written(
            cache_pb2.MinimumVersion(
                resource=cache_pb2.Resource(version="v1", resource="secrets"),
                position=cache_pb2.Position(history="h", resource_version="42"),
            )
        )
        return ask_with(bench, ahead, workers)

    bench.cache.script = [answer()]
    assert on_a_worker(turn).status == 200
    assert len(bench.cache.asked[-1].minimum) == 1  # the first may have been dropped before it was sent


def test_a_read_ahead_that_failed_is_asked_again_as_any_read(bench: Bench) -> None:
    def turn(workers: Workers) -> CallResponse:
        ahead, _ = ahead_of(bench, workers)
        return ask_with(bench, ahead, workers)

    bench.cache.script = [abort(grpc.StatusCode.UNAVAILABLE, retry_ms=120), answer()]
    assert on_a_worker(turn).status == 200 and bench.slept == [0.12]


def test_nothing_is_read_ahead_of_a_fence_or_of_a_read_that_must_be_live(bench: Bench) -> None:
    def turn(workers: Workers) -> CallResponse:
        ahead, _ = ahead_of(bench, workers)
        bench.fence.reason = ""
        return ask_with(bench, ahead, workers)

    bench.cache.script = [answer()]
    bench.fence.reason = "the Lease is lost"
    assert on_a_worker(turn).status == 200 and len(bench.cache.asked) == 1
    bench.cache.script = [answer(409), answer()]
    bench.ask("PUT", body=b"{}")
    assert on_a_worker(turn).status == 200
    assert [request.live for request in bench.cache.asked] == [False, False, True]


def test_a_write_says_until_when_it_may_be_made_and_a_read_does_not(bench: Bench) -> None:
    bench.cache.script = [answer()]
    bench.ask()
    bench.ask("PUT", body=b"{}", seconds=2.0)
    bench.ask("PUT", body=b"{}", seconds=600.0)
    # The cache's clock shows 1 s where the host's stands at 0.
    read, soon, late = bench.cache.not_after_ms
    assert read == 0 and 2900 <= soon <= 3000 and late == 1000 + round(WRITE_DEADLINE_S * 1000)


def test_another_call_of_the_guest_ends_what_was_read_ahead(bench: Bench) -> None:
    def turn(workers: Workers) -> CallResponse:
        ahead, _ = ahead_of(bench, workers)
        ahead.other_call()
        return ask_with(bench, ahead, workers)

    bench.cache.script = [answer()]
    assert on_a_worker(turn).status == 200 and bench.first_read is None
