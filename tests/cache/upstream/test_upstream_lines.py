"""Framing: lines of a watch, cut from chunks wherever these end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor_cache.watcher import Lines, LineTooLong


def _fed(lines: Lines, *chunks: bytes) -> list[bytes]:
    return [buffer[start:end] for chunk in chunks for buffer, start, end in lines.feed(chunk)]


@given(st.lists(st.binary(min_size=1, max_size=12).filter(lambda line: b"\n" not in line)), st.lists(st.integers(1, 9)))
def test_lines_are_the_same_wherever_chunks_end(lines, sizes):
    stream = b"".join(line + b"\n" for line in lines) + b"half"
    chunks = []
    for size in sizes:
        chunks.append(stream[:size])
        stream = stream[size:]
    assert _fed(Lines(100), *(chunk for chunk in (*chunks, stream) if chunk)) == lines


def test_empty_lines_are_passed_over():
    assert _fed(Lines(100), b"\n\na\n\n", b"b", b"\n") == [b"a", b"b"]


def test_a_line_within_a_chunk_is_not_copied():
    chunk = b"one\ntwo\n"
    assert all(buffer is chunk for buffer, _, _ in Lines(100).feed(chunk))


def test_a_line_beyond_the_bound_is_an_error_before_it_is_whole():
    lines = Lines(100)
    _fed(lines, b"x" * 60)
    with pytest.raises(LineTooLong, match="longer than 100 bytes"):
        _fed(lines, b"x" * 60)
