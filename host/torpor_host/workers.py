"""Threads that run guests: bounded in number, with the processor counted apart.

A job runs on a worker thread while it holds a *slot*. There is one slot a process: guests on two threads lose to the
interpreter's lock (`architecture.md`). Inside `blocking()` and a `wait()` the slot is given back, so that guests that
wait on the network stop nobody; whoever returns from a wait goes before new jobs, because its deadline runs. The slot
is handed from thread to thread: one that waits for an answer is woken when it has both, the answer and a slot, which is
one switch of threads a host call instead of two. A job that has held its slot for `slice_s` while others wait loses it
and runs on beside them: a guest that spins uses up its own budget, not its neighbours' time. Threads are started when a
job finds no idle one, and end after `idle_exit_s`: an idle host has none.

Jobs start in the order they were submitted. Overflow: the queue of jobs holds at most one job a turn that the
residency step has started, which bounds it by operators times their concurrency.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torpor_host.waits import Wait

log = logging.getLogger(__name__)

Job = Callable[[], None]

# A guest that overflows its stack ends the process on 512 KiB; see `facts.md`.
STACK_BYTES = 8 << 20


class Workers:
    """The pool."""

    def __init__(
        self,
        name: str,
        *,
        threads_max: int,
        slots: int = 1,
        idle_exit_s: float = 10.0,
        slice_s: float = float("inf"),
    ) -> None:
        self._name = name
        self._threads_max = threads_max
        self._idle_exit_s = idle_exit_s
        self._slice_s = slice_s
        self._holders: dict[int, float] = {}  # threads that hold a slot → since when, monotonic
        self._watching = 0  # threads that wait for a slot to be given back or to be held too long
        lock = threading.Lock()
        self._lock = lock
        self._work = threading.Condition(lock)
        self._ended = threading.Condition(lock)
        self._jobs: deque[Job] = deque()
        self._free = slots
        self._returning: deque[_SlotWait] = deque()  # over, and without a slot yet
        self._idle = 0
        self._notified = 0
        self._arriving = 0  # threads that were started and have not looked for a job yet
        self._threads = 0
        self._started = 0
        self._closed = False

    def submit(self, job: Job) -> None:
        """Runs the job as soon as a slot is free. After `close` it raises RuntimeError."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"workers {self._name} are closed")
            self._jobs.append(job)
            self._offer_slot()
            self._watch_slots()

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around a wait inside a job: its slot serves others meanwhile."""
        self.leave()
        try:
            yield
        finally:
            self.enter()

    def leave(self) -> None:
        """Gives the slot back; `enter` must follow on the same thread."""
        with self._lock:
            self._give_slot()

    def enter(self) -> None:
        """Takes a slot again, before any job that has not started."""
        wait = _SlotWait(self)
        wait.end()
        wait.until(0.0)

    def wait(self) -> Wait:
        """A wait of this thread's, without its slot for as long as it lasts."""
        return _SlotWait(self)

    @property
    def contended(self) -> bool:
        """Whether other jobs wait for this one to end."""
        return bool(self._jobs)

    @property
    def threads(self) -> int:
        return self._threads

    @property
    def jobs_waiting(self) -> int:
        return len(self._jobs)

    def close(self, timeout_s: float) -> bool:
        """Takes no more jobs and waits until those in flight have ended; says whether they have. Blocking."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            return self._ended.wait_for(lambda: not self._threads and not self._jobs, timeout_s)

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _offer_slot(self) -> None:
        """A slot or a job is new: whoever has the first right to run is woken."""
        self._serve_returning()
        if not self._free:
            return
        if self._notified + self._arriving < min(self._free, len(self._jobs)):
            if self._idle > self._notified:
                self._notified += 1
                self._work.notify()
            elif self._threads < self._threads_max:
                self._start_thread()

    def _serve_returning(self) -> None:
        while self._free and self._returning:
            wait = self._returning.popleft()
            self._take_slot(wait.thread)
            wait.go()

    def _start_thread(self) -> None:
        self._threads += 1
        self._arriving += 1
        self._started += 1
        thread = threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True)
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError:
            self._threads -= 1
            self._arriving -= 1
            if not self._threads:
                raise
            log.exception("no further worker thread can be started")
        finally:
            threading.stack_size(before)

    def _next_job(self) -> Job | None:
        """A job with a slot taken, or None when this thread is to end."""
        while True:
            if self._jobs and self._free:
                self._take_slot(threading.get_ident())
                job = self._jobs.popleft()
                self._offer_slot()
                self._watch_slots()
                return job
            if self._closed and not self._jobs:
                return None
            woken = self._wait_for_work()
            if self._notified:
                self._notified -= 1
            if not woken and not self._jobs:
                return None

    def _wait_for_work(self) -> bool:
        """As an idle thread; while jobs wait for a slot, only until one has been held too long."""
        watches = bool(self._jobs) and not self._free
        self._idle += 1
        self._watching += watches
        woken = self._work.wait(self._slice_left_s() if watches else self._idle_exit_s)
        self._watching -= watches
        self._idle -= 1
        if watches:
            self._end_slices()
        return woken

    def _watch_slots(self) -> None:
        """Sees to it that somebody watches the clock while jobs wait for a slot."""
        if self._free or self._watching or self._arriving or self._slice_s == float("inf") or not self._jobs:
            return
        if self._idle > self._notified:
            self._notified += 1
            self._work.notify()
        elif self._threads < self._threads_max:
            self._start_thread()

    def _take_slot(self, thread: int) -> None:
        self._free -= 1
        self._holders[thread] = time.monotonic()

    def _give_slot(self) -> None:
        """Nothing where the slot was taken away meanwhile."""
        if self._holders.pop(threading.get_ident(), None) is not None:
            self._free += 1
            self._offer_slot()

    def _end_job(self) -> None:
        """As `_give_slot`, but the next job is this thread's own to take: nobody is woken for it."""
        if self._holders.pop(threading.get_ident(), None) is not None:
            self._free += 1
            self._serve_returning()

    def _slice_left_s(self) -> float | None:
        """Seconds until the first holder has had its slice; None where slices never end."""
        if self._slice_s == float("inf") or not self._holders:
            return None
        return max(0.0, min(self._holders.values()) + self._slice_s - time.monotonic())

    def _end_slices(self) -> None:
        ended_s = time.monotonic() - self._slice_s
        for thread, since_s in list(self._holders.items()):
            if since_s <= ended_s:
                del self._holders[thread]
                self._free += 1
        self._serve_returning()

    # -- threads -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._lock.acquire()
        self._arriving -= 1
        try:
            while (job := self._next_job()) is not None:
                self._lock.release()
                try:
                    job()
                except BaseException:
                    log.exception("a job failed on a worker")
                finally:
                    del job
                    self._lock.acquire()
                    self._end_job()
        finally:
            self._threads -= 1
            self._ended.notify_all()
            if self._closed:
                self._work.notify_all()  # the others wait for jobs that will not come
            self._lock.release()


