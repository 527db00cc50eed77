"""Events that wait for a mapping in code: what joins, what is bounded, what is given up."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor_host import map_queue
from torpor_host.map_queue import FAILURES_MAX, EventType, MapEvent, MapMemory, MapQueue
from torpor_host.work_queue import Cause, Key


def event(name: str, kind: EventType = "MODIFIED", new: str = "new", old: str = "", **fields: Any) -> MapEvent:
    given = {"watch": 0, "cause": Cause.WATCH, "sequence": 1, "since_s": 1.0, "since_unix_ns": 1, **fields}
    return MapEvent(key=Key("", name), type=kind, object=new.encode(), old=old.encode(), **given)


@pytest.fixture
def memory() -> MapMemory:
    return MapMemory()


@pytest.fixture
def queue(memory: MapMemory) -> MapQueue:
    return MapQueue(threading.Lock(), memory)


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        (("ADDED", "1", ""), ("MODIFIED", "2", "1"), ("ADDED", "2", "")),
        (("MODIFIED", "2", "1"), ("MODIFIED", "3", "2"), ("MODIFIED", "3", "1")),
        (("MODIFIED", "2", "1"), ("DELETED", "2", "2"), ("DELETED", "2", "1")),
        (("ADDED", "1", ""), ("DELETED", "1", "1"), ("DELETED", "1", "1")),
        (("DELETED", "1", "0"), ("ADDED", "2", ""), ("MODIFIED", "2", "0")),
        (("DELETED", "1", ""), ("ADDED", "2", ""), ("MODIFIED", "2", "1")),
    ],
)
def test_of_one_object_the_oldest_untold_state_and_the_newest_wait(
    queue: MapQueue, first: Any, second: Any, joined: Any
) -> None:
    queue.add(event("a", *first, sequence=5, traces=("t1",)))
    queue.add(event("a", *second, sequence=6, traces=("t2",)))
    taken = queue.take()
    assert taken is not None and queue.take() is None
    assert (taken.type, taken.object.decode(), taken.old.decode()) == joined
    assert (taken.sequence, taken.traces) == (5, ("t1", "t2"))


def test_objects_of_two_watches_do_not_join_and_come_in_order(queue: MapQueue) -> None:
    queue.add(event("a", new="x", watch=0))
    queue.add(event("a", new="y", watch=1))
    taken = [queue.take(), queue.take()]
    assert [each.object for each in taken if each is not None] == [b"x", b"y"]


def test_a_live_change_that_joins_one_of_the_snapshot_makes_it_live(queue: MapQueue) -> None:
    queue.add(event("a", "ADDED", cause=Cause.START))
    queue.add(event("a", cause=Cause.WATCH))
    taken = queue.take()
    assert taken is not None and taken.cause is Cause.WATCH


def test_a_change_while_it_runs_waits_and_a_failure_joins_it(queue: MapQueue) -> None:
    queue.add(event("a", new="2", old="1", sequence=5))
    running = queue.take()
    assert running is not None
    queue.add(event("a", new="3", old="2", sequence=9))
    assert queue.oldest_sequence() == 5 and len(queue) == 2
    queue.failed(running)
    assert queue.take() is None, "it rests"
    queue.rested()
    again = queue.take()
    assert again is not None and (again.object, again.old, again.sequence) == (b"3", b"1", 5)
    assert queue.done(again) and queue.oldest_sequence() == 0 and not len(queue)


def test_one_bad_event_goes_behind_the_others_and_is_given_up_alone(queue: MapQueue) -> None:
    queue.add(event("bad", sequence=1))
    for i in range(20):
        queue.add(event(f"good-{i}", sequence=2 + i))
    failures = 0
    while queue.take_given_up() is None:
        taken = queue.take()
        assert taken is not None
        if taken.key.name == "bad":
            failures += 1
            queue.failed(taken)
            assert queue.rest_s == 0.1, "nothing else failed"
            queue.rested()
        else:
            assert queue.done(taken)
            queue.add(event(taken.key.name, sequence=100))
    assert failures == FAILURES_MAX
    assert len(queue) == 20, "the others wait as before"


def test_when_nothing_can_be_mapped_everything_is_given_up_after_a_few_tries_with_longer_rests(queue: MapQueue) -> None:
    for i in range(100):
        queue.add(event(f"a-{i}", sequence=10 + i))
    rests = []
    for _ in range(FAILURES_MAX):
        taken = queue.take()
        assert taken is not None
        queue.failed(taken)
        rests.append(queue.rest_s)
        queue.rested()
    assert rests == [0.1, 0.2, 0.4, 0.8, 1.6] and not len(queue)
    assert queue.oldest_sequence() == 10, "until every primary is marked"
    assert queue.take_given_up() == 10 and queue.take_given_up() is None and queue.oldest_sequence() == 0
    queue.add(event("later", sequence=300))
    taken = queue.take()
    assert taken is not None
    queue.failed(taken)
    assert queue.take_given_up() == 300, "and once is enough from now on"


def test_a_guest_that_does_not_load_is_tried_as_often(queue: MapQueue) -> None:
    queue.add(event("a", sequence=7))
    for _ in range(FAILURES_MAX):
        assert queue.take_given_up() is None
        queue.failed_to_load()
    assert queue.take_given_up() == 7 and not len(queue)


def test_too_many_events_or_bytes_are_given_up(
    queue: MapQueue, memory: MapMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_queue, "EVENTS_MAX", 3)
    for i in range(4):
        queue.add(event(f"a-{i}", sequence=1 + i))
    assert queue.take_given_up() == 1 and not len(queue) and memory.held_bytes == 0
    queue.add(event("large", new="x" * (map_queue.BYTES_MAX + 1), sequence=9))
    assert queue.take_given_up() == 9 and memory.held_bytes == 0


def test_the_memory_of_all_operators_together_is_bounded(memory: MapMemory) -> None:
    lock = threading.Lock()
    memory.maximum_bytes = 10_000
    one, other = MapQueue(lock, memory), MapQueue(lock, memory)
    one.add(event("a", new="x" * 6000))
    other.add(event("a", new="x" * 6000, sequence=4))
    assert other.take_given_up() == 4 and one.take_given_up() is None
    assert 6000 < memory.held_bytes < 7000
    taken = one.take()
    assert taken is not None and 6000 < memory.held_bytes < 7000, "what runs counts"
    other.add(event("a", new="x" * 6000, sequence=5))
    assert other.take_given_up() == 5
    assert one.done(taken) and memory.held_bytes == 0


def test_events_of_a_watch_that_is_gone_are_forgotten_also_while_they_run(queue: MapQueue, memory: MapMemory) -> None:
    queue.add(event("runs", watch=1))
    queue.add(event("kept", watch=0))
    queue.add(event("waits", watch=1))
    running = queue.take()
    assert running is not None
    queue.retain({0})
    assert not queue.done(running) and len(queue) == 1
    queue.clear()
    assert not len(queue) and memory.held_bytes == 0


def test_a_paused_queue_keeps_its_events(queue: MapQueue) -> None:
    queue.pause()
    queue.add(event("a"))
    assert queue.take() is None
    queue.resume()
    assert queue.take() is not None


@given(
    st.lists(st.sampled_from(["add", "big", "take", "done", "failed", "back", "load", "rest", "forget"]), max_size=80)
)
def test_no_change_is_lost_whatever_happens(steps: list[str]) -> None:
    """Every change is waiting, running, mapped with a later one of its object, or given up; the oldest holds the
    position."""
    memory = MapMemory(maximum_bytes=20_000)
    queue = MapQueue(threading.Lock(), memory)
    running: list[MapEvent] = []
    undone: dict[int, str] = {}  # by sequence: the object
    for number, step in enumerate(steps, start=1):
        name = f"object-{number % 3}"
        if step in {"add", "big"}:
            queue.add(event(name, new="x" * (15_000 if step == "big" else 10), sequence=number))
            undone[number] = name
        elif step == "take":
            taken = queue.take()
            running += [taken] if taken is not None else []
        elif step == "load":
            queue.failed_to_load()
        elif step == "rest":
            queue.rested()
        elif step == "forget":
            sequence = queue.take_given_up()
            if sequence is not None:  # every primary is run: that covers all but what is waiting or running
                held = [*queue._waiting.values(), *queue._running.values()]
                kept = {s: o for s, o in undone.items() if any(e.key.name == o and e.sequence <= s for e in held)}
                assert all(sequence <= s for s in undone if s not in kept)
                undone = kept
        elif running:
            ended = running.pop(0)
            if step == "done":
                assert queue.done(ended)
                others = (*queue._waiting.values(), *queue._running.values())
                later = min((e.sequence for e in others if e.key == ended.key), default=len(steps) + 1)
                mapped = range(ended.sequence, later)
                undone = {s: o for s, o in undone.items() if o != ended.key.name or s not in mapped}
            elif step == "failed":
                queue.failed(ended)
            else:
                queue.give_back(ended)
        if undone:
            assert 0 < queue.oldest_sequence() <= min(undone)
        everything = (*queue._waiting.values(), *queue._running.values())
        assert memory.held_bytes == sum(e.size for e in everything) <= 20_000
