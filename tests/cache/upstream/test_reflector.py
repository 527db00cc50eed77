"""What the watch says, applied: a relist is a difference, and versions never repeat."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torpor_cache.history import History
from torpor_cache.objects import Change, ChangeType, StoredObject, parse_object
from torpor_cache.reflector import Reflector
from torpor_cache.resources import ObjectKey, Resource, ResourceVersion
from torpor_cache.store import Store
from torpor_services import telemetry
from torpor_services.clock import ManualClock

ADDED, MODIFIED, DELETED = ChangeType.ADDED, ChangeType.MODIFIED, ChangeType.DELETED
T = 1_700_000_000_000_000_000


@dataclass
class Kept:
    """An observer that mirrors changes, and looks at the store as a listener would."""

    reflector: Reflector | None = None
    store: Store = field(default_factory=Store)
    history: History = field(default_factory=lambda: History(ManualClock()))
    changes: list[Change] = field(default_factory=list)
    mirror: dict[ObjectKey, StoredObject] = field(default_factory=dict)
    syncs: int = 0

    def changed(self, change: Change) -> None:
        assert self.store.get(change.key) is change.new
        assert self.history.newest == change.resource_version
        assert change.old is self.mirror.get(change.key)
        self.changes.append(change)
        if change.new is None:
            del self.mirror[change.key]
        else:
            self.mirror[change.key] = change.new

    def synced_first(self) -> None:
        self.syncs += 1
        self.mirror = {item.key: item for item in self.store}

    def advanced(self) -> None:
        pass

    @property
    def told(self) -> list[tuple[str, str, int]]:
        return [(each.type.value, each.key.name, each.resource_version) for each in self.changes]


def _object(name: str, version: int, uid: str = "", data: str = "") -> StoredObject:
    body = {
        "kind": "K",
        "apiVersion": "v1",
        "metadata": {"name": name, "uid": uid or f"u-{name}", "resourceVersion": str(version)},
        "data": data,
    }
    return parse_object(json.dumps(body).encode())


def _kept(version: int = 10, *items: StoredObject) -> tuple[Kept, Reflector]:
    kept = Kept()
    reflector = Reflector(Resource.parse("v1/things"), kept.store, kept.history, kept)
    reflector.stage(items)
    reflector.replace(ResourceVersion(version), T)
    return kept, reflector


def _relist(reflector: Reflector, version: int, *items: StoredObject) -> None:
    reflector.stage(items)
    reflector.replace(ResourceVersion(version), T)


def test_the_first_list_is_not_told_as_changes():
    kept, _ = _kept(10, _object("a", 5), _object("b", 9))
    assert (kept.told, kept.syncs, len(kept.store), kept.history.newest) == ([], 1, 2, 10)


def test_a_relist_is_a_difference_and_vanished_keys_are_deleted_state_unknown():
    kept, reflector = _kept(10, _object("same", 5), _object("changed", 6), _object("gone", 7))
    _relist(reflector, 20, _object("same", 5), _object("changed", 15), _object("new", 18))
    assert kept.told == [("DELETED", "gone", 11), ("MODIFIED", "changed", 15), ("ADDED", "new", 18)]
    assert kept.changes[0].final_state_unknown and kept.changes[0].old.resource_version == 7
    assert not kept.changes[1].final_state_unknown
    assert kept.history.newest == 20


def test_an_older_object_of_a_list_does_not_replace_a_newer_one():
    kept, reflector = _kept(10, _object("a", 5))
    reflector.apply(MODIFIED, _object("a", 12), T)
    _relist(reflector, 13, _object("a", 5))
    assert kept.told == [("MODIFIED", "a", 12)]
    assert kept.store.get(ObjectKey("", "a")).resource_version == 12


def test_the_same_key_with_another_uid_is_deleted_then_added():
    kept, reflector = _kept(10, _object("a", 5, "one"))
    reflector.apply(ADDED, _object("a", 15, "two"), T)
    assert kept.told == [("DELETED", "a", 14), ("ADDED", "a", 15)]
    assert [each.uid for each in kept.changes] == ["one", "two"]


def test_a_relist_tells_the_same_key_with_another_uid_as_deleted_then_added():
    kept, reflector = _kept(10, _object("a", 5, "one"), _object("b", 6))
    _relist(reflector, 20, _object("a", 12, "two"))
    assert kept.told == [("DELETED", "a", 11), ("ADDED", "a", 12), ("DELETED", "b", 13)]


def test_a_deletion_has_the_events_version_and_the_object_as_it_was_stored():
    """A selector that stops matching: the event may show a state that no longer says whom it concerned."""
    kept, reflector = _kept(10, _object("a", 5, data="matching"))
    reflector.apply(DELETED, _object("a", 30, data="no longer matching"), T)
    (change,) = kept.changes
    assert change.resource_version == 30
    assert json.loads(change.old.json)["data"] == "matching"
    assert change.new is None and not change.final_state_unknown


def test_a_deletion_of_an_earlier_namesake_or_of_nothing_is_ignored_but_counted_as_progress():
    kept, reflector = _kept(10, _object("a", 5, "two"))
    reflector.apply(DELETED, _object("a", 11, "one"), T)
    reflector.apply(DELETED, _object("zzz", 12), T)
    assert (kept.told, kept.history.newest, reflector.counters.ignored) == ([], 12, 2)


def test_modified_of_an_unknown_object_is_an_addition_and_added_of_a_known_one_a_modification():
    kept, reflector = _kept(10, _object("a", 5))
    reflector.apply(MODIFIED, _object("b", 11), T)
    reflector.apply(ADDED, _object("a", 12), T)
    assert [kind for kind, _, _ in kept.told] == ["ADDED", "MODIFIED"]


def test_the_same_version_with_other_bytes_is_repaired():
    kept, reflector = _kept(10, _object("a", 5, data="old"))
    _relist(reflector, 20, _object("a", 5, data="as a new server shows it"))
    assert kept.told == [("MODIFIED", "a", 11)]
    assert reflector.counters.repaired == 1


def test_an_unchanged_relist_keeps_the_objects_it_has():
    item = _object("a", 5)
    kept, reflector = _kept(10, item)
    _relist(reflector, 20, _object("a", 5))
    assert kept.store.get(item.key) is item
    assert kept.told == []


def test_a_dropped_stage_shows_nothing():
    kept, reflector = _kept(10, _object("a", 5))
    reflector.stage([_object("b", 11)])
    reflector.drop_stage()
    _relist(reflector, 12, _object("a", 5))
    assert (kept.told, len(kept.store)) == ([], 1)


def test_a_streamed_list_keeps_the_latest_of_what_it_was_told():
    kept, reflector = _kept(10)
    for kind, item in ((ADDED, _object("a", 11)), (MODIFIED, _object("a", 13)), (ADDED, _object("b", 12))):
        reflector.stage_change(kind, item)
    reflector.stage_change(DELETED, _object("b", 14))
    reflector.replace(ResourceVersion(15), T)
    assert kept.told == [("ADDED", "a", 13)]


def test_no_parsed_form_outlives_a_change():
    kept, reflector = _kept(10, _object("a", 5))
    reflector.apply(MODIFIED, _object("a", 11), T)
    assert all(item._metadata is None for item in (*kept.store, kept.changes[0].old))


def test_each_watch_event_is_a_span_that_began_when_its_bytes_came():
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    telemetry.use_provider(provider)
    try:
        kept, reflector = _kept(10, _object("a", 5))
        reflector.apply(MODIFIED, _object("a", 11), T)
    finally:
        telemetry.use_provider(None)
    (span,) = spans.get_finished_spans()
    assert (span.name, span.start_time) == ("watch event", T)
    assert span.attributes["k8s.object.name"] == "a"
    assert kept.changes[0].traceparent.split("-")[1] == f"{span.context.trace_id:032x}"
    assert kept.changes[0].received_unix_ns == T


class Cluster:
    """What an API server does: every write and every deletion takes the next version."""

    def __init__(self) -> None:
        self.version = 0
        self.objects: dict[str, tuple[int, str]] = {}
        self.log: list[tuple[ChangeType, str, int, str]] = []

    def do(self, name: str, action: str) -> None:
        known = self.objects.get(name)
        if action == "delete" and known is not None:
            self.version += 1
            del self.objects[name]
            self.log.append((DELETED, name, self.version, known[1]))
        elif action == "write":
            self.version += 1
            uid = known[1] if known is not None else f"{name}-{self.version}"
            self.objects[name] = (self.version, uid)
            self.log.append((MODIFIED if known else ADDED, name, self.version, uid))

    def items(self) -> list[StoredObject]:
        return [_object(name, version, uid) for name, (version, uid) in self.objects.items()]


actions = st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["write", "delete"])), max_size=25)


@given(actions, actions, st.sampled_from(["watch", "relist"]), actions)
def test_listeners_end_where_the_cluster_is_and_versions_strictly_grow(before, missed, how, after):
    cluster = Cluster()
    cluster.do("first", "write")
    for name, action in before:
        cluster.do(name, action)
    kept, reflector = _kept(cluster.version, *cluster.items())
    begin = ResourceVersion(cluster.version)
    for name, action in missed:
        cluster.do(name, action)
    if how == "relist":
        _relist(reflector, cluster.version, *cluster.items())
    else:
        for kind, name, version, uid in cluster.log:
            if version > begin:
                reflector.apply(kind, _object(name, version, uid), T)
    for name, action in after:
        cluster.do(name, action)
        kind, name, version, uid = cluster.log[-1]
        if version > kept.history.newest:
            reflector.apply(kind, _object(name, version, uid), T)

    expected = {name: version for name, (version, _) in cluster.objects.items()}
    assert {key.name: item.resource_version for key, item in kept.mirror.items()} == expected
    assert {item.key.name: item.resource_version for item in kept.store} == expected
    versions = [each.resource_version for each in kept.changes]
    assert versions == sorted(set(versions)) and all(begin < version <= cluster.version for version in versions)
    for place, each in enumerate(kept.changes):
        assert list(kept.history.since(each.resource_version)) == kept.changes[place + 1 :]
