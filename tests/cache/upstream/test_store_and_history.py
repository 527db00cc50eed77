"""What is kept: objects by key, changes by version."""

from __future__ import annotations

import pytest
from torpor_cache.history import Expired, History, HistoryLimits, Tombstone
from torpor_cache.objects import Change, ChangeType, StoredObject, parse_object
from torpor_cache.resources import ObjectKey, ResourceVersion
from torpor_cache.selectors import FieldSelector, LabelSelector
from torpor_cache.store import Store
from torpor_services.clock import ManualClock


def _object(name: str, version: int = 1, namespace: str = "ns", labels: str = "", fill: int = 0) -> StoredObject:
    body = (
        f'{{"kind":"K","apiVersion":"v1","metadata":{{"name":"{name}","namespace":"{namespace}","uid":"u-{name}",'
        f'"resourceVersion":"{version}","labels":{{{labels}}}}},"fill":"{"x" * fill}"}}'
    )
    return parse_object(body.encode())


def _change(version: int, name: str = "a", kind: ChangeType = ChangeType.MODIFIED, fill: int = 0) -> Change:
    old = None if kind is ChangeType.ADDED else _object(name, version - 1, fill=fill)
    new = None if kind is ChangeType.DELETED else _object(name, version)
    key = ObjectKey("ns", name)
    return Change(kind, key, f"u-{name}", ResourceVersion(version), old, new, False, 0, "")


def _history(clock: ManualClock, **limits) -> History:
    history = History(clock, HistoryLimits(**limits))
    history.begin(ResourceVersion(10))
    return history


def test_a_list_of_one_namespace_is_in_the_servers_order():
    store = Store([_object("b"), _object("a"), _object("a", namespace="other")])
    assert [item.key.name for item in store.select("ns")] == ["a", "b"]
    assert [str(item.key) for item in store.select()] == ["ns/a", "ns/b", "other/a"]
    assert store.select("nowhere") == []


def test_a_list_honours_labels_and_fields():
    store = Store([_object("a", labels='"app":"x"'), _object("b", labels='"app":"y"'), _object("c")])
    assert [item.key.name for item in store.select("", LabelSelector.parse("app!=x"))] == ["b", "c"]
    named = FieldSelector.parse("metadata.name=c")
    assert [item.key.name for item in store.select("", field_selector=named)] == ["c"]
    assert store.select("", LabelSelector.parse("app"), named) == []


def test_the_store_counts_objects_and_bytes_through_replacement_and_removal():
    store = Store([_object("a", fill=100)])
    bigger = _object("a", 2, fill=200)
    store.put(bigger)
    assert (len(store), store.bytes) == (1, len(bigger.json))
    assert store.remove(bigger.key) is bigger
    assert store.remove(bigger.key) is None
    assert (len(store), store.bytes, list(store), bigger.key in store) == (0, 0, [], False)


def test_history_tells_what_followed_a_version():
    history = _history(ManualClock())
    for version in (12, 15, 16):
        history.append(_change(version))
    assert [each.resource_version for each in history.since(ResourceVersion(10))] == [12, 15, 16]
    assert [each.resource_version for each in history.since(ResourceVersion(13))] == [15, 16]
    assert list(history.since(ResourceVersion(16))) == []


def test_a_reader_older_than_the_window_or_from_the_future_is_expired_and_never_given_a_gap():
    history = _history(ManualClock())
    history.append(_change(12))
    for version in (9, 13):
        with pytest.raises(Expired):
            history.since(ResourceVersion(version))


async def test_history_covers_75_seconds_whatever_the_number_of_changes():
    clock = ManualClock()
    history = _history(clock, changes_min=2)
    for version in range(11, 511):
        history.append(_change(version))
    await clock.advance(75)
    history.append(_change(600))
    assert len(history.since(ResourceVersion(10))) == 501
    await clock.advance(30)
    history.trim()
    assert len(history) == 2 or history.oldest >= 509
    with pytest.raises(Expired):
        history.since(ResourceVersion(10))


async def test_a_quiet_history_keeps_its_least_number_of_changes():
    clock = ManualClock()
    history = _history(clock, changes_min=3)
    for version in range(11, 21):
        history.append(_change(version))
    await clock.advance(10_000)
    history.trim()
    assert [each.resource_version for each in history.since(ResourceVersion(17))] == [18, 19, 20]


def test_a_storm_is_bounded_in_bytes():
    history = _history(ManualClock(), bytes_max=50_000)
    for version in range(11, 5011):
        history.append(_change(version, fill=1000))
    assert history.bytes <= 50_000
    assert history.newest == 5010
    with pytest.raises(Expired):
        history.since(ResourceVersion(11))


def test_deletions_are_told_also_of_keys_that_came_back():
    history = _history(ManualClock())
    history.append(_change(11, "a", ChangeType.DELETED))
    history.append(_change(12, "b", ChangeType.DELETED))
    history.append(_change(13, "a", ChangeType.ADDED))
    assert [each.key.name for each in history.deletions()] == ["a", "b"]
    assert history.tombstone(ObjectKey("ns", "a")) is None
    assert history.tombstone(ObjectKey("ns", "b")) == Tombstone("u-b", ResourceVersion(12))


async def test_tombstones_go_with_their_change():
    clock = ManualClock()
    history = _history(clock, changes_min=0)
    history.append(_change(11, "a", ChangeType.DELETED))
    await clock.advance(100)
    history.trim()
    assert history.tombstone(ObjectKey("ns", "a")) is None
    assert (len(history), history.bytes, history.oldest) == (0, 0, 11)


def test_bookmarks_move_the_newest_version_only_forward():
    history = _history(ManualClock())
    history.advance(ResourceVersion(20))
    history.advance(ResourceVersion(15))
    assert history.newest == 20
    assert list(history.since(ResourceVersion(18))) == []


async def test_a_quiet_history_keeps_few_bytes_of_a_busy_past():
    clock = ManualClock()
    history = _history(clock, changes_min=1_000, old_bytes_max=5_000)
    for version in range(11, 111):
        history.append(_change(version, fill=1000))
    await clock.advance(75)
    history.trim()
    assert len(history) == 100, "the window is promised"
    await clock.advance(30)
    history.trim()
    assert 0 < history.bytes <= 5_000
    assert [each.resource_version for each in history.since(ResourceVersion(108))] == [109, 110]
