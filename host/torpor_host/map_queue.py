"""The events of one operator that wait to be mapped to keys by its own code.

An event stays here until its keys are in the work queue, so that its position is not acknowledged before. Per object of
a watch one event waits: a later one joins it, which keeps the oldest state that was not told yet beside the newest.
What runs is apart; a change meanwhile waits behind it.

Failures: an event that failed goes to the end of the line, and the line rests (0.1 s · 2ⁿ for n failures in a row, at
most a minute). After 5 failures of one event, or 5 in a row of whichever, they are *given up*: every known primary is
to be run instead (`take_given_up`), which is what they could at most have asked for.

Bound: 10,000 events and 8 MiB of objects an operator, 64 MiB a host, with the event that runs. Overflow: what waits is
given up. Thread-safe, under the lock of all queues of a host: the loop adds, a worker takes and gives back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from torpor_host.work_queue import TRACES_MAX, Cause, Key

EVENTS_MAX = 10_000
BYTES_MAX = 8 << 20
HOST_BYTES_MAX = 64 << 20
FAILURES_MAX = 5
_REST_S = (0.1, 60.0)
_OVERHEAD_BYTES = 600  # of the Python objects around an event

EventType = Literal["ADDED", "MODIFIED", "DELETED"]


@dataclass(slots=True, eq=False)
class MapEvent:
    """A change of a watched object. `object` is the newest state (of a deletion the last), `old` the oldest not told
    yet; JSON, empty if there is none."""

    watch: int  # index into the spec's `watches`
    key: Key  # of the object
    type: EventType
    object: bytes
    old: bytes
    cause: Cause  # of the keys that come out of it
    since_s: float
    since_unix_ns: int
    sequence: int
    traces: tuple[str, ...] = ()
    failures: int = 0

    @property
    def size(self) -> int:
        return len(self.object) + len(self.old) + _OVERHEAD_BYTES

    def absorb(self, later: MapEvent) -> None:
        """The two become one: from before this one to after the later one."""
        if self.type == "DELETED" and later.type != "DELETED":
            self.type, self.old = "MODIFIED", self.old or self.object
        elif later.type == "DELETED":
            self.type = "DELETED"
        if self.type != "ADDED" and not self.old:
            self.old = later.old
        self.object = later.object
        if later.cause is Cause.WATCH:
            self.cause = later.cause
        self.sequence = min(self.sequence, later.sequence)
        self.traces = tuple(dict.fromkeys(self.traces + later.traces))[:TRACES_MAX]
        self.failures = max(self.failures, later.failures)


@dataclass(slots=True)
class MapMemory:
    """What the events of all operators of a host hold. Changed under the queues' lock."""

    maximum_bytes: int = HOST_BYTES_MAX
    held_bytes: int = 0


