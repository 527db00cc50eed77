"""How far each operator has reconciled, and what was deleted since: what a host that takes it over begins from.

Acknowledged positions are kept by (operator, subscription name, resource), only ever forwards within one history.
Deletions of kinds that somebody acknowledges are kept beyond the informers' own history, with the metadata of the last
state (mappings need it), at most `DELETIONS_MAX` a kind, once for each object that is gone: watches of several scopes
lag apart, so they arrive in no order. How far each scope was watched says from where on deletions may be missing here,
so that the next watch of it asks for them (`catch_up`); it is written together with them, and never ahead of them.

Both are in memory, and in diskcache where a folder is given: written in batches by a worker thread, so that neither the
loop nor an acknowledgement waits for the disk. What a crash loses are the last acknowledgements; the operator then
reconciles some keys twice. Only bytes are stored, and pickles are refused when read. A folder that cannot be read means
starting with nothing, which is safe: a takeover is then told all deletions that history holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from torpor_services.clock import Clock
from torpor_services.errors import one_line

from torpor_cache.informers import WatchScope
from torpor_cache.objects import Change, ChangeType, MalformedObject, parse_object
from torpor_cache.resources import NO_VERSION, InvalidResource, ObjectKey, Position, Resource, ResourceVersion

log = logging.getLogger(__name__)

DELETIONS_MAX = 5_000  # a kind; about 2 KB each
WATCHED_MAX = 1_000  # scopes
WRITE_PAUSE_S = 0.05  # between batches: many acknowledgements of one key's position become one write
_BYTES_MAX = 256 * 1024 * 1024
# SQLite's own defaults here would be 32 MiB of pages, and as much of the file as there is mapped; it is read once.
_SQLITE_PAGES = 64


class _PositionRecord(msgspec.Struct, array_like=True):
    operator: str
    name: str
    resource: str
    history: str
    resource_version: int


class _WatchedRecord(msgspec.Struct, array_like=True):
    resource: str
    namespace: str
    label_selector: str
    field_selector: str
    history: str
    resource_version: int


class _DeletionRecord(msgspec.Struct, array_like=True):
    resource: str
    history: str
    namespace: str
    name: str
    uid: str
    resource_version: int
    last_state: str  # a PartialObjectMetadata as JSON, or empty


_encode = msgspec.msgpack.Encoder().encode
_decode_position = msgspec.msgpack.Decoder(_PositionRecord).decode
_decode_deletion = msgspec.msgpack.Decoder(_DeletionRecord).decode
_decode_watched = msgspec.msgpack.Decoder(_WatchedRecord).decode

Ack = tuple[str, str, str]
Gone = tuple[str, ObjectKey, str]  # history, key, uid


class Positions:
    """`async with Positions(clock, folder) as positions`; everything but entering and leaving is at once."""

    def __init__(self, clock: Clock, folder: Path | None = None) -> None:
        self._clock = clock
        self._folder = folder
        self._positions: dict[Ack, Position] = {}
        self._deletions: dict[str, dict[Gone, Change]] = {}
        self._watched: dict[WatchScope, Position] = {}
        self._acknowledged_kinds: set[str] = set()
        self._disk: Any = None
        self._dirty: dict[str, bytes | None] = {}
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._folder is not None:
            self._disk, records = await asyncio.to_thread(_open, self._folder)
            self._load(records)
            self._writer = asyncio.create_task(self._write_batches())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writer
        if self._disk is not None:
            await self._flush()
            await asyncio.to_thread(self._disk.close)

    # ---- positions

    def acknowledge(self, operator: str, name: str, resource: Resource, position: Position) -> None:
        """Everything up to `position` is reconciled. Backwards within a history is ignored."""
        key = _ack(operator, name, str(resource))
        known = self._positions.get(key)
        is_same = known is not None and known.history == position.history
        if is_same and known is not None and known.resource_version >= position.resource_version:
            return
        self._positions[key] = Position(sys.intern(position.history), position.resource_version)
        self._acknowledged_kinds.add(key[2])
        record = _PositionRecord(*key, position.history, position.resource_version)
        self._save("position/" + "/".join(key), _encode(record))

    def acknowledged(self, operator: str, name: str, resource: Resource) -> Position | None:
        return self._positions.get((operator, name, str(resource)))

    def expect(self, resource: Resource) -> None:
        """Somebody is going to acknowledge this kind: its deletions are kept from now on."""
        self._acknowledged_kinds.add(str(resource))

    # ---- deletions

    def remember(self, resource: Resource, history: str, change: Change) -> None:
        """Keeps a deletion, if anybody acknowledges its kind; of one told by several watches the highest version."""
        kind = str(resource)
        if kind not in self._acknowledged_kinds or change.type is not ChangeType.DELETED:
            return
        kept = self._deletions.setdefault(kind, {})
        gone = (history, change.key, change.uid)
        known = kept.get(gone)
        if known is not None and known.resource_version >= change.resource_version:
            return
        record = _deletion_record(kind, history, change)
        kept.pop(gone, None)
        kept[gone] = _change(record)  # with metadata only: 5,000 large objects would be too much
        self._save(_deletion_name(kind, gone), _encode(record))
        while len(kept) > DELETIONS_MAX:  # Overflow: the oldest go; finalizers are for what must outlive that.
            oldest = next(iter(kept))
            del kept[oldest]
            self._save(_deletion_name(kind, oldest), None)

    def deletions(self, resource: Resource, history: str, since: Position | None) -> list[Change]:
        """What is remembered of this history after `since` (None, or of another history: all), oldest first."""
        after = since.resource_version if since is not None and since.history == history else 0
        kept = self._deletions.get(str(resource), {})
        found = [change for gone, change in kept.items() if gone[0] == history and change.resource_version > after]
        return sorted(found, key=_version)

    # ---- how far was watched

    def watched(self, scope: WatchScope, position: Position) -> None:
        """Every deletion of this scope up to `position` is remembered, if anybody acknowledges its kind."""
        if str(scope.resource) not in self._acknowledged_kinds or self._watched.get(scope) == position:
            return
        if scope not in self._watched:
            self._forget_covered(scope)
        self._watched[scope] = position
        where = (str(scope.resource), scope.namespace, scope.label_selector, scope.field_selector)
        record = _WatchedRecord(*where, position.history, position.resource_version)
        self._save(_watched_name(scope), _encode(record))

    def _forget_covered(self, scope: WatchScope) -> None:
        """From here on this scope says it for the narrower ones. Overflow: the one that was begun first goes."""
        covered = [other for other in self._watched if scope.covers(other)]
        while len(self._watched) - len(covered) >= WATCHED_MAX:
            covered.append(next(other for other in self._watched if other not in covered))
        for other in covered:
            del self._watched[other]
            self._save(_watched_name(other), None)

    def watched_until(self, scope: WatchScope, history: str) -> list[ResourceVersion]:
        """Where deletions of this scope may begin to be missing, best first; empty where nobody would ask for them.

        A later one is for when the API server no longer knows the earlier: what lies between is lost.
        """
        wider: list[ResourceVersion] = []
        narrower: list[ResourceVersion] = []
        for other, position in self._watched.items():
            if position.history != history or other.resource != scope.resource:
                continue
            if other.covers(scope):
                wider.append(position.resource_version)
            elif scope.covers(other):
                narrower.append(position.resource_version)
        least = max(wider, default=NO_VERSION)  # nothing before it is missing
        versions = {*wider, *narrower}
        ends = {version for version in (min(narrower, default=least), max(versions, default=least)) if version > least}
        return sorted({least, *ends} - {NO_VERSION})

    # ---- disk

    def _save(self, name: str, value: bytes | None) -> None:
        if self._folder is not None:
            # Bounded: one entry an acknowledged position or remembered deletion, the latest value.
            self._dirty[name] = value
            self._wake.set()

    async def _write_batches(self) -> None:
        while True:
            await self._wake.wait()
            await self._flush()
            await self._clock.sleep(WRITE_PAUSE_S)

    async def _flush(self) -> None:
        self._wake.clear()
        batch, self._dirty = self._dirty, {}
        if not batch:
            return
        try:
            await asyncio.to_thread(_write, self._disk, batch)
        except Exception as exc:  # a full disk must not end the service: memory still has everything
            log.warning("positions cannot be written", extra={"error": one_line(exc), "entries": len(batch)})

    def _load(self, records: Iterable[tuple[str, bytes]]) -> None:
        deletions: list[_DeletionRecord] = []
        for name, value in records:
            try:
                if name.startswith("position/"):
                    self._load_position(_decode_position(value))
                elif name.startswith("watched/"):
                    self._load_watched(_decode_watched(value))
                elif name.startswith("deletion/"):
                    deletions.append(_decode_deletion(value))
            except (msgspec.MsgspecError, InvalidResource):
                log.warning("a stored record cannot be read and is ignored", extra={"record": name[:200]})
        for record in sorted(deletions, key=lambda record: record.resource_version):
            change = _change(record)
            self._deletions.setdefault(record.resource, {})[record.history, change.key, change.uid] = change

    def _load_position(self, record: _PositionRecord) -> None:
        key = _ack(record.operator, record.name, record.resource)
        self._positions[key] = Position(sys.intern(record.history), ResourceVersion(record.resource_version))
        self._acknowledged_kinds.add(record.resource)

    def _load_watched(self, record: _WatchedRecord) -> None:
        resource = Resource.parse(record.resource)
        scope = WatchScope(resource, record.namespace, record.label_selector, record.field_selector)
        self._watched[scope] = Position(record.history, ResourceVersion(record.resource_version))
        self._acknowledged_kinds.add(record.resource)


def _ack(operator: str, name: str, resource: str) -> Ack:
    """Of texts that are there once: an operator has several subscriptions, and many have the same ones."""
    return sys.intern(operator), sys.intern(name), sys.intern(resource)


def _version(change: Change) -> ResourceVersion:
    return change.resource_version


def _deletion_name(kind: str, gone: Gone) -> str:
    history, key, uid = gone
    return f"deletion/{kind}/{history}/{key.namespace}/{key.name}/{uid}"


def _watched_name(scope: WatchScope) -> str:
    return "/".join(("watched", str(scope.resource), scope.namespace, scope.label_selector, scope.field_selector))


def _deletion_record(kind: str, history: str, change: Change) -> _DeletionRecord:
    last_state = b""
    if change.old is not None:
        from torpor_cache.encoding import payload_of
        from torpor_cache.subscriptions import Payload

        last_state = payload_of(change.old, Payload.METADATA)
    key = change.key
    return _DeletionRecord(
        kind, history, key.namespace, key.name, change.uid, change.resource_version, last_state.decode()
    )


def _change(record: _DeletionRecord) -> Change:
    try:
        old = parse_object(record.last_state.encode()) if record.last_state else None
    except MalformedObject:
        old = None
    return Change(
        type=ChangeType.DELETED,
        key=ObjectKey(record.namespace, record.name),
        uid=record.uid,
        resource_version=ResourceVersion(record.resource_version),
        old=old,
        new=None,
        final_state_unknown=True,
        received_unix_ns=0,
        traceparent="",
    )


# ---- in the worker thread


def _open(folder: Path) -> tuple[Any, list[tuple[str, bytes]]]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    path = folder / "positions"
    try:
        return _read(path)
    except Exception as exc:
        log.warning("stored positions cannot be read and are put aside", extra={"error": one_line(exc)})
        path.rename(_unused(folder))
        return _read(path)


def _unused(folder: Path) -> Path:
    return next(p for n in range(1_000_000) if not (p := folder / f"positions.broken-{n}").exists())


def _read(path: Path) -> tuple[Any, list[tuple[str, bytes]]]:
    import diskcache

    class BytesDisk(diskcache.Disk):  # type: ignore[misc]
        """Text keys and bytes; a pickle in the file is an error, never executed."""

        def get(self, key: Any, raw: Any) -> Any:
            if not raw:
                raise ValueError("a pickled key")
            return super().get(key, raw)

        def fetch(self, mode: int, filename: Any, value: Any, read: bool) -> Any:
            if mode not in (diskcache.core.MODE_RAW, diskcache.core.MODE_BINARY):
                raise ValueError("a value that is not bytes")
            return super().fetch(mode, filename, value, read)

    path.mkdir(mode=0o700, exist_ok=True)
    disk = diskcache.Cache(
        str(path),
        disk=BytesDisk,
        eviction_policy="none",
        size_limit=_BYTES_MAX,
        cull_limit=0,
        sqlite_cache_size=_SQLITE_PAGES,
        sqlite_mmap_size=0,
    )
    path.chmod(0o700)
    records = [(str(name), bytes(disk[name])) for name in disk.iterkeys()]
    return disk, records


def _write(disk: Any, batch: dict[str, bytes | None]) -> None:
    with disk.transact():
        for name, value in batch.items():
            if value is None:
                disk.delete(name)
            else:
                disk.set(name, value)
