"""What the work queue promises: no key lost, one run of a key at a time, live first, back-off, position."""

import threading

from hypothesis import given, settings
from hypothesis import strategies as st
from torpor_host.timers import Timers
from torpor_host.work_queue import Cause, Key, Work, WorkQueue

A, B, C = (Key("ns", name) for name in "abc")


class Ready:
    def __init__(self) -> None:
        self.times = 0

    def work_ready(self) -> None:
        self.times += 1


class StepClock:
    """Time that a test moves, without a loop."""

    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return round((1_700_000_000 + self.now_s) * 1e9)

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing sleeps here")


class Bench:
    """A queue in virtual time."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self.timers = Timers(self.clock)
        self.listener = Ready()
        self.queue = WorkQueue(self.timers, threading.Lock(), self.listener)

    def add(self, key: Key, cause: Cause = Cause.WATCH, sequence: int = 0, traces: tuple[str, ...] = ()) -> None:
        now_s, now_ns = self.clock.monotonic_s(), self.clock.unix_ns()
        self.queue.add(key, cause, now_s=now_s, now_unix_ns=now_ns, sequence=sequence, traces=traces)

    def take(self) -> Work:
        work = self.queue.take()
        assert work is not None
        return work

    def advance(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.timers.fire_due()


def test_a_key_added_twice_runs_once() -> None:
    bench = Bench()
    bench.add(A)
    bench.add(A)
    bench.queue.succeeded(bench.take())
    assert bench.queue.take() is None and bench.queue.idle


def test_a_key_that_changes_while_it_runs_runs_once_more_after() -> None:
    bench = Bench()
    bench.add(A)
    work = bench.take()
    bench.add(A)
    bench.add(A)
    assert bench.queue.take() is None
    bench.queue.succeeded(work)
    bench.queue.succeeded(bench.take())
    assert bench.queue.take() is None


def test_a_live_event_overtakes_a_resync_of_a_thousand_keys() -> None:
    bench = Bench()
    for i in range(1000):
        bench.add(Key("ns", f"resync-{i}"), Cause.RESYNC)
    bench.add(A, Cause.WATCH)
    assert bench.take().key == A


def test_an_event_for_a_key_of_a_resync_makes_it_live_and_it_runs_once() -> None:
    bench = Bench()
    bench.add(B, Cause.RESYNC)
    bench.add(A, Cause.RESYNC)
    bench.add(A, Cause.WATCH)
    first, second = bench.take(), bench.take()
    assert (first.key, first.pending.cause) == (A, Cause.WATCH)
    assert second.key == B
    bench.queue.succeeded(first)
    bench.queue.succeeded(second)
    assert bench.queue.take() is None


def test_a_failing_key_backs_off_as_client_go_does_and_forgets_on_success() -> None:
    bench = Bench()
    bench.add(A)
    delays = []
    for attempt in range(20):
        work = bench.take()
        assert work.attempt == attempt
        assert work.pending.cause is (Cause.RETRY if attempt else Cause.WATCH)
        delays.append(bench.queue.failed(work))
        assert bench.queue.take() is None
        bench.advance(delays[-1])
    assert delays[:4] == [0.005, 0.01, 0.02, 0.04]
    assert delays[-1] == 1000.0
    bench.queue.succeeded(bench.take())
    bench.add(A)
    assert bench.queue.failed(bench.take()) == 0.005


def test_an_event_does_not_wait_for_the_back_off_of_its_key_and_the_count_goes_on() -> None:
    bench = Bench()
    bench.add(A, sequence=7, traces=("first",))
    bench.queue.failed(bench.take())
    bench.add(A, sequence=9, traces=("second",))
    work = bench.take()
    assert (work.attempt, work.pending.sequence) == (1, 7)
    assert set(work.pending.traces) == {"first", "second"}
    bench.queue.succeeded(work)
    bench.advance(10)
    assert bench.queue.take() is None


def test_a_requeue_comes_when_it_is_due_and_tells_the_listener() -> None:
    bench = Bench()
    bench.add(A)
    bench.queue.requeue(bench.take(), 30)
    assert bench.queue.idle and bench.queue.timer_of(A) == (Cause.TIMER, 30.0)
    bench.advance(29)
    assert bench.queue.take() is None and bench.listener.times == 0
    bench.advance(1)
    work = bench.take()
    assert bench.listener.times == 1
    assert (work.key, work.pending.cause, work.pending.since_s) == (A, Cause.TIMER, 30.0)


def test_a_result_replaces_the_timer_of_its_key() -> None:
    bench = Bench()
    bench.add(A)
    bench.queue.requeue(bench.take(), 30)
    bench.add(A)
    bench.queue.succeeded(bench.take())
    bench.advance(100)
    assert bench.queue.take() is None and len(bench.timers) == 0


def test_a_requeue_of_a_key_that_changed_meanwhile_runs_at_once_instead() -> None:
    bench = Bench()
    bench.add(A)
    work = bench.take()
    bench.add(A)
    bench.queue.requeue(work, 1000)
    assert bench.take().key == A


def test_traces_are_united_oldest_first_and_bounded() -> None:
    bench = Bench()
    for i in range(50):
        bench.add(A, traces=(f"t{i}",))
    traces = bench.take().pending.traces
    assert len(traces) == 32 and traces[:2] == ("t0", "t1")


def test_the_position_waits_for_the_oldest_event_that_is_not_reconciled() -> None:
    bench = Bench()
    bench.add(A, sequence=5)
    bench.add(B, sequence=6)
    bench.add(A, sequence=7)
    assert bench.queue.oldest_sequence() == 5
    a = bench.take()
    assert a.key == A and bench.queue.oldest_sequence() == 5
    bench.add(A, sequence=8)
    bench.queue.failed(a)
    assert bench.queue.oldest_sequence() == 5
    bench.queue.succeeded(bench.take())
    assert bench.queue.oldest_sequence() == 5
    again = bench.take()
    assert again.key == A
    bench.queue.succeeded(again)
    assert bench.queue.oldest_sequence() == 0


def test_a_failed_key_holds_the_position_while_it_waits() -> None:
    bench = Bench()
    bench.add(A, sequence=5)
    bench.queue.failed(bench.take())
    assert bench.queue.idle and bench.queue.oldest_sequence() == 5


def test_a_paused_queue_keeps_its_keys_and_gives_none() -> None:
    bench = Bench()
    bench.add(A)
    bench.queue.pause()
    assert bench.queue.take() is None and bench.queue.ready
    bench.queue.resume()
    assert bench.take().key == A


def test_a_key_given_back_is_as_dirty_as_before() -> None:
    bench = Bench()
    bench.add(A, sequence=3, traces=("t",))
    bench.queue.give_back(bench.take())
    work = bench.take()
    assert (work.attempt, work.pending.sequence, work.pending.traces) == (0, 3, ("t",))


def test_a_cleared_queue_stays_empty_whatever_comes_back() -> None:
    bench = Bench()
    for key in (A, B, C):
        bench.add(key)
    works = [bench.take() for _ in range(3)]
    bench.queue.clear()
    bench.queue.failed(works[0])
    bench.queue.give_back(works[1])
    bench.queue.requeue(works[2], 1)
    bench.advance(5000)
    assert bench.queue.take() is None and bench.queue.idle and bench.listener.times == 0


def test_a_sleeping_queue_holds_nothing_of_its_past() -> None:
    bench = Bench()
    for i in range(1000):
        bench.add(Key("ns", str(i)), sequence=i + 1, traces=("t",))
    while (work := bench.queue.take()) is not None:
        bench.queue.succeeded(work)
    assert bench.queue._lanes is None and bench.queue._failures is None
    assert not bench.queue._pending and not bench.queue._running and not bench.queue._waiting


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "take", "take", "succeed", "fail", "requeue", "give_back", "advance", "pause"]),
        st.integers(0, 4),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_whatever_happens_no_key_is_lost_and_none_runs_twice_at_a_time(steps: list[tuple[str, int]]) -> None:
    bench, running, sequence = Bench(), dict[Key, Work](), 0
    undone: dict[Key, int] = {}  # the oldest sequence of each key that no successful run has begun after
    paused = False
    for step, i in steps:
        key = Key("ns", str(i))
        match step:
            case "add":
                sequence += 1
                bench.add(key, list(Cause)[i], sequence=sequence)
                undone.setdefault(key, sequence)
            case "take":
                work = bench.queue.take()
                if work is not None:
                    assert work.key not in running, "two runs of one key"
                    assert not paused
                    running[work.key] = work
            case "succeed" | "requeue" if running:
                work = running.pop(sorted(running)[i % len(running)])
                newer = bench.queue._pending.get(work.key)
                (bench.queue.succeeded if step == "succeed" else lambda w: bench.queue.requeue(w, 5.0))(work)
                undone.pop(work.key, None)
                if newer is not None and newer.sequence:
                    undone[work.key] = newer.sequence
            case "fail" if running:
                bench.queue.failed(running.pop(sorted(running)[i % len(running)]))
            case "give_back" if running:
                bench.queue.give_back(running.pop(sorted(running)[i % len(running)]))
            case "advance":
                bench.advance(0.01 * i)
            case "pause":
                paused = not paused
                (bench.queue.pause if paused else bench.queue.resume)()
        assert bench.queue.oldest_sequence() == min(undone.values(), default=0)
    bench.queue.resume()
    for work in list(running.values()):
        bench.queue.failed(work)
    seen = set[Key]()
    for _ in range(50):
        while (work := bench.queue.take()) is not None:
            seen.add(work.key)
            bench.queue.succeeded(work)
        bench.advance(2000)
    assert set(undone) <= seen, "a dirty key was never run"
    assert bench.queue.oldest_sequence() == 0


def test_what_comes_next_can_be_seen_without_taking_it() -> None:
    queue = Bench().queue
    for name, cause in (("old", Cause.RESYNC), ("a", Cause.WATCH), ("b", Cause.WATCH)):
        queue.add(Key("", name), cause, now_s=0.0, now_unix_ns=0)
    assert [key.name for key, _ in queue.peek(2)] == ["a", "b"]
    assert [key.name for key, _ in queue.peek(9)] == ["a", "b", "old"]
    seen = dict(queue.peek(9))
    work = queue.take()
    assert work is not None and work.pending is seen[work.key] and work.pending.merges == 0
    queue.add(work.key, Cause.WATCH, now_s=0.0, now_unix_ns=0)
    assert [key.name for key, _ in queue.peek(9)] == ["b", "old"], "what runs is not next"
    queue.pause()
    assert queue.peek(9) == []
