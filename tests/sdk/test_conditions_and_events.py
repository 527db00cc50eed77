"""Conditions keep the time of their last transition; the same event counts up."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from torpor_sdk import Kube, Operator, get_condition, is_true, set_condition
from torpor_sdk.clock import frozen
from torpor_sdk.testing import FakeKube, assert_condition, assert_event

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LATER = NOON + timedelta(minutes=5)
DATABASE = {"apiVersion": "example.com/v1", "kind": "Database", "metadata": {"name": "orders", "namespace": "shop"}}


def test_a_new_condition_has_the_time_and_generation_it_was_set_at() -> None:
    db: dict[str, Any] = {"metadata": {"generation": 3}}
    with frozen(NOON):
        assert set_condition(db, "Ready", True, "Available", "all well")
    assert db["status"]["conditions"] == [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Available",
            "message": "all well",
            "observedGeneration": 3,
            "lastTransitionTime": "2026-03-01T12:00:00Z",
        }
    ]


def test_the_transition_time_moves_with_the_status_only() -> None:
    db: dict[str, Any] = {}
    with frozen(NOON):
        set_condition(db, "Ready", False, "Starting")
    with frozen(LATER):
        assert set_condition(db, "Ready", False, "Pulling")
        assert get_condition(db, "Ready")["lastTransitionTime"] == "2026-03-01T12:00:00Z"
        assert set_condition(db, "Ready", True, "Available")
        assert get_condition(db, "Ready")["lastTransitionTime"] == "2026-03-01T12:05:00Z"


def test_setting_the_same_condition_again_changes_nothing() -> None:
    db: dict[str, Any] = {}
    with frozen(NOON):
        set_condition(db, "Ready", None, "Unsure")
    with frozen(LATER):
        assert not set_condition(db, "Ready", "Unknown", "Unsure")
    assert_condition(db, "Ready", "Unknown", "Unsure")


def test_other_conditions_keep_their_place() -> None:
    db: dict[str, Any] = {"status": {"conditions": [{"type": "A"}, {"type": "Ready"}, {"type": "B"}]}}
    set_condition(db, "Ready", True, "Available")
    assert [entry["type"] for entry in db["status"]["conditions"]] == ["A", "Ready", "B"]
    assert is_true(db, "Ready")
    assert not is_true(db, "A")


def test_an_event_is_about_its_object() -> None:
    kube = FakeKube()
    db = kube.add(DATABASE)
    with frozen(NOON):
        kube.event(db, "Started", "3 servers", "Normal")
    (event,) = kube.list("v1/events", "shop")
    assert event["involvedObject"] == {
        "apiVersion": "example.com/v1",
        "kind": "Database",
        "name": "orders",
        "namespace": "shop",
        "uid": db.uid,
        "resourceVersion": db.resource_version,
    }
    assert (event["type"], event["reason"], event["message"], event["count"]) == ("Normal", "Started", "3 servers", 1)
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-03-01T12:00:00Z"


def test_the_same_event_counts_up_also_after_a_sleep() -> None:
    cluster = FakeKube()
    db = cluster.add(DATABASE)
    for moment in (NOON, LATER):
        with frozen(moment):
            # A client of its own each time: nothing is remembered between wakes.
            op = Operator(for_="example.com/v1/databases", name="db")
            op.kube(send=cluster.cluster.send).event(db, "Failed", "no volume", "Warning")
    assert_event(cluster, db, "Failed", count=2)
    (event,) = cluster.list("v1/events")
    assert (event["firstTimestamp"], event["lastTimestamp"]) == ("2026-03-01T12:00:00Z", "2026-03-01T12:05:00Z")


def test_another_message_type_or_object_is_another_event() -> None:
    kube = FakeKube()
    one, other = kube.add(DATABASE), kube.add({**DATABASE, "metadata": {"name": "users", "namespace": "shop"}})
    kube.event(one, "Failed", "a", "Warning")
    kube.event(one, "Failed", "b", "Warning")
    kube.event(one, "Failed", "a", "Normal")
    kube.event(other, "Failed", "a", "Warning")
    assert [event["count"] for event in kube.list("v1/events")] == [1, 1, 1, 1]


def test_two_that_record_the_same_event_at_once_count_both(monkeypatch: pytest.MonkeyPatch) -> None:
    kube = FakeKube()
    db = kube.add(DATABASE)
    kube.event(db, "Failed", "a", "Warning")
    real, looks = kube.get, [None]
    # The first look comes before the other one's create.
    monkeypatch.setattr(kube, "get", lambda *args: looks.pop() if looks else real(*args))
    kube.event(db, "Failed", "a", "Warning")
    monkeypatch.undo()
    assert_event(kube, db, "Failed", count=2)


def test_an_event_about_a_cluster_scoped_object_is_in_default() -> None:
    kube = FakeKube()
    node = kube.add({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n" * 253}})
    kube.event(node, "Gone", "x" * 3000)
    (event,) = kube.list("v1/events", "default")
    assert len(event.name) <= 253
    assert len(event["message"]) == 1024


def test_an_event_that_cannot_be_recorded_does_not_fail_the_reconcile(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    db = kube.add(DATABASE)
    kube.fail_next("GET", "/events/", status=403, reason="Forbidden")
    Kube(send=kube.cluster.send).event(db, "Failed", "a", "Warning")
    assert "event Failed about Database shop/orders not recorded" in caplog.text
