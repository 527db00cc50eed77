"""What an operator has written, so that it reads its own writes.

A write's answer carries a position; it goes as the minimum with later reads of that kind, from whichever instance and
after whatever unload. After a conflict the key is read live once, so that a retry sees what it collided with. After a
delete no version says when it has been seen: that key, and lists of its kind, are read live until the watch has shown
the deletion, for at most `LIVE_S_MAX`. Changed by workers and the loop; each step is one operation on a dictionary.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from torpor.cache.v1 import cache_pb2

from torpor_host.api_path import ApiPath

LIVE_S_MAX = 60.0
_KINDS_MAX = 64
_LIVE_MAX = 512

_Kind = tuple[str, str]  # group, resource
_Place = tuple[str, str, str, str]  # group, resource, namespace, name


class _Written(NamedTuple):
    """Where a write of a kind took effect. Not the message: that is a part of an answer, and would keep all of it."""

    version: str
    history: str
    resource_version: str


class ReadPositions:
    """One operator's. Empty ones hold no dictionary."""

    __slots__ = ("_conflicts", "_deleted", "_written")

    def __init__(self) -> None:
        self._written: dict[_Kind, _Written] | None = None
        self._conflicts: dict[_Place, None] | None = None
        self._deleted: dict[_Place, float] | None = None

    def written(self, written: cache_pb2.MinimumVersion) -> None:
        """A write took effect there."""
        if self._written is None:
            self._written = {}
        resource, position = written.resource, written.position
        kind = (sys.intern(resource.group), sys.intern(resource.resource))
        new = _Written(sys.intern(resource.version), sys.intern(position.history), position.resource_version)
        known = self._written.pop(kind, None)
        self._written[kind] = new if known is None or _newer(new, known) else known
        while len(self._written) > _KINDS_MAX:
            del self._written[next(iter(self._written))]

    def conflicted(self, path: ApiPath) -> None:
        """A write of this key met a newer version."""
        if self._conflicts is None:
            self._conflicts = {}
        self._conflicts[_place(path)] = None
        while len(self._conflicts) > _LIVE_MAX:
            del self._conflicts[next(iter(self._conflicts))]

    def deleted(self, path: ApiPath, now_s: float) -> None:
        """A delete took effect that has no version to wait for."""
        if self._deleted is None:
            self._deleted = {}
        place = _place(path)
        self._deleted.pop(place, None)
        self._deleted[place] = now_s + LIVE_S_MAX
        while len(self._deleted) > _LIVE_MAX:
            del self._deleted[next(iter(self._deleted))]

    def deletion_seen(self, group: str, resource: str, namespace: str, name: str) -> None:
        """The watch has shown it."""
        if self._deleted is not None:
            self._deleted.pop((group, resource, namespace, name), None)
            if not self._deleted:
                self._deleted = None

    def read_live(self, path: ApiPath) -> None:
        """A live read of the key was answered: the conflict is seen."""
        if self._conflicts is not None:
            self._conflicts.pop(_place(path), None)
            if not self._conflicts:
                self._conflicts = None

    def must_read_live(self, path: ApiPath, now_s: float) -> bool:
        if self._conflicts is not None and _place(path) in self._conflicts:
            return True
        deleted = self._deleted
        if deleted is None:
            return False
        if path.name:
            return deleted.get(_place(path), 0.0) > now_s
        return any(
            until_s > now_s and place[:2] == (path.group, path.resource) and path.namespace in {"", place[2]}
            for place, until_s in list(deleted.items())
        )

    def minimum(self, path: ApiPath) -> cache_pb2.MinimumVersion | None:
        """What a read of this kind must not be older than."""
        kind = (path.group, path.resource)
        written = None if self._written is None else self._written.get(kind)
        return None if written is None else _minimum(kind, written)

    def version_written(self, group: str, resource: str) -> int:
        """Of the newest write of this kind; 0 if there was none."""
        written = None if self._written is None else self._written.get((group, resource))
        version = "" if written is None else written.resource_version
        return int(version) if version.isdecimal() else 0

    def all_minimums(self) -> list[cache_pb2.MinimumVersion]:
        return [] if self._written is None else [_minimum(*item) for item in list(self._written.items())]


def _place(path: ApiPath) -> _Place:
    return (path.group, path.resource, path.namespace, path.name)


def _minimum(kind: _Kind, written: _Written) -> cache_pb2.MinimumVersion:
    group, resource = kind
    return cache_pb2.MinimumVersion(
        resource=cache_pb2.Resource(group=group, version=written.version, resource=resource),
        position=cache_pb2.Position(history=written.history, resource_version=written.resource_version),
    )


def _newer(position: _Written, than: _Written) -> bool:
    if position.history != than.history:
        return True
    try:
        return int(position.resource_version) >= int(than.resource_version)
    except ValueError:
        return True
