"""What a subscription knows, compactly."""

import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from torpor_host.known_objects import KnownSet, ObjectTable
from torpor_host.work_queue import Key


def key(i: int) -> Key:
    return Key("ns", f"object-{i}")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.booleans(), st.integers(0, 600)), max_size=900))
def test_two_sets_over_one_table_behave_as_sets(steps: list[tuple[int, bool, int]]) -> None:
    table = ObjectTable()
    real, model = [KnownSet(table), KnownSet(table)], [dict[Key, str](), dict[Key, str]()]
    for which, add, i in steps:
        if add:
            real[which].add(key(i), f"uid-{i}")
            model[which][key(i)] = f"uid-{i}"
        else:
            real[which].discard(key(i))
            model[which].pop(key(i), None)
    for one, expected in zip(real, model, strict=True):
        assert dict(iter(one)) == expected and len(one) == len(expected)
        assert all(k in one for k in expected)
    assert len(table) == len(model[0].keys() | model[1].keys())


def test_more_than_an_array_holds_becomes_a_bitmap_and_is_still_right() -> None:
    known = KnownSet(ObjectTable())
    for i in range(1000):
        known.add(key(i), "u")
    for i in range(0, 1000, 2):
        known.discard(key(i))
    assert sorted(known.keys()) == sorted(key(i) for i in range(1, 1000, 2))
    assert known._numbers is None and len(known._bitmap) <= 126


def test_the_same_name_with_another_uid_is_the_new_object() -> None:
    known = KnownSet(ObjectTable())
    known.add(key(1), "old")
    known.add(key(1), "new")
    assert list(known) == [(key(1), "new")]


def test_clearing_gives_every_number_back() -> None:
    table = ObjectTable()
    known = KnownSet(table)
    for round_ in range(3):
        for i in range(500):
            known.add(key(round_ * 1000 + i), "u")
        known.clear()
        assert len(known) == 0 and len(table) == 0
    assert table.highest == 500


def test_a_set_of_a_thousand_objects_costs_little_beside_the_shared_table() -> None:
    table = ObjectTable()
    sets = [KnownSet(table) for _ in range(2)]
    for known in sets:
        for i in range(1000):
            known.add(key(i), "u")
    assert sys.getsizeof(sets[1]) + sys.getsizeof(sets[1]._bitmap) < 400
