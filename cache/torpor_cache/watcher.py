"""Drives `watch_protocol` on HTTP: one watcher for each upstream scope.

Owns the request in flight, the framing and parsing of what comes, and the timers. Decides nothing: what follows what is
`step`'s. Bounds: a line of a watch (one event) and a page of a list may have 32 MiB each; a longer page is asked for
with fewer objects, a longer event is an error that ends in a relist, whose page may be that long. A last line without
its newline is half an event and dropped; the next watch shows it whole.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from torpor_services.backoff import Backoff
from torpor_services.clock import Clock

from torpor_cache.apiserver import (
    ApiServer,
    ApiUnavailable,
    ReplyTooLarge,
    StreamedReply,
    parse_retry_after_s,
    status_of,
)
from torpor_cache.deadline import within
from torpor_cache.histories import Histories, HistoryUnknown
from torpor_cache.objects import MalformedObject
from torpor_cache.payloads import Bookmark, ErrorEvent, ObjectEvent, parse_event, parse_items, parse_page
from torpor_cache.reflector import Reflector
from torpor_cache.resources import NO_VERSION, Resource, ResourceVersion
from torpor_cache.watch_protocol import (
    Advance,
    Apply,
    BackingOff,
    BookmarkArrived,
    CloseWatch,
    DropStage,
    Effect,
    Elapsed,
    Empty,
    Ended,
    Event,
    Failed,
    Failure,
    FailureKind,
    FetchPage,
    InitialWatch,
    ObjectArrived,
    Opened,
    OpenWatch,
    PageArrived,
    Refused,
    Replace,
    Report,
    Silent,
    Stage,
    StageChange,
    Started,
    State,
    Wait,
    Watching,
    classify,
    is_live,
    step,
)

logger = logging.getLogger(__name__)

ITEMS_BETWEEN_YIELDS = 100  # of a page; about 2 ms of parsing


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """Times and sizes of a watcher. The defaults are what the module docs and `watch_protocol` speak of."""

    server_timeout_min_s: int = 300
    server_timeout_max_s: int = 600
    idle_timeout_s: float = 75.0  # bookmarks come about every 60 s
    initial_silence_s: float = 10.0  # between two events of a streamed list
    initial_total_s: float = 120.0  # for all of it: a server that ignores the parameter never ends it
    open_timeout_s: float = 30.0
    page_timeout_s: float = 60.0
    line_bytes_max: int = 32 * 1024 * 1024
    page_bytes_max: int = 32 * 1024 * 1024
    refused_retry_initial_s: float = 0.2  # no rights, no such kind: an operator and its CRD are often applied together
    refused_retry_factor: float = 1.5  # 6 tries in the first 4 s, while a mesh installs what it watches
    refused_retry_max_s: float = 30.0
    # A refused connection costs nobody anything: with the jitter at most 5 s. 429 and 5xx: to 30 s, as client-go.
    nobody_listens_retry_max_s: float = 4.0


class WatchSilent(Exception):
    """The watch has said nothing for longer than it may."""


class LineTooLong(Exception):
    """An event beyond `line_bytes_max`."""


class Supervisor(Protocol):
    """Who owns the watcher: the informer."""

    def reported(self, failure: Failure, final: bool) -> None: ...

    def lived(self, live: bool, trouble: str) -> None:
        """The watch is (no longer) live; `trouble` says why not, empty if all is well."""
        ...

    def named(self, kind: str, list_kind: str) -> None: ...

    def went_back_alone(self) -> None:
        """This resource's versions went back, the cluster's did not."""
        ...


@dataclass(frozen=True, slots=True)
class Scope:
    """What is asked of the server."""

    resource: Resource
    namespace: str
    label_selector: str
    field_selector: str

    def query(self) -> dict[str, str]:
        query: dict[str, str] = {}
        if self.label_selector:
            query["labelSelector"] = self.label_selector
        if self.field_selector:
            query["fieldSelector"] = self.field_selector
        return query


class Watcher:
    """`run` returns after a final refusal, or when another history has taken over; otherwise it is cancelled."""

    def __init__(
        self,
        api: ApiServer,
        histories: Histories,
        scope: Scope,
        reflector: Reflector,
        supervisor: Supervisor,
        *,
        clock: Clock,
        limits: WatchLimits,
        random_between: Callable[[int, int], int] = random.randint,
    ) -> None:
        self._api = api
        self._histories = histories
        self._scope = scope
        self._reflector = reflector
        self._supervisor = supervisor
        self._clock = clock
        self._limits = limits
        self._random_between = random_between
        self._path = scope.resource.path(scope.namespace)
        self._backoff = Backoff(clock)
        self._slow = Backoff(
            clock,
            initial_s=limits.refused_retry_initial_s,
            max_s=limits.refused_retry_max_s,
            factor=limits.refused_retry_factor,
        )
        self._hurry = asyncio.Event()
        self._pending: Coroutine[Any, Any, Event] | None = None
        self._stream: WatchStream | None = None
        self._received_unix_ns = 0
        self._over = False
        self.state: State = Empty()
        self.watches = 0  # opened since the beginning
        self.heard_unix_ns = 0

    def hurry(self) -> None:
        """Try again now if a wait is on: something happened that may have mended the cause."""
        self._hurry.set()

    async def run(self) -> None:
        event: Event = Started()
        try:
            while True:
                before = self.state
                self.state, effects = step(before, event)
                for effect in effects:
                    await self._perform(effect)
                    if self._over:
                        return
                if type(before) is not type(self.state) or isinstance(self.state, Watching):
                    self._state_changed(before)
                if isinstance(self.state, Failed):
                    return
                event = await self._next()
        finally:
            if self._pending is not None:
                self._pending.close()
            await self._close()

    def _state_changed(self, before: State) -> None:
        state = self.state
        if type(before) is not type(state):
            trouble = state.failure.message if isinstance(state, BackingOff | Failed) else ""
            self._supervisor.lived(is_live(state), trouble)
            self._limit_silence(state)
        elif isinstance(before, Watching) and isinstance(state, Watching) and before.traits is not state.traits:
            self._limit_silence(state)

    def _limit_silence(self, state: State) -> None:
        if self._stream is None:
            return
        if isinstance(state, InitialWatch):
            self._stream.limit_silence(self._limits.initial_silence_s, self._limits.initial_total_s)
        elif isinstance(state, Watching) and state.traits.bookmarks:
            self._stream.limit_silence(self._limits.idle_timeout_s)
        else:
            self._stream.limit_silence(None)

    # Effects

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case Apply():
                self._reflector.apply(effect.type, effect.item, self._received_unix_ns)
            case Advance():
                self._reflector.advance(effect.resource_version)
            case StageChange():
                self._reflector.stage_change(effect.type, effect.item)
            case Stage():
                self._reflector.stage(effect.items)
            case DropStage():
                self._reflector.drop_stage()
            case Replace():
                await self._replace(effect.resource_version)
            case FetchPage():
                self._pending = self._fetch(effect.continue_token, effect.limit)
            case OpenWatch():
                self._pending = self._open(effect.resource_version)
            case Wait():
                self._pending = self._wait(effect)
            case CloseWatch():
                await self._close()
            case Report():
                self._supervisor.reported(effect.failure, effect.final)
            case _:
                assert_never(effect)

    async def _replace(self, version: ResourceVersion) -> None:
        if self._reflector.goes_back(version):
            self._over = True
            if not await self._cluster_went_back():
                self._supervisor.went_back_alone()
            return
        self._reflector.replace(version, self._received_unix_ns)

    async def _cluster_went_back(self) -> bool:
        """Asked until answered: until then nothing of the list may be shown."""
        seen = self._histories.id
        while True:
            try:
                return await self._histories.went_back(seen, self._reflector.version)
            except (ApiUnavailable, HistoryUnknown) as exc:
                logger.warning("%s: a version went back, and the history cannot be asked: %s", self._path, exc)
                await self._clock.sleep(self._backoff.next_delay_s())

    # What is in flight

    async def _next(self) -> Event:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            return await pending
        assert self._stream is not None, "without a request in flight there is a watch"
        event = await self._stream.next_event()
        self._received_unix_ns = self._stream.received_unix_ns
        self.heard_unix_ns = self._stream.received_unix_ns
        if isinstance(event, Ended):
            await self._close()
        elif isinstance(event, BookmarkArrived) and event.ends_initial:
            self._supervisor.named(self._stream.kind, f"{self._stream.kind}List" if self._stream.kind else "")
        return event

    async def _wait(self, wait: Wait) -> Event:
        delay_s = max(self._back_off_s(wait), wait.failure.retry_after_s or 0.0)
        logger.log(
            logging.WARNING if wait.slowly else logging.INFO,
            *("%s: %s; again in %.1f s", self._path, wait.failure.message, delay_s),
        )
        self._hurry.clear()
        try:
            await within(self._clock, delay_s, self._hurry.wait())
        except TimeoutError:
            pass
        return Elapsed()

    def _back_off_s(self, wait: Wait) -> float:
        if wait.slowly:
            return self._slow.next_delay_s()
        if wait.failure.nobody_listens:
            return self._backoff.next_delay_s(self._limits.nobody_listens_retry_max_s)
        return self._backoff.next_delay_s()

    async def _fetch(self, continue_token: str, limit: int) -> Event:
        query = self._scope.query() | {"limit": str(limit)}
        if continue_token:
            query["continue"] = continue_token
        try:
            if not continue_token:
                await self._ask_history()
            reply = await self._api.request(
                "GET",
                self._path,
                query=query,
                headers={"Accept": "application/json"},
                timeout_s=self._limits.page_timeout_s,
                reply_bytes_max=self._limits.page_bytes_max,
            )
        except ReplyTooLarge as exc:
            return Refused(Failure(FailureKind.TOO_LARGE, str(exc)))
        except (ApiUnavailable, HistoryUnknown) as exc:
            return Refused(_unreachable(exc))
        self._received_unix_ns = self.heard_unix_ns = self._clock.unix_ns()
        if reply.status != 200:
            return Refused(classify(reply.status, reply.kubernetes_status(), reply.retry_after_s))
        try:
            return await self._page(reply.body)
        except MalformedObject as exc:
            return Refused(Failure(FailureKind.MALFORMED, f"{self._path}: {exc}"))

    async def _page(self, body: bytes) -> Event:
        page = parse_page(body)
        self._supervisor.named(page.kind, page.list_kind)
        items = []
        for start in range(0, len(page.raw_items), ITEMS_BETWEEN_YIELDS):
            items += parse_items(page, start, start + ITEMS_BETWEEN_YIELDS)
            await asyncio.sleep(0)  # nothing is shown before the list is complete, so others may go first
        return PageArrived(page.resource_version, page.continue_token, items)

    async def _open(self, version: ResourceVersion) -> Event:
        query = self._scope.query() | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(
                self._random_between(self._limits.server_timeout_min_s, self._limits.server_timeout_max_s)
            ),
        }
        if version == NO_VERSION:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        else:
            query["resourceVersion"] = str(version)
        try:
            if version == NO_VERSION:
                await self._ask_history()
            return await within(self._clock, self._limits.open_timeout_s, self._opened(query))
        except (ApiUnavailable, HistoryUnknown) as exc:
            return Refused(_unreachable(exc))
        except TimeoutError as exc:
            return Refused(_unreachable(exc))

    async def _opened(self, query: dict[str, str]) -> Event:
        async with AsyncExitStack() as stack:
            reply = await stack.enter_async_context(
                self._api.stream("GET", self._path, query=query, headers={"Accept": "application/json"})
            )
            if reply.status != 200:
                body = await reply.read(bytes_max=1024 * 1024)
                status = status_of(reply.status, body)
                return Refused(classify(reply.status, status, parse_retry_after_s(reply.headers)))
            self._stream = WatchStream(reply, stack.pop_all(), self._clock, self._limits)
        self._backoff.succeeded()
        self._slow.reset()
        self.watches += 1
        self._limit_silence(self.state)
        return Opened()

    async def _ask_history(self) -> None:
        """Before a list: which history it will be of. A relist may be the first to see that another replica knows."""
        if self._reflector.synced:
            known = self._histories.id
            if await self._histories.reread() != known:
                await asyncio.sleep(0)  # the informer has ended this watcher; here it is told so
        else:
            await self._histories.current()

    async def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()


def _unreachable(error: Exception) -> Failure:
    if not isinstance(error, ApiUnavailable):
        return Failure(FailureKind.UNREACHABLE, str(error))
    return Failure(
        FailureKind.UNREACHABLE, str(error), retry_after_s=error.retry_after_s, nobody_listens=error.nobody_listens
    )


class WatchStream:
    """An open watch, event by event."""

    def __init__(self, reply: StreamedReply, stack: AsyncExitStack, clock: Clock, limits: WatchLimits) -> None:
        self._reply = reply
        self._stack = stack
        self._clock = clock
        self._lines = Lines(limits.line_bytes_max)
        self._events: Iterator[Event] = iter(())
        self._opened_s = self._heard_s = clock.monotonic_s()
        self._watchdog: asyncio.Task[None] | None = None
        self.received_unix_ns = clock.unix_ns()
        self.kind = ""

    async def next_event(self) -> Event:
        """The next one; Ended or Silent last. Raises nothing but cancellation."""
        while True:
            try:
                for event in self._events:
                    return event
                chunk = await self._reply.chunk()
                self._heard_s = self._clock.monotonic_s()
                self.received_unix_ns = self._clock.unix_ns()
                if not chunk:
                    return Ended(self._lived_s())
                self._events = self._parsed(chunk)
            except WatchSilent:
                return Silent()
            except ApiUnavailable as exc:
                return Ended(self._lived_s(), _unreachable(exc))
            except MalformedObject as exc:
                return Ended(self._lived_s(), Failure(FailureKind.MALFORMED, str(exc)))
            except LineTooLong as exc:
                return Ended(self._lived_s(), Failure(FailureKind.TOO_LARGE, str(exc)))

    def _parsed(self, chunk: bytes) -> Iterator[Event]:
        for buffer, start, end in self._lines.feed(chunk):
            parsed = parse_event(buffer, start, end)
            match parsed:
                case ObjectEvent():
                    yield ObjectArrived(parsed.type, parsed.item)
                case Bookmark():
                    self.kind = parsed.kind or self.kind
                    yield BookmarkArrived(parsed.resource_version, parsed.ends_initial)
                case ErrorEvent():
                    yield Ended(self._lived_s(), classify(parsed.code, parsed.status))
                    return
                case _:
                    assert_never(parsed)

    def _lived_s(self) -> float:
        return self._clock.monotonic_s() - self._opened_s

    def limit_silence(self, silence_s: float | None, total_s: float | None = None) -> None:
        """From now on `next_event` gives Silent once nothing has come for that long, or in all after `total_s`."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if silence_s is not None:
            self._watchdog = asyncio.ensure_future(self._watch_silence(silence_s, total_s))

    async def _watch_silence(self, silence_s: float, total_s: float | None) -> None:
        while True:
            due_s = self._heard_s + silence_s
            if total_s is not None:
                due_s = min(due_s, self._opened_s + total_s)
            left_s = due_s - self._clock.monotonic_s()
            if left_s <= 0:
                self._reply.abort(WatchSilent())
                return
            await self._clock.sleep(left_s)

    async def close(self) -> None:
        self.limit_silence(None)
        await self._stack.aclose()


class Lines:
    """Cuts a stream into lines, as places in a buffer, so that a line within one chunk is not copied."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._begun: list[bytes] = []
        self._begun_bytes = 0

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, int, int]]:
        """(buffer, start, end) of each line that this chunk completes; raises LineTooLong."""
        start = 0
        if self._begun:
            end = chunk.find(b"\n")
            if end < 0:
                self._keep(chunk)
                return
            self._keep(chunk[:end])
            line = b"".join(self._begun)
            self._begun, self._begun_bytes = [], 0
            yield line, 0, len(line)
            start = end + 1
        while (end := chunk.find(b"\n", start)) >= 0:
            if end - start > self._bytes_max:
                raise self._too_long()
            if end > start:
                yield chunk, start, end
            start = end + 1
        if start < len(chunk):
            self._keep(chunk[start:])

    def _keep(self, part: bytes) -> None:
        self._begun_bytes += len(part)
        if self._begun_bytes > self._bytes_max:
            raise self._too_long()
        self._begun.append(part)

    def _too_long(self) -> LineTooLong:
        return LineTooLong(f"an event of the watch is longer than {self._bytes_max} bytes")
