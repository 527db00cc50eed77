"""The heap of Python objects: blocks of every size keep what is in them, and its end is a MemoryError."""

from __future__ import annotations

import pytest
from torpor_runtime.testing import Guest, operator

EVERY_SIZE = """
import random
rng = random.Random(7)
around = (-60, -34, -33, -32, -5, 0, 1)
sizes = [*range(0, 1100), *(2 ** power + offset for power in range(10, 19) for offset in around)]
held = {}
for turn in range(3):
    rng.shuffle(sizes)
    for size in sizes:
        held.pop(rng.choice(sizes), None)
        held[size] = bytes([size % 251]) * size
        assert all(len(value) == key and value == bytes([key % 251]) * key for key, value in list(held.items())[-3:])
assert all(value == bytes([size % 251]) * size for size, value in held.items())
print(len(held) > 500)
"""

GROWING = """
buffer, items = bytearray(), []
for number in range(60_000):
    buffer += number.to_bytes(4)
    items.append(number)
while len(items) > 10:
    del items[len(items) // 2:]
buffer[40:] = b""
print(buffer == b"".join(number.to_bytes(4) for number in range(10)), items == list(range(len(items))))
"""

TO_THE_END = """
held = []
try:
    while True:
        held.append(bytearray(SIZE))
except MemoryError:
    count = len(held)
    held.clear()
print(count * SIZE > 1 << 20, len(bytearray(SIZE)) == SIZE)
"""


def test_blocks_of_every_size_keep_their_content(guest: Guest) -> None:
    assert guest.run(EVERY_SIZE) == "True\n"


def test_blocks_that_grow_and_shrink_keep_their_content(guest: Guest) -> None:
    assert guest.run(GROWING) == "True True\n"


def test_the_end_of_memory_is_a_memory_error_and_what_is_freed_is_used_again(guest: Guest) -> None:
    guest.store.set_limits(memory_size=guest.memory.data_len(guest.store) + (8 << 20))
    for size in (100_000, 5_000):
        assert guest.run(f"SIZE = {size}\n{TO_THE_END}") == "True True\n"


def test_what_is_freed_is_used_again(guest: Guest) -> None:
    assert guest.load(operator("data = [str(n) * 20 for n in range(20_000)]")) == [b""]
    guest.send("torpor_describe")
    guest.reconcile()
    after_one = guest.memory.data_len(guest.store)
    for _ in range(5):
        guest.reconcile()
    assert guest.memory.data_len(guest.store) == after_one


SMALL_TO_THE_END = """
import json
held = []
try:
    while True:
        held.append(KIND)
except MemoryError:
    held.clear()
document = {"items": [{"name": "x" * 40, "i": i} for i in range(500)]}
print(json.loads(json.dumps(document)) == document)
"""

DRIFTING = """
peak = 0
for turn in range(60):
    size = 40 + 24 * turn
    held = [bytes(size) for _ in range((6 << 20) // size)]
    held.clear()
print("done")
"""

SHRINKING = """
keep, fill = bytearray(1 << 20), []
try:
    while True:
        fill.append(bytearray(3000))
except MemoryError:
    del keep[1000:]
    fill.clear()
print(len(keep))
"""


@pytest.mark.parametrize("kind", ["float(len(held))", "(len(held), 1)", "str(len(held)) * 9", "{'a': len(held)}"])
def test_after_small_objects_have_filled_memory_larger_ones_find_room_again(guest: Guest, kind: str) -> None:
    guest.store.set_limits(memory_size=guest.memory.data_len(guest.store) + (16 << 20))
    for _ in range(2):
        assert guest.run(SMALL_TO_THE_END.replace("KIND", kind)) == "True\n"


def test_sizes_that_drift_take_no_more_than_a_few_times_what_lives(guest: Guest) -> None:
    before = guest.memory.data_len(guest.store)
    assert guest.run(DRIFTING) == "done\n"
    assert guest.memory.data_len(guest.store) - before < 60 << 20


def test_what_shrinks_needs_no_memory(guest: Guest) -> None:
    guest.store.set_limits(memory_size=guest.memory.data_len(guest.store) + (16 << 20))
    assert guest.run(SHRINKING) == "1000\n"


def test_tuples_nested_deep_at_import_are_no_reason_to_refuse(guest: Guest) -> None:
    assert guest.load(operator("chain = ()\nfor n in range(150_000):\n    chain = (chain,)\nheld = [chain]")) == [b""]
    assert guest.send("torpor_describe")[0] == b""
