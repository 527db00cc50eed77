"""Objects as the cache keeps them: the bytes of the API server, and as much of them parsed as is asked for.

An object is kept as JSON without managedFields and with kind and apiVersion always present; nothing else is ever
changed in it (a masked read followed by a PUT would delete data). Parsing is partial: msgspec decodes what the types
below name and skips the rest.

managedFields, a third of a usual object, are cut out of the bytes where they stand instead of encoding anew: the
decoder tells their exact text, and where the member's name occurs once, followed by that text, it is the right one.
Where it occurs more often (an object that carries another one) or is written with blanks, metadata is rebuilt from its
raw members. Measured on a Pod of 2.5 KB, a third of it managedFields: decode 5 µs, cut 1 to 2, the rest 5; json.loads
alone takes 34.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
from torpor_services.errors import TorporError, one_line

from torpor_cache import fields as field_paths
from torpor_cache.resources import (
    InvalidResourceVersion,
    ObjectKey,
    ResourceVersion,
    parse_resource_version,
)


class MalformedObject(TorporError, ValueError):
    """Bytes of the API server that are no object, event or list of them."""


class OwnerReference(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """The part of ObjectMeta that the cache looks at. A missing generation is 0, a missing time empty."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    deletion_timestamp: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []
    finalizers: list[str] = []
    managed_fields: msgspec.Raw = msgspec.Raw()


class _Partial(msgspec.Struct, frozen=True, rename="camel"):
    metadata: Metadata
    kind: str = ""
    api_version: str = ""


class _MembersOfMetadata(msgspec.Struct, frozen=True):
    metadata: dict[str, msgspec.Raw]


_decode_partial = msgspec.json.Decoder(_Partial).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class StoredObject:
    """One object at one version. Immutable to its readers, and shared by all of them.

    `metadata` is parsed at each access, in about 3 µs, except while a change of the object is being dispatched: keep
    it in a variable. `labels` are kept, so that a selector over 20,000 objects takes 10 ms of the loop and not 80;
    objects with equal labels share them. `json` is what reads are answered with.
    """

    __slots__ = ("_metadata", "json", "key", "labels", "resource_version", "uid")

    def __init__(
        self, key: ObjectKey, uid: str, resource_version: ResourceVersion, json: bytes, metadata: Metadata | None = None
    ) -> None:
        self.key = key
        self.uid = uid
        self.resource_version = resource_version
        self.json = json
        self._metadata = metadata
        self.labels: Mapping[str, str] = _shared((metadata or _metadata_of(json)).labels)

    @property
    def metadata(self) -> Metadata:
        return self._metadata if self._metadata is not None else _metadata_of(self.json)

    def fields(self, paths: frozenset[str]) -> dict[str, str]:
        """The values that a field selector compares: see `fields.evaluable` for which paths are right."""
        body = None if paths <= field_paths.OF_METADATA else _decode_any(self.json)
        return {path: field_paths.value_of(path, self.key, body) for path in paths}

    def keep_parsed(self) -> None:
        """Parses metadata now and holds it until `drop_parsed`: while a change is told, which reads it often."""
        if self._metadata is None:
            self._metadata = _metadata_of(self.json)

    def drop_parsed(self) -> None:
        """Stored objects hold no parsed form: it is larger than the bytes it came from."""
        self._metadata = None

    def __repr__(self) -> str:
        return f"StoredObject({self.key}, uid={self.uid}, resource_version={self.resource_version})"


SHARED_LABELS_MAX = 4096  # sets of labels that are looked for among those of earlier objects
_NO_LABELS: Mapping[str, str] = {}
_shared_labels: dict[tuple[tuple[str, str], ...], Mapping[str, str]] = {}


def _shared(labels: dict[str, str]) -> Mapping[str, str]:
    """The equal labels of an earlier object, if it was a recent one."""
    if not labels:
        return _NO_LABELS
    if len(_shared_labels) >= SHARED_LABELS_MAX:
        _shared_labels.clear()
    return _shared_labels.setdefault(tuple(labels.items()), labels)


