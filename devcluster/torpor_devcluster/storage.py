"""All objects, under one revision that every write raises by one, as etcd does.

A write is one call that has no await inside: it is atomic because the loop is single-threaded. Each resource has
its current objects in key order and a `History`; the state at an older revision is the current one with the newer
events undone, which is what consistent paging stands on. Knows nothing of Kubernetes rules: see `registry.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from typing import Any

from torpor_devcluster.clock import Clock
from torpor_devcluster.history import Event, EventType, History, ObjectKey, Stored
from torpor_devcluster.resources import ResourceKey

Json = dict[str, Any]
Observer = Callable[[ResourceKey, Event], None]

# etcd starts at 1 and a fresh API server has written some tens of objects by the time it answers.
FIRST_REVISION = 1


class Table:
    """The objects of one resource, and the watchers to call when one changes."""

    def __init__(self, resource: ResourceKey, history: History) -> None:
        self.resource = resource
        self.history = history
        self.objects: dict[ObjectKey, Stored] = {}
        self._keys: list[ObjectKey] = []
        self.wakes: set[Callable[[], None]] = set()

    def keys(self, namespace: str | None, after: ObjectKey | None = None) -> Iterator[ObjectKey]:
        """Keys in order, of one namespace or of all (None), beginning behind `after`."""
        start = bisect_left(self._keys, (namespace or "", ""))
        if after is not None:
            start = max(start, bisect_right(self._keys, after))
        for index in range(start, len(self._keys)):
            key = self._keys[index]
            if namespace and key[0] != namespace:
                return
            yield key

    def insert(self, key: ObjectKey, stored: Stored) -> None:
        if key not in self.objects:
            insort(self._keys, key)
        self.objects[key] = stored

    def remove(self, key: ObjectKey) -> None:
        del self.objects[key]
        del self._keys[bisect_left(self._keys, key)]

    def at(self, revision: int) -> list[Stored]:
        """The objects as they were at `revision`, in key order. Raises history.TooOld."""
        start = self.history.after_revision(revision)
        newer = self.history.read(start, self.history.end_sequence - start)
        if not newer:
            return [self.objects[key] for key in self._keys]
        objects = dict(self.objects)
        for event in reversed(newer):
            if event.previous is None:
                objects.pop(event.key, None)
            else:
                objects[event.key] = event.previous
        return [objects[key] for key in sorted(objects)]

    def wake_watchers(self) -> None:
        for wake in list(self.wakes):
            wake()


class Storage:
    """The tables, the revision, and who is told of each commit (synchronously, after it is visible)."""

    def __init__(self, clock: Clock, *, history_window_s: float, history_events_max: int) -> None:
        self._clock = clock
        self._window_s = history_window_s
        self._events_max = history_events_max
        self._tables: dict[ResourceKey, Table] = {}
        self._dropped: dict[ResourceKey, int] = {}
        self._observers: list[Observer] = []
        self.revision = FIRST_REVISION
        self.writes = 0

    def table(self, resource: ResourceKey) -> Table:
        table = self._tables.get(resource)
        if table is None:
            history = History(
                window_s=self._window_s,
                events_max=self._events_max,
                compacted_revision=self._dropped.get(resource, 0),
            )
            table = self._tables[resource] = Table(resource, history)
        return table

    def tables(self) -> list[Table]:
        return list(self._tables.values())

    def drop_table(self, resource: ResourceKey) -> None:
        """Forget a resource (its CRD is gone). A namesake begins with no history from before this moment."""
        if self._tables.pop(resource, None) is not None:
            self._dropped[resource] = self.revision

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)

    def unobserve(self, observer: Observer) -> None:
        self._observers.remove(observer)

    def get(self, resource: ResourceKey, key: ObjectKey) -> Stored | None:
        return self.table(resource).objects.get(key)

    def put(self, resource: ResourceKey, key: ObjectKey, obj: Json) -> Stored:
        """Write `obj` (which becomes the storage's own) and stamp it with the new revision."""
        table = self.table(resource)
        previous = table.objects.get(key)
        self.revision += 1
        obj["metadata"]["resourceVersion"] = str(self.revision)
        stored = Stored.of(obj, self.revision)
        table.insert(key, stored)
        self._commit(table, "ADDED" if previous is None else "MODIFIED", key, stored, previous)
        return stored

    def delete(self, resource: ResourceKey, key: ObjectKey, last: Json) -> Stored:
        """Remove an object that exists; returns its `last` state, stamped with the revision of its deletion."""
        table = self.table(resource)
        previous = table.objects[key]
        self.revision += 1
        table.remove(key)
        last["metadata"]["resourceVersion"] = str(self.revision)
        final = Stored.of(last, self.revision)
        self._commit(table, "DELETED", key, final, previous)
        return final

    def compact(self) -> None:
        """Forget all history up to now: older watches and continue tokens expire."""
        for table in self._tables.values():
            table.history.compact(self.revision)
            table.wake_watchers()

    def _commit(self, table: Table, kind: EventType, key: ObjectKey, current: Stored, previous: Stored | None) -> None:
        self.writes += 1
        event = Event(self.revision, kind, key, current, previous, self._clock.monotonic_s())
        table.history.append(event)
        table.wake_watchers()
        for observer in tuple(self._observers):
            observer(table.resource, event)
