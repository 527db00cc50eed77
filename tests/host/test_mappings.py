"""Mappings in code: from a changed object by way of the guest to reconciled keys, and what goes wrong on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torpor.cache.v1 import cache_pb2
from torpor_host import abi, map_queue
from torpor_host.failures import GuestFailed, GuestStopped, GuestTimedOut, GuestTrapped, InstallFailed
from torpor_host.operator_record import Operator
from torpor_host.residency import Phase
from torpor_host.subscriber import Event
from torpor_host.testing_bench import OP, Bench

CODED: dict[str, Any] = {
    "owns": [],
    "watches": [{"resource": "v1/namespaces", "predicates": ["labels"], "mapping": {"code": True}}],
}


def keys(*names: str, error: str = "") -> bytes:
    return abi.encode([error.encode(), *(f"default/{name}".encode() for name in names)])


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def operator(bench: Bench) -> Operator:
    return bench.adopt(**CODED)


def known(bench: Bench, operator: Operator, *names: str) -> None:
    for name in names:
        bench.event(operator, name, Event.ADDED)
    bench.run()
    bench.advance(6)
    bench.ran.clear()
    bench.loads.clear()


def test_the_cache_is_asked_for_both_objects_and_for_no_keys(operator: Operator) -> None:
    request = operator.subscribe_request(operator.subscriptions[1])
    assert request.payload == cache_pb2.PAYLOAD_FULL and request.mappings[0].code
    assert list(request.predicates) == [cache_pb2.PREDICATE_LABELS] and request.name == "watches/0"
    primary = operator.subscribe_request(operator.subscriptions[0])
    assert primary.payload == cache_pb2.PAYLOAD_KEY


def test_a_change_is_mapped_and_its_keys_are_reconciled_and_all_sleeps_again(bench: Bench, operator: Operator) -> None:
    bench.mapping = lambda obj: keys("a", "b", "a")
    bench.change(operator, "team", "new", "old")
    assert operator.oldest_sequence() == bench.sequence
    bench.run()
    assert bench.mapped == ["0 MODIFIED new old"] and bench.ran == ["a watch 0", "b watch 0"]
    assert bench.loads[0].closed and operator.oldest_sequence() == 0
    assert (operator.wakes, operator.reconciles, operator.errors) == (2, 2, 0)
    bench.advance(6)
    assert operator.residency.phase is Phase.COLD and all(guest.closed for guest in bench.loads)
    assert bench.operators.used_bytes == 0 and not bench.operators.moving


def test_a_change_that_concerns_no_key_wakes_nobody_for_long(bench: Bench, operator: Operator) -> None:
    bench.change(operator, "team", "new")
    bench.run()
    assert operator.residency.phase is Phase.COLD and bench.loads[0].closed and bench.ran == []
    assert operator.oldest_sequence() == 0


def test_the_position_waits_until_the_keys_are_reconciled(bench: Bench, operator: Operator) -> None:
    bench.mapping = lambda obj: keys("a")
    bench.behaviour = lambda key: abi.encode([b"error", b"", b"not yet"])
    bench.change(operator, "team", "new")
    bench.run()
    assert operator.oldest_sequence() == bench.sequence, "mapped, not reconciled"
    bench.behaviour = lambda key: abi.encode([b"done"])
    bench.advance(1)
    assert operator.oldest_sequence() == 0


def test_it_does_not_wait_behind_a_reconcile(bench: Bench, operator: Operator) -> None:
    bench.mapping = lambda obj: keys("b")

    def long_call(key: str) -> bytes:
        if key == "default/a":
            bench.change(operator, "team", "new")
            bench.workers.jobs.popleft()()  # another worker, while this one waits for its call
            assert bench.mapped == ["0 MODIFIED new"]
        return abi.encode([b"done"])

    bench.behaviour = long_call
    bench.event(operator, "a")
    bench.run()
    assert bench.ran == ["a watch 0", "b watch 0"] and len(bench.loads) == 2


def test_changes_of_a_snapshot_are_background_work_and_those_of_one_object_are_one(
    bench: Bench, operator: Operator
) -> None:
    bench.mapping = lambda obj: keys("old") if obj == "listed" else keys("new")
    bench.change(operator, "a", "listed", kind=Event.ADDED, live=0)
    bench.change(operator, "b", "1", "0")
    bench.change(operator, "b", "2", "1")
    bench.run()
    assert bench.mapped == ["0 ADDED listed", "0 MODIFIED 2 0"]
    assert bench.ran == ["new watch 0", "old start 0"]


def test_a_deletion_is_mapped_also_when_only_the_name_is_known(bench: Bench, operator: Operator) -> None:
    bench.change(operator, "gone", "last", "last", kind=Event.DELETED)
    bench.run()
    bench.change(operator, "gone", "", kind=Event.DELETED)
    bench.run()
    assert bench.mapped == [
        "0 DELETED last last",
        '0 DELETED {"metadata":{"name":"gone","uid":"uid-gone"}}',
    ]


@pytest.mark.parametrize(
    "failure",
    [keys(error="not ready"), b"\x01\x02", keys("x" * 300), GuestTrapped("unreachable"), GuestTimedOut("spins")],
)
def test_a_failure_is_tried_again_and_ends_in_a_resync_of_every_primary(
    bench: Bench, operator: Operator, failure: bytes | GuestFailed
) -> None:
    known(bench, operator, "a", "b")

    def fail(obj: str) -> bytes:
        if isinstance(failure, GuestFailed):
            raise failure
        return failure

    bench.mapping = fail
    bench.change(operator, "team", "new")
    bench.run()
    assert len(bench.mapped) == 1 and bench.ran == [] and operator.oldest_sequence() == bench.sequence
    assert "team" in operator.last_error and "watches/0" in operator.last_error
    for _ in range(4):
        bench.advance(0.9)
    assert len(bench.mapped) == 5 and operator.errors == 5
    assert sorted(bench.ran) == ["a resync 0", "b resync 0"] and operator.oldest_sequence() == 0
    assert operator.residency.phase is Phase.RESIDENT, "the operator itself is not at fault"


def test_what_fails_once_is_mapped_after_a_rest(bench: Bench, operator: Operator) -> None:
    def once(obj: str) -> bytes:
        bench.mapping = lambda obj: keys("a")
        raise GuestTrapped("once")

    bench.mapping = once
    bench.change(operator, "team", "new")
    bench.run()
    assert bench.loads[0].closed
    bench.advance(0.05)
    assert len(bench.mapped) == 1
    bench.advance(0.06)
    assert len(bench.mapped) == 2 and bench.ran == ["a watch 0"]


def test_too_many_changes_end_in_a_resync(bench: Bench, operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    known(bench, operator, "a")
    monkeypatch.setattr(map_queue, "EVENTS_MAX", 10)
    for i in range(11):
        bench.change(operator, f"team-{i}", "new")
    first = bench.sequence - 10
    assert operator.oldest_sequence() == first, "the primaries hold the position now"
    bench.run()
    assert bench.mapped == [] and bench.ran == ["a resync 0"] and operator.oldest_sequence() == 0


def test_a_mapping_that_makes_keys_up_fills_no_memory(bench: Bench, operator: Operator) -> None:
    known(bench, operator, "a")
    bench.mapping = lambda obj: keys(*(f"{obj}-{i}" for i in range(60_000)))
    bench.change(operator, "one", "one")
    bench.change(operator, "two", "two")
    while bench.workers.jobs or bench.posted:
        bench.loop()
        if operator.queue.queued > 60_000:
            break
        if bench.workers.jobs and not bench.mapped:
            bench.workers.jobs.popleft()()
    assert operator.queue.queued == 60_001


def test_a_guest_that_does_not_load_ends_in_a_resync_too_and_is_installed_again(
    bench: Bench, operator: Operator
) -> None:
    known(bench, operator, "a")
    bench.load_error = InstallFailed("the image is gone")
    bench.change(operator, "team", "new")
    bench.run()
    assert bench.verified == [OP] and "image is gone" in operator.last_error
    for _ in range(4):
        bench.advance(0.9)
    bench.load_error = None
    bench.advance(300)
    assert bench.ran == ["a resync 0"] and operator.oldest_sequence() == 0


def test_without_the_lease_nothing_is_mapped_and_afterwards_it_is(bench: Bench, operator: Operator) -> None:
    bench.mapping = lambda obj: keys("a")
    bench.lease = "the Lease is lost"
    for i in range(3):
        bench.change(operator, f"team-{i}", "new")
    bench.run()
    assert bench.mapped == [] and bench.loads == []
    bench.lease = ""
    bench.advance(1)
    assert len(bench.mapped) == 3 and bench.ran == ["a watch 0"]


def test_a_mapping_that_ends_after_the_lease_was_lost_counts_as_not_run(bench: Bench, operator: Operator) -> None:
    def lose(obj: str) -> bytes:
        bench.lease = "the Lease is lost"
        return keys("a")

    bench.mapping = lose
    bench.change(operator, "team", "new")
    bench.run()
    assert bench.ran == [] and operator.oldest_sequence() == bench.sequence
    bench.lease, bench.mapping = "", lambda obj: keys("a")
    bench.advance(1)
    assert bench.mapped == ["0 MODIFIED new"] * 2 and bench.ran == ["a watch 0"]


def test_a_dropped_operator_stops_its_mapping_and_forgets_its_changes(bench: Bench, operator: Operator) -> None:
    def dropped(obj: str) -> bytes:
        bench.operators.drop(OP, "revoked")
        assert bench.operators.moving == 1
        raise GuestStopped("revoked")

    bench.mapping = dropped
    bench.change(operator, "one", "1")
    bench.change(operator, "two", "2")
    bench.run()
    assert bench.mapped == ["0 MODIFIED 1"] and bench.stopped == ["revoked"] and bench.loads[0].closed
    assert bench.operators.moving == 0 and bench.operators.mappings.memory.held_bytes == 0


def test_shutdown_waits_for_the_mapping_that_runs_and_begins_no_other(bench: Bench, operator: Operator) -> None:
    bench.mapping = lambda obj: keys("a")
    bench.change(operator, "one", "1")
    bench.operators.hold_all()
    assert bench.operators.moving == 1
    bench.run()
    assert bench.mapped == [] and bench.operators.moving == 0 and operator.oldest_sequence() == bench.sequence


def test_a_new_spec_waits_for_the_mapping_and_keeps_what_still_waits(bench: Bench, operator: Operator) -> None:
    def while_it_runs(obj: str) -> bytes:
        bench.mapping = lambda obj: keys("later")
        bench.operators.update(
            {
                "apiVersion": "torpor.dev/v1alpha1",
                "kind": "WasmOperator",
                "metadata": {"namespace": "default", "name": "op", "uid": "op", "generation": 2},
                "spec": {
                    "module": {"file": "x.wasm"},
                    "serviceAccountName": "x",
                    "for": {"resource": "v1/configmaps"},
                    "resync": "1h",
                    **CODED,
                },
            }
        )
        bench.installers.jobs.popleft()()
        bench.loop()
        assert operator.spec is not None and operator.spec.generation == 1, "nothing changes under a running guest"
        return keys("first")

    bench.mapping = while_it_runs
    bench.change(operator, "one", "1")
    bench.change(operator, "two", "2")
    bench.run()
    assert operator.spec is not None and operator.spec.generation == 2
    assert bench.mapped == ["0 MODIFIED 1", "0 MODIFIED 2"]
    assert sorted(bench.ran) == ["first watch 0", "later watch 0"] and operator.oldest_sequence() == 0


def test_a_spec_without_the_mapping_forgets_its_changes(bench: Bench, operator: Operator) -> None:
    bench.lease = "away"
    bench.change(operator, "one", "1")
    bench.lease = ""
    bench.adopt(generation=2)
    assert operator.mapping is None and operator.oldest_sequence() == 0
    bench.advance(10)
    assert bench.mapped == [] and bench.operators.mappings.memory.held_bytes == 0


def test_a_mapping_that_took_all_its_time_has_failed(bench: Bench, operator: Operator) -> None:
    def sleep(obj: str) -> bytes:
        bench.clock.now_s += 60
        bench.mapping = lambda obj: keys("a")
        return keys()

    bench.mapping = sleep
    bench.change(operator, "team", "new")
    bench.run()
    assert "limits.deadline" in operator.last_error and operator.oldest_sequence() == bench.sequence
    bench.advance(0.2)
    assert bench.ran == ["a watch 0"] and operator.oldest_sequence() == 0
