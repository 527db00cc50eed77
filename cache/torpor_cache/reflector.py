"""Applies what the watch says to store, history and listeners, as one step each.

Rules, each of which was a bug somewhere:
- A relist is a diff. What it shows reaches listeners as changes; vanished objects become DELETED, final state unknown.
- Only a newer version of an object is accepted, only a newer change of the whole.
- The same key with another uid is DELETED, then ADDED.
- DELETED carries the event's version and the object as it was stored, whatever the event shows: to a selector that
  stopped matching, the new state would not say whom it concerned.
- Versions in history strictly grow, so that acknowledging one change never skips its neighbour. The deletions that a
  relist finds get versions of their own: every deletion took one that no object bears, between the last version seen
  and the list's.

Knows nothing of the network. Every method ends without an await, so that nobody sees half of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torpor_services import telemetry

from torpor_cache.history import History
from torpor_cache.objects import Change, ChangeType, StoredObject
from torpor_cache.resources import NO_VERSION, ObjectKey, Resource, ResourceVersion
from torpor_cache.store import Store

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Who hears of each change: the informer, for its listeners."""

    def changed(self, change: Change) -> None: ...

    def synced_first(self) -> None: ...

    def advanced(self) -> None: ...


@dataclass(slots=True)
class Counters:
    """Since the informer began."""

    events: int = 0  # changes told to listeners
    ignored: int = 0  # of objects that were as new or newer already
    lists: int = 0  # complete lists, the first included
    repaired: int = 0  # changes that a relist found


