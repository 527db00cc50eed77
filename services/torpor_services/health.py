"""Readiness, bound to gRPC health.

A service names what it needs (`readiness.require("watches")`), and sets each as it becomes true. Health says SERVING
while all are, NOT_SERVING otherwise, for the whole server (the empty service name).
"""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health, health_pb2


class Readiness:
    """The conditions under which this service is ready, and why it is not."""

    def __init__(self) -> None:
        self._missing: dict[str, str] = {}
        self._draining = False
        self._version = 0
        self._waiters: set[asyncio.Event] = set()
        self.servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]

    def require(self, condition: str, reason: str = "starting") -> None:
        """Adds a condition that is not met yet."""
        self._missing[condition] = reason
        self._notify()

    def met(self, condition: str) -> None:
        if self._missing.pop(condition, None) is not None:
            self._notify()

    def lost(self, condition: str, reason: str) -> None:
        self.require(condition, reason)

    def drain(self) -> None:
        """Never ready again: load balancers look elsewhere while calls end."""
        self._draining = True
        self._notify()

    @property
    def ready(self) -> bool:
        return not self._missing and not self._draining

    @property
    def missing(self) -> dict[str, str]:
        return dict(self._missing)

    async def wait_ready(self) -> None:
        while not self.ready:
            await self._wait_change(self._version)

    async def publish(self) -> None:
        """Keeps the health service in step, until cancelled."""
        status = health_pb2.HealthCheckResponse
        while True:
            version = self._version
            await self.servicer.set("", status.SERVING if self.ready else status.NOT_SERVING)
            await self._wait_change(version)

    def _notify(self) -> None:
        self._version += 1
        for event in self._waiters:
            event.set()

    async def _wait_change(self, seen_version: int) -> None:
        if self._version != seen_version:
            return
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            await event.wait()
        finally:
            self._waiters.discard(event)