class _SlotWait(Wait):
    """Its thread sleeps until what it waits for has ended, or its time is over, and then until it has a slot."""

    __slots__ = ("_begun", "_pool", "_returned", "thread")

    def __init__(self, pool: Workers) -> None:
        super().__init__()
        self._pool = pool
        self._begun = False
        self._returned = False
        self.thread = threading.get_ident()

    def end(self) -> None:
        with self._pool._lock:
            if not self.ended:
                self.ended = True
                if self._begun:
                    self._return()

    def until(self, timeout_s: float) -> bool:
        pool = self._pool
        with pool._lock:
            if self.ended and self.thread in pool._holders:
                return True
            self._begun = True
            pool._give_slot()
            if self.ended:
                self._return()
        end_s = time.monotonic() + timeout_s
        while not self._over.acquire(timeout=self._patience_s(end_s)):
            with pool._lock:
                pool._end_slices()
                if time.monotonic() >= end_s:
                    self._return()
        return self.ended

    def go(self) -> None:
        """Under the pool's lock: it has a slot."""
        self._over.release()

    def _return(self) -> None:
        if not self._returned:
            self._returned = True
            self._pool._returning.append(self)
            self._pool._serve_returning()

    def _patience_s(self, end_s: float) -> float:
        """Until the end of its time, and no longer than a slice, since nobody else may be there to end one."""
        slice_s = self._pool._slice_s if self._pool._slice_s != float("inf") else 3600.0
        left_s = end_s - time.monotonic()
        return min(left_s, slice_s) if left_s > 0 else slice_s


class Mailbox:
    """Calls from any thread to be made on the loop, in order, with one wake-up of the loop for many."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._woken = False

    def post(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._calls.append(call)
            if self._woken:
                return
            self._woken = True
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, deque()
            self._woken = False
        for call in calls:
            try:
                call()
            except Exception:
                log.exception("a call from a worker failed on the loop")
