"""The C heap gives back what is free."""

import subprocess
import sys

# Blocks of 1 MiB below one that stays: with glibc's own threshold they come from the heap once such a block was freed.
CODE = """
import ctypes
from torpor_services.memory import bound_heap, trim_heap
bound_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def resident_kib():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Private_Dirty:"))

libc.free(libc.malloc(1 << 20))
before = resident_kib()
blocks = [libc.malloc(1 << 20) for _ in range(32)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
top = libc.malloc(1 << 10)
for block in blocks:
    libc.free(block)
trim_heap()
print(resident_kib() - before)
"""


def test_large_blocks_leave_no_holes_below_what_stays():
    output = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    assert int(output) < 2048, "of 32 MiB"
