"""Messages of the operator ABI: a sequence of fields, each a 32-bit little-endian length and its bytes.

Missing fields at the end read as empty, fields beyond those known are kept and ignored by the reader. Knows no
message by name; `_guest` and `_host` do.
"""

from collections.abc import Iterable

LENGTH_BYTES = 4
FIELD_BYTES_MAX = 0xFFFF_FFFF


class FrameError(ValueError):
    """The bytes are no sequence of fields."""


def encode(*fields: bytes | str | int | None) -> bytes:
    """One message. Text becomes UTF-8, numbers decimal text, None an empty field.

    >>> encode("ab", 7, None)
    b'\\x02\\x00\\x00\\x00ab\\x01\\x00\\x00\\x007\\x00\\x00\\x00\\x00'
    """
    return encode_all(fields)


def encode_all(fields: Iterable[bytes | str | int | None]) -> bytes:
    parts: list[bytes] = []
    for field in fields:
        content = _content(field)
        if len(content) > FIELD_BYTES_MAX:
            raise FrameError(f"a field of {len(content)} bytes does not fit into a message")
        parts.append(len(content).to_bytes(LENGTH_BYTES, "little"))
        parts.append(content)
    return b"".join(parts)


def _content(field: bytes | str | int | None) -> bytes:
    if field is None:
        return b""
    if isinstance(field, str):
        # Lone surrogates (from file names, or JSON) have no UTF-8; showing them beats failing.
        return field.encode("utf-8", "backslashreplace")
    if isinstance(field, int):
        return str(int(field)).encode()
    return bytes(field)


def decode(message: bytes, *, fields_min: int = 0) -> list[bytes]:
    """The fields of a message, padded with empty ones to at least `fields_min`.

    Raises `FrameError` where the message ends within a field.
    """
    fields: list[bytes] = []
    position, end = 0, len(message)
    while position < end:
        start = position + LENGTH_BYTES
        if start > end:
            raise FrameError(f"the message ends within the length of field {len(fields)}")
        length = int.from_bytes(message[position:start], "little")
        position = start + length
        if position > end:
            raise FrameError(f"field {len(fields)} says {length} bytes, the message has {end - start} left")
        fields.append(message[start:position])
    fields.extend([b""] * (fields_min - len(fields)))
    return fields


def text(field: bytes) -> str:
    """A field as text; what is no UTF-8 is shown, not refused."""
    return field.decode("utf-8", "replace")


def number(field: bytes, *, default: int = 0) -> int:
    """A field as a number; an empty one is `default`. Raises `FrameError` for anything else."""
    if not field:
        return default
    # int() would also take "+1", " 1" and "1_0".
    if not field.isdigit() or len(field) > 20:
        raise FrameError(f"{text(field[:40])!r} is not a decimal number")
    return int(field)
