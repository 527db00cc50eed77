"""Every timer of a host in one heap, fired by one task: requeues, retries, resyncs, unloads, back-offs.

A sleeping operator therefore costs a heap entry a timer and no task. `schedule` and `cancel` may be called from any
thread; callbacks run on the event loop, must not block, and a failing one is logged and harms no other.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from torpor_services.clock import Clock

log = logging.getLogger(__name__)

T = TypeVar("T")

# asyncio sleeps on a clock that stands still while the machine is suspended; ours does not. After a resume a timer that
# came due meanwhile is at most this late.
_SLEEP_S_MAX = 30.0
_COMPACT_ABOVE = 64


class Timer:
    """One planned call. `due_s` is on the clock's monotonic time."""

    __slots__ = ("_argument", "_callback", "due_s")

    def __init__(self, due_s: float, callback: Callable[[Any], None], argument: Any) -> None:
        self.due_s = due_s
        self._callback: Callable[[Any], None] | None = callback
        self._argument = argument

    @property
    def pending(self) -> bool:
        """Neither fired nor cancelled."""
        return self._callback is not None

    def _take(self) -> Callable[[], None] | None:
        callback, argument = self._callback, self._argument
        self._callback = self._argument = None
        if callback is None:
            return None
        return lambda: callback(argument)


class Timers:
    """The heap. `run` is its task."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._cancelled = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._changed: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._heap) - self._cancelled

    def now_s(self) -> float:
        return self._clock.monotonic_s()

    def unix_ns(self) -> int:
        return self._clock.unix_ns()

    def after(self, delay_s: float, callback: Callable[[T], None], argument: T) -> Timer:
        """Calls `callback(argument)` on the loop in `delay_s`."""
        return self.schedule(self.now_s() + max(0.0, delay_s), callback, argument)

    def schedule(self, due_s: float, callback: Callable[[T], None], argument: T) -> Timer:
        """Calls `callback(argument)` on the loop at `due_s`."""
        timer = Timer(due_s, callback, argument)
        with self._lock:
            heapq.heappush(self._heap, (due_s, next(self._order), timer))
            earliest = self._heap[0][2] is timer
        if earliest:
            self._notify()
        return timer

    def cancel(self, timer: Timer | None) -> None:
        """The call will not happen, unless it is happening. Cancelling again, or None, does nothing."""
        if timer is None:
            return
        with self._lock:
            if timer._take() is None:
                return
            self._cancelled += 1
            if self._cancelled > _COMPACT_ABOVE and self._cancelled * 2 > len(self._heap):
                self._heap = [entry for entry in self._heap if entry[2].pending]
                heapq.heapify(self._heap)
                self._cancelled = 0

    def next_due_s(self) -> float | None:
        with self._lock:
            while self._heap and not self._heap[0][2].pending:
                heapq.heappop(self._heap)
                self._cancelled -= 1
            return self._heap[0][0] if self._heap else None

    def fire_due(self) -> int:
        """Calls what is due; returns how many."""
        fired = 0
        while (call := self._take_due()) is not None:
            fired += 1
            try:
                call()
            except Exception:
                log.exception("a timer's callback failed")
        return fired

    def _take_due(self) -> Callable[[], None] | None:
        with self._lock:
            while self._heap and self._heap[0][0] <= self.now_s():
                call = heapq.heappop(self._heap)[2]._take()
                if call is not None:
                    return call
                self._cancelled -= 1
        return None

    async def run(self) -> None:
        """Fires timers as they come due, until cancelled."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        changed = self._changed = asyncio.Event()
        sleeping: asyncio.Task[None] | None = None
        until_s: float | None = None
        try:
            while True:
                self.fire_due()
                changed.clear()
                due_s = self.next_due_s()
                if sleeping is None or sleeping.done() or due_s != until_s:
                    if sleeping is not None:
                        sleeping.cancel()
                    sleeping = None if due_s is None else asyncio.create_task(self._sleep(due_s, changed))
                    until_s = due_s
                await changed.wait()
        finally:
            if sleeping is not None:
                sleeping.cancel()
                await asyncio.gather(sleeping, return_exceptions=True)

    async def _sleep(self, due_s: float, changed: asyncio.Event) -> None:
        await self._clock.sleep(min(due_s - self.now_s(), _SLEEP_S_MAX))
        changed.set()

    def _notify(self) -> None:
        loop, changed = self._loop, self._changed
        if loop is None or changed is None:
            return
        if threading.get_ident() == self._loop_thread:
            changed.set()
        else:
            with suppress(RuntimeError):  # the loop is closed: nothing fires any more
                loop.call_soon_threadsafe(changed.set)


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Returns when one of them is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
