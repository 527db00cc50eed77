"""A Database becomes what it says, keeps its password, reports, and cleans up."""

import base64
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torpor_sdk.testing import (
    FakeKube,
    assert_condition,
    assert_event,
    assert_owned,
    assert_settled,
    reconcile,
)

ORDERS = {
    "apiVersion": "example.com/v1",
    "kind": "Database",
    "metadata": {"name": "orders", "namespace": "databases"},
    "spec": {"replicas": 2, "storage": "10Gi", "parameters": {"max_connections": "200"}},
}
DATABASES = "example.com/v1/databases"


@pytest.fixture
def database(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("database/operator")


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube(ORDERS)


def get(kube: FakeKube, resource: str, name: str) -> Any:
    return kube.must_get(resource, name, "databases")


def decoded(secret: Any) -> dict[str, str]:
    return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}


def claim(name: str, database: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "database", "app.kubernetes.io/instance": database}
    metadata = {"name": name, "namespace": "databases", "labels": labels}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}


def test_it_makes_four_objects_that_it_owns(database: ModuleType, kube: FakeKube) -> None:
    reconcile(database.op, ORDERS, kube)
    db = kube.must_get(ORDERS)
    for resource, name in (
        ("v1/secrets", "orders-credentials"),
        ("v1/configmaps", "orders-config"),
        ("v1/services", "orders"),
        ("apps/v1/statefulsets", "orders"),
    ):
        assert_owned(get(kube, resource, name), db)


def test_the_servers_get_what_the_database_says(database: ModuleType, kube: FakeKube) -> None:
    reconcile(database.op, ORDERS, kube)
    spec = get(kube, "apps/v1/statefulsets", "orders")["spec"]
    assert spec["replicas"] == 2
    assert spec["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] == "10Gi"
    assert "max_connections = '200'" in get(kube, "v1/configmaps", "orders-config")["data"]["postgresql.conf"]


def test_the_password_is_random_and_stays(database: ModuleType, kube: FakeKube) -> None:
    reconcile(database.op, ORDERS, kube)
    first = decoded(get(kube, "v1/secrets", "orders-credentials"))
    assert len(first["password"]) >= 24
    assert first["url"] == f"postgresql://orders:{first['password']}@orders.databases.svc:5432/orders"
    kube.patch(ORDERS, {"spec": {"replicas": 3}})
    reconcile(database.op, ORDERS, kube)
    assert decoded(get(kube, "v1/secrets", "orders-credentials")) == first

    other = FakeKube(ORDERS)
    reconcile(database.op, ORDERS, other)
    assert decoded(get(other, "v1/secrets", "orders-credentials"))["password"] != first["password"]


def test_a_changed_parameter_restarts_the_servers_and_nothing_else_does(database: ModuleType, kube: FakeKube) -> None:
    def template() -> Any:
        reconcile(database.op, ORDERS, kube)
        return get(kube, "apps/v1/statefulsets", "orders")["spec"]["template"]

    first = template()
    kube.patch(ORDERS, {"spec": {"replicas": 5}})
    assert template() == first
    kube.patch(ORDERS, {"spec": {"parameters": {"work_mem": "8MB"}}})
    assert template() != first


def test_it_is_ready_when_all_servers_are(database: ModuleType, kube: FakeKube) -> None:
    reconcile(database.op, ORDERS, kube)
    db = kube.must_get(ORDERS)
    assert_condition(db, "Ready", False, "Starting")
    assert (db.status["phase"], db.status["readyReplicas"]) == ("Starting", 0)
    kube.patch_status("apps/v1/statefulsets", {"readyReplicas": 2}, "orders", "databases")
    reconcile(database.op, ORDERS, kube)
    db = kube.must_get(ORDERS)
    assert_condition(db, "Ready", True, "Available")
    assert db.status["endpoint"] == "orders.databases.svc:5432"
    assert db.status["observedGeneration"] == db.generation
    assert_event(kube, db, "Available", count=1)


def test_it_comes_to_rest(database: ModuleType, kube: FakeKube) -> None:
    reconcile(database.op, ORDERS, kube)
    assert_settled(database.op, ORDERS, kube)


@pytest.mark.parametrize("parameters", [{"a\nb": "1"}, {"UPPER": "1"}, {"x": "1'\nlisten_addresses = '*"}])
def test_a_parameter_that_would_break_the_file_is_said_and_not_retried(
    database: ModuleType, parameters: dict[str, str]
) -> None:
    kube = FakeKube({**ORDERS, "spec": {"parameters": parameters}})
    assert reconcile(database.op, ORDERS, kube) is None
    db = kube.must_get(ORDERS)
    assert_condition(db, "Ready", False, "InvalidSpec")
    assert_event(kube, db, "InvalidSpec")
    assert kube.get("apps/v1/statefulsets", "orders", "databases") is None


def test_quotes_in_a_parameter_stay_inside_of_it(database: ModuleType) -> None:
    kube = FakeKube({**ORDERS, "spec": {"parameters": {"log_line_prefix": "it's"}}})
    reconcile(database.op, ORDERS, kube)
    assert "log_line_prefix = 'it''s'\n" in get(kube, "v1/configmaps", "orders-config")["data"]["postgresql.conf"]


@pytest.mark.parametrize(
    ("policy", "left"), [("Delete", ["data-users-0"]), ("Retain", ["data-orders-0", "data-users-0"])]
)
def test_its_volumes_go_with_it_unless_they_are_retained(
    database: ModuleType, kube: FakeKube, policy: str, left: list[str]
) -> None:
    kube.patch(ORDERS, {"spec": {"deletionPolicy": policy}})
    kube.add(claim("data-orders-0", "orders"))
    kube.add(claim("data-users-0", "users"))
    reconcile(database.op, ORDERS, kube)
    kube.delete(ORDERS)
    reconcile(database.op, ORDERS, kube)
    assert kube.get(ORDERS) is None
    assert [obj.name for obj in kube.list("v1/persistentvolumeclaims")] == left
    assert kube.get("v1/secrets", "orders-credentials", "databases") is None


def test_a_database_that_has_gone_is_nothing_to_do(database: ModuleType, kube: FakeKube) -> None:
    kube.sent.clear()
    reconcile(database.op, "databases/unknown", kube)
    assert kube.writes == []
