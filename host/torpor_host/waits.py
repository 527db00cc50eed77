"""How a worker's thread waits for something outside of it, with or without a slot to give back meanwhile."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Wait:
    """For one thing, once: a thread waits in `until`, whoever has what it waits for calls `end`."""

    __slots__ = ("_over", "ended")

    def __init__(self) -> None:
        self._over = threading.Lock()
        self._over.acquire()
        self.ended = False

    def end(self) -> None:
        """From any thread, once."""
        self.ended = True
        self._over.release()

    def until(self, timeout_s: float) -> bool:
        """Whether it has ended by then."""
        return self._over.acquire(timeout=max(timeout_s, 0.0))


class Slot(Protocol):
    """What a thread holds while it works, and others may use while it waits."""

    def wait(self) -> Wait:
        """A wait that gives the slot back for as long as it lasts."""

    def blocking(self) -> AbstractContextManager[object]:
        """Around any other wait."""


class _NoSlot:
    """For threads that hold none."""

    wait = staticmethod(Wait)
    blocking = staticmethod(nullcontext)


NO_SLOT: Slot = _NoSlot()
