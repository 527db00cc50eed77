"""Images: a guest's memory and mutable globals right after initialisation and `describe`, on disk, shared by all wakes.

A base is the whole memory in one file whose zero pages are holes. An overlay is what one Python operator changed over
its base: runs of pages. Those that are new (the base has nothing there: the operator's own objects) are mapped, with
gaps of up to 4 pages filled. Those that the base has too are few, scattered, and mostly written to again by each wake:
they are copied, all by one call, which costs less than a map and a fault for each. Taking an image reads a guest that
does not run; laying one puts it over fresh memory. Whether a module may have an image at all, and whether a wake from
it is right, is decided elsewhere (`wasm_code`, `install`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torpor_host import native
from torpor_host.artifacts import Artifact, ArtifactStore
from torpor_host.dirty_pages import Range, merged, page_count, written_ranges
from torpor_host.native import PAGE, GuestMemory

_GAP = 4  # pages; measured: 151 maps an operator instead of 267, the same private memory
_MAPPED_MIN = 4  # pages; a shorter run is copied
COPIED_MAX = 128  # pages; an operator that changed more of the base has them mapped: copies are private memory
_CHUNK = 64 * PAGE
_RUN = struct.Struct("<II")
_IOV_MAX = 1000  # the kernel's is 1024


class ImageLost(Exception):
    """An image's file is missing or damaged; installing the module again makes a new one."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """Pages over a base. `runs` packs (first page, pages) of memory, and the file holds them one after the other: first
    `copied` ascending runs that a wake copies, then ascending ones that it maps."""

    pages: Artifact
    runs: bytes
    copied: int

    def to_copy(self) -> list[Range]:
        return list(_RUN.iter_unpack(self.runs[: self.copied * _RUN.size]))

    def to_map(self) -> list[Range]:
        return list(_RUN.iter_unpack(self.runs[self.copied * _RUN.size :]))

    @property
    def mapped(self) -> int:
        """Runs that a wake maps."""
        return len(self.runs) // _RUN.size - self.copied


@dataclass(frozen=True, slots=True)
class Image:
    """Everything a wake restores. Holds no descriptor and no memory of the guest's."""

    base: Artifact
    overlay: Overlay | None
    memory_bytes: int
    globals: bytes
    """Nine bytes for each mutable global, in the order of their indices."""
    monotonic_ns: int
    """What the guest's clock showed."""

    @property
    def identity(self) -> str:
        """Which memory this is, for snapshots laid over it."""
        return self.base.sha256 + (self.overlay.pages.sha256 if self.overlay else "")

    @property
    def own_bytes(self) -> int:
        """Bytes of file that no other operator shares."""
        return self.overlay.pages.size if self.overlay else self.base.size

    @property
    def map_count(self) -> int:
        """Memory maps that a mapped wake takes, at most."""
        return 1 + (2 * self.overlay.mapped if self.overlay else 0)


@dataclass(frozen=True, slots=True)
class GuestState:
    """What of a stopped guest goes into an image beside its pages."""

    globals: bytes
    monotonic_ns: int


def take_base(store: ArtifactStore, kind: str, key: str, memory: GuestMemory, state: GuestState) -> Image:
    """The whole memory."""
    with released(memory) as view:
        size = len(view)
        pages = store.write(kind, key, lambda file: _write_sparse(file, view))
    return Image(pages, None, size, state.globals, state.monotonic_ns)


