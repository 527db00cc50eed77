"""Worker threads: bounded, one slot, waits that stop nobody. Real threads, ordered by events."""

import asyncio
import itertools
import queue
import threading
from functools import partial

import pytest
from torpor_host.waits import Wait
from torpor_host.workers import Mailbox, Workers

WAIT_S = 10.0  # only for a test that fails


def gate() -> threading.Event:
    return threading.Event()


def test_one_slot_runs_one_job_at_a_time() -> None:
    workers = Workers("test", threads_max=8)
    running, most, done = [0], [0], threading.Semaphore(0)

    def job() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        threading.Event().wait(0.001)  # without giving the slot back
        running[0] -= 1
        done.release()

    for _ in range(20):
        workers.submit(job)
    for _ in range(20):
        assert done.acquire(timeout=WAIT_S)
    assert most[0] == 1 and workers.threads <= 2
    assert workers.close(WAIT_S)


def test_a_thread_that_is_slow_to_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, done = Workers("test", threads_max=8), threading.Semaphore(0)
    begun: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: begun.append(thread))
    for _ in range(20):
        workers.submit(done.release)
    monkeypatch.undo()
    assert len(begun) == 1, "there is one slot"
    begun[0].start()
    for _ in range(20):
        assert done.acquire(timeout=WAIT_S)
    assert workers.close(WAIT_S)


def test_six_jobs_that_wait_on_the_network_stop_nobody() -> None:
    workers = Workers("test", threads_max=8)
    network, other = gate(), gate()

    def waiting() -> None:
        with workers.blocking():
            network.wait(WAIT_S)

    for _ in range(6):
        workers.submit(waiting)
    workers.submit(other.set)
    assert other.wait(WAIT_S)
    network.set()
    assert workers.close(WAIT_S)


def test_who_returns_from_a_wait_goes_before_new_jobs() -> None:
    workers = Workers("test", threads_max=2)
    order: list[str] = []
    waiting, network, holding = gate(), gate(), gate()
    hold = gate()

    def waiter() -> None:
        workers.leave()
        waiting.set()
        network.wait(WAIT_S)
        workers.enter()
        order.append("returned")

    def holder() -> None:
        holding.set()
        hold.wait(WAIT_S)

    workers.submit(waiter)
    assert waiting.wait(WAIT_S)
    workers.submit(holder)
    assert holding.wait(WAIT_S)
    for i in range(3):
        workers.submit(lambda i=i: order.append(f"new {i}"))
    network.set()
    while not workers._returning:
        threading.Event().wait(0.001)
    hold.set()
    assert workers.close(WAIT_S)
    assert order == ["returned", "new 0", "new 1", "new 2"]


def test_threads_are_bounded_and_the_rest_waits() -> None:
    workers = Workers("test", threads_max=3)
    network, started = gate(), threading.Semaphore(0)

    def waiting() -> None:
        with workers.blocking():
            started.release()
            network.wait(WAIT_S)

    for _ in range(10):
        workers.submit(waiting)
    for _ in range(3):
        assert started.acquire(timeout=WAIT_S)
    assert workers.threads == 3 and workers.jobs_waiting == 7 and workers.contended
    network.set()
    for _ in range(7):
        assert started.acquire(timeout=WAIT_S)
    assert workers.close(WAIT_S)


def test_idle_threads_end() -> None:
    workers = Workers("test", threads_max=3, idle_exit_s=0.01)
    done = gate()
    workers.submit(done.set)
    assert done.wait(WAIT_S)
    with workers._lock:
        assert workers._ended.wait_for(lambda: workers.threads == 0, WAIT_S)
    again = gate()
    workers.submit(again.set)
    assert again.wait(WAIT_S)
    assert workers.close(WAIT_S)


def test_a_job_that_raises_harms_no_other() -> None:
    workers, done = Workers("test", threads_max=1), gate()

    def fail() -> None:
        raise RuntimeError("boom")

    workers.submit(fail)
    workers.submit(done.set)
    assert done.wait(WAIT_S)
    assert workers.close(WAIT_S)


def test_closing_waits_for_what_is_in_flight_and_takes_no_more() -> None:
    workers, release, ended = Workers("test", threads_max=1), gate(), []
    workers.submit(lambda: (release.wait(WAIT_S), ended.append(1)))
    assert not workers.close(0.01) and not ended
    release.set()
    assert workers.close(WAIT_S) and ended
    try:
        workers.submit(lambda: None)
    except RuntimeError as error:
        assert "closed" in str(error)
    else:
        raise AssertionError("a closed pool took a job")


async def test_a_mailbox_delivers_in_order_and_survives_a_failing_call() -> None:
    mailbox, seen, done = Mailbox(asyncio.get_running_loop()), list[int](), asyncio.Event()

    def fail() -> None:
        raise RuntimeError("boom")

    def post() -> None:
        for i in range(100):
            mailbox.post(lambda i=i: seen.append(i))
        mailbox.post(fail)
        mailbox.post(done.set)

    await asyncio.to_thread(post)
    await asyncio.wait_for(done.wait(), WAIT_S)
    assert seen == list(range(100))


