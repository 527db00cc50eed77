"""The clocks that guests see. A guest's monotonic clock never goes back: not across unloads, images, snapshots, hosts.

It counts like CLOCK_BOOTTIME and starts, with the process, at the wall clock, so that it goes on across restarts and
reboots. An image or a snapshot carries the time it was taken; if that lies ahead (the wall clock was set back, or it
comes from another machine) the clock of the whole process moves forward to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

_EPOCH_NS = 1_735_689_600 * 1_000_000_000  # 2025-01-01: small enough that a guest's double keeps 10 ns


class Clock(Protocol):
    """What WASI asks."""

    def monotonic_ns(self) -> int: ...
    def realtime_ns(self) -> int: ...
    def sleep_ns(self, duration_ns: int, wait: Callable[[float], None]) -> None:
        """Lets `duration_ns` pass; `wait(seconds)` is how to spend it."""


def _boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class GuestClock:
    """The clock of all guests of a process."""

    def __init__(
        self,
        boottime_ns: Callable[[], int] = _boottime_ns,
        realtime_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._boottime_ns = boottime_ns
        self._realtime_ns = realtime_ns
        self._lock = threading.Lock()
        self._offset_ns = max(realtime_ns() - _EPOCH_NS, 0) - boottime_ns()

    def monotonic_ns(self) -> int:
        return self._boottime_ns() + self._offset_ns

    def realtime_ns(self) -> int:
        return self._realtime_ns()

    def sleep_ns(self, duration_ns: int, wait: Callable[[float], None]) -> None:
        wait(duration_ns / 1e9)

    def not_before(self, monotonic_ns: int) -> None:
        """From now on the clock shows more than this."""
        with self._lock:
            behind_ns = monotonic_ns + 1 - self.monotonic_ns()
            if behind_ns > 0:
                self._offset_ns += behind_ns
