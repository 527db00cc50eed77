"""The cache service, put together: `async with running(config) as service` or `await run(config)`.

It starts whether or not the API server is there. It is ready while the WasmOperators are watched live; until then
health says NOT_SERVING with the reason in the log, and everything is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
from torpor_services.clock import Clock, SystemClock
from torpor_services.health import Readiness
from torpor_services.memory import trim_heap
from torpor_services.server import RunningServer, serving

from torpor_cache.access import Access
from torpor_cache.apiserver import ApiServer, ApiUnavailable, CredentialSource
from torpor_cache.breadth import Breadths
from torpor_cache.config import CacheConfig
from torpor_cache.feeds import Feeds
from torpor_cache.histories import Histories
from torpor_cache.identity import WASM_OPERATORS, Assignments, Identities
from torpor_cache.informers import Informer, Informers, InformerState, WatchScope
from torpor_cache.kinds import Kinds
from torpor_cache.kubeconfig import source_for
from torpor_cache.objects import Change, allow_deep_json
from torpor_cache.positions import Positions
from torpor_cache.requests import Requests
from torpor_cache.resources import Position
from torpor_cache.rights import RightsWatch
from torpor_cache.servicer import SERVICE, CacheServicer
from torpor_cache.streams import StreamParts

log = logging.getLogger(__name__)

OPERATORS_LIVE = "operators"
WATCHES_LIVE = "watches"
OPERATORS_RETRY_S = 1.0  # after a watch that was refused for good
TIDY_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class CacheService:
    """A running service. `address` is where it listens."""

    server: RunningServer
    readiness: Readiness
    informers: Informers
    servicer: CacheServicer

    @property
    def address(self) -> str:
        return self.server.address


async def run(config: CacheConfig, *, handle_signals: bool = True) -> None:
    """Serves until SIGTERM or SIGINT, then drains."""
    async with running(config, handle_signals=handle_signals) as service:
        await service.server.wait_stopped()


@asynccontextmanager
async def running(
    config: CacheConfig,
    *,
    credentials: CredentialSource | None = None,
    clock: Clock | None = None,
    handle_signals: bool = False,
) -> AsyncIterator[CacheService]:
    """Listens when it yields; wait for `service.readiness.wait_ready()` where that matters.

    `credentials` instead of the configured kubeconfig. Raises AddressInUse, InvalidSetting.
    """
    allow_deep_json()
    clock = clock or SystemClock()
    source = credentials or source_for(config.kubeconfig, config.context)
    readiness = Readiness()
    readiness.require(OPERATORS_LIVE, "the WasmOperators are not watched yet")
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(ApiServer(source, user_agent="torpor-cache", clock=clock))
        histories = Histories(api)
        stack.push_async_callback(_cancel, [asyncio.create_task(_resolve_early(api))])
        positions = await stack.enter_async_context(Positions(clock, config.state))
        informers = await stack.enter_async_context(Informers(api, histories, clock=clock, memory=positions))
        access = Access(api, clock, config.access)
        stack.push_async_callback(access.close)
        feeds = Feeds(informers, clock)
        assignments = Assignments()
        identities = Identities(api, assignments, config.accounts, clock, config.access)
        breadths = Breadths(api, informers, config.watches.wide_objects_max)
        parts = StreamParts(
            feeds, breadths, identities, access, Kinds(api), positions, clock, config.streams, config.access
        )
        requests = Requests(api, informers, access, config.requests)
        servicer = CacheServicer(parts, informers, feeds, identities, requests)
        assignments.observe(servicer.assignment_changed)
        rights = RightsWatch(informers, access, clock, servicer.rights_changed)
        tasks = [
            asyncio.create_task(_OperatorsWatch(informers, assignments, readiness).run(clock)),
            asyncio.create_task(_bookmark(feeds, clock, config.streams.bookmark_s)),
            asyncio.create_task(_tidy(feeds, clock)),
        ]
        if config.access.watch_rbac:
            tasks.append(asyncio.create_task(rights.run()))
        stack.push_async_callback(_cancel, tasks)
        server = await stack.enter_async_context(
            serving(
                config.server,
                add=servicer.add_to,
                names=[SERVICE],
                readiness=readiness,
                handle_signals=handle_signals,
            )
        )
        try:
            yield CacheService(server, readiness, informers, servicer)
        finally:
            servicer.close_streams()


class _OperatorsWatch:
    """The listener of the WasmOperators: feeds the assignments, and says whether the service is ready."""

    def __init__(self, informers: Informers, assignments: Assignments, readiness: Readiness) -> None:
        self._informers = informers
        self._assignments = assignments
        self._readiness = readiness
        self._informer: Informer | None = None
        self._problem = ""
        self._told: dict[str, str] = {}
        self.ended = asyncio.Event()
        informers.on_readiness(self.tell)

    async def run(self, clock: Clock) -> None:
        """Until cancelled; a watch that is refused for good is begun anew."""
        while True:
            self.ended.clear()
            self._informer = self._informers.acquire(WatchScope(WASM_OPERATORS), self)
            if self._informer.synced:
                self.on_synced()
            self.tell()
            await self.ended.wait()
            self._informers.release(self)
            await clock.sleep(OPERATORS_RETRY_S)

    def tell(self) -> None:
        """Brings readiness into step with the watches."""
        operators = self._informer
        if operators is not None and operators.state is InformerState.SYNCED:
            self._problem = ""
            self._met(OPERATORS_LIVE)
        elif operators is not None:
            self._lost(OPERATORS_LIVE, self._problem or f"the watch of WasmOperators is {operators.state.value}")
        stale = [str(informer.scope) for informer in self._informers if informer.state is InformerState.STALE]
        if stale:
            self._lost(WATCHES_LIVE, f"{len(stale)} watches are lost and being retried: {'; '.join(stale[:5])}")
        else:
            self._met(WATCHES_LIVE)

    def _met(self, condition: str) -> None:
        if self._told.pop(condition, None) is not None:
            log.info("regained", extra={"condition": condition})
        self._readiness.met(condition)

    def _lost(self, condition: str, reason: str) -> None:
        if self._told.get(condition) != reason:
            self._told[condition] = reason
            self._readiness.lost(condition, reason)
            log.warning("not ready", extra={"condition": condition, "reason": reason})

    # As a listener

    def on_change(self, change: Change) -> None:
        self._assignments.on_change(change)

    def on_synced(self) -> None:
        """Readiness follows when the watch behind the list is live."""
        if self._informer is not None:
            self._assignments.load(list(self._informer.store))

    def on_bookmark(self, position: Position) -> None:
        """Nothing has changed."""

    def on_resync(self) -> None:
        self._assignments.on_resync()
        self.tell()

    def on_error(self, status: bytes, final: bool) -> None:
        self._problem = _problem(status)
        self.tell()
        if final:
            self.ended.set()


def _problem(status: bytes) -> str:
    try:
        read = msgspec.json.decode(status)
    except (msgspec.MsgspecError, RecursionError):
        read = {}
    if not isinstance(read, dict):
        read = {}
    if read.get("code") == 404:
        return "the API server does not serve WasmOperators: run `torpor install-crds`"
    return f"WasmOperators cannot be watched: {read.get('message') or read.get('code') or 'no reason given'}"


async def _resolve_early(api: ApiServer) -> None:
    """The kubeconfig, while positions are loaded. Whoever asks first waits for it, or hears itself why it fails."""
    with contextlib.suppress(ApiUnavailable):
        await api.server()


async def _bookmark(feeds: Feeds, clock: Clock, period_s: float) -> None:
    while True:
        await clock.sleep(period_s)
        for feed in feeds:
            feed.bookmark()


async def _tidy(feeds: Feeds, clock: Clock) -> None:
    """Lets go of what only recent changes needed, and gives its memory back: a millisecond of a thread."""
    while True:
        await clock.sleep(TIDY_EVERY_S)
        feeds.quiet()
        await asyncio.to_thread(trim_heap)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
