"""An operator reads its own writes; and what a path of the API names."""

import pytest
from torpor.cache.v1 import cache_pb2
from torpor_host.api_path import ApiPath, parse
from torpor_host.read_positions import LIVE_S_MAX, ReadPositions


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/api/v1/namespaces/a/secrets/s", ApiPath("", "v1", "secrets", "a", "s")),
        ("/api/v1/namespaces/a/pods/p/log?tail=1", ApiPath("", "v1", "pods", "a", "p", "log")),
        ("/api/v1/secrets?limit=5", ApiPath("", "v1", "secrets")),
        ("/api/v1/namespaces/a", ApiPath("", "v1", "namespaces", "", "a")),
        ("/api/v1/namespaces/a/status", ApiPath("", "v1", "namespaces", "", "a", "status")),
        ("/apis/apps/v1/namespaces/a/deployments/d/scale", ApiPath("apps", "v1", "deployments", "a", "d", "scale")),
        ("/apis/example.com/v1/databases", ApiPath("example.com", "v1", "databases")),
        ("/apis/example.com/v1/databases/x%2fy", ApiPath("example.com", "v1", "databases", "", "x/y")),
        ("/api", None),
        ("/apis/apps/v1", None),
        ("/version", None),
        ("/api/v1/watch/pods", None),
    ],
)
def test_a_path_names_its_resource(path: str, expected: ApiPath | None) -> None:
    assert parse(path) == expected


SECRET = ApiPath("", "v1", "secrets", "a", "s")


def written(version: int, history: str = "h") -> cache_pb2.MinimumVersion:
    return cache_pb2.MinimumVersion(
        resource=cache_pb2.Resource(version="v1", resource="secrets"),
        position=cache_pb2.Position(history=history, resource_version=str(version)),
    )


def test_reads_carry_the_newest_write_of_their_kind() -> None:
    positions = ReadPositions()
    assert positions.minimum(SECRET) is None
    positions.written(written(9))
    positions.written(written(7))
    minimum = positions.minimum(SECRET)
    assert minimum is not None and minimum.position.resource_version == "9"
    assert positions.minimum(ApiPath("", "v1", "pods", "a")) is None


def test_a_write_of_another_history_replaces_what_was_written_before() -> None:
    positions = ReadPositions()
    positions.written(written(900))
    positions.written(written(3, "restored"))
    minimum = positions.minimum(SECRET)
    assert minimum is not None and minimum.position.resource_version == "3"


def test_after_a_conflict_the_key_is_read_live_once() -> None:
    positions = ReadPositions()
    positions.conflicted(SECRET)
    assert positions.must_read_live(SECRET, 0.0)
    positions.read_live(SECRET)
    assert not positions.must_read_live(SECRET, 0.0)


def test_after_a_delete_the_key_and_lists_are_read_live_until_the_watch_has_shown_it() -> None:
    positions = ReadPositions()
    positions.deleted(SECRET, now_s=0.0)
    for path in (SECRET, ApiPath("", "v1", "secrets", "a"), ApiPath("", "v1", "secrets")):
        assert positions.must_read_live(path, 1.0)
    assert not positions.must_read_live(ApiPath("", "v1", "secrets", "b"), 1.0)
    positions.read_live(SECRET)
    assert positions.must_read_live(SECRET, 1.0), "a live read does not mean that the cache has seen it"
    positions.deletion_seen("", "secrets", "a", "s")
    assert not positions.must_read_live(SECRET, 1.0)


def test_a_deletion_that_no_watch_shows_is_read_live_for_a_bounded_time() -> None:
    positions = ReadPositions()
    positions.deleted(SECRET, now_s=0.0)
    assert not positions.must_read_live(SECRET, LIVE_S_MAX + 1)


def test_what_is_kept_is_bounded() -> None:
    positions = ReadPositions()
    for i in range(2000):
        positions.deleted(ApiPath("", "v1", "secrets", "a", str(i)), 0.0)
        positions.conflicted(ApiPath("", "v1", "secrets", "a", str(i)))
        positions.written(
            cache_pb2.MinimumVersion(
                resource=cache_pb2.Resource(resource=f"kind{i}"),
                position=cache_pb2.Position(history="h", resource_version="1"),
            )
        )
    assert len(positions._deleted or ()) <= 512 and len(positions._conflicts or ()) <= 512
    assert len(positions.all_minimums()) <= 64


def test_a_write_is_kept_and_not_the_answer_that_told_of_it() -> None:
    positions = ReadPositions()
    answer = cache_pb2.Head(written=written(7))
    positions.written(answer.written)
    answer.Clear()
    assert positions.minimum(SECRET) == written(7)
    assert positions.all_minimums() == [written(7)]
