"""Kubernetes' protobuf encoding of built-in types, read into JSON. Never written: answers are JSON.

kubectl's imperative commands and typed Go clients send it. Field numbers come from the generated table; what the
table does not know is skipped, as protobuf does.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from torpor_devcluster.shapes import table

Json = dict[str, Any]

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
# meta/v1 kinds are sent under every group version.
_META_KINDS = {"DeleteOptions": "meta/v1.DeleteOptions"}
_PACKAGE = {"": "core"}
_DEPTH_MAX = 64


class Malformed(Exception):
    """Not the protobuf of a known type; the text says why."""


def decode(data: bytes) -> Json:
    """The object inside the `k8s\\0` envelope. Raises Malformed."""
    if not data.startswith(_MAGIC):
        raise Malformed("the body does not begin with the k8s protobuf prefix")
    try:
        return _decode_envelope(data[len(_MAGIC) :])
    except (IndexError, ValueError, struct.error, msgspec.MsgspecError, OverflowError) as error:
        raise Malformed(f"the body is not valid protobuf: {error}") from error


def _decode_envelope(data: bytes) -> Json:
    api_version, kind, raw = "", "", b""
    for number, value in _wire(data):
        if number == 1 and isinstance(value, bytes):
            for meta_number, text in _wire(value):
                if meta_number == 1 and isinstance(text, bytes):
                    api_version = text.decode()
                elif meta_number == 2 and isinstance(text, bytes):
                    kind = text.decode()
        elif number == 2 and isinstance(value, bytes):
            raw = value
    obj = _message(_type_name(api_version, kind), raw, 0)
    return {"kind": kind, "apiVersion": api_version, **obj}


def _type_name(api_version: str, kind: str) -> str:
    group, _, version = api_version.rpartition("/")
    package = _PACKAGE.get(group, group.partition(".")[0])
    name = _META_KINDS.get(kind, f"{package}/{version}.{kind}")
    if name not in table():
        raise Malformed(f"the devcluster cannot read protobuf of {api_version}, Kind={kind}: send JSON")
    return name


def _wire(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) pairs; varints and fixed numbers as int, the rest as bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
        elif kind == 1:
            yield number, int.from_bytes(data[at : at + 8], "little")
            at += 8
        elif kind == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("a field is longer than the message")
            yield number, data[at : at + size]
            at += size
        elif kind == 5:
            yield number, int.from_bytes(data[at : at + 4], "little")
            at += 4
        else:
            raise ValueError(f"wire type {kind} is not used")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a varint is too long")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _message(name: str, data: bytes, depth: int) -> Json:
    if depth > _DEPTH_MAX:
        raise Malformed("messages are nested too deep")
    rows, inlined = _numbers(name)
    obj: Json = {}
    for number, value in _wire(data):
        if number in inlined and isinstance(value, bytes):
            obj.update(_message(inlined[number], value, depth + 1))
        elif number in rows:
            _set(obj, *rows[number], value, depth)
    for field, row in rows.values():
        if row.get("z") and _is_zero(obj.get(field, 0)) and not row["t"].startswith("@"):
            obj.pop(field, None)
    return obj


def _is_zero(value: Any) -> bool:
    return value in ("", 0, False, [], {}, None)


def _numbers(name: str) -> tuple[dict[int, tuple[str, Json]], dict[int, str]]:
    entry = table()[name]
    rows = {row["n"]: (field, row) for field, row in entry["fields"].items() if "n" in row}
    inlined = {inline["n"]: inline["t"][1:] for inline in entry.get("inline", ()) if "n" in inline}
    return rows, inlined


def _set(obj: Json, field: str, row: Json, value: int | bytes, depth: int) -> None:
    kind = row["t"]
    if kind.startswith("[]"):
        obj.setdefault(field, []).extend(_items(kind[2:], value, depth))
    elif kind.startswith("{}"):
        key, item = _entry(kind[2:], value, depth)
        obj.setdefault(field, {})[key] = item
    else:
        obj[field] = _value(kind, value, depth)


def _items(kind: str, value: int | bytes, depth: int) -> list[Any]:
    if kind in ("int", "bool") and isinstance(value, bytes):
        numbers, at = [], 0
        while at < len(value):
            number, at = _varint(value, at)
            numbers.append(_value(kind, number, depth))
        return numbers
    return [_value(kind, value, depth)]


def _entry(kind: str, value: int | bytes, depth: int) -> tuple[str, Any]:
    key, item = "", _value(kind, b"", depth) if kind not in ("int", "bool") else 0
    for number, part in _wire(_bytes(value)):
        if number == 1:
            key = _bytes(part).decode()
        elif number == 2:
            item = _value(kind, part, depth)
    return key, item


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a text or message is due")
    return value


def _value(kind: str, value: int | bytes, depth: int) -> Any:
    match kind:
        case "string":
            return _bytes(value).decode()
        case "bytes":
            return base64.b64encode(_bytes(value)).decode()
        case "int":
            return _signed(int(value))
        case "bool":
            return bool(value)
        case "float":
            return struct.unpack("<d", int(value).to_bytes(8, "little"))[0]
        case "time" | "microtime":
            return _time(_bytes(value), micro=kind == "microtime")
        case "quantity":
            return _first_text(_bytes(value))
        case "intstr":
            return _int_or_string(_bytes(value))
        case "raw":
            raw = next((part for number, part in _wire(_bytes(value)) if number == 1), b"")
            return msgspec.json.decode(_bytes(raw)) if raw else None
    if kind.startswith("[]"):
        # A list inside a map is a message of its own with one repeated field.
        return [item for _, part in _wire(_bytes(value)) for item in _items(kind[2:], part, depth)]
    if kind.startswith("@"):
        return _message(kind[1:], _bytes(value), depth + 1)
    raise ValueError(f"{kind} has no protobuf form")


def _first_text(data: bytes) -> str:
    return next((_bytes(part).decode() for number, part in _wire(data) if number == 1), "")


def _int_or_string(data: bytes) -> int | str:
    parts = dict(_wire(data))
    if parts.get(1, 0) == 1:
        return _bytes(parts.get(3, b"")).decode()
    return _signed(int(parts.get(2, 0)))


def _time(data: bytes, *, micro: bool) -> str | None:
    parts = dict(_wire(data))
    if not parts:
        return None
    seconds, nanos = _signed(int(parts.get(1, 0))), int(parts.get(2, 0))
    moment = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{moment}.{nanos // 1000:06d}Z" if micro else f"{moment}Z"
