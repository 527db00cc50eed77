"""What host functions know of the guest that called them: its memory, clocks, limits, and the call it is in.

One `GuestContext` an instance, reached through the thread that runs it (`current`), so that one set of host functions
serves all instances and none of them holds a store. Only the running thread touches it, but for `stop`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torpor_host.guest_clock import Clock
from torpor_host.hostcalls import HostCalls
from torpor_host.limits import Deadline, InstanceLimits
from torpor_host.native import GuestMemory
from torpor_host.output import Output

_log = logging.getLogger("torpor.host.calls")

current = threading.local()
"""`current.guest` is the GuestContext whose code runs on this thread."""


@dataclass(slots=True)
class GuestContext:
    memory: GuestMemory
    clock: Clock
    random: Callable[[int], bytes]
    calls: HostCalls
    limits: InstanceLimits
    output: Output
    deadline: Deadline = field(default_factory=lambda: Deadline.after(0))
    pending: bytes | None = None
    """The result that `take` hands out."""
    exit_code: int | None = None
    ended_by: str | None = None
    """cpu, deadline, stop or exit, once `verdict` has said so."""
    stop_reason: str | None = None
    fault: str | None = None
    """The last exception of a host function: a bug of the host, told in the failure's reason."""
    _stopped: threading.Event | None = None
    _cpu_end_s: float = 0.0

    def begin(self, deadline: Deadline, cpu_budget_s: float) -> None:
        """A call into the guest starts on this thread."""
        self.deadline = deadline
        self.pending = None
        self._cpu_end_s = time.thread_time() + cpu_budget_s
        self.output.begin()

    def end(self) -> None:
        self.pending = None
        try:
            self.output.end(self.calls.log)
        except Exception:  # the call has its outcome already
            _log.exception("the log of a guest")

    def verdict(self) -> str | None:
        """At each tick, on the guest's thread: why it must end now, or None."""
        if self.exit_code is not None:
            self.ended_by = "exit"
            return f"exit {self.exit_code}"
        if self.stop_reason is not None:
            self.ended_by = "stop"
            return self.stop_reason
        if time.thread_time() >= self._cpu_end_s:
            self.ended_by = "cpu"
            return "CPU budget used up"
        if self.deadline.now() >= self.deadline.at_s + self.limits.grace_s:
            self.ended_by = "deadline"
            return "deadline passed"
        return None

    def stop(self, reason: str) -> None:
        """From any thread."""
        self.stop_reason = reason
        stopped = self._stopped
        if stopped is not None:
            stopped.set()

    def sleep_ns(self, duration_ns: int) -> None:
        """Sleeps until done, the deadline, or `stop`; the CPU slot is given back meanwhile."""
        self.clock.sleep_ns(duration_ns, self._wait)

    def _wait(self, seconds: float) -> None:
        # Set before stop_reason is read, so that a stop in between is seen by one of the two.
        stopped = self._stopped = threading.Event()
        try:
            seconds = min(seconds, self.deadline.remaining_s())
            if seconds > 0 and self.stop_reason is None:
                with self.calls.blocking():
                    stopped.wait(seconds)
        finally:
            self._stopped = None


def system_random(length: int) -> bytes:
    return os.urandom(length)
