"""Which pages of a private mapping this process has written. Exact; says nothing of what they contain.

A written page of a private file mapping is anonymous, an unwritten one is the file's or absent. Linux 6.7 answers that
by one ioctl (PAGEMAP_SCAN, 0.03 to 0.2 ms); older kernels by 8 bytes a page from /proc/self/pagemap (0.1 to 1.5 ms).
Where neither is there `written_ranges` returns None and the caller compares contents.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterable

from torpor_host.native import PAGE

Range = tuple[int, int]
"""(first page, pages), relative to the start asked about."""

_FILE, _PRESENT, _SWAPPED, _PFNZERO = 1 << 2, 1 << 3, 1 << 4, 1 << 5
_SCAN_ARGUMENT = struct.Struct("<12Q")
_REGION = struct.Struct("<3Q")
_REGIONS = 512
# _IOWR('f', 16, struct pm_scan_arg)
_PAGEMAP_SCAN = (3 << 30) | (_SCAN_ARGUMENT.size << 16) | (ord("f") << 8) | 16

_ENTRY_FILE, _ENTRY_SWAPPED, _ENTRY_PRESENT = 1 << 61, 1 << 62, 1 << 63
_READ_PAGES = 1 << 16


def written_ranges(start: int, length: int) -> list[Range] | None:
    """Ascending, disjoint ranges of written pages in [start, start + length), both page-aligned."""
    try:
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        ranges = _scan(descriptor, start, length)
        return ranges if ranges is not None else _read_pagemap(descriptor, start, length)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _scan(descriptor: int, start: int, length: int) -> list[Range] | None:
    """None where the kernel has no PAGEMAP_SCAN."""
    regions = ctypes.create_string_buffer(_REGIONS * _REGION.size)
    ranges: list[Range] = []
    position, end = start, start + length
    while position < end:
        argument = bytearray(
            _SCAN_ARGUMENT.pack(
                _SCAN_ARGUMENT.size,
                0,
                position,
                end,
                0,
                ctypes.addressof(regions),
                _REGIONS,
                0,
                _FILE | _PFNZERO,  # inverted: neither the file's page nor the shared zero page
                _FILE | _PFNZERO,
                _PRESENT | _SWAPPED,  # any of
                _FILE,
            )
        )
        try:
            found = fcntl.ioctl(descriptor, _PAGEMAP_SCAN, argument, True)
        except OSError as exc:
            if exc.errno in (errno.ENOTTY, errno.EINVAL, errno.ENOSYS):
                return None
            raise
        position = _SCAN_ARGUMENT.unpack(argument)[4]
        for first, last, _categories in _REGION.iter_unpack(regions.raw[: found * _REGION.size]):
            ranges.append(((first - start) // PAGE, (last - first) // PAGE))
        if found == 0 and position < end:
            return None
    return merged(ranges, 0)


def _read_pagemap(descriptor: int, start: int, length: int) -> list[Range] | None:
    first, pages = start // PAGE, length // PAGE
    ranges: list[Range] = []
    for block in range(0, pages, _READ_PAGES):
        count = min(_READ_PAGES, pages - block)
        raw = os.pread(descriptor, 8 * count, 8 * (first + block))
        if len(raw) != 8 * count:
            return None
        entries = array.array("Q", raw)
        for index, entry in enumerate(entries):
            if entry & (_ENTRY_PRESENT | _ENTRY_SWAPPED) and not entry & _ENTRY_FILE:
                ranges.append((block + index, 1))
    return merged(ranges, 0)


def merged(ranges: Iterable[Range], gap: int) -> list[Range]:
    """Ascending ranges with those at most `gap` pages apart made one."""
    result: list[Range] = []
    for first, count in ranges:
        if result and first - (result[-1][0] + result[-1][1]) <= gap:
            result[-1] = (result[-1][0], first + count - result[-1][0])
        else:
            result.append((first, count))
    return result


def page_count(ranges: Iterable[Range]) -> int:
    return sum(count for _first, count in ranges)
