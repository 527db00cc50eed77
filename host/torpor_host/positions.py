"""How far one subscription has come: what was received, and what of it may be acknowledged.

The cache keeps an acknowledged position for whoever takes the operator over, so it must never run ahead of a reconcile.
Every event gets a number, growing over the whole host; the work queue says which is the oldest that is not reconciled.
Until the snapshot is complete (SYNCED) nothing is acknowledged, and the snapshot's own position counts only once all of
its keys are done. Bounded: of many checkpoints every second one is dropped, which only acknowledges later.
"""

from __future__ import annotations

from torpor.cache.v1 import cache_pb2

_CHECKPOINTS_MAX = 64


class Progress:
    """Of one subscription. Resource versions are compared as integers, within one history."""

    __slots__ = ("_acknowledged", "_checkpoints", "history", "received", "synced")

    def __init__(self) -> None:
        self.history = ""
        self.received = 0
        self.synced = False
        self._acknowledged = 0
        self._checkpoints: list[tuple[int, int]] | None = None

    @property
    def position(self) -> cache_pb2.Position | None:
        """Where a reconnect resumes; None before the snapshot is complete."""
        if not self.synced or not self.received:
            return None
        return cache_pb2.Position(history=self.history, resource_version=str(self.received))

    def advance(self, sequence: int, position: cache_pb2.Position) -> None:
        """An event or bookmark with this number was received and its keys are in the queue."""
        if position.history and position.history != self.history:
            self.history, self.received, self._acknowledged = position.history, 0, 0
            self._checkpoints = None
        version = _version(position.resource_version)
        if version <= self.received:
            return
        self.received = version
        if self.synced:
            self._checkpoint(sequence)

    def complete(self, sequence: int, position: cache_pb2.Position) -> None:
        """SYNCED: the snapshot is whole."""
        self.synced = True
        self.advance(sequence, position)
        self._checkpoint(sequence)

    def restart(self) -> None:
        """A snapshot follows: nothing received before it counts."""
        self.synced, self.received, self._checkpoints = False, 0, None

    def acknowledge(self, oldest_sequence: int) -> cache_pb2.Position | None:
        """The position to acknowledge now, None if it has not moved. `oldest_sequence` 0: all is reconciled."""
        if not self._checkpoints:
            return None
        done = [c for c in self._checkpoints if not oldest_sequence or c[0] < oldest_sequence]
        if not done:
            return None
        self._checkpoints = self._checkpoints[len(done) :] or None
        version = done[-1][1]
        if version <= self._acknowledged:
            return None
        self._acknowledged = version
        return cache_pb2.Position(history=self.history, resource_version=str(version))

    def repeat_acknowledgement(self) -> None:
        """The stream broke: the last acknowledgement may not have arrived."""
        if self._acknowledged:
            self._checkpoints = [(0, self._acknowledged), *(self._checkpoints or [])]
            self._acknowledged = 0

    def _checkpoint(self, sequence: int) -> None:
        if self._checkpoints is None:
            self._checkpoints = []
        self._checkpoints.append((sequence, self.received))
        if len(self._checkpoints) > _CHECKPOINTS_MAX:
            self._checkpoints = self._checkpoints[1::2]


def _version(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
