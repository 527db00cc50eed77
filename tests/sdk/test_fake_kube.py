"""The cluster in memory behaves as a real one where operators depend on it."""

import subprocess
import sys
from typing import Any

import pytest
from torpor_sdk import AlreadyExists, ApiError, Conflict, Kube, NotFound, Operator, OperatorError
from torpor_sdk.testing import FakeKube, assert_owned, assert_settled, converge, map_event, reconcile

CONFIG: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "a", "namespace": "shop"},
    "data": {"x": "1"},
}
DATABASE: dict[str, Any] = {
    "apiVersion": "example.com/v1",
    "kind": "Database",
    "metadata": {"name": "orders", "namespace": "shop"},
    "spec": {"size": 1},
}


def as_manager(cluster: FakeKube, manager: str) -> Kube:
    return Kube(manager=manager, send=cluster.cluster.send)


def test_a_created_object_has_uid_version_and_time() -> None:
    made = FakeKube().create(CONFIG)
    assert made.uid and made.resource_version and made.metadata["creationTimestamp"]


def test_a_name_is_generated() -> None:
    kube = FakeKube()
    names = {kube.create({**CONFIG, "metadata": {"generateName": "a-", "namespace": "shop"}}).name for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("a-") for name in names)


def test_creating_twice_is_already_exists() -> None:
    with pytest.raises(AlreadyExists):
        FakeKube(CONFIG).create(CONFIG)


def test_an_update_of_an_old_version_is_a_conflict() -> None:
    kube = FakeKube(CONFIG)
    stale = kube.must_get(CONFIG)
    kube.patch(CONFIG, {"data": {"x": "2"}})
    with pytest.raises(Conflict):
        kube.update(stale)


def test_a_write_that_changes_nothing_keeps_the_version() -> None:
    kube = FakeKube(CONFIG)
    before = kube.must_get(CONFIG)
    kube.patch(CONFIG, {"data": {"x": "1"}})
    assert kube.must_get(CONFIG) == before


def test_generation_counts_changes_of_the_spec_only() -> None:
    kube = FakeKube(DATABASE)
    kube.patch(DATABASE, {"metadata": {"labels": {"a": "b"}}})
    kube.patch_status(DATABASE, {"ready": True})
    assert kube.must_get(DATABASE).generation == 1
    kube.patch(DATABASE, {"spec": {"size": 2}})
    assert kube.must_get(DATABASE).generation == 2


def test_status_and_the_rest_are_written_apart() -> None:
    kube = FakeKube(DATABASE)
    kube.patch(DATABASE, {"status": {"ready": True}})
    assert "status" not in kube.must_get(DATABASE)
    kube.patch(DATABASE, {"spec": {"size": 9}, "status": {"ready": True}}, subresource="status")
    db = kube.must_get(DATABASE)
    assert (db.spec["size"], db.status) == (1, {"ready": True})
    other = {**DATABASE, "metadata": {"name": "users", "namespace": "shop"}, "status": {"ready": True}}
    assert "status" not in kube.create(other)


def test_apply_removes_what_its_manager_no_longer_says_and_nothing_else() -> None:
    cluster = FakeKube()
    one, two = as_manager(cluster, "one"), as_manager(cluster, "two")
    one.apply({**CONFIG, "data": {"a": "1", "b": "1"}})
    two.apply({**CONFIG, "data": {"c": "2"}})
    one.apply({**CONFIG, "data": {"a": "1"}})
    assert cluster.must_get(CONFIG)["data"] == {"a": "1", "c": "2"}


def test_apply_without_force_conflicts_with_another_applier() -> None:
    cluster = FakeKube()
    as_manager(cluster, "one").apply(CONFIG)
    two = as_manager(cluster, "two")
    with pytest.raises(Conflict, match=r"\.data\.x"):
        two.apply({**CONFIG, "data": {"x": "2"}}, force=False)
    two.apply({**CONFIG, "data": {"x": "2"}})
    assert cluster.must_get(CONFIG)["data"] == {"x": "2"}


def test_dependents_go_with_their_last_owner() -> None:
    kube = FakeKube()
    one = kube.add(DATABASE)
    two = kube.add({**DATABASE, "metadata": {"name": "users", "namespace": "shop"}})
    kube.apply(CONFIG, owner=one)
    kube.apply({**CONFIG, "metadata": {**CONFIG["metadata"], "ownerReferences": [], "name": "shared"}}, owner=one)
    shared = kube.must_get("v1/configmaps", "shared", "shop")
    assert_owned(shared, one)
    shared.metadata["ownerReferences"].append(
        {"apiVersion": "example.com/v1", "kind": "Database", "name": "users", "uid": two.uid}
    )
    kube.update(shared)
    kube.delete(one)
    assert kube.get(CONFIG) is None
    assert kube.get("v1/configmaps", "shared", "shop") is not None
    kube.delete(two)
    assert kube.get("v1/configmaps", "shared", "shop") is None


def test_a_namespace_takes_its_objects_with_it() -> None:
    kube = FakeKube({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}, CONFIG)
    kube.delete("v1/namespaces", "shop")
    assert kube.get(CONFIG) is None


