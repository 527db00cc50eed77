"""Which objects each subscription knows, compactly: one table a resource, a set of small numbers a subscription.

A hundred operators that watch the same thousand objects keep the names once, and 125 bytes each. A subscription's set
says what a resync has to run, what a reconnect tells the cache it has, and what is gone after one. Loop only.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

from torpor_host.work_queue import Key

# Above this many members a bitmap; up to it a sorted array of 32-bit numbers.
_ARRAY_MAX = 256


class ObjectTable:
    """The objects of one resource that any subscription knows. A number is reused when nobody knows it any more."""

    __slots__ = ("_entries", "_free", "_numbers", "_references")

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._entries: list[tuple[Key, str] | None] = []
        self._references = array("I")
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def highest(self) -> int:
        return len(self._entries)

    def number(self, key: Key) -> int | None:
        return self._numbers.get(key)

    def entry(self, number: int) -> tuple[Key, str]:
        entry = self._entries[number]
        assert entry is not None
        return entry

    def name(self, key: Key, uid: str) -> int:
        """The object's number; the uid is the one last seen."""
        number = self._numbers.get(key)
        if number is not None:
            if self.entry(number)[1] != uid:
                self._entries[number] = (self.entry(number)[0], uid)
            return number
        if self._free:
            number = self._free.pop()
            self._entries[number] = (key, uid)
        else:
            number = len(self._entries)
            self._entries.append((key, uid))
            self._references.append(0)
        self._numbers[key] = number
        return number

    def retain(self, number: int) -> None:
        self._references[number] += 1

    def release(self, number: int) -> None:
        self._references[number] -= 1
        if self._references[number] == 0:
            del self._numbers[self.entry(number)[0]]
            self._entries[number] = None
            self._free.append(number)


class KnownSet:
    """The objects that one subscription knows."""

    __slots__ = ("_bitmap", "_count", "_numbers", "_table")

    def __init__(self, table: ObjectTable) -> None:
        self._table = table
        self._numbers: array[int] | None = array("I")
        self._bitmap = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Key) -> bool:
        number = self._table.number(key)
        return number is not None and self._has(number)

    def __iter__(self) -> Iterator[tuple[Key, str]]:
        """(key, uid) of each; do not change the set meanwhile."""
        return (self._table.entry(number) for number in self._members())

    def keys(self) -> list[Key]:
        return [key for key, _ in self]

    def add(self, key: Key, uid: str) -> None:
        number = self._table.name(key, uid)
        if self._has(number):
            return
        self._table.retain(number)
        self._count += 1
        if self._numbers is not None and self._count <= _ARRAY_MAX:
            self._numbers.insert(bisect_left(self._numbers, number), number)
            return
        self._to_bitmap()
        self._set(number, True)

    def discard(self, key: Key) -> None:
        number = self._table.number(key)
        if number is None or not self._has(number):
            return
        if self._numbers is not None:
            del self._numbers[bisect_left(self._numbers, number)]
        else:
            self._set(number, False)
        self._count -= 1
        self._table.release(number)

    def clear(self) -> None:
        for number in list(self._members()):
            self._table.release(number)
        self._numbers, self._bitmap, self._count = array("I"), bytearray(), 0

    def _has(self, number: int) -> bool:
        if self._numbers is not None:
            at = bisect_left(self._numbers, number)
            return at < len(self._numbers) and self._numbers[at] == number
        byte = number >> 3
        return byte < len(self._bitmap) and bool(self._bitmap[byte] & 1 << (number & 7))

    def _members(self) -> Iterator[int]:
        if self._numbers is not None:
            yield from self._numbers
            return
        for byte, bits in enumerate(self._bitmap):
            while bits:
                lowest = bits & -bits
                yield (byte << 3) + lowest.bit_length() - 1
                bits ^= lowest

    def _to_bitmap(self) -> None:
        if self._numbers is None:
            return
        numbers, self._numbers = self._numbers, None
        for number in numbers:
            self._set(number, True)

    def _set(self, number: int, present: bool) -> None:
        byte, bit = number >> 3, 1 << (number & 7)
        if byte >= len(self._bitmap):
            self._bitmap.extend(bytes(byte + 1 - len(self._bitmap)))
        if present:
            self._bitmap[byte] |= bit
        else:
            self._bitmap[byte] &= ~bit
