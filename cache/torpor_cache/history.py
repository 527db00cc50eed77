"""Recent changes of one watch scope, in the order of their versions, with the deletions among them findable by key.

Readers older than the window get `Expired`, never a gap. Knows nothing of subscribers.

The window: what is younger than `window_s` is kept, but never more than `bytes_max` of old states; a storm that fills
that in less than the window shortens it (and its slow readers resynchronise) instead of taking the machine's memory.
Of what is older, as much stays as the last `changes_min` changes and `old_bytes_max` of old states allow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torpor_services.clock import Clock
from torpor_services.errors import TorporError

from torpor_cache.objects import Change, ChangeType
from torpor_cache.resources import NO_VERSION, ObjectKey, ResourceVersion


class Expired(TorporError):
    """The version is older than the window, or newer than anything seen: read a snapshot instead."""

    def __init__(self, version: ResourceVersion, oldest: ResourceVersion) -> None:
        super().__init__(f"version {version} is outside the history, which begins after {oldest}")
        self.version = version
        self.oldest = oldest


@dataclass(frozen=True, slots=True)
class Tombstone:
    """That an object is gone, and since which version."""

    uid: str
    resource_version: ResourceVersion


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """How much is kept."""

    window_s: float = 90.0  # 75 s is promised; the rest covers what a slow trim or a late reader takes
    changes_min: int = 1_000
    old_bytes_max: int = 256 * 1024  # beyond the window: a quiet cluster keeps little of a busy past
    bytes_max: int = 64 * 1024 * 1024


class History:
    """Appended to by the reflector alone, with versions that strictly grow."""

    def __init__(self, clock: Clock, limits: HistoryLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits or HistoryLimits()
        self._changes: deque[Change] = deque()
        self._times_s: deque[float] = deque()
        self._tombstones: dict[ObjectKey, Tombstone] = {}
        self._oldest = NO_VERSION
        self._newest = NO_VERSION
        self._bytes = 0

    # Reading

    @property
    def oldest(self) -> ResourceVersion:
        """Every change after this version is here."""
        return self._oldest

    @property
    def newest(self) -> ResourceVersion:
        """Up to where nothing is missing: of the last change, list or bookmark."""
        return self._newest

    @property
    def bytes(self) -> int:
        """Of the old states that only history keeps alive."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._changes)

    def since(self, version: ResourceVersion) -> Sequence[Change]:
        """Every change after `version`, oldest first; raises Expired where that cannot be told."""
        if version < self._oldest or version > self._newest:
            raise Expired(version, self._oldest)
        changes = list(self._changes)
        return changes[bisect_right(changes, version, key=_version) :]

    def deletions(self) -> Sequence[Change]:
        """Every deletion in history, oldest first; also of keys that have come back, perhaps with other owners."""
        return [change for change in self._changes if change.type is ChangeType.DELETED]

    def tombstone(self, key: ObjectKey) -> Tombstone | None:
        """Of a key that is gone: what keeps a late reply from raising the dead."""
        return self._tombstones.get(key)

    # Writing

    def begin(self, version: ResourceVersion) -> None:
        """Forgets everything; history begins after `version`."""
        self._changes.clear()
        self._times_s.clear()
        self._tombstones.clear()
        self._bytes = 0
        self._oldest = self._newest = version

    def append(self, change: Change) -> None:
        assert change.resource_version > self._newest, "versions of a history grow"
        self._changes.append(change)
        self._times_s.append(self._clock.monotonic_s())
        self._bytes += _weight(change)
        self._newest = change.resource_version
        if change.type is ChangeType.DELETED:
            self._tombstones[change.key] = Tombstone(change.uid, change.resource_version)
        elif change.type is ChangeType.ADDED:
            self._tombstones.pop(change.key, None)
        self.trim()

    def advance(self, version: ResourceVersion) -> None:
        """Nothing has changed up to `version`."""
        self._newest = max(self._newest, version)

    def trim(self) -> None:
        """Drops what the limits no longer keep; called with each change, and when the scope is quiet by its owner."""
        limits, expired_s = self._limits, self._clock.monotonic_s() - self._limits.window_s
        while self._changes:
            is_old = self._times_s[0] < expired_s
            is_much = len(self._changes) > limits.changes_min or self._bytes > limits.old_bytes_max
            if not (self._bytes > limits.bytes_max or (is_old and is_much)):
                break
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        change = self._changes.popleft()
        self._times_s.popleft()
        self._bytes -= _weight(change)
        self._oldest = change.resource_version
        stone = self._tombstones.get(change.key)
        if stone is not None and stone.resource_version == change.resource_version:
            del self._tombstones[change.key]


def _version(change: Change) -> ResourceVersion:
    return change.resource_version


def _weight(change: Change) -> int:
    """The new state is charged to the store, or to the change that replaces it."""
    return 0 if change.old is None else len(change.old.json)
