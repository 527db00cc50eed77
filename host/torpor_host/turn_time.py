"""How long an operator's turn goes on before others get theirs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

# It goes on in another turn, with the same instance.
_WALL_S = 0.25
# What it takes from others is the processor, not the time it waits in host calls: with thirty operators in flight, one
# read each, turns counted by the clock ended after every single key.
_CPU_S_CONTENDED = 0.02


class Contention(Protocol):
    @property
    def contended(self) -> bool:
        """Whether others wait for this turn to end."""


class TurnTime:
    """Begins when it is made, on the thread of the turn. `wall_s` and `cpu_s` are clocks."""

    __slots__ = ("_began_cpu_s", "_began_s", "_contention", "_cpu_s", "_wall_s")

    def __init__(
        self, contention: Contention, wall_s: Callable[[], float], cpu_s: Callable[[], float] = time.thread_time
    ) -> None:
        self._contention = contention
        self._wall_s = wall_s
        self._cpu_s = cpu_s
        self._began_s = wall_s()
        self._began_cpu_s = cpu_s()

    @property
    def over(self) -> bool:
        if self._wall_s() - self._began_s > _WALL_S:
            return True
        return self._contention.contended and self._cpu_s() - self._began_cpu_s > _CPU_S_CONTENDED
