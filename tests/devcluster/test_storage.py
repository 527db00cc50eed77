"""Revisions, key order, the state at an older revision, and the window of history."""

import pytest
from torpor_devcluster.clock import SystemClock
from torpor_devcluster.history import TooOld
from torpor_devcluster.resources import ResourceKey
from torpor_devcluster.storage import Storage

THINGS = ResourceKey("", "things")
OTHERS = ResourceKey("", "others")


class StoppedClock(SystemClock):
    """Monotonic time that only tests move."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def monotonic_s(self) -> float:
        return self.at_s


def storage(*, window_s: float = 300.0, events_max: int = 1000, clock: SystemClock | None = None) -> Storage:
    return Storage(clock or SystemClock(), history_window_s=window_s, history_events_max=events_max)


def put(store: Storage, name: str, value: int = 0, *, namespace: str = "ns", resource: ResourceKey = THINGS) -> int:
    metadata = {"name": name, "namespace": namespace, "uid": name}
    return store.put(
        resource, (namespace, name), {"kind": "T", "apiVersion": "v1", "metadata": metadata, "v": value}
    ).revision


def delete(store: Storage, name: str) -> int:
    stored = store.get(THINGS, ("ns", name))
    assert stored is not None
    return store.delete(THINGS, ("ns", name), {**stored.object, "metadata": dict(stored.metadata)}).revision


def values_at(store: Storage, revision: int) -> dict[str, int]:
    return {stored.metadata["name"]: stored.object["v"] for stored in store.table(THINGS).at(revision)}


def test_every_write_of_any_resource_raises_the_one_revision() -> None:
    store = storage()
    revisions = [put(store, "a"), put(store, "b", resource=OTHERS), put(store, "a", 2), delete(store, "a")]
    assert revisions == list(range(revisions[0], revisions[0] + 4))
    assert store.revision == revisions[-1]


def test_a_deletion_carries_its_own_revision_and_the_last_state() -> None:
    store = storage()
    put(store, "a", 7)
    gone = delete(store, "a")
    (event,) = store.table(THINGS).history.read(1, 10)
    assert (event.type, event.revision) == ("DELETED", gone)
    assert event.current.object["v"] == 7
    assert event.current.metadata["resourceVersion"] == str(gone)
    assert event.previous is not None and event.previous.revision < gone


def test_the_state_at_any_revision_is_the_present_with_newer_events_undone() -> None:
    store = storage()
    first = put(store, "a", 1)
    put(store, "b", 1)
    second = put(store, "a", 2)
    delete(store, "b")
    put(store, "c", 1)
    assert values_at(store, first) == {"a": 1}
    assert values_at(store, second) == {"a": 2, "b": 1}
    assert values_at(store, store.revision) == {"a": 2, "c": 1}


def test_keys_come_in_order_by_namespace_and_from_behind_a_key() -> None:
    store = storage()
    for namespace, name in (("b", "x"), ("a", "y"), ("a", "x"), ("ab", "z")):
        put(store, name, namespace=namespace)
    table = store.table(THINGS)
    assert list(table.keys(None)) == [("a", "x"), ("a", "y"), ("ab", "z"), ("b", "x")]
    assert list(table.keys("a")) == [("a", "x"), ("a", "y")]
    assert list(table.keys("a", ("a", "x"))) == [("a", "y")]
    assert list(table.keys(None, ("a", "y"))) == [("ab", "z"), ("b", "x")]


def test_compaction_makes_older_revisions_too_old_and_the_present_stays() -> None:
    store = storage()
    old = put(store, "a", 1)
    put(store, "a", 2)
    store.compact()
    with pytest.raises(TooOld) as error:
        store.table(THINGS).at(old)
    assert error.value.oldest == store.revision
    assert values_at(store, store.revision) == {"a": 2}


def test_history_is_bounded_by_number_and_by_age() -> None:
    clock = StoppedClock()
    store = storage(window_s=10, events_max=100, clock=clock)
    first = put(store, "a")
    for value in range(500):
        put(store, "a", value)
    history = store.table(THINGS).history
    assert history.end_sequence == 501
    with pytest.raises(TooOld):
        history.after_revision(first)
    assert len(history.read(history.after_revision(history.compacted_revision), 1000)) <= 110
    middle = store.revision
    clock.at_s = 11.0
    for value in range(20):
        put(store, "a", value)
    with pytest.raises(TooOld):
        history.after_revision(middle - 1)


def test_a_reader_whose_place_was_dropped_learns_it() -> None:
    store = storage()
    put(store, "a")
    history = store.table(THINGS).history
    place = history.after_revision(0)
    store.compact()
    put(store, "a")
    with pytest.raises(TooOld):
        history.read(place, 10)


def test_a_resource_that_comes_back_has_no_history_from_before() -> None:
    store = storage()
    old = put(store, "a")
    store.drop_table(THINGS)
    put(store, "a")
    with pytest.raises(TooOld):
        store.table(THINGS).history.after_revision(old - 1)
