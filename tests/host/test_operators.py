"""Operators, their turns and their residency, with guests that are functions; every step is taken by the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torpor.cache.v1 import cache_pb2
from torpor_host import abi
from torpor_host.failures import GuestStopped, GuestTrapped, InstallFailed
from torpor_host.installation import Problem
from torpor_host.operator_record import Operator
from torpor_host.operators import CRASHES_MAX, DEGRADED_AFTER
from torpor_host.own_writes import RUN_MAX
from torpor_host.residency import Keep, Phase, UnloadAt
from torpor_host.subscriber import Event
from torpor_host.testing_bench import OP, Bench
from torpor_host.work_queue import Key


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_event_wakes_a_sleeping_operator_and_idleness_unloads_it(bench: Bench) -> None:
    operator = bench.adopt()
    assert [s.name for s in bench.subscriptions.present] == ["for", "owns/0"]
    bench.event(operator, "a")
    bench.run()
    assert bench.ran == ["a watch 0"] and operator.residency.phase is Phase.RESIDENT
    bench.advance(4.9)
    assert operator.residency.phase is Phase.RESIDENT
    bench.advance(0.2)
    assert operator.residency.phase is Phase.COLD and bench.loads[0].closed
    assert (operator.wakes, operator.reconciles, operator.errors) == (1, 1, 0)


def test_a_loaded_guest_drains_its_queue_in_one_turn(bench: Bench) -> None:
    operator = bench.adopt()
    for i in range(50):
        bench.event(operator, f"k{i}")
    bench.run()
    assert len(bench.ran) == 50 and operator.wakes == 1


def test_what_the_snapshot_shows_waits_behind_what_changes(bench: Bench) -> None:
    operator = bench.adopt()
    bench.event(operator, "old-1", Event.ADDED, live=0)
    bench.event(operator, "old-2", Event.ADDED, live=0)
    bench.event(operator, "new", Event.MODIFIED, live=1)
    bench.run()
    assert bench.ran == ["new watch 0", "old-1 start 0", "old-2 start 0"]


def test_an_event_during_the_snapshot_of_an_unload_turns_it_round(bench: Bench) -> None:
    operator = bench.adopt(unload={"policy": "idle", "idleAfter": "5s", "state": "snapshot"})
    bench.event(operator, "a")
    bench.run()
    bench.on_snapshot = lambda: bench.event(operator, "b")
    bench.advance(6)
    assert bench.ran == ["a watch 0", "b watch 0"]
    assert operator.wakes == 1 and not bench.loads[0].closed, "the instance was kept"
    assert operator.snapshot is None, "and its snapshot is not woken from later"


def test_a_snapshot_is_kept_and_used_once(bench: Bench) -> None:
    operator = bench.adopt(unload={"policy": "idle", "idleAfter": "5s", "state": "snapshot"})
    bench.event(operator, "a")
    bench.run()
    bench.advance(6)
    assert operator.snapshot is not None and operator.snapshot.epoch == 1
    bench.event(operator, "b")
    bench.run()
    assert operator.snapshot is None


def test_a_trap_costs_the_instance_delays_its_key_and_nobody_else(bench: Bench) -> None:
    operator = bench.adopt()

    def behaviour(key: str) -> bytes:
        if key.endswith("bad"):
            raise GuestTrapped("unreachable")
        return abi.encode([b"done"])

    bench.behaviour = behaviour
    bench.event(operator, "bad")
    bench.event(operator, "good")
    bench.run()
    assert bench.ran == ["bad watch 0", "good watch 0"]
    assert bench.loads[0].closed and len(bench.loads) == 2
    assert operator.errors == 1 and "bad" in operator.last_error and "unreachable" in operator.last_error
    bench.behaviour = lambda key: abi.encode([b"done"])
    bench.advance(0.006)
    assert bench.ran[-1] == "bad retry 1"


def test_after_many_crashes_in_a_row_the_whole_operator_rests(bench: Bench) -> None:
    operator = bench.adopt()

    def trap(key: str) -> bytes:
        raise GuestTrapped("always")

    bench.behaviour = trap
    for i in range(CRASHES_MAX):
        bench.event(operator, f"k{i}")
    bench.run()
    assert operator.residency.phase is Phase.FAILED
    ready = operator.condition("Ready")
    assert ready is not None and (ready.status, ready.reason) == ("False", "Resting")
    runs = len(bench.ran)
    bench.event(operator, "during")
    bench.run()
    assert len(bench.ran) == runs, "it rests"
    bench.behaviour = lambda key: abi.encode([b"done"])
    bench.advance(2000)
    assert operator.residency.phase is not Phase.FAILED and operator.queue.idle
    assert any(run.startswith("during") for run in bench.ran)


def test_a_guest_that_does_not_load_rests_and_its_keys_wait(bench: Bench) -> None:
    operator = bench.adopt()
    bench.load_error = GuestTrapped("in torpor_wake")
    bench.event(operator, "a")
    bench.run()
    assert operator.residency.phase is Phase.FAILED and operator.queue.queued == 1
    bench.load_error = None
    bench.advance(1.5)
    assert bench.ran == ["a watch 0"]


def test_a_lost_image_is_installed_again(bench: Bench) -> None:
    operator = bench.adopt()
    bench.load_error = InstallFailed("the image is gone")
    bench.event(operator, "a")
    bench.run()
    assert bench.verified == [OP] and operator.generation == 0


def test_an_error_of_the_operator_is_retried_and_keeps_the_instance(bench: Bench) -> None:
    operator = bench.adopt()
    bench.behaviour = lambda key: abi.encode([b"error", b"", b"not yet"])
    bench.event(operator, "a")
    bench.run()
    assert operator.last_error == "default/a: not yet" and len(bench.loads) == 1
    bench.advance(0.006)
    assert bench.ran == ["a watch 0", "a retry 1"]


def test_a_requeue_comes_when_it_is_due(bench: Bench) -> None:
    operator = bench.adopt()
    bench.behaviour = lambda key: abi.encode([b"requeue", b"60000"])
    bench.event(operator, "a")
    bench.run()
    assert bench.operators.next_wake_s(operator) == bench.clock.now_s + 60
    bench.advance(59)
    assert operator.residency.phase is Phase.COLD and len(bench.ran) == 1
    bench.advance(1.1)
    assert bench.ran == ["a watch 0", "a timer 0"]


def test_a_requeue_at_once_comes_after_a_tenth_of_a_second(bench: Bench) -> None:
    operator = bench.adopt()
    bench.behaviour = lambda key: abi.encode([b"requeue", b"0"])
    bench.event(operator, "a")
    bench.run()
    assert bench.ran == ["a watch 0"]
    bench.advance(0.099)
    assert len(bench.ran) == 1
    bench.advance(0.002)
    assert bench.ran == ["a watch 0", "a timer 0"]


def test_an_error_stands_in_the_operators_log(bench: Bench) -> None:
    operator = bench.adopt()
    bench.behaviour = lambda key: abi.encode([b"error", b"", b"Traceback: no"])
    bench.event(operator, "a")
    bench.run()
    assert [(line.level, line.text) for line in bench.logs.tail(operator.id)] == [("error", "default/a: Traceback: no")]


def test_an_answer_that_cannot_be_read_costs_the_instance(bench: Bench) -> None:
    operator = bench.adopt()
    bench.behaviour = lambda key: b"\x01\x02"
    bench.event(operator, "a")
    bench.run()
    assert operator.errors == 1 and bench.stopped == ["its answer cannot be read"]


def test_a_reconcile_that_ends_after_the_lease_was_lost_counts_as_not_run(bench: Bench) -> None:
    operator = bench.adopt()

    def lose(key: str) -> bytes:
        bench.lease = "the Lease is lost"
        return abi.encode([b"done"])

    bench.behaviour = lose
    bench.event(operator, "a")
    bench.workers.jobs.popleft()()
    bench.loop()
    assert operator.queue.oldest_sequence() == 1 and operator.queue.queued == 1
    bench.lease, bench.behaviour = "", lambda key: abi.encode([b"done"])
    bench.advance(1)
    assert bench.ran == ["a watch 0", "a watch 0"] and operator.queue.oldest_sequence() == 0


def test_a_reconcile_that_is_done_only_because_its_deadline_ended_its_sleep_has_failed(bench: Bench) -> None:
    operator = bench.adopt()

    def sleep(key: str) -> bytes:
        bench.clock.now_s += 60.0  # the default of limits.deadline
        bench.behaviour = lambda key: abi.encode([b"done"])
        return abi.encode([b"done"])

    bench.behaviour = sleep
    bench.event(operator, "a")
    bench.run()
    assert operator.errors == 1 and "deadline of 60 s" in operator.last_error
    bench.advance(1)
    assert bench.ran == ["a watch 0", "a retry 1"] and operator.errors == 1


def test_a_stopped_reconcile_counts_as_not_run_and_is_no_failure(bench: Bench) -> None:
    operator = bench.adopt()

    def stop(key: str) -> bytes:
        bench.behaviour = lambda key: abi.encode([b"done"])
        raise GuestStopped("the host shuts down")

    bench.behaviour = stop
    bench.event(operator, "a")
    bench.run()
    assert bench.ran == ["a watch 0", "a watch 0"] and operator.errors == 0


def test_a_fenced_operator_does_not_act_until_its_assignment_is_confirmed(bench: Bench) -> None:
    operator = bench.adopt()
    operator.report_fenced("epoch 2 is confirmed")
    bench.run()
    assert bench.verified == [OP] and "epoch 2" in operator.refusal()
    bench.event(operator, "a")
    bench.advance(1)
    assert bench.ran == []
    bench.operators.confirmed(OP)
    bench.advance(1)
    assert bench.ran == ["a watch 0"]


def test_a_dropped_operator_is_stopped_and_forgotten(bench: Bench) -> None:
    operator = bench.adopt()
    bench.event(operator, "a")
    bench.run()
    bench.operators.drop(OP, "it was deleted")
    bench.run()
    assert bench.loads[0].closed and not bench.subscriptions.present and len(bench.operators) == 0
    assert not bench.operators.moving and len(bench.timers) == 0
    bench.operators.work_arrived(operator)
    bench.run()
    assert bench.ran == ["a watch 0"]


def test_an_operator_dropped_while_it_runs_is_stopped_and_its_instance_closed(bench: Bench) -> None:
    operator = bench.adopt()

    def drop(key: str) -> bytes:
        bench.operators.drop(OP, "it was deleted")
        return abi.encode([b"done"])

    bench.behaviour = drop
    bench.event(operator, "a")
    bench.run()
    assert bench.stopped == ["it was deleted"] and bench.loads[0].closed and not bench.operators.moving


def test_a_new_generation_is_drained_into_and_runs_every_key(bench: Bench) -> None:
    operator = bench.adopt()
    bench.event(operator, "a", Event.ADDED)
    bench.run()
    kept = operator.subscriptions[0]
    bench.adopt(generation=2, owns=[], config={"x": 1})
    assert operator.spec is not None and operator.spec.generation == 2
    assert operator.actor is not None and b'"x":1' in operator.actor.settings
    assert bench.subscriptions.present == [kept], "the watch that asks for the same goes on"
    assert bench.ran == ["a watch 0", "a start 0"] and bench.loads[0].closed


def test_another_primary_forgets_the_keys_of_the_old_one(bench: Bench) -> None:
    operator = bench.adopt()
    bench.event(operator, "a", Event.ADDED)
    bench.run()
    old = list(operator.subscriptions)
    bench.adopt(generation=2, **{"for": {"resource": "v1/secrets"}})
    assert len(operator.known) == 0 and not set(old) & set(bench.subscriptions.present)
    assert bench.ran == ["a watch 0"]


def test_a_generation_that_cannot_be_installed_leaves_the_running_one(bench: Bench) -> None:
    operator = bench.adopt()
    bench.install_problem = Problem("ModuleRefused", "it is broken", final=True)
    bench.adopt(generation=2)
    installed = operator.condition("Installed")
    assert installed is not None and (installed.status, installed.reason) == ("False", "ModuleRefused")
    bench.event(operator, "a")
    bench.run()
    assert bench.ran == ["a watch 0"]
    assert operator.shown_phase is not Phase.FAILED, "the earlier generation runs"


def test_what_cannot_be_installed_is_told_as_failed_with_the_reason(bench: Bench) -> None:
    bench.install_problem = Problem("ModuleRefused", "it is broken", final=True)
    operator = bench.adopt()
    assert operator.shown_phase is Phase.FAILED and operator.shown_error == "it is broken"


def test_an_adopted_operator_is_told_of_before_it_is_installed(bench: Bench) -> None:
    told: list[int] = []

    class Told:
        def phase_changed(self, operator: Operator) -> None:
            told.append(operator.epoch)
            assert operator.spec is None or len(told) > 1

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: None

    bench.operators.observers.append(Told())
    bench.install_problem = Problem("ModuleUnavailable", "not there", final=True)
    bench.adopt(epoch=7)
    assert told == [7]


def test_an_installation_that_failed_for_now_is_tried_again(bench: Bench) -> None:
    bench.install_problem = Problem("ModuleUnavailable", "not there yet", final=False)
    operator = bench.adopt()
    assert operator.spec is None
    bench.install_problem = None
    bench.advance(1.1)
    assert operator.spec is not None and len(bench.subscriptions.present) == 2


def test_a_resync_runs_every_known_key_behind_live_ones(bench: Bench) -> None:
    operator = bench.adopt(resync="1h")
    for name in ("a", "b"):
        bench.event(operator, name, Event.ADDED)
    bench.run()
    bench.ran.clear()
    bench.advance(3601)
    assert sorted(bench.ran) == ["a resync 0", "b resync 0"]
    bench.advance(3601)
    assert len(bench.ran) == 4


def test_a_lost_history_runs_what_is_known_and_forgets_what_is_gone(bench: Bench) -> None:
    operator = bench.adopt()
    for name in ("stays", "gone"):
        bench.event(operator, name, Event.ADDED)
    bench.run()
    bench.ran.clear()
    primary = operator.subscriptions[0]
    bench.operators.on_resync(operator, primary, 100)
    bench.event(operator, "stays", Event.ADDED, live=0)
    operator.subscriptions[0].progress.synced = True
    bench.operators.on_synced(operator, primary)
    bench.run()
    assert {run.split()[0] for run in bench.ran} == {"stays", "gone"}
    assert operator.known.keys() == [Key("default", "stays")]


def test_deleting_a_primary_runs_it_and_forgets_it(bench: Bench) -> None:
    operator = bench.adopt()
    bench.event(operator, "a", Event.ADDED)
    bench.run()
    bench.event(operator, "a", Event.DELETED)
    bench.run()
    assert len(bench.ran) == 2 and len(operator.known) == 0


def test_the_schedulers_word_counts_only_until_something_happens(bench: Bench) -> None:
    operator = bench.adopt(unload={"policy": "predictive"})
    bench.event(operator, "a")
    bench.run()
    bench.operators.advise(operator, Keep(), "soon")
    bench.advance(3600)
    assert operator.residency.phase is Phase.RESIDENT
    bench.event(operator, "a")
    bench.run()
    bench.advance(601)
    assert operator.residency.phase is Phase.COLD, "break-even without advice"


def test_the_scheduler_unloads_and_preloads(bench: Bench) -> None:
    operator = bench.adopt(unload={"policy": "predictive"})
    bench.event(operator, "a")
    bench.run()
    bench.operators.advise(operator, UnloadAt(0.0), "now")
    bench.run()
    assert operator.residency.phase is Phase.COLD
    bench.operators.advise_preload(operator, bench.clock.now_s + 10, bench.clock.now_s + 20, "it comes")
    bench.advance(10)
    assert operator.residency.phase is Phase.RESIDENT and len(bench.ran) == 1
    bench.advance(10)
    assert operator.residency.phase is Phase.COLD


def test_without_the_scheduler_its_old_advice_no_longer_counts(bench: Bench) -> None:
    operator = bench.adopt(unload={"policy": "predictive"})
    bench.event(operator, "a")
    bench.run()
    bench.operators.advise(operator, Keep(), "soon")
    bench.operators.scheduler_away()
    bench.advance(601)
    assert operator.residency.phase is Phase.COLD


def test_above_the_memory_budget_idle_guests_leave_the_oldest_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path, budget=(5 << 20) // 2)
    operators = [bench.adopt(name=f"op-{i}", unload={"policy": "idle", "idleAfter": "1h"}) for i in range(3)]
    for operator in operators:
        bench.event(operator, "a")
        bench.run()
    assert [o.residency.phase for o in operators] == [Phase.COLD, Phase.RESIDENT, Phase.RESIDENT]


def test_two_calls_run_at_once_where_the_operator_allows_it(bench: Bench) -> None:
    operator = bench.adopt(concurrency=2)
    bench.event(operator, "a")
    job = bench.workers.jobs.popleft()

    def during(key: str) -> bytes:
        bench.behaviour = lambda key: abi.encode([b"done"])
        bench.loop()  # the first turn has loaded
        bench.event(operator, "b")
        assert operator.residency.turns == 2
        bench.workers.jobs.popleft()()
        return abi.encode([b"done"])

    bench.behaviour = during
    job()
    bench.run()
    assert bench.ran == ["a watch 0", "b watch 0"] and len(bench.loads) == 2


def test_a_long_drain_gives_way_when_others_wait_and_keeps_its_instance(bench: Bench) -> None:
    busy, other = bench.adopt(name="busy"), bench.adopt(name="other")

    def slow(key: str) -> bytes:
        bench.clock.now_s += 0.015
        return abi.encode([b"done"])

    bench.behaviour = slow
    for i in range(6):
        bench.event(busy, f"busy-{i}")
    bench.event(other, "other")
    bench.workers.contended = True
    bench.run()
    assert bench.ran.index("other watch 0") == 2, "two keys of 15 ms, then it was the other's turn"
    assert len(bench.ran) == 7 and busy.wakes == 1


def test_time_that_a_turn_waits_is_not_counted_as_taken_from_others(bench: Bench) -> None:
    busy, other = bench.adopt(name="busy"), bench.adopt(name="other")
    cpu = [0.0]

    def waits(key: str) -> bytes:
        bench.clock.now_s += 0.05  # of which nothing on the processor
        return abi.encode([b"done"])

    bench.operators.reconciler._cpu_s = lambda: cpu[0]
    bench.behaviour = waits
    for i in range(8):
        bench.event(busy, f"busy-{i}")
    bench.event(other, "other")
    bench.workers.contended = True
    bench.run()
    assert bench.ran.index("other watch 0") == 6, "what it may wait for others is a quarter of a second"


def test_an_instance_that_does_not_load_beside_one_that_runs_is_no_reason_to_rest(bench: Bench) -> None:
    operator = bench.adopt(concurrency=2)
    bench.event(operator, "a")
    job = bench.workers.jobs.popleft()

    def during(key: str) -> bytes:
        bench.behaviour = lambda key: abi.encode([b"done"])
        bench.loop()
        bench.event(operator, "b")
        bench.load_error = GuestTrapped("no room for two")
        return abi.encode([b"done"])

    bench.behaviour = during
    second_first = bench.workers.jobs
    job()
    assert second_first, "the second turn was promised"
    bench.run()
    assert "b watch 0" in bench.ran and operator.residency.phase is Phase.RESIDENT


def test_shutdown_lets_what_runs_end_and_starts_nothing(bench: Bench) -> None:
    operator = bench.adopt()
    bench.event(operator, "a")
    bench.event(operator, "b")

    def shut(key: str) -> bytes:
        bench.operators.hold_all()
        return abi.encode([b"done"])

    bench.behaviour = shut
    bench.run()
    assert bench.ran == ["a watch 0"] and not bench.operators.moving and bench.loads[0].closed
    assert operator.queue.queued == 1


def test_a_sleeping_operator_costs_at_most_eight_kibibytes(bench: Bench) -> None:
    import tracemalloc

    def sleep(first: int, count: int) -> None:
        for i in range(first, first + count):
            operator = bench.adopt(name=f"op-{i}")
            bench.event(operator, "a", Event.ADDED)
            bench.run()
        bench.advance(10)
        bench.loads.clear()
        bench.ran.clear()

    sleep(0, 20)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    sleep(20, 100)
    each = (tracemalloc.get_traced_memory()[0] - before) / 100
    tracemalloc.stop()
    assert each < 8192, f"{each:.0f} bytes"


def test_wake_latencies_are_of_the_last_wakes(bench: Bench) -> None:
    operator = bench.adopt()
    for i in range(300):
        operator.entered(i / 1000)
    assert operator.latency(0.0) == pytest.approx(0.044) and operator.latency(0.99) > 0.29


def test_a_stopped_guest_is_not_left_in_the_call_it_waits_for(bench: Bench) -> None:
    operator = bench.adopt()
    cancelled: list[str] = []

    def wait(key: str) -> bytes:
        (loaded,) = operator.running
        with loaded.calls._in_flight.waiting(lambda: cancelled.append(key)):
            bench.operators.drop_all("the Lease is lost")
        raise GuestStopped("the Lease is lost")

    bench.behaviour = wait
    bench.event(operator, "a")
    bench.run()
    assert cancelled == ["default/a"] and bench.stopped == ["the Lease is lost"]


def test_events_during_a_fence_leave_one_timer(bench: Bench) -> None:
    operator = bench.adopt()
    before = len(bench.timers)
    operator.fenced = "another assignment may be confirmed"
    for i in range(20):
        bench.event(operator, f"k{i}")
        bench.run()
    assert len(bench.timers) == before + 1 and bench.ran == []
    operator.fenced = ""
    bench.advance(1)
    assert len(bench.ran) == 20


def failing(key: str) -> bytes:
    return abi.encode([b"error", b"", b"Traceback\nValueError: always"])


def test_an_operator_whose_every_reconcile_fails_is_degraded_until_one_succeeds(bench: Bench) -> None:
    operator = bench.adopt()
    bench.operators.on_synced(operator, operator.subscriptions[0])
    for subscription in operator.subscriptions:
        subscription.progress.synced = True
    bench.operators.on_synced(operator, operator.subscriptions[0])
    assert operator.is_true("Ready") and operator.condition("Degraded").status == "False"  # type: ignore[union-attr]
    bench.behaviour = failing
    bench.event(operator, "a")
    bench.run()
    assert operator.failures == 1 and operator.is_true("Ready"), "one failure may come of anything"
    for _ in range(DEGRADED_AFTER - 2):
        bench.advance(1)
    assert operator.failures == DEGRADED_AFTER - 1 and not operator.degraded
    bench.advance(1)
    degraded = operator.condition("Degraded")
    assert degraded is not None and (degraded.status, degraded.reason) == ("True", "ReconcilesFail")
    assert "ValueError: always" in degraded.message and not operator.is_true("Ready")
    bench.advance(1)
    assert operator.failures > DEGRADED_AFTER and operator.condition("Degraded") == degraded, (
        "a failure more changes nothing"
    )
    bench.behaviour = lambda key: abi.encode([b"done"])
    bench.event(operator, "b")
    bench.run()
    assert not operator.degraded and operator.is_true("Ready")


def test_one_object_that_fails_among_others_that_do_not_degrades_nothing(bench: Bench) -> None:
    operator = bench.adopt()
    bench.behaviour = lambda key: failing(key) if key.endswith("bad") else abi.encode([b"done"])
    for i in range(DEGRADED_AFTER * 2):
        bench.event(operator, "bad")
        bench.event(operator, f"good-{i}")
        bench.run()
    assert operator.errors >= DEGRADED_AFTER and not operator.degraded


def write(operator: Operator, version: int) -> None:
    position = cache_pb2.Position(resource_version=str(version))
    resource = cache_pb2.Resource(version="v1", resource="configmaps")
    operator.positions.written(cache_pb2.MinimumVersion(resource=resource, position=position))


def live(bench: Bench, operator: Operator, name: str, version: int) -> None:
    key = cache_pb2.ObjectKey(namespace="default", name=name)
    event = Event(
        type=Event.MODIFIED, key=key, received_unix_ns=1, position=cache_pb2.Position(resource_version=str(version))
    )
    bench.sequence += 1
    bench.operators.on_event(operator, operator.subscriptions[0], [Key("default", name)], event, bench.sequence)
    bench.run()


def test_an_operator_that_writes_its_primary_each_time_is_told_of_and_no_longer_after_a_pause(bench: Bench) -> None:
    operator = bench.adopt()
    version = 10

    def behaviour(key: str) -> bytes:
        nonlocal version
        version += 1
        write(operator, version)
        return abi.encode([b"done"])

    bench.behaviour = behaviour
    live(bench, operator, "a", version)
    for _ in range(RUN_MAX - 1):
        live(bench, operator, "a", version)
    assert operator.own_writes.total == RUN_MAX - 1 and not operator.wakes_itself
    live(bench, operator, "a", version)
    warning = operator.condition("WakesItself")
    assert warning is not None and (warning.status, warning.reason) == ("True", "OwnWrites")
    live(bench, operator, "a", version)
    assert [line.level for line in bench.logs.tail(operator.id)] == ["warning"], "told once"
    bench.advance(2)
    live(bench, operator, "a", version)
    assert not operator.wakes_itself


def test_a_write_whose_event_comes_before_its_answer_still_counts(bench: Bench) -> None:
    operator = bench.adopt()

    def behaviour(key: str) -> bytes:
        operator.own_writes.shown("11")
        write(operator, 11)
        return abi.encode([b"done"])

    bench.behaviour = behaviour
    live(bench, operator, "a", 10)
    live(bench, operator, "a", 11)
    assert operator.own_writes.total == 1


def test_writes_that_change_nothing_and_changes_from_outside_are_no_own_wakes(bench: Bench) -> None:
    operator = bench.adopt()
    version = 10
    bench.behaviour = lambda key: (write(operator, version), abi.encode([b"done"]))[1]
    for _ in range(RUN_MAX + 1):
        version += 1
        live(bench, operator, "a", version)
    assert operator.own_writes.total == 0 and not operator.wakes_itself
