"""The envelopes around objects: watch events and pages of a list, from bytes.

A usual event is parsed in one pass: the API server writes `{"type":"ADDED","object":` exactly so, and the object is
what stands between that and the last brace; whatever is written otherwise goes through a general decoder. The stored
bytes are cut from the receive buffer once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from torpor_services.errors import one_line

from torpor_cache.objects import ChangeType, MalformedObject, StoredObject, parse_object
from torpor_cache.resources import InvalidResourceVersion, ResourceVersion, parse_resource_version

INITIAL_EVENTS_END = "k8s.io/initial-events-end"

_PREFIXES = tuple((b'{"type":"%s","object":' % kind.value.encode(), kind) for kind in ChangeType)
_TYPES = {kind.value: kind for kind in ChangeType}


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    type: ChangeType
    item: StoredObject


@dataclass(frozen=True, slots=True)
class Bookmark:
    resource_version: ResourceVersion
    ends_initial: bool
    kind: str


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    code: int
    status: dict[str, Any]


ParsedEvent: TypeAlias = ObjectEvent | Bookmark | ErrorEvent


class _Envelope(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _BookmarkMetadata(msgspec.Struct, rename="camel"):
    resource_version: str
    annotations: dict[str, str] | None = None


class _Bookmark(msgspec.Struct):
    metadata: _BookmarkMetadata
    kind: str = ""


class _ListMetadata(msgspec.Struct, rename={"continue_token": "continue", "resource_version": "resourceVersion"}):
    resource_version: str = ""
    continue_token: str = ""


class _List(msgspec.Struct, rename="camel"):
    metadata: _ListMetadata
    kind: str = ""
    api_version: str = ""
    items: list[msgspec.Raw] | None = None


_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_bookmark = msgspec.json.Decoder(_Bookmark).decode
_decode_list = msgspec.json.Decoder(_List).decode


def parse_event(buffer: bytes, start: int, end: int) -> ParsedEvent:
    """The watch event that stands at this place of a buffer; raises MalformedObject."""
    if buffer[end - 1] == 0x7D:  # }
        for prefix, kind in _PREFIXES:
            if buffer.startswith(prefix, start):
                return ObjectEvent(kind, parse_object(buffer, start + len(prefix), end - 1))
    return _parse_any_event(buffer[start:end])


def _parse_any_event(line: bytes) -> ParsedEvent:
    try:
        envelope = _decode_envelope(line)
        if envelope.type == "BOOKMARK":
            return _bookmark(_decode_bookmark(envelope.object))
        if envelope.type == "ERROR":
            return _error(msgspec.json.decode(envelope.object))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedObject(f"no watch event: {one_line(exc, 200)}") from exc
    kind = _TYPES.get(envelope.type)
    if kind is None:
        raise MalformedObject(f"no watch event: unknown type {envelope.type[:40]!r}")
    return ObjectEvent(kind, parse_object(bytes(envelope.object)))


def _bookmark(found: _Bookmark) -> Bookmark:
    annotations = found.metadata.annotations or {}
    version = _version(found.metadata.resource_version)
    return Bookmark(version, annotations.get(INITIAL_EVENTS_END) == "true", found.kind)


def _error(status: Any) -> ErrorEvent:
    if not isinstance(status, dict):
        raise MalformedObject("an ERROR event without a Status")
    code = status.get("code")
    return ErrorEvent(code if isinstance(code, int) and code >= 400 else 500, status)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list whose objects are yet to be parsed."""

    resource_version: ResourceVersion
    continue_token: str
    list_kind: str
    api_version: str
    raw_items: list[msgspec.Raw]

    @property
    def kind(self) -> str:
        """Of the objects, which do not say it themselves in lists of built-in kinds."""
        return self.list_kind.removesuffix("List")


def parse_page(body: bytes) -> Page:
    """Raises MalformedObject."""
    try:
        found = _decode_list(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedObject(f"no list: {one_line(exc, 200)}") from exc
    version = _version(found.metadata.resource_version)
    return Page(version, found.metadata.continue_token, found.kind, found.api_version, found.items or [])


def parse_items(page: Page, start: int, stop: int) -> list[StoredObject]:
    """Some of the page's objects; raises MalformedObject."""
    kind, api_version = page.kind, page.api_version
    items = [parse_object(bytes(raw), kind=kind, api_version=api_version) for raw in page.raw_items[start:stop]]
    for item in items:
        item.drop_parsed()
    return items


def _version(text: str) -> ResourceVersion:
    try:
        return parse_resource_version(text)
    except InvalidResourceVersion as exc:
        raise MalformedObject(str(exc)) from exc
