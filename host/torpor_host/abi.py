"""The messages of `proto/wit/abi.md`: a sequence of fields, each a 32-bit little-endian length and its bytes.

Only framing and the fields' meaning live here; memory and calls do not. Input may be hostile: every reader raises
`MessageInvalid` and nothing else, and allocates no more than the message is long.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torpor_host.hostcalls import (
    CallResponse,
    FetchRequest,
    FetchResponse,
    KubeRequest,
    TreeRequest,
)

VERSION = 1

Cause = Literal["start", "watch", "timer", "resync", "retry", "wake"]

_FIELDS_MAX = 100_000  # a map result may have many keys; beyond this it is an attack on the host's memory
_LENGTH = struct.Struct("<I")


class MessageInvalid(ValueError):
    """The bytes are no message, or a field has not the form it must have."""


def encode(fields: Sequence[bytes]) -> bytes:
    """The message with these fields, in order."""
    parts: list[bytes] = []
    for field in fields:
        parts.append(_LENGTH.pack(len(field)))
        parts.append(field)
    return b"".join(parts)


def decode(message: bytes) -> list[bytes]:
    """The fields of a message."""
    fields: list[bytes] = []
    offset, end = 0, len(message)
    while offset < end:
        if end - offset < 4:
            raise MessageInvalid(f"message ends inside the length of field {len(fields)}")
        (length,) = _LENGTH.unpack_from(message, offset)
        offset += 4
        if length > end - offset:
            raise MessageInvalid(f"field {len(fields)} says {length} bytes, {end - offset} are left")
        fields.append(message[offset : offset + length])
        offset += length
        if len(fields) > _FIELDS_MAX:
            raise MessageInvalid(f"message has more than {_FIELDS_MAX} fields")
    return fields


class _Reader:
    """Fields by position; missing ones at the end are empty."""

    def __init__(self, message: bytes) -> None:
        self._fields = decode(message)

    def raw(self, index: int) -> bytes:
        return self._fields[index] if index < len(self._fields) else b""

    def text(self, index: int, name: str) -> str:
        try:
            return self.raw(index).decode()
        except UnicodeDecodeError as exc:
            raise MessageInvalid(f"field {name!r} is not UTF-8") from exc

    def number(self, index: int, name: str) -> int | None:
        digits = self.raw(index)
        if not digits:
            return None
        if len(digits) > 18 or not digits.isdigit():
            raise MessageInvalid(f"field {name!r} is no decimal number: {digits[:32]!r}")
        return int(digits)

    def rest(self, index: int) -> list[bytes]:
        return self._fields[index:]


@dataclass(frozen=True, slots=True)
class ReconcileRequest:
    namespace: str
    name: str
    cause: Cause
    attempt: int = 0
    traceparent: str = ""

    def encode(self) -> bytes:
        return encode(
            [
                self.namespace.encode(),
                self.name.encode(),
                self.cause.encode(),
                b"%d" % self.attempt,
                self.traceparent.encode(),
            ]
        )


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing more to do for this key until something changes."""


@dataclass(frozen=True, slots=True)
class RequeueAfter:
    milliseconds: int


@dataclass(frozen=True, slots=True)
class ReconcileFailed:
    """The operator says so itself; retried with back-off. The instance is sound."""

    message: str


ReconcileResult = Done | RequeueAfter | ReconcileFailed


def decode_reconcile_result(message: bytes) -> ReconcileResult:
    reader = _Reader(message)
    outcome = reader.text(0, "outcome")
    if outcome == "done":
        return Done()
    if outcome == "requeue":
        milliseconds = reader.number(1, "requeue-after-ms")
        if milliseconds is None:
            raise MessageInvalid("outcome 'requeue' without requeue-after-ms")
        return RequeueAfter(milliseconds)
    if outcome == "error":
        return ReconcileFailed(reader.text(2, "message") or "the operator gave no message")
    raise MessageInvalid(f"outcome {outcome[:32]!r} is none of done, requeue, error")


def decode_describe_result(message: bytes) -> tuple[str, bytes]:
    """(error, manifest JSON)."""
    reader = _Reader(message)
    return reader.text(0, "error"), reader.raw(1)


@dataclass(frozen=True, slots=True)
class MapRequest:
    watch: int
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: bytes
    old_object: bytes = b""

    def encode(self) -> bytes:
        return encode([b"%d" % self.watch, self.type.encode(), self.object, self.old_object])


def decode_map_result(message: bytes) -> tuple[str, list[tuple[str, str]]]:
    """(error, keys as (namespace, name)); the namespace is empty for cluster-scoped primaries."""
    reader = _Reader(message)
    keys: list[tuple[str, str]] = []
    for raw in reader.rest(1):
        try:
            namespace, slash, name = raw.decode().partition("/")
        except UnicodeDecodeError as exc:
            raise MessageInvalid("a key is not UTF-8") from exc
        if not slash or not name or "/" in name:
            raise MessageInvalid(f"key {raw[:64]!r} is not namespace/name")
        keys.append((namespace, name))
    return reader.text(0, "error"), keys


def encode_load_request(kind: Literal["source", "zip"], filename: str, content: bytes) -> bytes:
    return encode([kind.encode(), filename.encode(), content])


def decode_load_result(message: bytes) -> str:
    """The error, empty if none."""
    return _Reader(message).text(0, "error")


def decode_kube_request(message: bytes) -> tuple[KubeRequest, float | None]:
    """The request and its own timeout in seconds, None for as long as the reconcile has."""
    reader = _Reader(message)
    request = KubeRequest(
        method=reader.text(0, "method"),
        path=reader.text(1, "path"),
        accept=reader.text(2, "accept"),
        content_type=reader.text(3, "content-type"),
        body=reader.raw(4),
    )
    return request, _seconds(reader.number(5, "timeout-ms"))


def decode_tree_request(message: bytes) -> tuple[TreeRequest, float | None]:
    reader = _Reader(message)
    request = TreeRequest(
        resource=reader.text(0, "resource"),
        namespace=reader.text(1, "namespace"),
        name=reader.text(2, "name"),
    )
    return request, _seconds(reader.number(3, "timeout-ms"))


def decode_fetch_request(message: bytes) -> tuple[FetchRequest, float | None]:
    reader = _Reader(message)
    request = FetchRequest(
        method=reader.text(0, "method"),
        url=reader.text(1, "url"),
        headers=_headers(reader.text(2, "headers")),
        body=reader.raw(3),
    )
    return request, _seconds(reader.number(4, "timeout-ms"))


def encode_call_response(response: CallResponse) -> bytes:
    return encode(
        [
            _status(response.status),
            response.content_type.encode(),
            response.body,
            (response.error or "").encode(),
            response.message.encode(),
        ]
    )


def encode_fetch_response(response: FetchResponse) -> bytes:
    headers = "".join(f"{name}: {value}\n" for name, value in response.headers)
    return encode(
        [
            _status(response.status),
            headers.encode(),
            response.body,
            (response.error or "").encode(),
            response.message.encode(),
        ]
    )


def _status(status: int) -> bytes:
    return b"%d" % status if status else b""


def _seconds(milliseconds: int | None) -> float | None:
    """0 and empty both mean: as long as the reconcile has (`operator.wit`)."""
    return milliseconds / 1000 if milliseconds else None


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    headers: list[tuple[str, str]] = []
    for line in text.split("\n"):
        if not line:
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or "\r" in line or "\0" in line:
            raise MessageInvalid(f"header line {line[:64]!r} is not 'Name: value'")
        headers.append((name.strip(), value.strip()))
    return tuple(headers)