def test_lists_are_selected_and_paged() -> None:
    kube = FakeKube()
    for number in range(1203):
        labels = {"parity": "odd" if number % 2 else "even"}
        kube.add({**CONFIG, "metadata": {"name": f"c{number:04d}", "namespace": "shop", "labels": labels}})
    operator = as_manager(kube, "operator")
    assert [obj.name for obj in operator.list("v1/configmaps")] == [f"c{number:04d}" for number in range(1203)]
    assert len(kube.sent) == 3
    assert len(kube.list("v1/configmaps", labels={"parity": "odd"})) == 601
    assert kube.list("v1/configmaps", "elsewhere") == []
    assert [obj.name for obj in kube.list("v1/configmaps", fields={"metadata.name": "c0007"})] == ["c0007"]


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("a=1", ["one"]),
        ("a==1", ["one"]),
        ("a!=1", ["none", "two"]),
        ("a", ["one", "two"]),
        ("!a", ["none"]),
        ("a in (1,2)", ["one", "two"]),
        ("a notin (1)", ["none", "two"]),
        ("a in (1,2),a!=2", ["one"]),
    ],
)
def test_label_selectors_mean_what_they_mean_in_kubernetes(selector: str, found: list[str]) -> None:
    kube = FakeKube()
    for name, labels in (("one", {"a": "1"}), ("two", {"a": "2"}), ("none", {})):
        kube.add({**CONFIG, "metadata": {"name": name, "namespace": "shop", "labels": labels}})
    assert [obj.name for obj in kube.list("v1/configmaps", labels=selector)] == found


def test_a_json_patch_changes_places_in_a_list() -> None:
    kube = FakeKube({**DATABASE, "spec": {"users": ["a", "b"]}})
    operations = [
        {"op": "test", "path": "/spec/users/0", "value": "a"},
        {"op": "replace", "path": "/spec/users/0", "value": "c"},
        {"op": "add", "path": "/spec/users/-", "value": "d"},
        {"op": "remove", "path": "/spec/users/1"},
    ]
    assert kube.patch(DATABASE, operations, type="json").spec == {"users": ["c", "d"]}
    with pytest.raises(ApiError, match="422"):
        kube.patch(DATABASE, [{"op": "remove", "path": "/spec/nothing"}], type="json")


def test_what_it_does_not_have_it_refuses() -> None:
    kube = FakeKube(DATABASE)
    with pytest.raises(ApiError, match="415 UnsupportedMediaType: FakeKube takes no"):
        kube.patch(DATABASE, {}, type="strategic")
    with pytest.raises(NotFound):
        kube.list("example.com/v1/unheard")


def test_a_fault_happens_once() -> None:
    kube = FakeKube(CONFIG)
    kube.fail_next("GET", "/configmaps/a", status=403, reason="Forbidden")
    operator = as_manager(kube, "operator")
    with pytest.raises(ApiError, match="403 Forbidden: as the test asked for"):
        operator.get(CONFIG)
    assert operator.get(CONFIG) is not None


def test_what_the_test_itself_does_is_neither_recorded_nor_broken() -> None:
    kube = FakeKube(CONFIG)
    kube.fail_next("GET", "/configmaps/a", status=403, reason="Forbidden")
    assert kube.get(CONFIG) is not None
    assert kube.sent == []
    as_manager(kube, "operator").delete(CONFIG)
    assert [(sent.method, sent.path) for sent in kube.writes] == [("DELETE", "/api/v1/namespaces/shop/configmaps/a")]


def test_must_get_says_what_there_is() -> None:
    with pytest.raises(AssertionError, match="there is no v1/secrets shop/x; there are: ConfigMap shop/a"):
        FakeKube(CONFIG).must_get("v1/secrets", "x", "shop")


def test_converge_stops_when_nothing_changes_and_complains_when_it_never_does() -> None:
    op = Operator(for_="example.com/v1/databases")
    limit = {"size": 5}

    @op.reconcile
    def _(request: Any, kube: Any) -> None:
        db = kube.get(request)
        kube.patch(db, {"spec": {"size": min(limit["size"], db.spec["size"] + 1)}})

    kube = FakeKube(DATABASE)
    assert converge(op, kube) == {"shop/orders": None}
    assert kube.must_get(DATABASE).spec["size"] == 5
    assert_settled(op, DATABASE, kube)
    limit["size"] = 1000
    with pytest.raises(AssertionError, match="after 20 rounds the operator still writes"):
        converge(op, kube)
    with pytest.raises(AssertionError, match="another reconcile changed something"):
        assert_settled(op, DATABASE, kube)


def test_an_event_is_mapped_as_the_guest_would() -> None:
    op = Operator(for_="example.com/v1/databases")
    op.map("v1/nodes")(lambda event, kube: [("shop", event.object.name)])
    assert map_event(op, "v1/nodes", "ADDED", {"metadata": {"name": "n"}}) == ["shop/n"]
    with pytest.raises(OperatorError, match=r"no @op.map\('v1/pods'\)"):
        map_event(op, "v1/pods", "ADDED", {})


def test_outside_of_guest_and_test_a_call_says_where_it_works() -> None:
    kube = Operator(for_="v1/pods").kube()
    with pytest.raises(OperatorError, match=r"In a unit test run the operator with torpor_sdk\.testing"):
        kube.get("v1/pods", "a", "b")


def test_errors_go_through_to_the_test() -> None:
    op = Operator(for_="v1/pods")

    @op.reconcile
    def _(request: Any, kube: Any) -> None:
        raise LookupError(request.key)

    with pytest.raises(LookupError, match="a/b"):
        reconcile(op, "a/b", FakeKube())


def test_a_guest_never_imports_the_testing_package() -> None:
    code = "import sys, torpor_sdk._guest; print([m for m in sys.modules if 'testing' in m and 'torpor' in m])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
