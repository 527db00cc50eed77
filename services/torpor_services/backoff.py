"""Exponential back-off with jitter that forgets after a time of health."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from torpor_services.clock import Clock


@dataclass
class Backoff:
    """Delays of `initial_s · factorⁿ` up to `max_s`, each spread by ± `jitter` of itself.

    client-go's reflector uses 0.8 s, 30 s and a reset after 2 minutes (tools/cache/reflector.go); those are the
    defaults. `succeeded` marks health: once it has lasted `reset_after_s`, the next delay is the first again.
    """

    clock: Clock
    initial_s: float = 0.8
    max_s: float = 30.0
    factor: float = 2.0
    jitter: float = 0.25
    reset_after_s: float = 120.0
    random: Callable[[], float] = random.random
    _failures: int = field(default=0, init=False)
    _healthy_since_s: float | None = field(default=None, init=False)

    def next_delay_s(self, max_s: float | None = None) -> float:
        """The delay before the next try.

        `max_s`: a lower bound, for a failure whose repetition is cheap. Where it binds the failure does not count, so
        that another kind of failure goes on from that bound, not at the longest delay.
        """
        limit_s = self.max_s if max_s is None else min(max_s, self.max_s)
        if self._healthy_since_s is not None:
            if self.clock.monotonic_s() - self._healthy_since_s >= self.reset_after_s:
                self._failures = 0
            self._healthy_since_s = None
        delay_s = self.initial_s
        for _ in range(self._failures):
            delay_s = min(delay_s * self.factor, limit_s)
            if delay_s == limit_s:
                break
        if delay_s < limit_s or limit_s == self.max_s:
            self._failures += 1
        return delay_s * (1 + self.jitter * (2 * self.random() - 1))

    def succeeded(self) -> None:
        """Marks the beginning of health, if it is not marked already."""
        if self._healthy_since_s is None:
            self._healthy_since_s = self.clock.monotonic_s()

    def reset(self) -> None:
        """The next delay is the first again."""
        self._failures = 0
        self._healthy_since_s = None