def take_overlay(
    store: ArtifactStore, kind: str, key: str, memory: GuestMemory, state: GuestState, base: Image
) -> Image:
    """What differs from `base`, which this guest was woken from."""
    candidates = written_ranges(memory.address(), memory.size())
    with released(memory) as view, _mapped(base.base.path) as under:
        if candidates is None:
            candidates = [(0, len(view) // PAGE)]
        to_copy, to_map = arranged(_changed(view, under, candidates))

        def produce(file: BinaryIO) -> None:
            for first, count in to_copy + to_map:
                file.write(view[first * PAGE : (first + count) * PAGE])

        pages = store.write(kind, key, produce)
        size = len(view)
    packed = b"".join(_RUN.pack(first, count) for first, count in to_copy + to_map)
    return Image(base.base, Overlay(pages, packed, len(to_copy)), size, state.globals, state.monotonic_ns)


def arranged(changed: Iterable[tuple[int, bool]]) -> tuple[list[Range], list[Range]]:
    """Which runs to copy and which to map, of pages that changed and whether each is new."""
    new: list[Range] = []
    old: list[Range] = []
    for page, is_new in changed:
        (new if is_new else old).append((page, 1))
    to_map = [run for run in merged(new, _GAP) if run[1] >= _MAPPED_MIN]
    inside = {page for first, count in to_map for page in range(first, first + count)}
    # What is old and fills a gap is copied all the same, after mapping: it is there without a fault.
    to_copy = merged(sorted(old + [run for run in new if run[0] not in inside]), 0)
    if page_count(to_copy) > COPIED_MAX:
        return [], merged(sorted(old + new), _GAP)
    return to_copy, to_map


def lay(store: ArtifactStore, image: Image, memory: GuestMemory, *, map_overlay: bool) -> None:
    """Puts the image over a memory that has its size already. Raises ImageLost, OSError (no maps left)."""
    if memory.size() != image.memory_bytes or image.base.size > image.memory_bytes:
        raise ImageLost(f"the image is of {image.memory_bytes} bytes, the memory has {memory.size()}")
    address = memory.address()
    with _opened(store, image.base) as descriptor:
        native.map_private(address, image.base.size, descriptor, 0)
    overlay = image.overlay
    if overlay is None:
        return
    to_copy, to_map = overlay.to_copy(), overlay.to_map()
    for last in (to_copy[-1:], to_map[-1:]):
        if last and sum(last[0]) * PAGE > image.memory_bytes:
            raise ImageLost(f"a page of {overlay.pages.path.name} lies outside of the memory")
    offset = overlay.pages.size - PAGE * page_count(to_map)
    with _opened(store, overlay.pages) as descriptor:
        if map_overlay:
            for first, count in to_map:
                native.map_private(address + first * PAGE, count * PAGE, descriptor, offset)
                offset += count * PAGE
        else:
            _copy(overlay, address, to_map, descriptor, offset)
        _copy(overlay, address, to_copy, descriptor, 0)


def _copy(overlay: Overlay, address: int, ranges: list[Range], descriptor: int, offset: int) -> None:
    for start in range(0, len(ranges), _IOV_MAX):
        part = ranges[start : start + _IOV_MAX]
        wanted = PAGE * page_count(part)
        done = native.read_into([(address + first * PAGE, count * PAGE) for first, count in part], descriptor, offset)
        if done != wanted:
            raise ImageLost(f"{overlay.pages.path.name}: {done} of {wanted} bytes at {offset}")
        offset += wanted


@contextlib.contextmanager
def _opened(store: ArtifactStore, pages: Artifact) -> Iterator[int]:
    """A descriptor of a file that has been verified and has its size: mapping beyond the end is SIGBUS."""
    descriptor = store.opened(pages)
    if descriptor is None:
        raise ImageLost(f"image file {pages.path} is missing or damaged")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def released(memory: GuestMemory) -> Iterator[memoryview]:
    """A view of the memory that is gone afterwards: one kept past the guest's next move is a crash."""
    view = memory.view()
    try:
        yield view
    finally:
        view.release()


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        try:
            yield view
        finally:
            view.release()


def _write_sparse(file: BinaryIO, view: memoryview) -> None:
    """Zero pages become holes."""
    zero_chunk, zero_page = bytes(_CHUNK), bytes(PAGE)
    for start in range(0, len(view), _CHUNK):
        chunk = bytes(view[start : start + _CHUNK])
        if chunk == zero_chunk[: len(chunk)]:
            continue
        for offset in range(0, len(chunk), PAGE):
            page = chunk[offset : offset + PAGE]
            if page != zero_page:
                file.seek(start + offset)
                file.write(page)
    file.truncate(len(view))


def _changed(view: memoryview, under: memoryview, candidates: list[Range]) -> Iterator[tuple[int, bool]]:
    """The candidates whose content is not the base's (zero beyond its end), and whether the base has zeros there."""
    zero = bytes(PAGE)
    for first, count in candidates:
        for page in range(first, first + count):
            start = page * PAGE
            below = under[start : start + PAGE] if start < len(under) else zero
            if view[start : start + PAGE] != below:
                yield page, below == zero


@dataclass(frozen=True, slots=True)
class Digests:
    """What a memory contained, in 32 bytes for each 256 KiB."""

    size: int
    chunks: tuple[bytes, ...]

    def first_difference(self, other: Digests) -> int | None:
        """The offset of the first chunk that differs, None if all agree."""
        for number, (one, two) in enumerate(zip(self.chunks, other.chunks, strict=False)):
            if one != two:
                return number * _CHUNK
        return None if self.size == other.size else min(self.size, other.size)


def digests(memory: GuestMemory) -> Digests:
    """Of a guest that does not run."""
    with released(memory) as view:
        chunks = (hashlib.sha256(view[start : start + _CHUNK]).digest() for start in range(0, len(view), _CHUNK))
        return Digests(len(view), tuple(chunks))


def to_record(image: Image) -> dict[str, Any]:
    """JSON of an image, to keep with the installation. Files are named by hash alone."""
    return {
        "base": [image.base.sha256, image.base.size],
        "overlay": None
        if image.overlay is None
        else [
            image.overlay.pages.sha256,
            image.overlay.pages.size,
            base64.b64encode(image.overlay.runs).decode(),
            image.overlay.copied,
        ],
        "memory_bytes": image.memory_bytes,
        "globals": image.globals.hex(),
        "monotonic_ns": image.monotonic_ns,
    }


def from_record(record: dict[str, Any], base: Artifact | None, overlay: Artifact | None) -> Image | None:
    """The image of a record whose files were found; None where they are not the ones it names."""
    if base is None or [base.sha256, base.size] != record["base"]:
        return None
    over = None
    if record["overlay"] is not None:
        sha256, size, runs, copied = record["overlay"]
        if overlay is None or (overlay.sha256, overlay.size) != (sha256, size):
            return None
        over = Overlay(overlay, base64.b64decode(runs), copied)
    return Image(base, over, record["memory_bytes"], bytes.fromhex(record["globals"]), record["monotonic_ns"])
