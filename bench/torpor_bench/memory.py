"""Memory and processor time of processes, from the kernel: never from their own counters."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `pss`: with each shared page divided by those who share it; `private`: of this process alone; `dirty`:
    private, and not to be read again from a file."""

    pss: int = 0
    private: int = 0
    dirty: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.pss + other.pss, self.private + other.private, self.dirty + other.dirty)


def parse_smaps_rollup(text: str) -> Memory:
    sizes: dict[str, int] = {}
    for line in text.splitlines()[1:]:
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    return Memory(
        pss=sizes["Pss"],
        private=sizes["Private_Clean"] + sizes["Private_Dirty"],
        dirty=sizes["Private_Dirty"],
    )


def memory_of(pid: int) -> Memory:
    """Sync first (`os.sync`): a page of a file that was not written back yet counts as dirty."""
    return parse_smaps_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text())


def memory_together(pids: Iterable[int]) -> Memory:
    return sum(map(memory_of, pids), start=Memory())


def cpu_s(pid: int) -> float:
    """User and system time of a process and of its children that have ended, in steps of 10 ms."""
    # The name, in parentheses, may contain anything; the fields are counted from behind it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS_PER_S
