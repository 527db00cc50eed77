"""Recent events of one resource, ordered by revision. Older than the window is Expired, never a gap.

Readers hold a sequence number (their place in the list), not a queue: a slow watcher costs nothing but its place,
and learns that it is too late when the window has passed it. Knows nothing of watchers or of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Json = dict[str, Any]
EventType = Literal["ADDED", "MODIFIED", "DELETED"]
ObjectKey = tuple[str, str]
"""(namespace, name); the namespace is empty for cluster-scoped objects."""


@dataclass(slots=True, eq=False)
class Stored:
    """One version of one object. `object` is never changed once stored; `data` is its JSON, encoded once.

    The first two members of the JSON are always kind and apiVersion, so that the item form of a built-in list
    (without them) is a slice.
    """

    object: Json
    revision: int
    data: bytes
    views: dict[str, Json] | None = None
    """The object in other versions than the stored one, by apiVersion; filled when first asked for."""

    @property
    def metadata(self) -> Json:
        metadata: Json = self.object["metadata"]
        return metadata

    @property
    def key(self) -> ObjectKey:
        return self.metadata.get("namespace", ""), self.metadata["name"]

    @property
    def uid(self) -> str:
        uid: str = self.metadata["uid"]
        return uid

    @classmethod
    def of(cls, obj: Json, revision: int) -> Stored:
        return cls(obj, revision, msgspec.json.encode(obj))

    def at_revision(self, revision: int) -> Stored:
        """The same content told at another revision: the last state, as a DELETED event carries it."""
        metadata = {**self.metadata, "resourceVersion": str(revision)}
        return Stored.of({**self.object, "metadata": metadata}, revision)


@dataclass(slots=True, eq=False)
class Event:
    """One committed change. `previous` is None for ADDED; for DELETED `current` is the last state, re-stamped."""

    revision: int
    type: EventType
    key: ObjectKey
    current: Stored
    previous: Stored | None
    at_s: float
    _left: Stored | None = field(default=None)

    def previous_restamped(self) -> Stored:
        """The previous object with the event's revision: what a selector that stops matching is told."""
        if self._left is None:
            assert self.previous is not None, "only a change has a previous object"
            self._left = self.previous.at_revision(self.revision)
        return self._left


class TooOld(Exception):
    """The reader's place is no longer in the window; `oldest` is the revision up to which events are gone."""

    def __init__(self, oldest: int) -> None:
        super().__init__(f"history before revision {oldest} is gone")
        self.oldest = oldest


class History:
    """Events after `compacted_revision`, in order. Bounded by age and by number; overflow drops the oldest."""

    def __init__(self, *, window_s: float, events_max: int, compacted_revision: int = 0) -> None:
        self._window_s = window_s
        self._events_max = events_max
        self._events: list[Event] = []
        self._first_sequence = 0
        self.compacted_revision = compacted_revision

    @property
    def end_sequence(self) -> int:
        """The place after the newest event."""
        return self._first_sequence + len(self._events)

    def append(self, event: Event) -> None:
        self._events.append(event)
        self._trim(event.at_s)

    def after_revision(self, revision: int) -> int:
        """The place of the first event newer than `revision`. Raises TooOld."""
        if revision < self.compacted_revision:
            raise TooOld(self.compacted_revision)
        low, high = 0, len(self._events)
        while low < high:
            middle = (low + high) // 2
            if self._events[middle].revision <= revision:
                low = middle + 1
            else:
                high = middle
        return self._first_sequence + low

    def read(self, sequence: int, limit: int) -> Sequence[Event]:
        """Up to `limit` events from a place on. Raises TooOld when the place has been dropped."""
        if sequence < self._first_sequence:
            raise TooOld(self.compacted_revision)
        start = sequence - self._first_sequence
        return self._events[start : start + limit]

    def compact(self, revision: int) -> None:
        """Drop everything up to and including `revision`, and remember that it is gone."""
        keep = self.after_revision(revision) if revision > self.compacted_revision else self._first_sequence
        self._drop(keep - self._first_sequence)
        self.compacted_revision = max(self.compacted_revision, revision)

    def _trim(self, now_s: float) -> None:
        # In steps, because deleting from the front of a list moves the rest.
        excess = len(self._events) - self._events_max
        if excess > self._events_max // 10:
            self._drop(excess)
        horizon_s = now_s - self._window_s
        if self._events[0].at_s < horizon_s and self._events[len(self._events) // 10].at_s < horizon_s:
            stale = next((i for i, event in enumerate(self._events) if event.at_s >= horizon_s), 0)
            self._drop(stale)

    def _drop(self, count: int) -> None:
        if count > 0:
            self.compacted_revision = max(self.compacted_revision, self._events[count - 1].revision)
            del self._events[:count]
            self._first_sequence += count