class ChangeType(Enum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to one object. Within one informer and history, `resource_version` grows with each change.

    `old` is the previous state, None for ADDED; `new` is None for DELETED, whose `old` is the last state known and
    whose version is the event's. `final_state_unknown`: the deletion was found by a relist, or by another uid under
    the same key; its version then lies between the last one seen before and the list's.
    """

    type: ChangeType
    key: ObjectKey
    uid: str
    resource_version: ResourceVersion
    old: StoredObject | None
    new: StoredObject | None
    final_state_unknown: bool
    received_unix_ns: int
    traceparent: str

    @property
    def latest(self) -> StoredObject:
        """The new state, or the last one known."""
        latest = self.new if self.new is not None else self.old
        assert latest is not None, "a change has a state before or after"
        return latest


# Go's decoder, and so the API server, takes JSON nested 10,000 deep; msgspec counts its levels as Python's calls, of
# which 1,000 are allowed by default. One deep object must not break the watch of its kind: it takes 2 MB of a stack.
JSON_DEPTH_MAX = 10_000


def allow_deep_json() -> None:
    """For the whole process, once at its start."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), JSON_DEPTH_MAX + 1_000))


# ---- from bytes -----------------------------------------------------------------------------------------------------


def parse_object(
    buffer: bytes, start: int = 0, end: int | None = None, *, kind: str = "", api_version: str = ""
) -> StoredObject:
    """The object whose JSON stands at this place of a buffer.

    `kind` and `api_version` are added where it has none, as items of built-in lists. Raises MalformedObject, for an
    object without name, uid or version too.
    """
    if end is None:
        end = len(buffer)
    partial = _partial(memoryview(buffer)[start:end])
    metadata = partial.metadata
    stored = without_managed_fields(buffer, start, end, metadata.managed_fields)
    if not (partial.kind and partial.api_version):
        stored = _with_kind(stored, partial.kind or kind, partial.api_version or api_version)
    return _stored(stored, metadata)


def _stored(json: bytes, metadata: Metadata) -> StoredObject:
    if not metadata.name or not metadata.uid:
        raise MalformedObject("an object without name or uid")
    try:
        version = parse_resource_version(metadata.resource_version)
    except InvalidResourceVersion as exc:
        raise MalformedObject(f"{metadata.namespace}/{metadata.name}: {exc}") from exc
    key = ObjectKey(sys.intern(metadata.namespace), metadata.name)  # thousands of objects are in one namespace
    return StoredObject(key, metadata.uid, version, json, metadata)


def _partial(raw: bytes | memoryview) -> _Partial:
    try:
        return _decode_partial(raw)
    except msgspec.ValidationError:
        return _tolerant(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedObject(f"no object: {one_line(exc, 200)}") from exc


def _tolerant(raw: bytes | memoryview) -> _Partial:
    """Nulls stand for absence in what some aggregated API servers write."""
    try:
        body = _decode_any(raw)
        metadata = {k: v for k, v in body["metadata"].items() if v is not None and k != "managedFields"}
        members = _decode_members(_decode_members(raw)["metadata"])
        kept = msgspec.convert(metadata, Metadata)
        managed = members.get("managedFields", msgspec.Raw())
        kind, api_version = body.get("kind") or "", body.get("apiVersion") or ""
        return msgspec.convert(
            {
                "metadata": msgspec.structs.replace(kept, managed_fields=managed),
                "kind": kind,
                "apiVersion": api_version,
            },
            _Partial,
        )
    except (msgspec.MsgspecError, KeyError, AttributeError, TypeError, RecursionError) as exc:
        raise MalformedObject(f"no object: {one_line(exc, 200)}") from exc


def _metadata_of(json: bytes) -> Metadata:
    return _partial(json).metadata


def _with_kind(json: bytes, kind: str, api_version: str) -> bytes:
    """Kind and apiVersion first, as the API server writes them; empty ones are replaced."""
    head = _encode({"kind": kind, "apiVersion": api_version})[:-1] + b","
    members = _decode_members(json)
    members.pop("kind", None)
    members.pop("apiVersion", None)
    return head + _encode(members)[1:]


_MANAGED_FIELDS = b'"managedFields":'


def without_managed_fields(buffer: bytes, start: int, end: int, managed: msgspec.Raw) -> bytes:
    """The object's bytes less `metadata.managedFields`, whose exact text is `managed` (empty: there are none)."""
    text = bytes(managed)
    if not text:
        return buffer[start:end]
    at = buffer.find(_MANAGED_FIELDS, start, end)
    after = at + len(_MANAGED_FIELDS)
    if at < 0 or not buffer.startswith(text, after) or buffer.find(_MANAGED_FIELDS, after + len(text), end) >= 0:
        return _rebuilt_without_managed_fields(buffer[start:end])
    after += len(text)
    if buffer[after] == 0x2C:  # a comma follows
        after += 1
    elif buffer[at - 1] == 0x2C:
        at -= 1
    view = memoryview(buffer)
    return b"".join((view[start:at], view[after:end]))


def _rebuilt_without_managed_fields(raw: bytes) -> bytes:
    members: dict[str, Any] = dict(_decode_members(raw))
    metadata = _decode_members(members["metadata"])
    metadata.pop("managedFields", None)
    members["metadata"] = metadata
    return _encode(members)
