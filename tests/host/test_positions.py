"""What may be acknowledged, and where a reconnect resumes."""

from hypothesis import given, settings
from hypothesis import strategies as st
from torpor.cache.v1 import cache_pb2
from torpor_host.positions import Progress


def at(version: int, history: str = "h") -> cache_pb2.Position:
    return cache_pb2.Position(history=history, resource_version=str(version))


def version(position: cache_pb2.Position | None) -> int | None:
    return None if position is None else int(position.resource_version)


def test_nothing_is_acknowledged_or_resumed_before_the_snapshot_is_whole() -> None:
    progress = Progress()
    progress.advance(1, at(5))
    assert progress.acknowledge(0) is None and progress.position is None
    progress.complete(2, at(10))
    assert version(progress.position) == 10


def test_the_snapshots_position_waits_for_all_of_its_keys() -> None:
    progress = Progress()
    progress.complete(4, at(10))
    assert progress.acknowledge(oldest_sequence=2) is None
    assert version(progress.acknowledge(oldest_sequence=0)) == 10


def test_the_position_stops_before_the_oldest_event_that_is_not_reconciled() -> None:
    progress = Progress()
    progress.complete(1, at(10))
    for sequence, resource_version in ((2, 11), (3, 12), (4, 13)):
        progress.advance(sequence, at(resource_version))
    assert version(progress.acknowledge(oldest_sequence=3)) == 11
    assert progress.acknowledge(oldest_sequence=3) is None
    assert version(progress.acknowledge(oldest_sequence=0)) == 13


def test_another_history_starts_anew() -> None:
    progress = Progress()
    progress.complete(1, at(100))
    progress.restart()
    progress.complete(5, at(7, "restored"))
    position = progress.acknowledge(0)
    assert position is not None and (position.history, version(position)) == ("restored", 7)


def test_after_a_broken_stream_the_last_acknowledgement_is_sent_again() -> None:
    progress = Progress()
    progress.complete(1, at(10))
    assert version(progress.acknowledge(0)) == 10
    progress.repeat_acknowledgement()
    assert version(progress.acknowledge(oldest_sequence=2)) == 10


def test_a_long_backlog_keeps_few_checkpoints() -> None:
    progress = Progress()
    progress.complete(1, at(1))
    for i in range(2, 10_000):
        progress.advance(i, at(i))
    assert progress._checkpoints is not None and len(progress._checkpoints) <= 64
    assert version(progress.acknowledge(0)) == 9_999


def test_a_version_that_is_no_number_is_ignored() -> None:
    progress = Progress()
    progress.complete(1, at(10))
    progress.advance(2, cache_pb2.Position(history="h", resource_version="what"))
    assert progress.received == 10


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=300))
def test_it_never_runs_ahead_of_what_is_reconciled(steps: list[tuple[bool, int]]) -> None:
    progress, outstanding, sequence = Progress(), dict[int, int](), 1
    progress.complete(1, at(1))
    for arrives, which in steps:
        if arrives:
            sequence += 1
            progress.advance(sequence, at(sequence))
            outstanding[sequence] = sequence
        elif outstanding:
            del outstanding[sorted(outstanding)[which % len(outstanding)]]
        acknowledged = version(progress.acknowledge(min(outstanding, default=0)))
        if acknowledged is not None:
            assert all(number > acknowledged for number in outstanding)
