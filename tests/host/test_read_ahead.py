"""What a guest reads first is asked for before it asks, and used only where it is what the guest would get."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torpor.cache.v1 import cache_pb2
from torpor_host.operator_spec import ResourceRef
from torpor_host.read_ahead import AGE_S_MAX, KEYS, ReadAhead
from torpor_host.timers import Timers
from torpor_host.work_queue import Cause, Key, Work, WorkQueue
from torpor_services.clock import ManualClock

JSON = "application/json"


class Asked:
    def __init__(self, path: str, trace: str) -> None:
        self.path, self.trace, self.dropped = path, trace, False

    def drop(self) -> None:
        self.dropped = True


class Bench:
    """An operator's queue and a turn of it; `minimum` is what its reads must have reached."""

    first_read: str | None = JSON

    def __init__(self, resource: str = "example.com/v1/widgets") -> None:
        self.now_s = 0.0
        self.queue = WorkQueue(Timers(ManualClock()), threading.Lock(), self)
        self.asked: list[Asked] = []
        self.minimum = ""
        self.refused = False
        self.ahead = ReadAhead(self, ResourceRef.parse(resource, ""), self, self.queue.peek, lambda: self.now_s)  # type: ignore[arg-type]

    def work_ready(self) -> None: ...

    def read_message(self, path: str, accept: str) -> cache_pb2.HttpRequest | None:
        return None if self.refused else self.message(path, accept)

    def message(self, path: str, accept: str = JSON, method: str = "GET") -> cache_pb2.HttpRequest:
        message = cache_pb2.HttpRequest(method=method, path=path, accept=accept)
        if self.minimum:
            message.minimum.add().position.resource_version = self.minimum
        return message

    def start(self, message: cache_pb2.HttpRequest, trace: str) -> Any:
        self.asked.append(Asked(message.path, trace))
        return self.asked[-1]

    def event(self, *names: str, cause: Cause = Cause.WATCH, trace: str = "") -> None:
        for name in names:
            traces = (trace,) if trace else ()
            self.queue.add(Key("ns", name), cause, now_s=0.0, now_unix_ns=0, traces=traces)

    def take(self) -> Work:
        work = self.queue.take()
        assert work is not None
        return work

    def reconcile(self, *, path: str = "", accept: str = JSON, method: str = "GET") -> Any:
        """One key whose first request is this one, its own object if nothing else is said; what was ahead of it."""
        work = self.take()
        self.ahead.begin(work)
        got = self.ahead.take(self.message(path or path_of(work.key.name), accept, method))
        self.ahead.end()
        self.queue.succeeded(work)
        return got


def path_of(name: str) -> str:
    return f"/apis/example.com/v1/namespaces/ns/widgets/{name}"


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_answer_is_used_once_by_the_request_it_answers(bench: Bench) -> None:
    bench.event("a", trace="t")
    bench.ahead.fill()
    assert [(asked.path, asked.trace) for asked in bench.asked] == [(path_of("a"), "t")]
    work = bench.take()
    bench.ahead.begin(work)
    assert bench.ahead.take(bench.message(path_of("a"))) is bench.asked[0]
    assert bench.ahead.take(bench.message(path_of("a"))) is None
    bench.ahead.end()
    bench.ahead.close()
    assert not bench.asked[0].dropped and len(bench.asked) == 1


def test_nothing_is_asked_for_until_a_reconcile_has_begun_with_its_own_object(bench: Bench) -> None:
    bench.first_read = None
    bench.event("a", "b", "c")
    bench.ahead.fill()
    assert not bench.asked
    assert bench.reconcile() is None
    assert bench.reconcile() is None, "it is known from the next key on"
    assert bench.reconcile() is bench.asked[0] and bench.asked[0].path == path_of("c")


@pytest.mark.parametrize(
    "first",
    [{"path": path_of("other")}, {"method": "PUT"}, {"path": path_of("a") + "?resourceVersion=0"}],
    ids=["another object", "a write", "a parameter"],
)
def test_a_reconcile_that_begins_in_another_way_ends_it(bench: Bench, first: dict[str, str]) -> None:
    bench.event("a", "b")
    bench.ahead.fill()
    assert bench.reconcile(**first) is None
    assert bench.asked[0].dropped and bench.first_read is None


