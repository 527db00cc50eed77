"""Snapshots: what a guest changed over its image, on disk, used once.

A private layer of dirty pages, zstd-compressed (a Kubernetes-like heap becomes 8 to 12 times smaller; 0.7 to 1.4 ms a
MiB with fsync), with the image it lies over, the assignment's epoch and the number of the wake it ended. Whoever wakes
from it removes it first, durably: two wakes from one snapshot would be two lives of one state. A snapshot that does not
fit is removed and refused; the guest then wakes from its image alone, as after any restart.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from torpor_host.dirty_pages import Range, written_ranges
from torpor_host.images import GuestState, released
from torpor_host.native import PAGE, GuestMemory

_MAGIC = b"TORPORS1"
_HEADER_LENGTH = struct.Struct("<I")
_RUN = struct.Struct("<II")
_HEADER_MAX = 1 << 20
_DIGEST_SIZE = 32
_LEVEL = 1  # higher ones cost more than the disk saves


class SnapshotImpossible(Exception):
    """This instance cannot be saved; `discard` is what is left."""


class SnapshotUnusable(Exception):
    """This snapshot cannot be woken from and is gone; wake without it."""


@dataclass(frozen=True, slots=True)
class Label:
    """Which state this is. All three must be what the waker expects."""

    image: str
    epoch: int
    wake: int


@dataclass(frozen=True, slots=True)
class Expected:
    """A snapshot to wake from: its file, and the label the runtime kept in its own record."""

    path: Path
    epoch: int
    wake: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    label: Label
    memory_bytes: int
    state: GuestState
    runs: list[Range]
    pages: bytes


def write(path: Path, label: Label, memory: GuestMemory, state: GuestState) -> int:
    """Writes the snapshot whole or not at all; returns its size."""
    import zstandard

    runs = written_ranges(memory.address(), memory.size())
    if runs is None:
        raise SnapshotImpossible("this kernel does not tell which pages were written (/proc/self/pagemap)")
    header = json.dumps(
        {
            "label": asdict(label),
            "memory_bytes": memory.size(),
            "globals": state.globals.hex(),
            "monotonic_ns": state.monotonic_ns,
            "runs": len(runs),
        }
    ).encode()
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(6)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file, released(memory) as view:
            hashed = _Hashed(file)
            hashed.write(_MAGIC + _HEADER_LENGTH.pack(len(header)) + header)
            compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
            hashed.write(compressor.compress(b"".join(_RUN.pack(*run) for run in runs)))
            for first, count in runs:
                hashed.write(compressor.compress(view[first * PAGE : (first + count) * PAGE]))
            hashed.write(compressor.flush())
            file.write(hashed.digest())
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _fsync_folder(path.parent)
    return size


def consume(expected: Expected, *, memory_bytes_max: int) -> Snapshot:
    """Reads the snapshot and removes it, before anything of it runs. Raises SnapshotUnusable; it is gone then too."""
    try:
        raw = expected.path.read_bytes()
    except OSError as exc:
        raise SnapshotUnusable(f"snapshot {expected.path}: {exc.strerror}") from exc
    finally:
        expected.path.unlink(missing_ok=True)
    _fsync_folder(expected.path.parent)
    snapshot = _read(raw, memory_bytes_max)
    if (snapshot.label.epoch, snapshot.label.wake) != (expected.epoch, expected.wake):
        raise SnapshotUnusable(
            f"snapshot {expected.path} is of epoch {snapshot.label.epoch}, wake {snapshot.label.wake};"
            f" wanted {expected.epoch}, {expected.wake}"
        )
    return snapshot


def lay(snapshot: Snapshot, memory: GuestMemory) -> None:
    """Copies the pages over a memory that has the snapshot's size."""
    offset = 0
    for first, count in snapshot.runs:
        length = count * PAGE
        if not memory.write(first * PAGE, snapshot.pages[offset : offset + length]):
            raise SnapshotUnusable("the snapshot has pages outside of its memory")
        offset += length


def _read(raw: bytes, memory_bytes_max: int) -> Snapshot:
    import zstandard

    start, end = len(_MAGIC) + _HEADER_LENGTH.size, len(raw) - _DIGEST_SIZE
    try:
        if raw[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin like one")
        if end < start or hashlib.sha256(memoryview(raw)[:end]).digest() != raw[end:]:
            raise ValueError("its content is not what was written")
        (length,) = _HEADER_LENGTH.unpack_from(raw, len(_MAGIC))
        if length > _HEADER_MAX:
            raise ValueError("its header is too long")
        header = json.loads(raw[start : start + length])
        size, runs_count = int(header["memory_bytes"]), int(header["runs"])
        if size > memory_bytes_max or runs_count * PAGE > size:
            raise ValueError(f"it is of {size} bytes, {memory_bytes_max} are allowed")
        plain_max = runs_count * _RUN.size + size
        with zstandard.ZstdDecompressor().stream_reader(raw[start + length : end]) as reader:
            plain = reader.read(plain_max + 1)
        if len(plain) > plain_max:
            raise ValueError("it has more pages than memory")
        runs = list(_RUN.iter_unpack(plain[: runs_count * _RUN.size]))
        pages = plain[runs_count * _RUN.size :]
        if sum(count for _first, count in runs) * PAGE != len(pages):
            raise ValueError("pages are missing")
        return Snapshot(
            Label(**header["label"]),
            size,
            GuestState(bytes.fromhex(header["globals"]), int(header["monotonic_ns"])),
            runs,
            pages,
        )
    except (ValueError, KeyError, TypeError, struct.error, zstandard.ZstdError, RecursionError) as exc:
        raise SnapshotUnusable(f"damaged snapshot: {exc}") from exc


class _Hashed:
    """A file that knows the hash of what was written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self._digest.update(content)
        return self._file.write(content)

    def digest(self) -> bytes:
        return self._digest.digest()


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