class MapQueue:
    """One operator's; only operators with a mapping in code have one."""

    __slots__ = ("_bytes", "_failures", "_given_up", "_lock", "_memory", "_paused", "_resting", "_running", "_waiting")

    def __init__(self, lock: threading.Lock, memory: MapMemory) -> None:
        self._lock = lock
        self._memory = memory
        self._waiting: OrderedDict[tuple[int, Key], MapEvent] = OrderedDict()
        self._running: dict[int, MapEvent] = {}
        self._bytes = 0
        self._failures = 0  # in a row
        self._given_up: int | None = None
        self._paused = self._resting = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def ready(self) -> bool:
        """Whether `take` would give an event."""
        return bool(self._waiting) and not self._paused and not self._resting

    @property
    def rest_s(self) -> float:
        """How long nothing is to be tried, after a failure; then call `rested`. 0: it does not rest."""
        if not self._resting:
            return 0.0
        first_s, longest_s = _REST_S
        return min(first_s * 2.0 ** min(max(self._failures - 1, 0), 20), longest_s)

    def oldest_sequence(self) -> int:
        """The lowest sequence that is not mapped yet; 0 if all are."""
        with self._lock:
            events = (*self._waiting.values(), *self._running.values())
            sequences = [event.sequence for event in events if event.sequence]
            return min([*sequences, *([self._given_up] if self._given_up else [])], default=0)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def add(self, event: MapEvent) -> None:
        """It waits; what waits is given up if that is too much."""
        with self._lock:
            self._put(event)
            too_many = len(self._waiting) > EVENTS_MAX or self._bytes > BYTES_MAX
            if too_many or self._memory.held_bytes > self._memory.maximum_bytes:
                self._give_up_waiting()

    def take_given_up(self) -> int | None:
        """The lowest sequence of what was given up since the last time; the caller runs every primary for it. None:
        nothing was."""
        with self._lock:
            sequence, self._given_up = self._given_up, None
            return sequence

    def rested(self) -> None:
        self._resting = False

    def pause(self) -> None:
        """`take` gives nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def retain(self, watches: set[int]) -> None:
        """Forgets the events of all other watches."""
        with self._lock:
            for place in [place for place in self._waiting if place[0] not in watches]:
                self._weigh(-self._waiting.pop(place).size)
            for event in [event for event in self._running.values() if event.watch not in watches]:
                self._end(event)

    def clear(self) -> None:
        """Forgets everything; what runs comes back to nothing."""
        self.retain(set())
        self._given_up = None

    # -- a worker ----------------------------------------------------------------------------------------------------

    def take(self) -> MapEvent | None:
        """The event that has waited longest."""
        with self._lock:
            if not self.ready:
                return None
            _, event = self._waiting.popitem(last=False)
            self._running[id(event)] = event
            return event

    def done(self, event: MapEvent) -> bool:
        """Its keys are in the work queue, or are put there before the loop does anything else. False: it was
        forgotten meanwhile, and its keys with it."""
        with self._lock:
            self._failures = 0
            return self._end(event)

    def failed(self, event: MapEvent) -> None:
        """It could not be mapped."""
        with self._lock:
            self._count_failure()
            if not self._end(event):
                return
            event.failures += 1
            if event.failures >= FAILURES_MAX or self._failures >= FAILURES_MAX:
                self._give_up(event)
            else:
                self._put_back(event)
            if self._failures >= FAILURES_MAX:
                self._give_up_waiting()

    def failed_to_load(self) -> None:
        """Nothing could be tried."""
        with self._lock:
            self._count_failure()
            if self._failures >= FAILURES_MAX:
                self._give_up_waiting()

    def give_back(self, event: MapEvent) -> None:
        """It was not mapped after all, and nothing is counted."""
        with self._lock:
            if self._end(event):
                self._put_back(event)

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _put(self, event: MapEvent) -> None:
        place = (event.watch, event.key)
        present = self._waiting.get(place)
        if present is None:
            self._waiting[place] = event
            self._weigh(event.size)
        else:
            before = present.size
            present.absorb(event)
            self._weigh(present.size - before)

    def _put_back(self, event: MapEvent) -> None:
        """At the end of the line; what came meanwhile comes after it."""
        later = self._waiting.pop((event.watch, event.key), None)
        if later is not None:
            self._weigh(-later.size)
            event.absorb(later)
        self._put(event)

    def _end(self, event: MapEvent) -> bool:
        """It no longer runs; False if it was forgotten meanwhile."""
        if self._running.pop(id(event), None) is None:
            return False
        self._weigh(-event.size)
        return True

    def _weigh(self, size: int) -> None:
        self._bytes += size
        self._memory.held_bytes += size

    def _count_failure(self) -> None:
        self._failures += 1
        self._resting = True

    def _give_up(self, event: MapEvent) -> None:
        self._given_up = event.sequence if self._given_up is None else min(self._given_up, event.sequence)

    def _give_up_waiting(self) -> None:
        while self._waiting:
            _, event = self._waiting.popitem(last=False)
            self._weigh(-event.size)
            self._give_up(event)
