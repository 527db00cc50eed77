"""Objects go when their time has come: not before, and not if it was put off."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest
from torpor_sdk import Conflict, requeue_after
from torpor_sdk.testing import FakeKube, assert_event, reconcile

CLASS = "ttl.example.com/class"
EXPIRES_AT = "ttl.example.com/expires-at"
TTL = "ttl.example.com/ttl"
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def note(**annotations: str) -> dict[str, Any]:
    named = {{"at": EXPIRES_AT, "ttl": TTL}[key]: value for key, value in annotations.items()}
    metadata = {
        "name": "note",
        "namespace": "scratch",
        "labels": {CLASS: "default"},
        "annotations": named,
        "creationTimestamp": "2026-03-01T12:00:00Z",
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


@pytest.fixture
def ttl(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("ttl/operator")


@pytest.mark.parametrize(
    ("annotations", "wait"),
    [
        ({"at": "2026-03-01T13:00:00Z"}, timedelta(hours=1)),
        ({"at": "2026-03-01T13:00:00+01:00"}, timedelta(0)),
        ({"ttl": "90s"}, timedelta(seconds=90)),
        ({"ttl": "1d2h3m4s"}, timedelta(days=1, hours=2, minutes=3, seconds=4)),
        ({"ttl": "2h", "at": "2026-03-01T13:00:00Z"}, timedelta(hours=1)),
        ({"ttl": "30m", "at": "2026-03-01T13:00:00Z"}, timedelta(minutes=30)),
    ],
)
def test_it_waits_until_the_time_and_deletes_at_it(
    ttl: ModuleType, annotations: dict[str, str], wait: timedelta
) -> None:
    kube = FakeKube(described := note(**annotations))
    if wait:
        assert reconcile(ttl.op, described, kube, now=NOON) == requeue_after(wait)
        assert reconcile(ttl.op, described, kube, now=NOON + wait - timedelta(seconds=1)) == requeue_after(seconds=1)
        assert kube.get(described) is not None
    assert reconcile(ttl.op, described, kube, now=NOON + wait) is None
    assert kube.get(described) is None


def test_a_time_that_was_put_off_replaces_the_timer(ttl: ModuleType) -> None:
    kube = FakeKube(described := note(ttl="1h"))
    assert reconcile(ttl.op, described, kube, now=NOON) == requeue_after(hours=1)
    kube.patch(described, {"metadata": {"annotations": {TTL: "3h"}}})
    assert reconcile(ttl.op, described, kube, now=NOON + timedelta(hours=1)) == requeue_after(hours=2)


def test_a_time_put_off_in_the_last_moment_is_a_conflict_and_not_a_deletion(
    ttl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube = FakeKube(described := note(ttl="1h"))
    real = ttl.expiry

    def meanwhile(obj: Any) -> Any:
        kube.patch(described, {"metadata": {"annotations": {TTL: "9h"}}})
        return real(obj)

    monkeypatch.setattr(ttl, "expiry", meanwhile)
    with pytest.raises(Conflict):
        reconcile(ttl.op, described, kube, now=NOON + timedelta(hours=2))
    assert kube.get(described) is not None


@pytest.mark.parametrize(
    "annotations",
    [{"ttl": "soon"}, {"ttl": ""}, {"ttl": "-1h"}, {"ttl": "99999999999d"}, {"at": "tomorrow"}, {"at": ""}],
)
def test_a_time_that_is_none_is_said_and_nothing_is_deleted(ttl: ModuleType, annotations: dict[str, str]) -> None:
    kube = FakeKube(described := note(**annotations))
    assert reconcile(ttl.op, described, kube, now=NOON + timedelta(days=10_000)) is None
    assert kube.get(described) is not None
    assert_event(kube, described, "InvalidTTL", count=1)


def test_without_an_annotation_an_object_stays(ttl: ModuleType) -> None:
    kube = FakeKube(described := note())
    assert reconcile(ttl.op, described, kube, now=NOON) is None
    assert kube.get(described) is not None


def test_objects_of_another_class_are_another_instances(ttl: ModuleType) -> None:
    kube = FakeKube(described := note(at="2020-01-01T00:00:00Z"))
    assert reconcile(ttl.op, described, kube, now=NOON, config={"class": "other"}) is None
    assert kube.get(described) is not None


def test_the_resource_is_configuration(ttl: ModuleType) -> None:
    job = {**note(at="2020-01-01T00:00:00Z"), "apiVersion": "batch/v1", "kind": "Job"}
    kube = FakeKube(job)
    reconcile(ttl.op, "scratch/note", kube, now=NOON, config={"resource": "batch/v1/jobs"})
    assert kube.get(job) is None


def test_what_is_going_already_is_left_to_go(ttl: ModuleType) -> None:
    described = note(at="2020-01-01T00:00:00Z")
    described["metadata"] |= {"finalizers": ["other.com/x"], "deletionTimestamp": "2026-03-01T11:00:00Z"}
    kube = FakeKube(described)
    kube.sent.clear()
    assert reconcile(ttl.op, described, kube, now=NOON) is None
    assert kube.writes == []
