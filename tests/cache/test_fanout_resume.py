"""Beginning again: by position, after a takeover, in another history, after falling too far behind."""

import dataclasses

import pytest
from torpor_cache.fanout import After, Feed, Takeover
from torpor_cache.history import History, HistoryLimits
from torpor_cache.mapping import OwnerMapping
from torpor_cache.resources import NO_VERSION, ObjectKey, Position, ResourceVersion
from torpor_cache.selectors import LabelSelector
from torpor_cache.subscriptions import Filter
from torpor_cache.testing_informer import FakeInformer, LocalStream, make_object
from torpor_services.clock import ManualClock

OWNER = Filter(mappings=(OwnerMapping("example.com", "Database"),))


@pytest.fixture
def informer():
    return FakeInformer()


@pytest.fixture
def stream(informer):
    feed = Feed(informer, ManualClock())
    informer.attach(feed)
    return LocalStream(feed)


def at(version, history="h1"):
    return Position(history, ResourceVersion(version))


def known(*pairs):
    return tuple((ObjectKey("ns", name), uid) for name, uid in pairs)


def types(received):
    return [(each.type, each.key[1]) for each in received]


def forget(informer):
    """History reaches back to now only."""
    version = informer.position.resource_version
    informer.history = History(ManualClock(), HistoryLimits())
    informer.history.begin(version)


def test_a_client_that_resumes_is_sent_what_came_after_its_position(informer, stream):
    informer.put("a")  # 2
    informer.put("b")  # 3
    informer.put("a")  # 4
    informer.delete("b")  # 5
    stream.subscribe(1, resume=After(at(2)))
    got = stream.take()[1]
    assert types(got) == [("DELETED", "b"), ("MODIFIED", "a"), ("SYNCED", "")]
    assert got[-1].version == 5


def test_positions_of_a_replay_are_resume_points(informer):
    feed = Feed(informer, ManualClock())
    stream = LocalStream(feed, events_max=1)
    for name in ("a", "b", "c"):
        informer.put(name)
    stream.subscribe(1, resume=After(at(1)))
    got = stream.take()[1]
    assert [r.version for r in got] == [2, 3, 4, 4]


def test_a_client_that_has_seen_everything_is_synced_at_once(informer, stream):
    informer.put("a")
    stream.subscribe(1, resume=After(at(2)))
    assert [(r.type, r.version) for r in stream.take()[1]] == [("SYNCED", 2)]


def test_a_position_too_old_gets_resync_before_any_event(informer, stream):
    informer.put("a")
    forget(informer)
    stream.subscribe(1, resume=After(at(1)))
    assert types(stream.take()[1]) == [("RESYNC", ""), ("ADDED", "a"), ("SYNCED", "")]


def test_a_position_of_another_history_gets_resync(informer, stream):
    informer.put("a")
    stream.subscribe(1, resume=After(at(2, "other")))
    assert types(stream.take()[1])[0] == ("RESYNC", "")


def test_a_resynced_client_is_told_what_of_its_knowledge_is_gone(informer, stream):
    informer.put("a", uid="new")
    informer.put("b")
    forget(informer)
    stream.subscribe(1, resume=After(at(1), known(("a", "old"), ("b", "uid-b"), ("c", "uid-c"))))
    got = stream.take()[1]
    gone = [(r.key[1], r.uid, r.event.final_state_unknown) for r in got if r.type == "DELETED"]
    assert gone == [("a", "old", True), ("c", "uid-c", True)]
    assert types(got)[0] == ("RESYNC", "")
    order = types(got)
    assert order.index(("DELETED", "a")) < order.index(("ADDED", "a"))


def test_what_is_gone_is_told_with_its_last_state_where_history_has_it(informer, stream):
    informer.put("a", owner="x")
    informer.delete("a")
    stream.subscribe(1, OWNER, resume=After(at(2, "other"), known(("a", "uid-a"))))
    (gone,) = [r for r in stream.take()[1] if r.type == "DELETED"]
    assert gone.keys == (("ns", "x"),)


def test_a_new_holder_is_told_every_key_and_the_deletions_since_the_acknowledged_position(informer, stream):
    for name in ("a", "b", "c"):
        informer.put(name)  # 2, 3, 4
    informer.delete("a")  # 5
    informer.delete("b")  # 6
    stream.subscribe(1, resume=Takeover(at(5)))
    assert sorted(types(stream.take()[1])) == [("ADDED", "c"), ("DELETED", "b"), ("SYNCED", "")]


