"""Acknowledged positions and remembered deletions, in memory and on disk."""

import dataclasses
import os
import stat

import diskcache
import pytest
from torpor_cache.informers import WatchScope
from torpor_cache.positions import DELETIONS_MAX, WATCHED_MAX, Positions
from torpor_cache.resources import Position, Resource, ResourceVersion
from torpor_cache.testing_informer import CONFIG_MAPS, FakeInformer
from torpor_services.clock import ManualClock

OTHER = Resource("", "v1", "secrets")


def at(version, history="h1"):
    return Position(history, ResourceVersion(version))


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def positions(clock):
    async with Positions(clock) as positions:
        yield positions


async def test_positions_are_kept_by_operator_name_and_kind(positions):
    positions.acknowledge("ns/x", "for", CONFIG_MAPS, at(5))
    assert positions.acknowledged("ns/x", "for", CONFIG_MAPS) == at(5)
    assert positions.acknowledged("ns/x", "owns/0", CONFIG_MAPS) is None
    assert positions.acknowledged("ns/y", "for", CONFIG_MAPS) is None
    assert positions.acknowledged("ns/x", "for", OTHER) is None


async def test_positions_go_forward_only_and_anew_in_another_history(positions):
    for position, kept in ((at(5), at(5)), (at(3), at(5)), (at(2, "h2"), at(2, "h2"))):
        positions.acknowledge("ns/x", "for", CONFIG_MAPS, position)
        assert positions.acknowledged("ns/x", "for", CONFIG_MAPS) == kept


async def test_deletions_of_kinds_that_somebody_acknowledges_are_remembered(positions):
    informer = FakeInformer()
    informer.put("a")
    positions.remember(CONFIG_MAPS, "h1", informer.delete("a"))
    assert positions.deletions(CONFIG_MAPS, "h1", None) == []
    positions.expect(CONFIG_MAPS)
    for name in ("b", "c"):
        informer.put(name)
        positions.remember(CONFIG_MAPS, "h1", informer.delete(name))
    assert [c.key.name for c in positions.deletions(CONFIG_MAPS, "h1", None)] == ["b", "c"]
    assert [c.key.name for c in positions.deletions(CONFIG_MAPS, "h1", at(5))] == ["c"]
    assert [c.key.name for c in positions.deletions(CONFIG_MAPS, "h1", at(99, "h0"))] == ["b", "c"]
    assert positions.deletions(CONFIG_MAPS, "h2", None) == []


async def test_deletions_told_by_watches_that_lag_apart_are_all_remembered(positions):
    """Two scopes of one kind: what the slower one tells is older than what the faster one has told."""
    positions.expect(CONFIG_MAPS)
    informer = FakeInformer()
    for namespace in ("a", "b"):
        informer.put("x", namespace=namespace, uid=f"uid-{namespace}")
    earlier, later = informer.delete("x", namespace="b"), informer.delete("x", namespace="a")
    positions.remember(CONFIG_MAPS, "h1", later)
    positions.remember(CONFIG_MAPS, "h1", earlier)
    assert [c.key.namespace for c in positions.deletions(CONFIG_MAPS, "h1", None)] == ["b", "a"]
    after = at(earlier.resource_version)
    assert [c.key.namespace for c in positions.deletions(CONFIG_MAPS, "h1", after)] == ["a"]


async def test_a_deletion_told_by_two_watches_is_kept_once_at_its_highest_version(positions):
    """A relist gives a deletion a version of its own, which another operator may be behind."""
    positions.expect(CONFIG_MAPS)
    informer = FakeInformer()
    informer.put("x")
    told = informer.delete("x")
    found = dataclasses.replace(told, resource_version=ResourceVersion(told.resource_version + 10))
    for change in (told, found, told):
        positions.remember(CONFIG_MAPS, "h1", change)
    (kept,) = positions.deletions(CONFIG_MAPS, "h1", at(told.resource_version + 5))
    assert kept.resource_version == found.resource_version


async def test_large_objects_are_remembered_by_their_metadata(positions):
    positions.expect(CONFIG_MAPS)
    informer = FakeInformer()
    informer.put("x", labels={"app": "x"}, annotations={"pad": "y"})
    positions.remember(CONFIG_MAPS, "h1", informer.delete("x"))
    (kept,) = positions.deletions(CONFIG_MAPS, "h1", None)
    assert kept.old.labels == {"app": "x"} and b'"data"' not in kept.old.json


WIDE, A, B = WatchScope(CONFIG_MAPS), WatchScope(CONFIG_MAPS, "a"), WatchScope(CONFIG_MAPS, "b")