def test_a_reconcile_that_asks_for_nothing_ends_it(bench: Bench) -> None:
    bench.event("a")
    bench.ahead.fill()
    bench.ahead.begin(bench.take())
    bench.ahead.end()
    assert bench.asked[0].dropped and bench.first_read is None


def test_another_accept_header_is_another_answer_and_is_learned(bench: Bench) -> None:
    bench.event("a")
    bench.ahead.fill()
    assert bench.reconcile(accept="application/yaml") is None
    assert bench.asked[0].dropped and bench.first_read == "application/yaml"


def test_an_event_after_it_was_asked_for_makes_it_old(bench: Bench) -> None:
    bench.event("a", "b")
    bench.ahead.fill()
    bench.event("a")
    assert bench.reconcile() is None and bench.asked[0].dropped
    assert bench.reconcile() is bench.asked[1]


def test_a_key_that_is_dirty_again_is_not_served_what_its_first_run_was(bench: Bench) -> None:
    bench.event("a")
    bench.ahead.fill()
    work = bench.take()
    bench.ahead.begin(work)
    bench.event("a")
    bench.ahead.end()
    bench.queue.succeeded(work)
    assert bench.reconcile() is None


def test_a_write_meanwhile_asks_for_a_newer_version_than_the_answer_has(bench: Bench) -> None:
    bench.event("a")
    bench.ahead.fill()
    bench.minimum = "42"
    assert bench.reconcile() is None and bench.asked[0].dropped
    assert bench.first_read == JSON


def test_after_a_second_it_is_old_whatever_happened(bench: Bench) -> None:
    bench.event("a", "b")
    bench.ahead.fill()
    bench.now_s += AGE_S_MAX
    assert bench.reconcile() is bench.asked[0]
    bench.now_s += 0.001
    assert bench.reconcile() is None


def test_what_comes_next_is_asked_for_in_batches_live_keys_first(bench: Bench) -> None:
    bench.event(*(f"k{n}" for n in range(20)), cause=Cause.START)
    bench.event("live")
    bench.ahead.fill()
    assert [asked.path for asked in bench.asked] == [path_of(name) for name in ("live", *(f"k{n}" for n in range(7)))]
    bench.ahead.fill()
    assert len(bench.asked) == KEYS
    for _ in range(21):
        assert bench.reconcile() is not None
    assert len(bench.asked) == 21


def test_the_end_of_the_turn_drops_what_is_left_and_a_fence_asks_for_nothing(bench: Bench) -> None:
    bench.event("a", "b")
    bench.ahead.fill()
    bench.ahead.close()
    assert [asked.dropped for asked in bench.asked] == [True, True]
    bench.refused = True
    bench.ahead.fill()
    assert len(bench.asked) == 2


def test_cluster_scoped_and_core_kinds_have_their_paths() -> None:
    bench = Bench("v1/nodes")
    bench.queue.add(Key("", "a b"), Cause.WATCH, now_s=0.0, now_unix_ns=0)
    bench.ahead.fill()
    assert bench.asked[0].path == "/api/v1/nodes/a%20b"


def test_a_guest_that_reads_late_gets_no_old_answer(bench: Bench) -> None:
    bench.event("a")
    bench.ahead.fill()
    bench.ahead.begin(bench.take())
    bench.now_s += AGE_S_MAX + 0.001  # it slept, say
    assert bench.ahead.take(bench.message(path_of("a"))) is None and bench.asked[0].dropped


def test_keys_that_are_no_longer_to_come_make_room(bench: Bench) -> None:
    bench.event(*(f"k{n}" for n in range(40)))
    bench.ahead.fill()
    for _ in range(KEYS):  # another turn of the operator takes them
        bench.queue.succeeded(bench.take())
    assert bench.reconcile() is None
    assert all(asked.dropped for asked in bench.asked[:KEYS]) and len(bench.asked) == 2 * KEYS
    assert bench.reconcile() is not None
