"""Shared informers: one upstream watch for each kind and scope, whatever the number of those who listen.

An informer is acquired with a listener and released with it. Whoever asks for a narrower scope than one that is watched
already is given that one, and filters by its own selectors; the first listener opens the watch, the last one's leaving
closes it after `linger_s`, so that reconnecting subscribers do not relist.

Everything here runs on one loop and is consistent between two awaits: an informer's store, history and position move
together, and a listener that reads them in a callback, or right after `acquire` or `attach`, sees one state.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
from torpor_services.backoff import Backoff
from torpor_services.clock import Clock, SystemClock
from torpor_services.errors import TorporError

from torpor_cache import fields
from torpor_cache.apiserver import ApiServer, make_status
from torpor_cache.catch_up import CatchUp, deletion
from torpor_cache.deadline import within
from torpor_cache.histories import Histories
from torpor_cache.history import History, HistoryLimits
from torpor_cache.objects import Change, ChangeType, StoredObject
from torpor_cache.reflector import Counters, Reflector
from torpor_cache.resources import Position, Resource, ResourceVersion
from torpor_cache.selectors import FieldSelector, LabelSelector
from torpor_cache.store import Store
from torpor_cache.watch_protocol import Failure
from torpor_cache.watcher import Scope, Watcher, WatchLimits

logger = logging.getLogger(__name__)


class InformerState(Enum):
    STARTING = "starting"  # no list is complete yet; nothing to read
    SYNCED = "synced"  # live
    STALE = "stale"  # was synced; the watch is lost and being retried; reads show the last state known
    FAILED = "failed"  # the API server refuses: no rights, no such kind, a selector it does not know; see `error`


class NotSynced(TorporError):
    """The first list is not complete yet, or refused; retry after `retry_after_s`."""

    def __init__(self, scope: WatchScope, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{scope} is not synced yet")
        self.retry_after_s = retry_after_s


class NotFresh(TorporError):
    """The watch has not come as far as the reader asks; retry after `retry_after_s`."""

    def __init__(self, scope: WatchScope, wanted: ResourceVersion, reached: ResourceVersion) -> None:
        super().__init__(f"{scope} is at version {reached}, {wanted} is asked for")
        self.retry_after_s = 1.0


@dataclass(frozen=True, slots=True)
class WatchScope:
    """What is watched upstream. Raises InvalidSelector when its selectors are first looked at (`normal`)."""

    resource: Resource
    namespace: str = ""
    label_selector: str = ""
    field_selector: str = ""

    def normal(self) -> WatchScope:
        """With canonical selectors, so that equal scopes are equal; raises InvalidSelector."""
        labels, selected = LabelSelector.parse(self.label_selector), FieldSelector.parse(self.field_selector)
        return WatchScope(self.resource, self.namespace, str(labels), str(selected))

    def covers(self, other: WatchScope) -> bool:
        """True only if a watch of this scope shows everything of `other`, and the cache can pick it out itself."""
        if self.resource != other.resource or self.namespace not in ("", other.namespace):
            return False
        wide, narrow = FieldSelector.parse(self.field_selector), FieldSelector.parse(other.field_selector)
        if wide != narrow and not fields.evaluable(self.resource, wide.paths | narrow.paths):
            return False
        labels = LabelSelector.parse(self.label_selector)
        return labels.covers(LabelSelector.parse(other.label_selector)) and wide.covers(narrow)

    def __str__(self) -> str:
        parts = [str(self.resource)]
        parts += [f"namespace {self.namespace}"] if self.namespace else []
        parts += [f"labels {self.label_selector}"] if self.label_selector else []
        parts += [f"fields {self.field_selector}"] if self.field_selector else []
        return ", ".join(parts)


class Listener(Protocol):
    """Called on the loop, between two awaits; must neither block nor raise (what it raises is logged).

    Between attaching to an informer that is not yet synced (or `on_resync`) and `on_synced` there are no changes: read
    the store in `on_synced`. Attaching to an informer that has synced before calls nothing: read the store at once.
    """

    def on_change(self, change: Change) -> None:
        """Store, history and position show this change already, and none later."""
        ...

    def on_synced(self) -> None:
        """The first list is complete, or the one that replaced everything."""
        ...

    def on_bookmark(self, position: Position) -> None:
        """Nothing else up to here; the watch is alive."""
        ...

    def on_resync(self) -> None:
        """Another history: all that was known is void. Old positions are worthless; `on_synced` follows when listed."""
        ...

    def on_error(self, status: bytes, final: bool) -> None:
        """A Kubernetes Status as JSON: no rights, no such kind. Not final: retried, slowly; the store stays."""
        ...


class Memory(Protocol):
    """What outlives informers: deletions, and how far each scope was watched."""

    def remember(self, resource: Resource, history: str, change: Change) -> None:
        """A deletion, told before the listeners hear of it, also while there are none."""
        ...

    def watched(self, scope: WatchScope, position: Position) -> None:
        """Every deletion of the scope up to here was told."""
        ...

    def watched_until(self, scope: WatchScope, history: str) -> Sequence[ResourceVersion]:
        """Where deletions of the scope may begin to be missing, best first; empty where nobody asks for them."""
        ...


class NoMemory:
    """Nobody asks for what happened while nobody watched."""

    def remember(self, resource: Resource, history: str, change: Change) -> None:
        pass

    def watched(self, scope: WatchScope, position: Position) -> None:
        pass

    def watched_until(self, scope: WatchScope, history: str) -> Sequence[ResourceVersion]:
        return ()


WATCHED_PERIOD_S = 5.0  # how often memory is told how far a busy scope has come: what a crash makes us ask for again


@dataclass(frozen=True, slots=True)
class InformerLimits:
    """What informers keep, and for how long."""

    history: HistoryLimits = field(default_factory=HistoryLimits)
    watch: WatchLimits = field(default_factory=WatchLimits)
    linger_s: float = 10.0  # an upstream watch outlives its last listener: longer than a host takes to reconnect


class Informer:
    """One upstream watch, its objects and its recent changes. Made by `Informers` alone."""

    def __init__(self, informers: Informers, scope: WatchScope, reason: str) -> None:
        self._informers = informers
        self._clock = informers.clock
        self._listeners: tuple[Listener, ...] = ()
        self._waiters: list[tuple[ResourceVersion, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._live = False
        self._refused = False
        self._own_history = ""  # of a resource that went back while the cluster did not
        self._task: asyncio.Task[None] | None = None
        self._lingering: asyncio.Task[None] | None = None
        self._catching_up: asyncio.Task[None] | None = None
        self._synced = asyncio.Event()
        self._caught_up = asyncio.Event()
        self._watched_told_s = -WATCHED_PERIOD_S
        self._watches_before = 0
        self._began_unix_ns = self._clock.unix_ns()
        self.scope = scope
        self.reason = reason
        self.store = Store()
        self.history = History(self._clock, informers.limits.history)
        self.kind = ""
        self.list_kind = ""
        self.error = b""  # the Status of the last refusal, while it lasts
        self.trouble = ""  # why the watch is not live, in words
        self.final = False  # refused for good: the informer has ended
        self._reflector = Reflector(scope.resource, self.store, self.history, self)
        self._watcher = self._make_watcher()

    # State

    @property
    def synced(self) -> bool:
        """Store, history and position hold a complete list, perhaps a stale one."""
        return self._reflector.synced

    @property
    def state(self) -> InformerState:
        if self.final or self._refused:
            return InformerState.FAILED
        if not self._reflector.synced:
            return InformerState.STARTING
        return InformerState.SYNCED if self._live else InformerState.STALE

    @property
    def position(self) -> Position:
        """What store and history show; version 0 before the first list."""
        return Position(self._informers.history_id + self._own_history, self._reflector.version)

    @property
    def events(self) -> int:
        """Changes told to listeners."""
        return self._reflector.counters.events

    @property
    def relists(self) -> int:
        """Lists after the first."""
        return max(0, self._reflector.counters.lists - 1)

    @property
    def counters(self) -> Counters:
        return self._reflector.counters

    @property
    def watches(self) -> int:
        """Watches opened upstream so far."""
        return self._watches_before + self._watcher.watches

    @property
    def last_heard_unix_ns(self) -> int:
        """When the API server last sent anything; 0: never."""
        return self._watcher.heard_unix_ns

    def lag_s(self) -> float:
        """How old the state shown may be: 0 while live, else the time since the API server was last heard."""
        if self._live:
            return 0.0
        since_ns = self.last_heard_unix_ns or self._began_unix_ns
        return max(0.0, (self._clock.unix_ns() - since_ns) / 1e9)

    # Listeners

    @property
    def listeners(self) -> Sequence[Listener]:
        return self._listeners

    def attach(self, listener: Listener) -> None:
        """Calls nothing: read the store now if `synced`. Attaching twice is as once."""
        if not any(each is listener for each in self._listeners):
            self._listeners = (*self._listeners, listener)
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None

    def detach(self, listener: Listener) -> None:
        """It hears no more, not even of the change being told. After the last one the watch ends, in a while."""
        before = self._listeners
        self._listeners = tuple(each for each in before if each is not listener)
        if before and not self._listeners:
            self._informers._abandoned(self)

    release = detach

    def hurry(self) -> None:
        """Try again now where a wait is on, as when a CRD or a role has been made."""
        self._watcher.hurry()

    # Waiting

    async def wait_synced(self, timeout_s: float) -> None:
        """Raises NotSynced, at once where the API server has refused for good."""
        if self.final:
            raise NotSynced(self.scope)
        try:
            await within(self._clock, timeout_s, self._synced.wait())
        except TimeoutError as exc:
            raise NotSynced(self.scope) from exc
        if not self.synced:
            raise NotSynced(self.scope)

    async def wait_caught_up(self) -> None:
        """After the first list: until deletions of the time before it, when nobody watched, are remembered."""
        await self._caught_up.wait()

    async def wait_at_least(self, version: ResourceVersion, timeout_s: float) -> None:
        """Until the store shows `version` or a later one; raises NotSynced, NotFresh."""
        if not self.synced:
            raise NotSynced(self.scope)
        if self._reflector.version >= version:
            return
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (version, next(self._order), reached)
        heapq.heappush(self._waiters, entry)
        try:
            await within(self._clock, timeout_s, _wait_for(reached))
        except TimeoutError as exc:
            raise NotFresh(self.scope, version, self._reflector.version) from exc
        finally:
            if not reached.done():
                reached.cancel()

    def _wake_waiters(self) -> None:
        version = self._reflector.version
        while self._waiters and (self._waiters[0][0] <= version or self._waiters[0][2].done()):
            _, _, reached = heapq.heappop(self._waiters)
            if not reached.done():
                reached.set_result(None)

    # Told by the reflector

    def changed(self, change: Change) -> None:
        if change.type is ChangeType.DELETED:
            self._informers.memory.remember(self.scope.resource, self.position.history, change)
        self._tell_watched()
        for listener in self._listeners:
            self._call(listener, listener.on_change, change)
        if self._waiters:
            self._wake_waiters()

    def synced_first(self) -> None:
        self._begin_to_catch_up()
        self._synced.set()
        for listener in self._listeners:
            self._call(listener, listener.on_synced)
        self._wake_waiters()

    def advanced(self) -> None:
        self._tell_watched()
        position = self.position
        for listener in self._listeners:
            self._call(listener, listener.on_bookmark, position)
        self._wake_waiters()

    # Memory

    def _begin_to_catch_up(self) -> None:
        at = self.position
        known = self._informers.memory.watched_until(self.scope, at.history)
        since = [version for version in known if version < at.resource_version]
        if since:
            self._catching_up = self._informers._spawn(self._catch_up(since, at))
        else:
            self._caught_up.set()

    async def _catch_up(self, since: Sequence[ResourceVersion], until: Position) -> None:
        """Whatever happens, nobody waits for ever; what could not be told is in the log."""

        def tell(item: StoredObject) -> None:
            present = self.store.get(item.key)
            if present is None or present.uid != item.uid:
                change = deletion(item, self._clock.unix_ns())
                self._informers.memory.remember(self.scope.resource, until.history, change)

        try:
            catch_up = CatchUp(
                self._informers.api,
                _upstream(self.scope),
                tell,
                clock=self._clock,
                limits=self._informers.limits.watch,
            )
            await catch_up.run(since, until.resource_version)
        except Exception:
            logger.exception("%s: what happened while nobody watched cannot be asked for", self.scope)
        self._caught_up.set()
        self._tell_watched(at_once=True)

    def tell_memory(self) -> None:
        """Somebody counts on memory from now on: it is told at once how far this scope is watched."""
        self._tell_watched(at_once=True)

    def _tell_watched(self, *, at_once: bool = False) -> None:
        """Never ahead of what is remembered, so not before the time without a watch is made up for."""
        if not self._caught_up.is_set() or not self.synced:
            return
        now_s = self._clock.monotonic_s()
        if at_once or now_s - self._watched_told_s >= WATCHED_PERIOD_S:
            self._watched_told_s = now_s
            self._informers.memory.watched(self.scope, self.position)

    def _call(self, listener: Listener, method: Callable[..., None], *arguments: object) -> None:
        if not any(each is listener for each in self._listeners):
            return  # released by one that was called before it
        try:
            method(*arguments)
        except Exception:
            # A bug of one listener; the others, and the watch, are not to suffer for it.
            logger.exception("%s: a listener failed", self.scope)

    # Told by the watcher

    def reported(self, failure: Failure, final: bool) -> None:
        status = failure.status or make_status(500, failure.message)
        self.error = msgspec.json.encode(status)
        self._refused = True
        self.final = self.final or final
        if final:
            self._informers._ended(self)
            self._synced.set()  # whoever waits for it waits in vain
        for listener in self._listeners:
            self._call(listener, listener.on_error, self.error, final)

    def lived(self, live: bool, trouble: str) -> None:
        before, self._live = self._live, live
        if trouble or live:
            self.trouble = trouble
        if live and self._refused and not self.final:
            self._refused = False
            self.error = b""
        if live and not before and self.synced:
            self.advanced()
        self._informers._readiness_changed()

    def named(self, kind: str, list_kind: str) -> None:
        self.kind = kind or self.kind
        self.list_kind = list_kind or self.list_kind

    def went_back_alone(self) -> None:
        """Its versions began again: positions of this resource get a history of their own."""
        self._own_history = f"/{secrets.token_hex(4)}"
        self.resync()

    # Life, in the hands of Informers

    def start(self) -> None:
        self._task = self._informers._spawn(self._run())

    def resync(self) -> None:
        """Another history: forget everything, tell everyone, list anew."""
        logger.warning("%s: another history; listing anew", self.scope)
        self._cancel_tasks()
        self._reflector.reset()
        self._synced.clear()
        self._caught_up.clear()
        self._live = False
        self._watches_before += self._watcher.watches
        self._watcher = self._make_watcher()
        for listener in self._listeners:
            self._call(listener, listener.on_resync)
        self._task = self._informers._spawn(self._run())

    def stop(self) -> None:
        self._tell_watched(at_once=True)
        self._cancel_tasks()

    def _cancel_tasks(self) -> None:
        for task in (self._task, self._lingering, self._catching_up):
            if task is not None:
                task.cancel()
        self._task = self._lingering = self._catching_up = None

    def _make_watcher(self) -> Watcher:
        return Watcher(
            self._informers.api,
            self._informers.histories,
            _upstream(self.scope),
            self._reflector,
            self,
            clock=self._clock,
            limits=self._informers.limits.watch,
        )

    async def _run(self) -> None:
        backoff = Backoff(self._clock)
        watcher = self._watcher
        while True:
            try:
                await watcher.run()
                return
            except Exception:
                # A bug of ours, met by this watch alone: it begins anew, the others never notice.
                logger.exception("%s: the watch failed; beginning anew", self.scope)
            self.lived(False, "internal error")
            self._reflector.drop_stage()
            self._watches_before += watcher.watches
            watcher = self._watcher = self._make_watcher()
            await self._clock.sleep(backoff.next_delay_s())


def _upstream(scope: WatchScope) -> Scope:
    return Scope(scope.resource, scope.namespace, scope.label_selector, scope.field_selector)


async def _wait_for(future: asyncio.Future[None]) -> None:
    await future


class Informers:
    """`async with Informers(api, histories) as informers`: every informer of the process, one a scope."""

    def __init__(
        self,
        api: ApiServer,
        histories: Histories,
        *,
        clock: Clock | None = None,
        limits: InformerLimits | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.api = api
        self.histories = histories
        self.clock = clock or SystemClock()
        self.limits = limits or InformerLimits()
        self.memory: Memory = memory or NoMemory()
        self._informers: dict[WatchScope, Informer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = False
        self._on_readiness: list[Callable[[], None]] = []
        histories.subscribe(self._history_changed)

    async def __aenter__(self) -> Self:
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for informer in list(self._informers.values()):
            informer.stop()
        self._informers.clear()
        self._open = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Acquiring

    def acquire(self, scope: WatchScope, listener: Listener, reason: str = "") -> Informer:
        """The informer of this scope, or of a wider one that is watched already; let go of it with `release`.

        `reason`: why this scope, where another might do; kept if a watch has to be opened.
        Raises InvalidSelector. An informer that was refused for good is not given out again: a new try is made.
        """
        scope = scope.normal()
        informer = self._informers.get(scope) or self._wider(scope)
        if informer is None:
            informer = Informer(self, scope, reason or self._reason(scope))
            self._informers[scope] = informer
            informer.attach(listener)
            informer.start()
        else:
            informer.attach(listener)
        return informer

    def release(self, listener: Listener) -> None:
        """Detaches the listener wherever it is attached."""
        for informer in list(self._informers.values()):
            informer.detach(listener)

    def whole(self, resource: Resource, namespace: str) -> Informer | None:
        """A live informer that shows every object of the kind, in the namespace at least. Two looks into a table."""
        for scope in (WatchScope(resource), WatchScope(resource, namespace)):
            informer = self._informers.get(scope)
            if informer is not None and informer.state is InformerState.SYNCED:
                return informer
        return None

    def covering(self, scope: WatchScope) -> Informer | None:
        """A live informer whose store shows everything of this scope; raises InvalidSelector."""
        scope = scope.normal()
        exact = self._informers.get(scope)
        if exact is not None and exact.state is InformerState.SYNCED:
            return exact
        wider = self._wider(scope)
        return wider if wider is not None and wider.state is InformerState.SYNCED else None

    def _wider(self, scope: WatchScope) -> Informer | None:
        """Live ones first. One that is refused may be so because it is wide, so it carries nobody."""
        order = (InformerState.SYNCED, InformerState.STALE, InformerState.STARTING)
        fitting = [
            informer
            for informer in self._informers.values()
            if informer.scope.resource == scope.resource and informer.state in order and informer.scope.covers(scope)
        ]
        return min(fitting, key=lambda informer: order.index(informer.state), default=None)

    def _reason(self, scope: WatchScope) -> str:
        others = sum(1 for informer in self._informers.values() if informer.scope.resource == scope.resource)
        if others == 0:
            return "the first watch of this kind"
        return f"none of the {others} other watches of this kind covers this scope"

    # State

    @property
    def history_id(self) -> str:
        """Of the cluster; empty until it is known."""
        return self.histories.id

    @property
    def ready(self) -> bool:
        """Every watch is live or has been refused: nothing is behind that could be up to date."""
        behind = (InformerState.STARTING, InformerState.STALE)
        return not any(informer.state in behind for informer in self._informers.values())

    def on_readiness(self, callback: Callable[[], None]) -> None:
        """Called whenever `ready` may have changed."""
        self._on_readiness.append(callback)

    def __iter__(self) -> Iterator[Informer]:
        return iter(list(self._informers.values()))

    def __len__(self) -> int:
        return len(self._informers)

    def hurry(self, resource: Resource | None = None) -> None:
        """Whatever waits to try again (of this resource) does so now."""
        for informer in self:
            if resource is None or informer.scope.resource == resource:
                informer.hurry()

    # Told by informers

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Not a TaskGroup's: that would wrap whatever the block inside `async with` raises."""
        if not self._open:
            work.close()
            raise RuntimeError("Informers are used inside `async with`")
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _abandoned(self, informer: Informer) -> None:
        if self._informers.get(informer.scope) is informer and self._open:
            informer._lingering = self._spawn(self._linger(informer))

    async def _linger(self, informer: Informer) -> None:
        await self.clock.sleep(self.limits.linger_s)
        # From here to the end nobody else runs, so a listener that comes now finds it gone, or has come before.
        if not informer.listeners and self._informers.get(informer.scope) is informer:
            del self._informers[informer.scope]
            informer._lingering = None
            informer.stop()
            self._readiness_changed()

    def _ended(self, informer: Informer) -> None:
        if self._informers.get(informer.scope) is informer:
            del self._informers[informer.scope]

    def _history_changed(self) -> None:
        for informer in self:
            informer.resync()

    def _readiness_changed(self) -> None:
        for callback in self._on_readiness:
            callback()