@pytest.mark.parametrize(
    ("watched", "asked", "expected"),
    [
        ([(A, 5)], A, [5]),
        ([(A, 5)], B, []),
        ([(A, 5), (B, 9)], WIDE, [5, 9]),
        ([(WIDE, 7)], A, [7]),
        ([(WIDE, 7), (A, 9)], A, [9]),  # both cover it: nothing before the later is missing
        ([(WIDE, 7), (A, 9)], WIDE, [7, 9]),
        ([(A, 5), (WIDE, 7)], WIDE, [7]),  # from 7 on the wide one speaks for it
    ],
)
async def test_where_deletions_may_begin_to_be_missing(positions, watched, asked, expected):
    positions.expect(CONFIG_MAPS)
    for scope, version in watched:
        positions.watched(scope, at(version))
    assert positions.watched_until(asked, "h1") == expected
    assert positions.watched_until(asked, "h2") == []


async def test_how_far_a_scope_was_watched_outlives_the_process_and_counts_as_interest(clock, tmp_path):
    async with Positions(clock, tmp_path / "state") as first:
        first.watched(A, at(3))
        first.expect(CONFIG_MAPS)
        first.watched(A, at(5))
    async with Positions(clock, tmp_path / "state") as second:
        assert second.watched_until(A, "h1") == [5]
        informer = FakeInformer()
        informer.put("x")
        second.remember(CONFIG_MAPS, "h1", informer.delete("x"))
        assert second.deletions(CONFIG_MAPS, "h1", None)


async def test_of_very_many_scopes_the_earliest_are_forgotten(positions):
    positions.expect(CONFIG_MAPS)
    scopes = [WatchScope(CONFIG_MAPS, f"n{number}") for number in range(WATCHED_MAX + 5)]
    for scope in scopes:
        positions.watched(scope, at(5))
    assert positions.watched_until(scopes[0], "h1") == []
    assert positions.watched_until(scopes[-1], "h1") == [5]


async def test_deletions_are_bounded(positions):
    positions.expect(CONFIG_MAPS)
    informer = FakeInformer()
    for number in range(DELETIONS_MAX + 10):
        informer.put("a", uid=f"uid-{number}")
        positions.remember(CONFIG_MAPS, "h1", informer.delete("a"))
    assert len(positions.deletions(CONFIG_MAPS, "h1", None)) == DELETIONS_MAX


async def test_everything_outlives_the_process(clock, tmp_path):
    informer = FakeInformer()
    informer.put("a", labels={"app": "x"}, owner="db")
    async with Positions(clock, tmp_path / "state") as first:
        first.acknowledge("ns/x", "for", CONFIG_MAPS, at(5))
        first.remember(CONFIG_MAPS, "h1", informer.delete("a"))
    async with Positions(clock, tmp_path / "state") as second:
        assert second.acknowledged("ns/x", "for", CONFIG_MAPS) == at(5)
        (deletion,) = second.deletions(CONFIG_MAPS, "h1", None)
    assert (deletion.key.name, deletion.uid, deletion.new) == ("a", "uid-a", None)
    assert deletion.old.labels == {"app": "x"}
    assert deletion.old.metadata.owner_references[0].name == "db"


async def test_what_was_dropped_from_memory_is_dropped_from_disk(clock, tmp_path):
    informer = FakeInformer()
    async with Positions(clock, tmp_path / "state") as first:
        first.expect(CONFIG_MAPS)
        for number in range(DELETIONS_MAX + 5):
            informer.put("a", uid=f"uid-{number}")
            first.remember(CONFIG_MAPS, "h1", informer.delete("a"))
    async with Positions(clock, tmp_path / "state") as second:
        assert len(second.deletions(CONFIG_MAPS, "h1", None)) == DELETIONS_MAX


async def test_writes_are_batched_and_need_no_end_of_the_process(clock, tmp_path):
    async with Positions(clock, tmp_path / "state") as first:
        for version in range(1, 1_000):
            first.acknowledge("ns/x", "for", CONFIG_MAPS, at(version))
        while first._dirty:
            await clock.advance(1)
        # As after kill -9: another process reads what is there now.
        async with Positions(clock, tmp_path / "state") as second:
            assert second.acknowledged("ns/x", "for", CONFIG_MAPS) == at(999)


async def test_the_folder_is_private(clock, tmp_path):
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    async with Positions(clock, folder):
        for path in (folder, folder / "positions"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700


async def test_a_file_that_is_no_database_is_put_aside(clock, tmp_path):
    folder = tmp_path / "state" / "positions"
    folder.mkdir(parents=True)
    (folder / "cache.db").write_bytes(os.urandom(4096))
    async with Positions(clock, tmp_path / "state") as positions:
        positions.acknowledge("ns/x", "for", CONFIG_MAPS, at(5))
    assert list((tmp_path / "state").glob("positions.broken-*"))
    async with Positions(clock, tmp_path / "state") as again:
        assert again.acknowledged("ns/x", "for", CONFIG_MAPS) == at(5)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


async def test_a_pickle_in_the_file_is_never_executed(clock, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with diskcache.Cache(str(tmp_path / "state" / "positions")) as cache:
        cache.set("position/x", Bomb())
    async with Positions(clock, tmp_path / "state") as positions:
        assert positions.acknowledged("ns/x", "for", CONFIG_MAPS) is None
    assert not (tmp_path / "exploded").exists()
