"""What the kernel says of a process."""

import os
import time

from torpor_bench.memory import Memory, cpu_s, memory_of, memory_together, parse_smaps_rollup

ROLLUP = """\
55d0-7ffe ---p 00000000 00:00 0                          [rollup]
Rss:               40000 kB
Pss:               30000 kB
Pss_Dirty:         21000 kB
Shared_Clean:       9000 kB
Private_Clean:      1000 kB
Private_Dirty:     20000 kB
"""


def test_sizes_are_read_in_bytes():
    assert parse_smaps_rollup(ROLLUP) == Memory(pss=30000 * 1024, private=21000 * 1024, dirty=20000 * 1024)


def test_processes_are_added_up():
    together = memory_together([os.getpid(), os.getpid()])
    assert together.pss > memory_of(os.getpid()).pss > 0


def test_memory_that_is_written_is_private_and_dirty():
    before = memory_of(os.getpid())
    block = bytearray(os.urandom(1 << 20) * 32)
    after = memory_of(os.getpid())
    assert after.dirty - before.dirty > len(block) * 0.9


def test_processor_time_is_what_was_computed_and_not_what_was_waited():
    before = cpu_s(os.getpid())
    until_s = time.process_time() + 0.1
    while time.process_time() < until_s:
        pass
    assert 0.05 < cpu_s(os.getpid()) - before < 5
