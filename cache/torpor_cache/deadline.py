"""Waiting with a limit on an injected clock."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from torpor_services.clock import Clock

Result = TypeVar("Result")


async def within(clock: Clock, seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; cancels it and raises TimeoutError after `seconds` of the clock."""
    task = asyncio.ensure_future(work)
    limit = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({task, limit}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise TimeoutError(f"not within {seconds} s")
        return task.result()
    finally:
        for each in (task, limit):
            each.cancel()
        # The work may hold a connection: it is over before its limit is told.
        await asyncio.gather(task, limit, return_exceptions=True)
