"""Hears of changed Roles and bindings, so that answers about rights are forgotten before their time is over.

The API server's authorizer learns of such a change when we do, not before: answers are forgotten at once and once more
`SETTLE_S` later, and live watches are checked again then. Without the right to watch RBAC objects (or with another
authorizer) the bounded time of `Access` is what remains.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from torpor_services.clock import Clock

from torpor_cache.access import Access
from torpor_cache.informers import Informers, WatchScope
from torpor_cache.objects import Change
from torpor_cache.resources import Position, Resource

SETTLE_S = 0.5  # a burst of changes (an installation) is one round of checks
_GROUP = "rbac.authorization.k8s.io"
_KINDS = ("roles", "rolebindings", "clusterroles", "clusterrolebindings")


class RightsWatch:
    """The listener of the RBAC informers; `run` until cancelled."""

    def __init__(self, informers: Informers, access: Access, clock: Clock, recheck: Callable[[], None]) -> None:
        self._informers = informers
        self._access = access
        self._clock = clock
        self._recheck = recheck
        self._changed = asyncio.Event()

    async def run(self) -> None:
        for kind in _KINDS:
            self._informers.acquire(WatchScope(Resource(_GROUP, "v1", kind)), self)
        try:
            while True:
                await self._changed.wait()
                await self._clock.sleep(SETTLE_S)
                self._changed.clear()
                self._access.forget()
                self._recheck()
        finally:
            with contextlib.suppress(RuntimeError):  # the informers may be closed already
                self._informers.release(self)

    def on_change(self, change: Change) -> None:
        self._access.forget()
        self._changed.set()

    def on_synced(self) -> None:
        """Nothing was answered on the ground of what is listed now."""

    def on_bookmark(self, position: Position) -> None:
        """Nothing has changed."""

    def on_resync(self) -> None:
        self._access.forget()
        self._changed.set()

    def on_error(self, status: bytes, final: bool) -> None:
        """Answers then live as long as `Access` lets them."""
