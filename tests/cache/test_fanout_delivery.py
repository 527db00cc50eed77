"""What a stream is sent: snapshot, live changes, coalescing, sharing, credit. Input: changes of a fake informer."""

import pytest
from torpor.cache.v1 import cache_pb2
from torpor_cache.fanout import Feed
from torpor_cache.mapping import CodeMapping, LabelMapping, OwnerMapping
from torpor_cache.selectors import LabelSelector
from torpor_cache.subscriptions import KEYS_MAX, TRACES_MAX, Filter, Payload
from torpor_cache.testing_informer import FakeInformer, LocalStream
from torpor_services.clock import ManualClock

OWNER = Filter(mappings=(OwnerMapping("example.com", "Database"),))


@pytest.fixture
def informer():
    return FakeInformer()


@pytest.fixture
def feed(informer):
    feed = Feed(informer, ManualClock())
    informer.attach(feed)
    return feed


@pytest.fixture
def stream(feed):
    return LocalStream(feed)


def types(received):
    return [(each.type, each.key[1]) for each in received]


def test_a_snapshot_ends_with_synced_and_live_changes_follow(informer, stream):
    informer.put("a")
    informer.put("b")
    stream.subscribe(1)
    got = stream.take()[1]
    assert types(got) == [("ADDED", "a"), ("ADDED", "b"), ("SYNCED", "")]
    assert got[-1].version == 3
    informer.put("a")
    assert [(r.type, r.version, r.keys) for r in stream.take()[1]] == [("MODIFIED", 4, (("ns", "a"),))]


def test_positions_before_synced_are_no_resume_points(informer, stream):
    informer.put("a")
    stream.subscribe(1)
    assert [r.version for r in stream.take()[1]] == [0, 2]


def test_a_change_during_the_snapshot_is_sent_once_and_first(informer, stream):
    informer.put("a")
    informer.put("b")
    stream.subscribe(1)
    informer.put("b")
    informer.delete("a")
    assert types(stream.take()[1]) == [("MODIFIED", "b"), ("DELETED", "a"), ("SYNCED", "")]


def test_live_changes_go_before_other_subscriptions_snapshots(informer, feed):
    for number in range(20):
        informer.put(f"n{number}")
    stream = LocalStream(feed, events_max=8)
    stream.subscribe(1)
    stream.take()
    stream.subscribe(2)
    stream.take_batch()
    informer.put("n0")
    first = stream.take_batch()
    assert types(first[1]) == [("MODIFIED", "n0")]


def test_a_snapshot_ends_though_live_changes_alone_would_fill_every_batch(informer, feed):
    for number in range(20):
        informer.put(f"n{number}")
    stream = LocalStream(feed, events_max=8)
    stream.subscribe(1, Filter(labels=LabelSelector.parse("busy")))
    stream.take()
    stream.subscribe(2, Filter(labels=LabelSelector.parse("!busy")), credit=10_000)
    for _ in range(30):
        for number in range(10):
            informer.put(f"busy{number}", labels={"busy": "x"})
        got = stream.take_batch()
        if ("SYNCED", "") in types(got.get(2, [])):
            return
    pytest.fail("the snapshot never ended")


def test_unsent_changes_of_a_key_become_one_event_with_all_keys_and_traces(informer, stream):
    stream.subscribe(1, OWNER)
    stream.take()
    for owner in ("first", "second", "third"):
        informer.put("a", owner=owner, traceparent=f"00-{owner}")
    (event,) = stream.take()[1]
    assert event.type == "ADDED"
    assert event.keys == (("ns", "first"), ("ns", "second"), ("ns", "third"))
    assert [trace.traceparent for trace in event.event.traces] == ["00-first", "00-second", "00-third"]


def test_at_most_32_traces_and_the_newest_of_them(informer, stream):
    stream.subscribe(1)
    stream.take()
    for number in range(40):
        informer.put("a", traceparent=f"00-{number}")
    event = stream.take()[1][0]
    traces = [trace.traceparent for trace in event.event.traces]
    assert len(traces) == TRACES_MAX
    assert traces[-1] == "00-39"


def test_united_keys_are_bounded_and_keep_the_first_and_the_last(informer, stream):
    stream.subscribe(1, Filter(mappings=(LabelMapping("for"),)))
    stream.take()
    for number in range(KEYS_MAX + 50):
        informer.put("a", labels={"for": f"x{number}"})
    (event,) = stream.take()[1]
    assert len(event.keys) <= KEYS_MAX
    assert event.keys[0] == ("ns", "x0")
    assert event.keys[-1] == ("ns", f"x{KEYS_MAX + 49}")


def test_an_unsent_deletion_is_kept_when_the_name_is_taken_again(informer, stream):
    informer.put("a", uid="one", owner="first")
    stream.subscribe(1, OWNER)
    stream.take()
    informer.delete("a")
    informer.put("a", uid="two", owner="second")
    informer.put("a", uid="two", owner="second")
    got = stream.take()[1]
    assert [(r.type, r.uid) for r in got] == [("DELETED", "one"), ("ADDED", "two")]
    assert [r.keys for r in got] == [(("ns", "first"),), (("ns", "second"),)]