class Reflector:
    """The only writer of its store and history."""

    def __init__(self, resource: Resource, store: Store, history: History, observer: Observer) -> None:
        self._resource = resource
        self._store = store
        self._history = history
        self._observer = observer
        self._stage: dict[ObjectKey, StoredObject] = {}
        self.synced = False
        self.counters = Counters()

    @property
    def version(self) -> ResourceVersion:
        """Store and history are complete up to here; none before the first list."""
        return self._history.newest

    def reset(self) -> None:
        """Another history: all that was known is void until the next list."""
        self._stage = {}
        self._store.clear()
        self._history.begin(NO_VERSION)
        self.synced = False

    # A list under way

    def stage(self, items: Iterable[StoredObject]) -> None:
        for item in items:
            self._put_staged(item)

    def stage_change(self, kind: ChangeType, item: StoredObject) -> None:
        if kind is not ChangeType.DELETED:
            self._put_staged(item)
            return
        staged = self._stage.get(item.key)
        if staged is not None and staged.resource_version < item.resource_version:
            del self._stage[item.key]

    def _put_staged(self, item: StoredObject) -> None:
        item.drop_parsed()
        known = self._store.get(item.key)
        if known is not None and known.resource_version == item.resource_version and known.json == item.json:
            item = known  # the bytes are held once while a relist is under way
        staged = self._stage.get(item.key)
        if staged is None or staged.resource_version < item.resource_version:
            self._stage[item.key] = item

    def drop_stage(self) -> None:
        self._stage = {}

    def goes_back(self, version: ResourceVersion) -> bool:
        """Whether a list at this version is older than what was seen: then this is another history."""
        return self.synced and version < self.version

    def replace(self, version: ResourceVersion, received_unix_ns: int) -> None:
        """What is staged is all there is. The first time it is not told as changes; later as the difference."""
        staged, self._stage = self._stage, {}
        self.counters.lists += 1
        if not self.synced:
            for item in staged.values():
                self._store.put(item)
            self._history.begin(version)
            self.synced = True
            self._observer.synced_first()
            return
        span = telemetry.start(
            "relist", start_unix_ns=received_unix_ns, attributes={"k8s.resource": str(self._resource)}
        )
        changes = self._difference(staged, version, received_unix_ns, span.traceparent)
        self.counters.repaired += len(changes)
        for change in changes:
            self._commit(change)
        span.end()
        self._history.advance(version)
        self._observer.advanced()

    def _difference(
        self,
        staged: dict[ObjectKey, StoredObject],
        version: ResourceVersion,
        received_unix_ns: int,
        traceparent: str,
    ) -> list[Change]:
        replaced: list[tuple[StoredObject, StoredObject]] = []
        updated: list[StoredObject] = []
        for item in staged.values():
            known = self._store.get(item.key)
            if known is None or (known.uid == item.uid and known.resource_version < item.resource_version):
                updated.append(item)
            elif known.uid != item.uid:
                replaced.append((known, item))
            elif known.resource_version == item.resource_version and known.json != item.json:
                updated.append(item)  # shown otherwise than before: a new server, or what a watch has lost
        gone = [known for known in self._store if known.key not in staged]
        return self._numbered(replaced, updated, gone, version, received_unix_ns, traceparent)

    def _numbered(
        self,
        replaced: list[tuple[StoredObject, StoredObject]],
        updated: list[StoredObject],
        gone: list[StoredObject],
        version: ResourceVersion,
        received_unix_ns: int,
        traceparent: str,
    ) -> list[Change]:
        """The changes in the order of their versions; those without one of their own get the lowest that is free."""
        newer = [item for item in updated if item.resource_version > self.version]
        same = [item for item in updated if item.resource_version <= self.version]
        replaced.sort(key=lambda pair: pair[1].resource_version)
        free = _FreeVersions(
            self.version, version, {item.resource_version for item in (*newer, *(new for _, new in replaced))}
        )

        def change(at: ResourceVersion, old: StoredObject | None, new: StoredObject | None) -> Change:
            return _change(at, old, new, received_unix_ns, traceparent, unknown=new is None)

        # Never behind the object that took its key: the sort below keeps this order among equals.
        numbered = [change(min(free.take(), new.resource_version), old, None) for old, new in replaced]
        numbered += [change(free.take(), old, None) for old in gone]
        numbered += [change(free.take(), self._store.get(item.key), item) for item in same]
        numbered += [change(new.resource_version, None, new) for _, new in replaced]
        numbered += [change(item.resource_version, self._store.get(item.key), item) for item in newer]
        numbered.sort(key=lambda each: each.resource_version)
        return numbered

    # The watch

    def apply(self, kind: ChangeType, item: StoredObject, received_unix_ns: int) -> None:
        """An event of the watch; its version is above all that were seen."""
        known = self._store.get(item.key)
        at = item.resource_version
        if kind is ChangeType.DELETED:
            if known is None or known.uid != item.uid:
                self._ignore(at)
                return
            self._tell(at, known, None, received_unix_ns)
        elif known is not None and known.uid != item.uid:
            # Its deletion was never shown. One version below the event's is free, or else was the last one seen.
            self._tell(max(ResourceVersion(at - 1), self.version), known, None, received_unix_ns, unknown=True)
            self._tell(at, None, item, received_unix_ns)
        else:
            self._tell(at, known, item, received_unix_ns)

    def advance(self, version: ResourceVersion) -> None:
        self._history.advance(version)
        self._history.trim()
        self._observer.advanced()

    def _ignore(self, version: ResourceVersion) -> None:
        self.counters.ignored += 1
        self._history.advance(version)
        self._observer.advanced()

    def _tell(
        self,
        at: ResourceVersion,
        old: StoredObject | None,
        new: StoredObject | None,
        received_unix_ns: int,
        *,
        unknown: bool = False,
    ) -> None:
        if not telemetry.enabled():
            self._commit(_change(at, old, new, received_unix_ns, "", unknown=unknown))
            return
        span = telemetry.start("watch event", start_unix_ns=received_unix_ns, attributes=self._attributes(at, old, new))
        try:
            self._commit(_change(at, old, new, received_unix_ns, span.traceparent, unknown=unknown))
        finally:
            span.end()

    def _attributes(
        self, at: ResourceVersion, old: StoredObject | None, new: StoredObject | None
    ) -> dict[str, str | int | float | bool]:
        item = new or old
        assert item is not None
        return {
            "k8s.resource": str(self._resource),
            "k8s.namespace.name": item.key.namespace,
            "k8s.object.name": item.key.name,
            "k8s.object.resource_version": str(at),
            "torpor.change": _type_of(old, new).value,
        }

    def _commit(self, change: Change) -> None:
        """One change into store and history, then to the listeners, who may look at both."""
        if change.new is not None:
            self._store.put(change.new)
        else:
            self._store.remove(change.key)
        if change.resource_version > self._history.newest:
            self._history.append(change)
        else:
            logger.warning("%s: %s has no version of its own; a resume may miss it", self._resource, change.key)
        self.counters.events += 1
        for item in (change.old, change.new):
            if item is not None:
                item.keep_parsed()
        try:
            self._observer.changed(change)
        finally:
            for item in (change.old, change.new):
                if item is not None:
                    item.drop_parsed()


class _FreeVersions:
    """The versions after `low` up to `high` that no object of the list bears, lowest first."""

    def __init__(self, low: ResourceVersion, high: ResourceVersion, taken: set[ResourceVersion]) -> None:
        self._next = low
        self._high = high
        self._taken = taken

    def take(self) -> ResourceVersion:
        """The list's version again where none is left: such a server does not count as Kubernetes does."""
        candidate = ResourceVersion(self._next + 1)
        while candidate in self._taken:
            candidate = ResourceVersion(candidate + 1)
        if candidate > self._high:
            return self._high if self._high != NO_VERSION else candidate
        self._next = candidate
        return candidate


def _type_of(old: StoredObject | None, new: StoredObject | None) -> ChangeType:
    if new is None:
        return ChangeType.DELETED
    return ChangeType.ADDED if old is None else ChangeType.MODIFIED


def _change(
    at: ResourceVersion,
    old: StoredObject | None,
    new: StoredObject | None,
    received_unix_ns: int,
    traceparent: str,
    *,
    unknown: bool,
) -> Change:
    item = new or old
    assert item is not None, "a change has a state before or after"
    return Change(_type_of(old, new), item.key, item.uid, at, old, new, unknown, received_unix_ns, traceparent)
