"""What an instance waits for outside of its process, so that whoever stops the instance can end the wait.

A guest blocks in a host call on a worker's thread; after the Lease is lost, nothing may hold that thread to the call's
own deadline. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class InFlight:
    """Of one instance; one wait at a time."""

    __slots__ = ("_cancel", "_lock", "_stopped")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._cancel: Callable[[], object] | None = None

    def stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Ends the wait that is under way, and each that begins from now on."""
        with self._lock:
            self._stopped.set()
            cancel = self._cancel
        if cancel is not None:
            cancel()

    @contextmanager
    def waiting(self, cancel: Callable[[], object]) -> Iterator[None]:
        """`cancel` ends what the block waits for, from any thread, also twice."""
        with self._lock:
            self._cancel = cancel
        try:
            if self.stopped():
                cancel()
            yield
        finally:
            with self._lock:
                self._cancel = None

    def sleep(self, seconds: float) -> None:
        """Less if it is stopped."""
        self._stopped.wait(seconds)