def test_names_taken_and_freed_again_and_again_are_two_events_at_most(informer, stream):
    informer.put("a", uid="u0", owner="o0")
    stream.subscribe(1, OWNER)
    stream.take()
    for number in range(1, 6):
        informer.put("a", uid=f"u{number}", owner=f"o{number}")
    got = stream.take()[1]
    assert [r.type for r in got] == ["DELETED", "ADDED"]
    assert {name for r in got for _, name in r.keys} == {f"o{number}" for number in range(6)}


def test_created_and_deleted_unsent_is_told_as_deleted(informer, stream):
    stream.subscribe(1)
    stream.take()
    informer.put("a")
    informer.delete("a")
    assert types(stream.take()[1]) == [("DELETED", "a")]


def test_a_busy_key_is_sent_in_its_turn(informer, feed):
    stream = LocalStream(feed, events_max=1)
    stream.subscribe(1)
    stream.take()
    informer.put("busy")
    informer.put("calm")
    informer.put("busy")
    assert types(stream.take_batch()[1]) == [("ADDED", "busy")]


def test_a_position_never_passes_an_unsent_change(informer, feed):
    stream = LocalStream(feed, events_max=1)
    stream.subscribe(1)
    stream.take()
    informer.put("busy")  # 2
    informer.put("calm")  # 3
    informer.put("busy")  # 4
    assert [r.version for r in stream.take_batch()[1]] == [2]
    assert [r.version for r in stream.take_batch()[1]] == [4]


def test_without_credit_nothing_is_sent_and_the_rest_waits_coalesced(informer, stream):
    stream.subscribe(1, credit=2)
    stream.take()
    for name in ("a", "b", "c", "c", "c"):
        informer.put(name)
    assert types(stream.take()[1]) == [("ADDED", "a"), ("ADDED", "b")]
    assert stream.take() == {}
    stream.credit(1, 5)
    assert types(stream.take()[1]) == [("ADDED", "c")]


def test_a_snapshot_stops_at_the_credit_and_other_subscriptions_go_on(informer, stream):
    for number in range(10):
        informer.put(f"n{number}")
    stream.subscribe(1, credit=3)
    stream.subscribe(2, credit=100)
    got = stream.take()
    assert len(got[1]) == 3
    assert len(got[2]) == 11
    stream.credit(1, 7)
    assert types(stream.take()[1])[-1] == ("SYNCED", "")


def test_bookmarks_synced_and_errors_cost_no_credit(informer, stream):
    member = stream.subscribe(1, credit=1)
    stream.take()
    stream.feed.bookmark()
    assert [r.type for r in stream.take()[1]] == ["BOOKMARK"]
    assert member.subscription.credit == 1


def test_one_event_is_encoded_once_for_all_subscriptions_of_a_stream(informer, feed, stream):
    for number in range(1, 301):
        stream.subscribe(number, payload=Payload.FULL)
    stream.take()
    encoded, before = feed.encoder.encoded, len(stream.batches)
    informer.put("a")
    assert set(stream.take()) == set(range(1, 301))
    assert feed.encoder.encoded == encoded + 1
    deliveries = [d for batch in stream.batches[before:] for d in batch.deliveries]
    assert len(deliveries) == 1
    assert len(deliveries[0].targets) == 1


def test_an_event_is_encoded_once_for_all_streams(informer, feed):
    streams = [LocalStream(feed) for _ in range(5)]
    for stream in streams:
        stream.subscribe(1, payload=Payload.FULL)
        stream.take()
    encoded = feed.encoder.encoded
    informer.put("a")
    assert all(types(stream.take()[1]) == [("ADDED", "a")] for stream in streams)
    assert feed.encoder.encoded == encoded + 1


def test_subscriptions_with_other_keys_are_other_targets_of_one_event(informer, stream):
    stream.subscribe(1)
    stream.subscribe(2, OWNER)
    stream.take()
    informer.put("a", owner="x")
    got = stream.take()
    assert got[1][0].keys == (("ns", "a"),)
    assert got[2][0].keys == (("ns", "x"),)
    assert len(stream.batches[-2].deliveries) == 1


def test_sharing_never_reorders_a_subscription(informer, stream):
    stream.subscribe(1)
    stream.subscribe(2, Filter(labels=LabelSelector.parse("both")))
    stream.take()
    informer.put("only-first")
    informer.put("x", labels={"both": ""})
    informer.put("y", labels={"both": ""})
    got = stream.take()
    assert types(got[1]) == [("ADDED", "only-first"), ("ADDED", "x"), ("ADDED", "y")]
    assert types(got[2]) == [("ADDED", "x"), ("ADDED", "y")]


