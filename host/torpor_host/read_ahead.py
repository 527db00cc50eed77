"""What a guest reads first, asked for before it asks.

Nearly every reconcile begins by reading its own object. While a guest is woken, and while it works on a key, the reads
of the keys that come next are under way already: a wake waits for none, and a drain of many keys asks for several in
one message. An answer is used once, by the very request it answers (the operator, the path, the headers, the versions
that must have been reached), and only if nothing has happened to its key since it was asked for, a second ago at most;
otherwise the request goes its usual way. An operator whose last reconcile began in another way is asked nothing for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

from torpor.cache.v1 import cache_pb2

from torpor_host.operator_spec import ResourceRef
from torpor_host.request_stream import Asked
from torpor_host.work_queue import Key, Pending, Work

KEYS = 8  # asked for at once, by a turn
# What predicates hide from a subscription tells nobody that an answer is old.
AGE_S_MAX = 1.0


class Reader(Protocol):
    """Asks as the operator does."""

    def read_message(self, path: str, accept: str) -> cache_pb2.HttpRequest | None:
        """None where the answer could not be used."""

    def start(self, message: cache_pb2.HttpRequest, trace: str) -> Asked: ...


class Reads(Protocol):
    """What of an operator is learned, from one turn to the next."""

    first_read: str | None
    """The Accept header with which a reconcile reads its object first; None if it begins in another way."""


@dataclass(slots=True)
class _Ahead:
    message: cache_pb2.HttpRequest
    asked: Asked
    pending: Pending
    merges: int
    since_s: float


class ReadAhead:
    """Of one turn, on its thread."""

    def __init__(
        self,
        reads: Reads,
        resource: ResourceRef,
        reader: Reader,
        peek: Callable[[int], Sequence[tuple[Key, Pending]]],
        now_s: Callable[[], float],
    ) -> None:
        self._reads = reads
        self._resource = resource
        self._reader = reader
        self._peek = peek
        self._now_s = now_s
        self._entries: dict[Key, _Ahead] = {}
        self._current: _Ahead | None = None
        self._expected = ""  # the path, until the reconcile's first request

    def fill(self) -> None:
        """Asks for what comes next, once half of what was asked for is used."""
        accept = self._reads.first_read
        if accept is None or len(self._entries) > KEYS // 2:
            return
        for key, pending in self._peek(KEYS):
            if key in self._entries:
                continue
            message = self._reader.read_message(self._path(key), accept)
            if message is not None:
                trace = pending.traces[0] if pending.traces else ""
                merges, now_s = pending.merges, self._now_s()
                self._entries[key] = _Ahead(message, self._reader.start(message, trace), pending, merges, now_s)

    def begin(self, work: Work) -> None:
        """A reconcile starts."""
        self._expected = self._path(work.key)
        ahead = self._entries.pop(work.key, None)
        if ahead is None and self._entries:
            self._forget_what_does_not_come()
        if ahead is not None and not self._is_current(ahead, work):
            ahead.asked.drop()
            ahead = None
        self._current = ahead
        self.fill()

    def _forget_what_does_not_come(self) -> None:
        """Others took it, or it moved behind what is live now."""
        for key in self._entries.keys() - dict(self._peek(KEYS)).keys():
            self._entries.pop(key).asked.drop()

    def _is_current(self, ahead: _Ahead, work: Work) -> bool:
        """Not where it may be older than the event that this reconcile is for."""
        if ahead.pending is not work.pending or ahead.merges != work.pending.merges:
            return False
        return self._is_young(ahead)

    def _is_young(self, ahead: _Ahead) -> bool:
        return self._now_s() - ahead.since_s <= AGE_S_MAX

    def take(self, message: cache_pb2.HttpRequest) -> Asked | None:
        """The answer to this request (its trace not set yet), if it is the one that was asked for."""
        if not self._expected:
            return None
        reads = message.method == "GET" and message.path == self._expected
        self._expected = ""
        self._reads.first_read = message.accept if reads else None
        ahead, self._current = self._current, None
        if ahead is None:
            return None
        if ahead.message == message and self._is_young(ahead):
            return ahead.asked
        ahead.asked.drop()
        return None

    def other_call(self) -> None:
        """The guest asks somebody else first, who may change the object."""
        self.end()

    def end(self) -> None:
        """The reconcile is over."""
        if self._expected:
            self._expected, self._reads.first_read = "", None
        if self._current is not None:
            self._current.asked.drop()
            self._current = None

    def close(self) -> None:
        """The turn is over."""
        self.end()
        for ahead in self._entries.values():
            ahead.asked.drop()
        self._entries.clear()

    def _path(self, key: Key) -> str:
        namespace = f"/namespaces/{quote(key.namespace, safe='')}" if key.namespace else ""
        return f"{self._resource.api_root}{namespace}/{self._resource.resource}/{quote(key.name, safe='')}"
