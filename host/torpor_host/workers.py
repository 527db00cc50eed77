"""Threads that run guests: bounded in number, with the processor counted apart.

A job runs on a worker thread while it holds a *slot*. There is one slot a process: guests on two threads lose to the
interpreter's lock (`architecture.md`). Inside `blocking()` the slot is given back, so that guests that wait on the
network stop nobody; whoever returns from a wait goes before new jobs, because its deadline runs. Threads are started
when a job finds no idle one, and end after `idle_exit_s`: an idle host has none.

Jobs start in the order they were submitted. Overflow: the queue of jobs holds at most one job a turn that the
residency step has started, which bounds it by operators times their concurrency.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)

Job = Callable[[], None]

# A guest that overflows its stack ends the process on 512 KiB; see `facts.md`.
STACK_BYTES = 8 << 20


class Workers:
    """The pool."""

    def __init__(self, name: str, *, threads_max: int, slots: int = 1, idle_exit_s: float = 10.0) -> None:
        self._name = name
        self._threads_max = threads_max
        self._idle_exit_s = idle_exit_s
        lock = threading.Lock()
        self._lock = lock
        self._work = threading.Condition(lock)
        self._slot_free = threading.Condition(lock)
        self._ended = threading.Condition(lock)
        self._jobs: deque[Job] = deque()
        self._free = slots
        self._returning = 0
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
            self._free += 1
            self._offer_slot()

    def enter(self) -> None:
        """Takes a slot again, before any job that has not started."""
        with self._lock:
            self._returning += 1
            while not self._free:
                self._slot_free.wait()
            self._returning -= 1
            self._free -= 1

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
        if not self._free:
            return
        if self._returning:
            self._slot_free.notify()
        elif self._notified + self._arriving < min(self._free, len(self._jobs)):
            if self._idle > self._notified:
                self._notified += 1
                self._work.notify()
            elif self._threads < self._threads_max:
                self._start_thread()

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
            if self._jobs and self._free and not self._returning:
                self._free -= 1
                return self._jobs.popleft()
            if self._closed and not self._jobs:
                return None
            self._idle += 1
            woken = self._work.wait(self._idle_exit_s)
            self._idle -= 1
            if self._notified:
                self._notified -= 1
            if not woken and not self._jobs:
                return None

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
                    self._free += 1
                    self._offer_slot()
        finally:
            self._threads -= 1
            self._ended.notify_all()
            self._lock.release()


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