def test_payloads(informer, stream):
    informer.put("a", labels={"x": "1"})
    for number, payload in enumerate(Payload, start=1):
        stream.subscribe(number, payload=payload)
    got = stream.take()
    assert got[Payload.KEY][0].event.object == b""
    assert got[Payload.METADATA][0].event.object.startswith(b'{"kind":"PartialObjectMetadata"')
    assert b'"data"' not in got[Payload.METADATA][0].event.object
    assert b'"data":{"version":"2"}' in got[Payload.FULL][0].event.object


def test_code_mappings_are_sent_the_oldest_unsent_and_the_newest_object(informer, stream):
    informer.put("a")
    stream.subscribe(1, Filter(mappings=(CodeMapping(),)), payload=Payload.FULL)
    stream.take()
    informer.put("a")
    informer.put("a")
    (event,) = stream.take()[1]
    assert b'"version":"2"' in event.event.old_object
    assert b'"version":"4"' in event.event.object


def test_a_deletion_shows_the_last_state(informer, stream):
    informer.put("a", labels={"app": "x"})
    stream.subscribe(1, Filter(labels=LabelSelector.parse("app")), payload=Payload.FULL)
    stream.take()
    informer.put("a")
    (event,) = stream.take()[1]
    assert event.type == "DELETED"
    assert event.version == 3
    assert b'"app":"x"' in event.event.object


def test_idle_and_filtered_subscriptions_get_bookmarks_and_busy_ones_none(informer, stream):
    stream.subscribe(1)
    stream.subscribe(2, Filter(labels=LabelSelector.parse("never")))
    stream.subscribe(3, credit=1)
    stream.take()
    informer.put("a")
    informer.put("b")
    stream.take()
    informer.pass_by(5)
    stream.feed.bookmark()
    got = stream.take()
    assert [(r.type, r.version) for r in got[1]] == [("BOOKMARK", 8)]
    assert [(r.type, r.version) for r in got[2]] == [("BOOKMARK", 8)]
    assert 3 not in got  # it has an unsent change


def test_bookmarks_wait_for_the_snapshot(informer, stream):
    informer.put("a")
    stream.subscribe(1, credit=1)
    informer.put("b")
    stream.take()
    stream.feed.bookmark()
    assert stream.take() == {}


def test_batches_are_bounded_in_events_and_bytes(informer, feed):
    for number in range(100):
        informer.put(f"n{number}", annotations={"x": "y" * 1_000})
    stream = LocalStream(feed, events_max=30, bytes_max=10_000)
    stream.subscribe(1, payload=Payload.FULL)
    stream.take()
    assert max(batch.ByteSize() for batch in stream.batches) < 12_000
    other = LocalStream(feed, events_max=30)
    other.subscribe(1)
    other.take()
    assert max(len(batch.deliveries) for batch in other.batches) <= 31  # SYNCED besides


def test_an_error_that_is_final_is_the_last_word(informer, feed, stream):
    stream.subscribe(1)
    stream.take()
    informer.put("a")
    feed.on_error(b'{"kind":"Status","code":404}', True)
    informer.put("b")
    got = stream.take()[1]
    assert [(r.type, r.event.error.final) for r in got] == [("ERROR", True)]
    assert len(feed) == 0


def test_an_error_that_passes_keeps_the_subscription(informer, feed, stream):
    stream.subscribe(1)
    stream.take()
    feed.on_error(b'{"kind":"Status","code":500}', False)
    informer.put("a")
    assert types(stream.take()[1]) == [("ERROR", ""), ("ADDED", "a")]


def test_a_filter_that_fails_ends_its_own_subscriptions_only(informer, feed, stream):
    stream.subscribe(1)
    stream.subscribe(2, Filter(mappings=(object(),)))
    stream.take()
    informer.put("a")
    got = stream.take()
    assert types(got[1]) == [("ADDED", "a")]
    assert got[2][-1].status["code"] == 500


def test_batches_decode_with_the_generated_classes(informer, stream):
    informer.put("a", namespace="äöü")
    stream.subscribe(300)
    stream.take()
    event = stream.batches[0].deliveries[0].event
    assert event.type == cache_pb2.Event.ADDED
    assert event.key.namespace == "äöü"
    assert stream.batches[0].deliveries[0].targets[0].subscriptions == [300]


def test_an_order_that_differs_between_subscriptions_is_kept_for_both(informer, stream):
    informer.put("z", labels={"both": ""})
    stream.subscribe(1)
    stream.subscribe(2, Filter(labels=LabelSelector.parse("both")))
    informer.put("a")
    informer.put("b", labels={"both": ""})
    informer.put("a", labels={"both": ""})
    got = stream.take()
    assert types(got[1])[:2] == [("ADDED", "a"), ("ADDED", "b")]
    assert types(got[2])[:2] == [("ADDED", "b"), ("ADDED", "a")]