def test_a_new_holder_without_an_acknowledged_position_is_told_every_deletion_in_history(informer, stream):
    for name in ("a", "b"):
        informer.put(name)
        informer.delete(name)
    for acknowledged in (None, at(5, "other")):
        stream.subscribe(1, resume=Takeover(acknowledged))
        assert types(stream.take()[1])[:2] == [("DELETED", "a"), ("DELETED", "b")]


def test_a_new_holder_is_told_of_an_object_whose_name_was_taken_again(informer, stream):
    informer.put("a", uid="one", owner="x")
    informer.put("a", uid="two", owner="y")
    stream.subscribe(1, OWNER, resume=Takeover(at(2)))
    got = stream.take()[1]
    assert [(r.type, r.uid, r.keys) for r in got[:2]] == [
        ("DELETED", "one", (("ns", "x"),)),
        ("ADDED", "two", (("ns", "y"),)),
    ]


def test_a_new_holder_is_told_of_keys_that_only_the_old_object_mapped_to(informer, stream):
    informer.put("a", owner="x")
    informer.put("a", owner="y")
    stream.subscribe(1, OWNER, resume=Takeover(at(2)))
    keys = {key for r in stream.take()[1] for key in r.keys}
    assert keys == {("ns", "x"), ("ns", "y")}


def test_a_new_holder_is_told_of_objects_that_left_its_selection(informer, stream):
    informer.put("a", labels={"app": "x"})
    informer.put("a")
    stream.subscribe(1, Filter(labels=LabelSelector.parse("app")), resume=Takeover(at(2)))
    assert types(stream.take()[1]) == [("DELETED", "a"), ("SYNCED", "")]


def test_remembered_deletions_are_told_besides_history(informer, stream):
    remembered = informer.put("old") and informer.delete("old")
    forget(informer)
    informer.put("new")
    informer.delete("new")
    stream.subscribe(1, resume=Takeover(None, (remembered,)))
    assert types(stream.take()[1]) == [("DELETED", "old"), ("DELETED", "new"), ("SYNCED", "")]


def test_a_deletion_without_a_last_state_is_told_within_its_namespace_only(informer, stream):
    informer.put("old", namespace="a")
    remembered = dataclasses.replace(informer.delete("old", namespace="a"), old=None)
    forget(informer)
    for number, namespace in enumerate(("a", "b"), 1):
        stream.subscribe(number, Filter(namespace=namespace), resume=Takeover(None, (remembered,)))
    got = stream.take()
    assert types(got[1]) == [("DELETED", "old"), ("SYNCED", "")]
    assert types(got[2]) == [("SYNCED", "")]


def test_another_history_resyncs_live_subscriptions(informer, stream):
    informer.put("a")
    stream.subscribe(1)
    stream.take()
    informer.put("a")  # unsent, and void
    informer.begin_history("h2", [make_object("b", 2)])
    got = stream.take()[1]
    assert types(got) == [("RESYNC", ""), ("ADDED", "b"), ("SYNCED", "")]
    assert {r.history for r in got if r.type != "RESYNC"} == {"h2"}
    informer.put("c")
    assert types(stream.take()[1]) == [("ADDED", "c")]


def test_a_subscription_that_falls_too_far_behind_starts_anew_and_misses_no_deletion(informer, stream):
    for number in range(20):
        informer.put(f"n{number}")
    stream.subscribe(1, pending_max=10)
    stream.take()
    for number in range(20):
        informer.delete(f"n{number}")
    informer.put("last")
    got = stream.take()[1]
    assert types(got)[0] == ("RESYNC", "")
    assert {r.key[1] for r in got if r.type == "DELETED"} == {f"n{number}" for number in range(20)}
    assert ("ADDED", "last") in types(got)
    assert types(got)[-1] == ("SYNCED", "")


def test_an_empty_position_is_too_old(informer, stream):
    informer.put("a")
    stream.subscribe(1, resume=After(Position("h1", NO_VERSION)))
    assert types(stream.take()[1])[0] == ("RESYNC", "")


def test_a_deletion_goes_before_the_new_object_of_its_name_in_every_batch(informer):
    feed = Feed(informer, ManualClock())
    stream = LocalStream(feed, events_max=8)
    for number in reversed(range(10)):
        informer.put(f"n{number}", uid=f"old-{number}")
        informer.put(f"n{number}", uid=f"new-{number}")
    stream.subscribe(1, resume=Takeover())
    order = types(stream.take()[1])
    for number in range(10):
        assert order.index(("DELETED", f"n{number}")) < order.index(("ADDED", f"n{number}"))