def test_a_job_that_spins_loses_its_slot_after_its_slice_and_stops_nobody() -> None:
    workers = Workers("test", threads_max=4, slice_s=0.05)
    end, others = gate(), threading.Semaphore(0)
    spinning = gate()

    def spin() -> None:
        spinning.set()
        while not end.wait(0.001):  # without giving the slot back
            pass

    workers.submit(spin)
    assert spinning.wait(WAIT_S)
    for _ in range(50):
        workers.submit(others.release)
    for _ in range(50):
        assert others.acquire(timeout=WAIT_S)
    end.set()
    assert workers.close(WAIT_S)


def test_whoever_returns_from_a_wait_is_not_held_up_by_a_job_that_spins() -> None:
    workers = Workers("test", threads_max=4, slice_s=0.05)
    waiting, network, returned, end, spinning = gate(), gate(), gate(), gate(), gate()

    def waits() -> None:
        with workers.blocking():
            waiting.set()
            network.wait(WAIT_S)
        returned.set()

    def spin() -> None:
        spinning.set()
        end.wait(WAIT_S)

    workers.submit(waits)
    assert waiting.wait(WAIT_S)
    workers.submit(spin)
    assert spinning.wait(WAIT_S)
    network.set()
    assert returned.wait(WAIT_S)
    end.set()
    assert workers.close(WAIT_S)


def test_slots_are_neither_lost_nor_made_when_slices_end() -> None:
    workers = Workers("test", threads_max=6, slice_s=0.001)
    done = threading.Semaphore(0)

    def job() -> None:
        threading.Event().wait(0.003)
        with workers.blocking():
            threading.Event().wait(0.001)
        threading.Event().wait(0.003)
        done.release()

    for _ in range(200):
        workers.submit(job)
    for _ in range(200):
        assert done.acquire(timeout=WAIT_S)
    running, most = [0], [0]
    workers._slice_s = float("inf")

    def alone() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        threading.Event().wait(0.002)
        running[0] -= 1
        done.release()

    for _ in range(20):
        workers.submit(alone)
    for _ in range(20):
        assert done.acquire(timeout=WAIT_S)
    assert most[0] == 1
    assert workers.close(WAIT_S)


def test_a_wait_gives_the_slot_back_and_is_over_with_it_in_hand() -> None:
    workers, waits, order = Workers("test", threads_max=2), list[Wait](), list[str]()
    waiting, hold, holding = gate(), gate(), gate()

    def waiter() -> None:
        waits.append(workers.wait())
        waiting.set()
        assert waits[0].until(WAIT_S)
        order.append("returned")

    def holder() -> None:
        holding.set()
        hold.wait(WAIT_S)

    workers.submit(waiter)
    assert waiting.wait(WAIT_S)
    workers.submit(holder)
    assert holding.wait(WAIT_S), "the waiter's slot is free"
    workers.submit(lambda: order.append("new"))
    waits[0].end()
    assert not order
    hold.set()
    assert workers.close(WAIT_S) and order == ["returned", "new"]


def test_what_has_ended_before_is_not_waited_for_and_a_second_end_is_nothing() -> None:
    workers, told = Workers("test", threads_max=1), list[bool]()

    def job() -> None:
        wait = workers.wait()
        wait.end()
        wait.end()
        told.append(wait.until(0.0))

    workers.submit(job)
    assert workers.close(WAIT_S) and told == [True] and workers._free == 1


def test_a_wait_that_runs_out_comes_back_with_a_slot_and_its_late_end_makes_none() -> None:
    workers, told, done = Workers("test", threads_max=2), list[bool](), gate()

    def job() -> None:
        wait = workers.wait()
        told.append(wait.until(0.01))
        wait.end()
        done.set()

    workers.submit(job)
    assert done.wait(WAIT_S) and told == [False]
    assert workers.close(WAIT_S) and workers._free == 1


def test_slots_are_neither_lost_nor_made_by_waits_that_end_at_any_moment() -> None:
    workers = Workers("test", threads_max=8, slice_s=0.002)
    answers: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
    done = threading.Semaphore(0)

    def answer() -> None:
        for number in itertools.count():
            if (wait := answers.get()) is None:
                return
            if number % 7 == 0:
                threading.Event().wait(0.0005)
            wait.end()

    def job(number: int) -> None:
        for turn in range(20):
            wait = workers.wait()
            answers.put(wait)
            wait.until(0.0 if (number + turn) % 5 == 0 else 0.0004 if turn % 3 else WAIT_S)
            if turn % 9 == 0:
                threading.Event().wait(0.003)  # its slice ends
        done.release()

    answering = threading.Thread(target=answer)
    answering.start()
    for number in range(100):
        workers.submit(partial(job, number))
    for _ in range(100):
        assert done.acquire(timeout=WAIT_S)
    answers.put(None)
    answering.join(WAIT_S)
    assert workers.close(WAIT_S)
    assert workers._free == 1 and not workers._holders and not workers._returning
