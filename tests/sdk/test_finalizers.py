"""Finalizers: put before the first reconcile, run instead of it at deletion, taken away last."""

from typing import Any

import pytest
from torpor_sdk import Conflict, Kube, Operator, Request, Requeue, Resource, requeue_after
from torpor_sdk.testing import FakeKube, reconcile

NAME = "example.com/cleanup"
DATABASES = "example.com/v1/databases"
DATABASE = {"apiVersion": "example.com/v1", "kind": "Database", "metadata": {"name": "orders", "namespace": "shop"}}


class Recorded:
    """An operator that writes down what ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.again: Requeue | None = None
        self.op = Operator(for_=DATABASES)

        @self.op.finalizer(NAME)
        def cleanup(db: Resource, kube: Any) -> Requeue | None:
            self.ran.append(f"cleanup {db.name}")
            return self.again

        @self.op.reconcile
        def _(request: Request, kube: Any) -> None:
            db = kube.get(request)
            self.ran.append(f"reconcile {'nothing' if db is None else db.finalizers}")


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube(DATABASE)


def test_the_finalizer_is_there_before_the_first_reconcile_sees_the_object(recorded: Recorded, kube: FakeKube) -> None:
    reconcile(recorded.op, DATABASE, kube)
    assert recorded.ran == [f"reconcile {[NAME]}"]
    assert kube.must_get(DATABASE).finalizers == [NAME]


def test_the_primary_is_read_once_although_the_finalizer_looks_first(recorded: Recorded, kube: FakeKube) -> None:
    reconcile(recorded.op, DATABASE, kube)
    kube.sent.clear()
    reconcile(recorded.op, DATABASE, kube)
    assert [(sent.method, sent.path.rsplit("/", 1)[1]) for sent in kube.sent] == [("GET", "orders")]


def test_a_deletion_runs_the_finalizer_instead_of_reconcile_and_lets_go(recorded: Recorded, kube: FakeKube) -> None:
    reconcile(recorded.op, DATABASE, kube)
    kube.delete(DATABASE)
    assert kube.must_get(DATABASE).deleting
    recorded.ran.clear()
    assert reconcile(recorded.op, DATABASE, kube) is None
    assert recorded.ran == ["cleanup orders"]
    assert kube.get(DATABASE) is None


def test_a_finalizer_that_is_not_done_stays_and_runs_again(recorded: Recorded, kube: FakeKube) -> None:
    reconcile(recorded.op, DATABASE, kube)
    kube.delete(DATABASE)
    recorded.again = requeue_after(seconds=5)
    assert reconcile(recorded.op, DATABASE, kube) == requeue_after(seconds=5)
    assert kube.must_get(DATABASE).finalizers == [NAME]
    recorded.again = None
    reconcile(recorded.op, DATABASE, kube)
    assert kube.get(DATABASE) is None


def test_an_object_that_is_deleted_before_it_had_the_finalizer_gets_none(recorded: Recorded, kube: FakeKube) -> None:
    kube.add({**DATABASE, "metadata": {**DATABASE["metadata"], "finalizers": ["other.com/x"]}})
    kube.delete(DATABASE)
    reconcile(recorded.op, DATABASE, kube)
    assert recorded.ran == []
    assert kube.must_get(DATABASE).finalizers == ["other.com/x"]


def test_reconcile_sees_that_a_primary_has_gone(recorded: Recorded, kube: FakeKube) -> None:
    reconcile(recorded.op, "shop/nobody", kube)
    assert recorded.ran == ["reconcile nothing"]


def test_finalizers_of_others_are_kept_when_they_change_at_the_same_time(kube: FakeKube) -> None:
    stale = kube.must_get(DATABASE)
    kube.modify(DATABASE, lambda obj: obj.metadata.update(finalizers=["other.com/x"]))
    assert kube.add_finalizer(stale, NAME)
    assert kube.must_get(DATABASE).finalizers == ["other.com/x", NAME]
    assert stale.finalizers == ["other.com/x", NAME]
    assert not kube.add_finalizer(stale, NAME)


def test_removing_the_finalizer_of_what_has_gone_is_fine(kube: FakeKube) -> None:
    kube.add_finalizer(db := kube.must_get(DATABASE), NAME)
    kube.delete(DATABASE)
    copy = db.deepcopy()
    assert kube.remove_finalizer(copy, NAME)
    assert kube.get(DATABASE) is None
    assert not kube.remove_finalizer(db, NAME)


def test_a_conflict_that_does_not_end_goes_through(kube: FakeKube) -> None:
    db = kube.must_get(DATABASE)
    for _ in range(5):
        kube.fail_next("PATCH", "/databases/", status=409, reason="Conflict")
    with pytest.raises(Conflict):
        Kube(send=kube.cluster.send).add_finalizer(db, NAME)


def test_a_get_after_the_operators_own_write_sees_it() -> None:
    op, seen = Operator(for_="example.com/v1/databases"), list[object]()
    op.finalizer(NAME)(lambda db, kube: None)

    @op.reconcile
    def reconcile_one(request: Request, kube: Kube) -> None:
        kube.patch(request, {"metadata": {"labels": {"seen": "yes"}}})
        db = kube.get(request)
        seen.append(None if db is None else dict(db.labels))

    reconcile(op, DATABASE, FakeKube(DATABASE))
    assert seen == [{"seen": "yes"}]
