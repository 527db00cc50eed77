"""A guest's output, cut into lines and bounded. A guest that prints without end costs one line that says so.

Overflow: what one call writes beyond `bytes_max` is counted and dropped; a line longer than 16 KiB is cut into several.
"""

from __future__ import annotations

from collections.abc import Callable

_LINE_MAX = 16 * 1024

Log = Callable[[int, str], None]


class Output:
    __slots__ = ("_bytes_max", "_dropped", "_partial", "_written")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._partial: dict[int, bytes] = {}
        self._written = 0
        self._dropped = 0

    def begin(self) -> None:
        self._written = self._dropped = 0

    def _admit(self, length: int) -> bool:
        if self._written + length > self._bytes_max:
            self._dropped += length
            return False
        self._written += length
        return True

    def line(self, log: Log, level: int, text: bytes) -> None:
        """One line of `log`."""
        if self._admit(len(text)):
            for start in range(0, len(text) or 1, _LINE_MAX):
                log(level, text[start : start + _LINE_MAX].decode(errors="replace"))

    def stream(self, log: Log, level: int, content: bytes) -> None:
        """Bytes of stdout or stderr; whole lines go out, the rest waits for more."""
        if not self._admit(len(content)):
            return
        *lines, rest = (self._partial.get(level, b"") + content).split(b"\n")
        while len(rest) > _LINE_MAX:
            lines.append(rest[:_LINE_MAX])
            rest = rest[_LINE_MAX:]
        self._partial[level] = rest
        for line in lines:
            for start in range(0, len(line) or 1, _LINE_MAX):
                log(level, line[start : start + _LINE_MAX].decode(errors="replace"))

    def end(self, log: Log) -> None:
        """The call has returned: half lines go out too."""
        if self._partial:
            for level, rest in self._partial.items():
                if rest:
                    log(level, rest.decode(errors="replace"))
            self._partial.clear()
        if self._dropped:
            log(2, f"{self._dropped} bytes of output dropped: a call may write {self._bytes_max}")
            self._dropped = 0
