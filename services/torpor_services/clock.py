"""Time as a dependency.

Services take a `Clock`, so that tests advance time instead of waiting for it. Monotonic time counts suspend
(CLOCK_BOOTTIME): a laptop that slept must not believe that its Lease is still good.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some start, nanoseconds since the epoch, and sleeping."""

    def monotonic_s(self) -> float: ...

    def unix_ns(self) -> int: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def monotonic_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def unix_ns(self) -> int:
        return time.time_ns()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that stands still until `advance`; sleepers wake in the order of their times."""

    def __init__(self, unix_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_s = 0.0
        self._unix_ns = unix_ns
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic_s(self) -> float:
        return self._now_s

    def unix_ns(self) -> int:
        return self._unix_ns

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Moves time on, waking every sleeper on the way and letting it run before the next."""
        target = self._now_s + seconds
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= target:
            due, _, future = heapq.heappop(self._sleepers)
            self._move_to(due)
            if not future.done():
                future.set_result(None)
            await self._settle()
        self._move_to(target)
        await self._settle()

    def _move_to(self, now_s: float) -> None:
        self._unix_ns += round((now_s - self._now_s) * 1e9)
        self._now_s = now_s

    @staticmethod
    async def _settle() -> None:
        # Ready callbacks may schedule more; 20 rounds let a chain of tasks run dry without depending on its length.
        for _ in range(20):
            await asyncio.sleep(0)
