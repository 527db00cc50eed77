"""The dirty keys of one operator: which run next, which wait, and how far the past is done with.

A key is *pending* (dirty), *running*, or *waiting* for its timer (a requeue or a retry); pending and running at once
means that it changed while it ran and runs once more after. No key is ever run twice at a time, none is lost.

Merge rules, for a key that is added while it is pending or waiting:

- *priority*: the more urgent one. Live before background (start, resync): a resync of 1,000 keys
  delays no event.
- *cause*: the one that says most, in the order watch, wake, timer, retry, start, resync.
- *since*: the earlier time. *traces*: united, oldest first, at most 32, the oldest dropped last.
- *sequence*: the lowest that is not 0; what the acknowledged position waits for.
- *attempt* belongs to the key, not to what was added: failures in a row since the last success.
- A new event does not wait for the key's back-off (as client-go's Add beside AddRateLimited); the next failure goes on
  counting. A result replaces the key's timer: the guest has just said what it wants next.

Thread-safe: the loop adds, workers take and give back. The lock is one for all queues of a host. Overflow: none, the
number of keys is bounded by the objects watched, and events coalesce into keys.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from typing import NamedTuple, Protocol

from torpor_host.timers import Timer, Timers

TRACES_MAX = 32
# client-go's DefaultTypedControllerRateLimiter: 5 ms · 2ⁿ, at most 1,000 s.
RETRY_INITIAL_S = 0.005
RETRY_MAX_S = 1000.0
_NEVER_S = float("inf")


class Key(NamedTuple):
    """A primary's key; the namespace is empty for cluster-scoped ones."""

    namespace: str
    name: str


class Cause(StrEnum):
    """Why a key is reconciled, as `abi.md` writes it."""

    WATCH = "watch"
    WAKE = "wake"
    TIMER = "timer"
    RETRY = "retry"
    START = "start"
    RESYNC = "resync"


_RANK = {cause: rank for rank, cause in enumerate(Cause)}


class Priority(IntEnum):
    LIVE = 0
    BACKGROUND = 1


class Released(Enum):
    CLEAN = "nothing happened to the key while it ran"
    DIRTY = "it changed while it ran, and stands in its lane again"
    FORGOTTEN = "the queue was cleared meanwhile"


_PRIORITY = {Cause.START: Priority.BACKGROUND, Cause.RESYNC: Priority.BACKGROUND}


@dataclass(slots=True)
class Pending:
    """Why and since when a key is dirty. Changed only by the queue that holds it."""

    cause: Cause
    priority: Priority
    since_s: float
    since_unix_ns: int
    sequence: int = 0  # of the oldest event in it, 0 for none
    traces: tuple[str, ...] = ()
    merges: int = 0  # how often something was added to it

    def merge(self, other: Pending) -> None:
        """The rules of the module's text."""
        self.merges += 1
        self.priority = min(self.priority, other.priority)
        if _RANK[other.cause] < _RANK[self.cause]:
            self.cause = other.cause
        if other.since_s < self.since_s:  # a retry or requeue that waits has no age yet
            self.since_s, self.since_unix_ns = other.since_s, other.since_unix_ns
        if other.sequence and (not self.sequence or other.sequence < self.sequence):
            self.sequence = other.sequence
        if other.traces and other.traces != self.traces:
            self.traces = tuple(dict.fromkeys(self.traces + other.traces))[:TRACES_MAX]


@dataclass(frozen=True, slots=True)
class Work:
    """A key that a worker runs; goes back by exactly one of `succeeded`, `requeue`, `failed`, `give_back`."""

    key: Key
    attempt: int
    pending: Pending


class QueueListener(Protocol):
    """Who is told on the loop that a timer made work ready."""

    def work_ready(self) -> None: ...


@dataclass(slots=True)
class _Waiting:
    queue: WorkQueue
    key: Key
    pending: Pending
    timer: Timer | None = field(default=None)


