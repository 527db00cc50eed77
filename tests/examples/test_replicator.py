"""Copies are where their source says, as their source is, and nowhere else."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torpor_sdk import Kube
from torpor_sdk.testing import FakeKube, assert_event, assert_settled, map_event, reconcile

CLASS = "replicator.example.com/class"
TO = "replicator.example.com/to"
TO_SELECTOR = "replicator.example.com/to-selector"


def namespace(name: str, **labels: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def source(kind: str = "Secret", *, to: str = "team-*", **fields: Any) -> dict[str, Any]:
    metadata = {"name": "registry", "namespace": "home", "labels": {CLASS: "default"}, "annotations": {TO: to}}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "data": {"token": "eA=="}, **fields}


@pytest.fixture
def replicator(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("replicator/operator")


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube(namespace("home"), namespace("team-red", stage="production"), namespace("team-blue"))


def where(kube: Kube, resource: str = "v1/secrets") -> list[str]:
    return [obj.namespace for obj in kube.list(resource) if obj.name == "registry"]


def run(replicator: ModuleType, kube: FakeKube, **arguments: Any) -> None:
    reconcile(replicator.op, "home/registry", kube, **arguments)


@pytest.mark.parametrize(("kind", "resource"), [("Secret", "v1/secrets"), ("ConfigMap", "v1/configmaps")])
def test_a_source_is_copied_to_the_namespaces_it_names(
    replicator: ModuleType, kube: FakeKube, kind: str, resource: str
) -> None:
    kube.add(source(kind))
    run(replicator, kube)
    assert where(kube, resource) == ["home", "team-blue", "team-red"]
    copy = kube.must_get(resource, "registry", "team-red")
    assert copy["data"] == {"token": "eA=="}
    assert CLASS not in copy.labels
    assert copy.annotations == {"replicator.example.com/source": "home/registry"}
    assert_settled(replicator.op, "home/registry", kube)


def test_namespaces_can_be_chosen_by_their_labels(replicator: ModuleType, kube: FakeKube) -> None:
    described = source(to="")
    described["metadata"]["annotations"][TO_SELECTOR] = "stage=production"
    kube.add(described)
    run(replicator, kube)
    assert where(kube) == ["home", "team-red"]


def test_a_changed_source_changes_its_copies_down_to_removed_keys(replicator: ModuleType, kube: FakeKube) -> None:
    described = kube.add(source(data={"token": "eA==", "old": "eQ=="}))
    run(replicator, kube)
    kube.patch(described, {"data": {"token": "eg==", "old": None}})
    run(replicator, kube)
    assert kube.must_get("v1/secrets", "registry", "team-red")["data"] == {"token": "eg=="}


def test_a_copy_that_someone_changed_is_put_right(replicator: ModuleType, kube: FakeKube) -> None:
    kube.add(source())
    run(replicator, kube)
    kube.patch("v1/secrets", {"data": {"token": "bad", "added": "bad"}}, "registry", "team-red")
    run(replicator, kube)
    assert kube.must_get("v1/secrets", "registry", "team-red")["data"] == {"token": "eA=="}


def test_a_copy_that_someone_deleted_is_back(replicator: ModuleType, kube: FakeKube) -> None:
    kube.add(source())
    run(replicator, kube)
    kube.delete("v1/secrets", "registry", "team-red")
    run(replicator, kube)
    assert where(kube) == ["home", "team-blue", "team-red"]


def test_copies_go_when_the_source_goes_also_after_any_time_away(replicator: ModuleType, kube: FakeKube) -> None:
    described = kube.add(source())
    run(replicator, kube)
    kube.delete(described)
    run(replicator, kube, cause="start")
    assert where(kube) == []


@pytest.mark.parametrize(
    "change",
    [
        {"annotations": {TO: None}},
        {"annotations": {TO: "nowhere"}},
        {"labels": {CLASS: None}},
        {"labels": {CLASS: "other"}},
    ],
)
def test_copies_go_when_the_source_no_longer_says_so(
    replicator: ModuleType, kube: FakeKube, change: dict[str, Any]
) -> None:
    described = kube.add(source())
    run(replicator, kube)
    kube.patch(described, {"metadata": change})
    run(replicator, kube)
    assert where(kube) == ["home"]


def test_the_secret_and_the_configmap_of_one_name_do_not_disturb_each_other(
    replicator: ModuleType, kube: FakeKube
) -> None:
    secret = kube.add(source("Secret"))
    kube.add(source("ConfigMap", to="team-red"))
    run(replicator, kube)
    kube.delete(secret)
    run(replicator, kube)
    assert (where(kube, "v1/secrets"), where(kube, "v1/configmaps")) == ([], ["home", "team-red"])


def test_an_object_of_someone_else_is_left_alone_and_said_so(replicator: ModuleType, kube: FakeKube) -> None:
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "registry", "namespace": "team-red"}}
    kube.add({**theirs, "data": {"own": "eA=="}})
    described = kube.add(source())
    run(replicator, kube)
    assert kube.must_get(theirs)["data"] == {"own": "eA=="}
    assert where(kube) == ["home", "team-blue", "team-red"]
    assert_event(kube, described, "NameTaken", count=1)


def test_a_secret_of_another_type_is_made_anew(replicator: ModuleType, kube: FakeKube) -> None:
    kube.add(source(type="Opaque"))
    run(replicator, kube)
    before = kube.must_get("v1/secrets", "registry", "team-red").uid
    kube.add(source(type="kubernetes.io/tls"))
    run(replicator, kube)
    copy = kube.must_get("v1/secrets", "registry", "team-red")
    assert copy["type"] == "kubernetes.io/tls"
    assert copy.uid != before


def test_a_namespace_that_is_going_gets_no_copy(replicator: ModuleType, kube: FakeKube) -> None:
    kube.add({**namespace("team-old"), "metadata": {"name": "team-old", "deletionTimestamp": "2026-01-01T00:00:00Z"}})
    kube.add(source())
    run(replicator, kube)
    assert "team-old" not in where(kube)


def test_a_namespace_concerns_every_source_of_the_class(replicator: ModuleType, kube: FakeKube) -> None:
    kube.add(source())
    other = source("ConfigMap")
    other["metadata"] |= {"name": "proxy"}
    kube.add(other)
    foreign = source("ConfigMap")
    foreign["metadata"] |= {"name": "foreign", "labels": {CLASS: "other"}}
    kube.add(foreign)
    keys = map_event(replicator.op, "v1/namespaces", "ADDED", namespace("team-new"), kube)
    assert keys == ["home/registry", "home/proxy"]


def test_instances_of_two_classes_leave_each_others_copies_alone(replicator: ModuleType, kube: FakeKube) -> None:
    kube.add(source())
    run(replicator, kube)
    run(replicator, kube, config={"class": "other"})
    assert where(kube) == ["home", "team-blue", "team-red"]
