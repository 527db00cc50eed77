"""WATCH: one stream of one resource, from its place in the history.

A stream keeps a sequence number, not a queue; it reads what is new, filters it by namespace and selector, and writes
it in one piece. When its place has been compacted away it says 410 in an ERROR event and ends: never a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from torpor_devcluster import errors
from torpor_devcluster.history import Event, Stored, TooOld
from torpor_devcluster.resources import ResourceType
from torpor_devcluster.selectors import Selector
from torpor_devcluster.storage import Storage, Table

Json = dict[str, Any]
WatchEventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
Encode = Callable[[Stored], bytes]

_BATCH_EVENTS = 500


@dataclass(frozen=True, slots=True)
class WatchOptions:
    namespace: str | None
    selector: Selector
    start_revision: int | None
    """None or 0: begin with the objects that are there, as ADDED events."""
    bookmarks: bool
    initial_events_end: bool
    """sendInitialEvents: mark the end of the initial events with a bookmark."""
    timeout_s: float
    bookmark_interval_s: float


def frame(kind: WatchEventType, data: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), data)


def bookmark(resource: ResourceType, revision: int, *, initial_end: bool = False) -> Json:
    metadata: Json = {"resourceVersion": str(revision), "creationTimestamp": None}
    if initial_end:
        metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
    return {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}


def seen_as(event: Event, namespace: str | None, selector: Selector) -> tuple[WatchEventType, Stored] | None:
    """What a watcher with this scope sees of a change; None if it does not concern it."""
    if namespace and event.key[0] != namespace:
        return None
    if selector.empty:
        return event.type, event.current
    now = event.type != "DELETED" and selector.matches(event.current.object)
    before = event.previous is not None and selector.matches(event.previous.object)
    if now:
        return ("MODIFIED" if before else "ADDED"), event.current
    if not before:
        return None
    return "DELETED", event.previous_restamped() if event.type != "DELETED" else event.current


class Watch:
    """One live watch. `close()` ends it from outside (the server stops, the CRD is gone, a fault)."""

    def __init__(self, storage: Storage, resource: ResourceType, options: WatchOptions, encode: Encode) -> None:
        self.resource = resource
        self._storage = storage
        self._table: Table = storage.table(resource.key)
        self._options = options
        self._encode = encode
        self._changed = asyncio.Event()
        self._closed = False
        self._mute = False
        self._initial: list[Stored] = []
        self._initial_revision = storage.revision
        self._refusal: errors.ApiError | None = None
        self._sequence = self._place()

    def _place(self) -> int:
        history, start = self._table.history, self._options.start_revision
        if not start:
            self._initial = self._present()
            return history.end_sequence
        try:
            return history.after_revision(start)
        except TooOld as error:
            # As the real server does: the stream begins, says 410 and ends.
            self._refusal = errors.too_old(start, error.oldest)
            return history.end_sequence

    def _present(self) -> list[Stored]:
        objects = (self._table.objects[key] for key in self._table.keys(self._options.namespace))
        selector = self._options.selector
        return [stored for stored in objects if selector.empty or selector.matches(stored.object)]

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def mute(self) -> None:
        """Say nothing any more but keep the connection: what a half-open one looks like."""
        self._mute = True

    async def stream(self) -> AsyncIterator[bytes]:
        """Chunks of newline-delimited events, until closed, timed out or compacted."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.timeout_s
        if self._refusal is not None:
            yield frame("ERROR", msgspec.json.encode(self._refusal.status()))
            return
        self._table.wakes.add(self._changed.set)
        try:
            for chunk in self._initial_chunks():
                yield chunk
            next_bookmark = loop.time() + self._options.bookmark_interval_s
            while not self._closed and loop.time() < deadline:
                self._changed.clear()
                try:
                    chunk = self._pending()
                except TooOld as error:
                    yield frame("ERROR", _expired(error))
                    return
                if chunk:
                    yield chunk
                    continue
                if self._options.bookmarks and not self._mute and loop.time() >= next_bookmark:
                    yield self._bookmark()
                    next_bookmark = loop.time() + self._options.bookmark_interval_s
                until = min(deadline, next_bookmark) if self._options.bookmarks else deadline
                await self._wait_until(until)
            if not self._mute:
                yield self._farewell()
        finally:
            self._table.wakes.discard(self._changed.set)

    def _initial_chunks(self) -> list[bytes]:
        """The present objects, and the mark behind them, fixed at the revision at which the watch began."""
        initial, self._initial = self._initial, []
        frames = [frame("ADDED", self._encode(stored)) for stored in initial]
        if self._options.initial_events_end:
            mark = bookmark(self.resource, self._initial_revision, initial_end=True)
            frames.append(frame("BOOKMARK", msgspec.json.encode(mark)))
        step = _BATCH_EVENTS
        return [b"".join(frames[at : at + step]) for at in range(0, len(frames), step)]

    def _pending(self) -> bytes:
        """The next batch that concerns this watch; moves the place. Raises TooOld."""
        frames: list[bytes] = []
        while not frames and not self._mute:
            events = self._table.history.read(self._sequence, _BATCH_EVENTS)
            if not events:
                break
            self._sequence += len(events)
            for event in events:
                seen = seen_as(event, self._options.namespace, self._options.selector)
                if seen is not None:
                    frames.append(frame(seen[0], self._encode(seen[1])))
        return b"".join(frames)

    def _bookmark(self) -> bytes:
        """Only sent when everything up to now has been told."""
        return frame("BOOKMARK", msgspec.json.encode(bookmark(self.resource, self._storage.revision)))

    def _farewell(self) -> bytes:
        """What came in at the very end, and where the next watch may begin."""
        try:
            pending = self._pending()
        except TooOld as error:
            return frame("ERROR", _expired(error))
        # A batch may be cut short; then there is more to tell and no bookmark may be given.
        told_all = self._sequence == self._table.history.end_sequence
        wanted = self._options.bookmarks and not self._closed
        return pending + (self._bookmark() if wanted and told_all else b"")

    async def _wait_until(self, when: float) -> None:
        try:
            async with asyncio.timeout_at(when):
                await self._changed.wait()
        except TimeoutError:
            return


def _expired(error: TooOld) -> bytes:
    """Inside a stream the server words it so; the client starts over with a list."""
    message = f"The resourceVersion for the provided watch is too old. History begins after {error.oldest}."
    return msgspec.json.encode(errors.expired(message).status())
