"""Which pages of a private mapping were written, by each way the kernel tells it."""

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor_host import dirty_pages
from torpor_host.dirty_pages import merged, page_count, written_ranges

PAGE = mmap.PAGESIZE
PAGES = 1200


@pytest.fixture
def mapping(tmp_path: Path) -> Iterator[mmap.mmap]:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (PAGES * PAGE))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    yield mapped
    mapped.close()


def address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


@pytest.fixture(params=["PAGEMAP_SCAN", "pagemap"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pagemap":
        monkeypatch.setattr(dirty_pages, "_scan", lambda *arguments: None)


@pytest.mark.usefixtures("way")
def test_written_pages_are_found_and_read_ones_are_not(mapping: mmap.mmap):
    at = address(mapping)
    assert written_ranges(at, PAGES * PAGE) == []
    assert bytes(mapping[: PAGES * PAGE : PAGE]) == b"x" * PAGES
    assert written_ranges(at, PAGES * PAGE) == []
    for page in (0, 5, 6, 7, PAGES - 1):
        mapping[page * PAGE] = 0
    assert written_ranges(at, PAGES * PAGE) == [(0, 1), (5, 3), (PAGES - 1, 1)]
    assert written_ranges(at + 6 * PAGE, 10 * PAGE) == [(0, 2)]


@pytest.mark.usefixtures("way")
def test_more_ranges_than_one_question_returns_are_all_found(mapping: mmap.mmap):
    for page in range(0, PAGES, 2):
        mapping[page * PAGE] = 0
    ranges = written_ranges(address(mapping), PAGES * PAGE)
    assert ranges == [(page, 1) for page in range(0, PAGES, 2)]


def test_kernel_without_pagemap_gives_none(monkeypatch: pytest.MonkeyPatch, mapping: mmap.mmap):
    def refuse(*arguments: object) -> int:
        raise PermissionError

    monkeypatch.setattr("torpor_host.dirty_pages.os.open", refuse)
    assert written_ranges(address(mapping), PAGES * PAGE) is None


def test_gaps_up_to_a_length_are_filled():
    ranges = [(0, 1), (3, 2), (10, 1), (14, 1)]
    assert merged(ranges, 0) == ranges
    assert merged(ranges, 2) == [(0, 5), (10, 1), (14, 1)]
    assert merged(ranges, 3) == [(0, 5), (10, 5)]
    assert page_count(merged(ranges, 0)) == 5
