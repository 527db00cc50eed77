"""What a guest may use, and by when. Knows nothing of the engine that enforces it.

`InstanceLimits` belongs to an instance and holds for each of its calls. `Deadline` belongs to one call: at the deadline
host calls answer `deadline`, and `InstanceLimits.grace_s` later a guest that has still not returned is stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class InstanceLimits:
    """Bounds of one instance. Lower ones stop a guest earlier; none of them is shared between instances."""

    memory_bytes: int = 256 * MIB
    """Linear memory. `memory.grow` beyond it answers -1; most guests then end themselves."""

    cpu_budget_s: float = 5.0
    """Processor time of one call into the guest, host functions included and waiting excluded."""

    grace_s: float = 0.5
    """Time after the deadline in which a guest may end in order before it is stopped."""

    message_bytes_max: int = 32 * MIB
    """Longest message in either direction. A longer one from the guest answers -1, a longer answer `too-large`."""

    output_bytes_max: int = MIB
    """What one call may write to stdout, stderr and `log`; the rest is counted and dropped."""

    table_elements: int = 200_000
    """Function table entries, 8 bytes each. Go guests have some 20,000."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "message_bytes_max", "output_bytes_max", "table_elements"):
            if getattr(self, name) <= 0:
                raise ValueError(f"limits: {name} must be positive, is {getattr(self, name)}")
        if self.cpu_budget_s <= 0 or self.grace_s < 0:
            raise ValueError(
                "limits: cpu_budget_s must be positive and grace_s not negative,"
                f" are {self.cpu_budget_s} and {self.grace_s}"
            )


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on a monotonic clock, seconds. Immutable: narrower ones are made with `within`."""

    at_s: float
    now: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float, now: Callable[[], float] = time.monotonic) -> Deadline:
        """The deadline `seconds` from now."""
        return cls(now() + seconds, now)

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - self.now())

    @property
    def passed(self) -> bool:
        return self.now() >= self.at_s

    def within(self, seconds: float | None) -> Deadline:
        """This deadline or the one `seconds` from now, whichever is earlier. None: this one."""
        if seconds is None:
            return self
        return Deadline(min(self.at_s, self.now() + seconds), self.now)