class WorkQueue:
    """One operator's. A sleeping one holds three empty dictionaries."""

    __slots__ = ("_failures", "_lanes", "_listener", "_lock", "_paused", "_pending", "_running", "_timers", "_waiting")

    def __init__(self, timers: Timers, lock: threading.Lock, listener: QueueListener) -> None:
        self._timers = timers
        self._lock = lock
        self._listener = listener
        self._paused = False
        self._pending: dict[Key, Pending] = {}
        self._running: dict[Key, Pending] = {}
        self._waiting: dict[Key, _Waiting] = {}
        self._failures: dict[Key, int] | None = None
        # By priority; a lane may hold keys that were taken from another lane or are gone: `take` passes over them.
        self._lanes: tuple[deque[Key], deque[Key]] | None = None

    # -- what the loop adds ------------------------------------------------------------------------------------------

    def add(
        self,
        key: Key,
        cause: Cause,
        *,
        now_s: float,
        now_unix_ns: int,
        sequence: int = 0,
        traces: tuple[str, ...] = (),
    ) -> None:
        """Marks the key dirty."""
        pending = Pending(cause, _PRIORITY.get(cause, Priority.LIVE), now_s, now_unix_ns, sequence, traces[:TRACES_MAX])
        with self._lock:
            waiting = self._waiting.pop(key, None)
            if waiting is not None:
                self._timers.cancel(waiting.timer)
                if waiting.pending.sequence:  # a retry: what it retries is still undone
                    pending.merge(waiting.pending)
            self._put(key, pending)

    def add_all(self, keys: Iterable[Key], cause: Cause, *, now_s: float, now_unix_ns: int, sequence: int = 0) -> int:
        """Marks each key dirty; returns how many."""
        count = 0
        for key in keys:
            self.add(key, cause, now_s=now_s, now_unix_ns=now_unix_ns, sequence=sequence)
            count += 1
        return count

    # -- what workers do ---------------------------------------------------------------------------------------------

    def take(self) -> Work | None:
        """The next key to run, or None if none is ready now."""
        with self._lock:
            if self._paused or self._lanes is None:
                return None
            for priority, lane in enumerate(self._lanes):
                while lane:
                    key = lane.popleft()
                    pending = self._pending.get(key)
                    if pending is None or key in self._running or pending.priority != priority:
                        continue
                    del self._pending[key]
                    if not self._pending:
                        self._pending = {}  # an emptied dictionary keeps the table it has grown to
                    self._running[key] = pending
                    return Work(key, (self._failures or {}).get(key, 0), pending)
            self._lanes = None
            return None

    def peek(self, count: int) -> list[tuple[Key, Pending]]:
        """What `take` would give next, in that order, if nothing happened meanwhile."""
        with self._lock:
            if self._paused or self._lanes is None:
                return []
            found: dict[Key, Pending] = {}
            for priority, lane in enumerate(self._lanes):
                for key in lane:
                    pending = self._pending.get(key)
                    if pending is None or key in self._running or pending.priority != priority:
                        continue
                    found[key] = pending
                    if len(found) == count:
                        return list(found.items())
            return list(found.items())

    def succeeded(self, work: Work) -> None:
        """The key is in order until something changes."""
        with self._lock:
            self._release(work)
            self._forget_failures(work.key)

    def requeue(self, work: Work, after_s: float) -> None:
        """The key is in order, and is run again after `after_s`."""
        with self._lock:
            if self._release(work) is Released.CLEAN:
                self._wait(work.key, Pending(Cause.TIMER, Priority.LIVE, _NEVER_S, 0), after_s)
            self._forget_failures(work.key)

    def failed(self, work: Work) -> float:
        """The key is run again after its back-off, which is returned in seconds."""
        with self._lock:
            failures = (self._failures or {}).get(work.key, 0)
            delay_s = min(RETRY_INITIAL_S * 2.0 ** min(failures, 40), RETRY_MAX_S)
            if self._failures is None:
                self._failures = {}
            self._failures[work.key] = failures + 1
            undone = work.pending
            retry = Pending(Cause.RETRY, undone.priority, _NEVER_S, 0, undone.sequence, undone.traces)
            match self._release(work):
                case Released.DIRTY:
                    self._pending[work.key].merge(retry)
                case Released.CLEAN:
                    self._wait(work.key, retry, delay_s)
                case Released.FORGOTTEN:
                    self._forget_failures(work.key)
            return delay_s

    def give_back(self, work: Work) -> None:
        """The key did not run after all: it is as dirty as before, and nothing is counted."""
        with self._lock:
            if self._running.get(work.key) is not work.pending:
                return
            del self._running[work.key]
            dirty = self._pending.pop(work.key, None)
            if dirty is not None:
                work.pending.merge(dirty)
            self._put(work.key, work.pending)

    # -- state -------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """`take` gives nothing until `resume`; keys are kept."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    @property
    def ready(self) -> bool:
        """Whether `take` would give a key, were the queue not paused."""
        with self._lock:
            return any(key not in self._running for key in self._pending)

    @property
    def idle(self) -> bool:
        """No dirty key and no call in flight; keys may wait for a timer."""
        return not self._pending and not self._running

    @property
    def queued(self) -> int:
        return len(self._pending)

    @property
    def running(self) -> int:
        return len(self._running)

    def oldest_sequence(self) -> int:
        """The lowest sequence that is not reconciled yet; 0 if all are."""
        with self._lock:
            lowest = 0
            waiting = (entry.pending for entry in self._waiting.values())
            for pending in itertools.chain(self._pending.values(), self._running.values(), waiting):
                if pending.sequence and (not lowest or pending.sequence < lowest):
                    lowest = pending.sequence
            return lowest

    def timers(self) -> list[tuple[Key, Cause, float]]:
        """(key, cause, due on the monotonic clock) of every key that waits."""
        with self._lock:
            return [(w.key, w.pending.cause, w.timer.due_s) for w in self._waiting.values() if w.timer is not None]

    def timer_of(self, key: Key) -> tuple[Cause, float] | None:
        """(cause, due on the monotonic clock) if the key waits."""
        with self._lock:
            waiting = self._waiting.get(key)
            return None if waiting is None or waiting.timer is None else (waiting.pending.cause, waiting.timer.due_s)

    def clear(self) -> None:
        """Forgets every key and timer; running ones come back to nothing."""
        with self._lock:
            for waiting in self._waiting.values():
                self._timers.cancel(waiting.timer)
            self._pending.clear()
            self._running.clear()
            self._waiting.clear()
            self._failures = self._lanes = None

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _put(self, key: Key, pending: Pending) -> None:
        present = self._pending.get(key)
        if present is None:
            self._pending[key] = present = pending
        else:
            before = present.priority
            present.merge(pending)
            if present.priority == before:
                return  # it stands in that lane already, or is running and will be put there after
        if key not in self._running:
            self._lane(present.priority).append(key)

    def _release(self, work: Work) -> Released:
        """Ends the run."""
        if self._running.get(work.key) is not work.pending:
            return Released.FORGOTTEN
        del self._running[work.key]
        if not self._running:
            self._running = {}
        pending = self._pending.get(work.key)
        if pending is None:
            return Released.CLEAN
        self._lane(pending.priority).append(work.key)
        return Released.DIRTY

    def _wait(self, key: Key, pending: Pending, delay_s: float) -> None:
        waiting = _Waiting(self, key, pending)
        waiting.timer = self._timers.after(delay_s, _due, waiting)
        self._waiting[key] = waiting

    def _wake(self, waiting: _Waiting) -> None:
        with self._lock:
            if self._waiting.get(waiting.key) is not waiting:
                return
            del self._waiting[waiting.key]
            if not self._waiting:
                self._waiting = {}
            assert waiting.timer is not None
            # What counts as the wait of this event begins when it was due.
            waiting.pending.since_s = waiting.timer.due_s
            late_s = self._timers.now_s() - waiting.timer.due_s
            waiting.pending.since_unix_ns = self._timers.unix_ns() - round(late_s * 1e9)
            self._put(waiting.key, waiting.pending)
        self._listener.work_ready()

    def _lane(self, priority: Priority) -> deque[Key]:
        if self._lanes is None:
            self._lanes = (deque(), deque())
        return self._lanes[priority]

    def _forget_failures(self, key: Key) -> None:
        if self._failures is not None:
            self._failures.pop(key, None)
            if not self._failures:
                self._failures = None


def _due(waiting: _Waiting) -> None:
    waiting.queue._wake(waiting)
