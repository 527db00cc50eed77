"""The clock of the cluster: wall time for timestamps, monotonic time for windows. Tests bring their own."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never go back."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()


def rfc3339(seconds: float) -> str:
    """`2026-01-02T03:04:05Z`, as metav1.Time prints (whole seconds)."""
    return _rfc3339(int(seconds))


@lru_cache(maxsize=64)
def _rfc3339(seconds: int) -> str:
    # Every write asks for the present second, some of them twice.
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
