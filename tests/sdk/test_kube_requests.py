"""The client: what goes over the wire, and what its answers become."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from torpor_sdk import (
    AlreadyExists,
    ApiError,
    CallError,
    Conflict,
    DeadlineExceeded,
    Fenced,
    Forbidden,
    Invalid,
    Kube,
    NotFound,
    Request,
    Resource,
    ServerError,
    Unavailable,
    retry_on_conflict,
)
from torpor_sdk.kinds import Kind

SECRETS = "/api/v1/namespaces/shop/secrets"
DATABASES = "/apis/example.com/v1/namespaces/shop/databases"
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a", "namespace": "shop"}}
DATABASE = {
    "apiVersion": "example.com/v1",
    "kind": "Database",
    "metadata": {"name": "orders", "namespace": "shop", "uid": "u1", "resourceVersion": "7"},
}
NO_SUCH_SECRET = {"reason": "NotFound", "message": 'secrets "a" not found', "details": {"name": "a"}}


@pytest.fixture
def kube(host: Any) -> Kube:
    return Kube(primary=Kind.parse("example.com/v1/databases"), manager="db-operator")


def body_of(fields: list[bytes]) -> Any:
    return json.loads(fields[4])


def status(reason: str, message: str = "no", **details: Any) -> Mapping[str, Any]:
    return {"kind": "Status", "reason": reason, "message": message, "details": details}


# ---- reading


def test_a_request_means_the_primary_of_its_key(kube: Kube, host: Any) -> None:
    host.answer("GET", f"{DATABASES}/orders", 200, DATABASE)
    db = kube.get(Request("shop", "orders"))
    assert isinstance(db, Resource)
    assert (db.name, db.namespace, db.uid, db.resource_version) == ("orders", "shop", "u1", "7")
    assert host.asked == [[b"GET", f"{DATABASES}/orders".encode(), b"application/json", b"", b"", b""]]


def test_a_resource_with_a_name_means_that_object(kube: Kube, host: Any) -> None:
    host.answer("GET", f"{SECRETS}/a", 200, SECRET)
    assert kube.get("v1/secrets", "a", "shop") == SECRET


def test_a_cluster_scoped_object_has_no_namespace_in_its_path(kube: Kube, host: Any) -> None:
    host.answer("GET", "/api/v1/nodes/n1", 200, {"kind": "Node"})
    assert kube.get("v1/nodes", "n1") is not None


def test_an_object_that_was_read_is_read_again(kube: Kube, host: Any) -> None:
    host.answer("GET", f"{SECRETS}/a", 200, {**SECRET, "data": {"x": "eQ=="}})
    assert kube.get(SECRET)["data"] == {"x": "eQ=="}


def test_an_object_that_is_not_there_is_none(kube: Kube, host: Any) -> None:
    host.answer("GET", f"{SECRETS}/a", 404, NO_SUCH_SECRET)
    assert kube.get("v1/secrets", "a", "shop") is None


def test_a_resource_that_is_not_served_is_an_error_and_no_missing_object(kube: Kube, host: Any) -> None:
    with pytest.raises(NotFound, match="nothing here"):
        kube.get("example.com/v1/typos", "a", "shop")


def test_names_are_quoted_in_paths(kube: Kube, host: Any) -> None:
    with pytest.raises(NotFound):
        kube.get("v1/secrets", "a/../b?x", "shop")
    assert host.requests() == [f"GET {SECRETS}/a%2F..%2Fb%3Fx"]


def test_an_empty_name_is_refused_instead_of_reading_the_list(kube: Kube) -> None:
    with pytest.raises(ValueError, match="a name is needed for v1/secrets"):
        kube.get("v1/secrets", "", "shop")


def test_a_list_goes_through_its_pages_with_its_selectors(kube: Kube, host: Any) -> None:
    query = "?labelSelector=app%3Dweb%2Ctier+in+%28a%2Cb%29&fieldSelector=metadata.name%3Dx&limit=500"
    first = {
        "kind": "SecretList",
        "apiVersion": "v1",
        "metadata": {"continue": "t0"},
        "items": [{"metadata": {"name": "1"}}],
    }
    last = {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": [{"metadata": {"name": "2"}}]}
    host.answer("GET", f"{SECRETS}{query}", 200, first)
    host.answer("GET", f"{SECRETS}{query}&continue=t0", 200, last)
    found = kube.list("v1/secrets", "shop", labels={"app": "web", "tier": ["a", "b"]}, fields={"metadata.name": "x"})
    assert [(obj.name, obj.kind, obj.api_version) for obj in found] == [("1", "Secret", "v1"), ("2", "Secret", "v1")]


def test_a_list_whose_pages_expire_is_read_in_one_piece(kube: Kube, host: Any) -> None:
    host.answer("GET", f"{SECRETS}?limit=500", 200, {"metadata": {"continue": "t0"}, "items": [SECRET]})
    host.answer("GET", f"{SECRETS}?limit=500&continue=t0", 410, status("Expired"))
    host.answer("GET", SECRETS, 200, {"items": [SECRET, {**SECRET, "metadata": {"name": "b"}}]})
    assert [obj.name for obj in kube.list("v1/secrets", "shop")] == ["a", "b"]


def test_a_list_can_be_of_what_an_object_owns(kube: Kube, host: Any) -> None:
    mine = {"metadata": {"name": "mine", "ownerReferences": [{"uid": "u1"}]}}
    other = {"metadata": {"name": "other", "ownerReferences": [{"uid": "u2"}]}}
    host.answer("GET", f"{SECRETS}?limit=500", 200, {"kind": "SecretList", "items": [mine, other, SECRET]})
    assert [obj.name for obj in kube.list("v1/secrets", "shop", owner=DATABASE)] == ["mine"]


def test_a_tree_is_asked_for_by_resource_and_key(kube: Kube, host: Any) -> None:
    host.answer("TREE", "example.com/v1/databases", 200, {"primary": DATABASE})
    assert kube.tree(Request("shop", "orders"), timeout_s=1.5) == {"primary": DATABASE}
    assert host.asked[0][1:5] == [b"example.com/v1/databases", b"shop", b"orders", b"1500"]


# ---- writing


def test_apply_is_server_side_apply_by_the_operator_with_its_owner(kube: Kube, host: Any) -> None:
    path = f"{SECRETS}/a?fieldManager=db-operator&force=true"
    host.answer("PATCH", path, 200, SECRET)
    described = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}, "data": {}}
    kube.apply(described, owner=DATABASE)
    (fields,) = host.asked
    assert fields[3] == b"application/apply-patch+yaml"
    reference = {
        "apiVersion": "example.com/v1",
        "kind": "Database",
        "name": "orders",
        "uid": "u1",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {"name": "a", "namespace": "shop", "ownerReferences": [reference]}
    assert body_of(fields) == {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {}}
    assert described["metadata"] == {"name": "a"}


def test_apply_leaves_out_what_the_api_server_refuses(kube: Kube, host: Any) -> None:
    host.answer("PATCH", f"{SECRETS}/a?fieldManager=db-operator", 200, SECRET)
    kube.apply({**SECRET, "metadata": {**SECRET["metadata"], "managedFields": [{}]}}, force=False)
    assert "managedFields" not in body_of(host.asked[0])["metadata"]


def test_patch_status_is_a_merge_patch_that_brings_the_object_up_to_date(kube: Kube, host: Any) -> None:
    host.answer("GET", f"{DATABASES}/orders", 200, DATABASE)
    after = {**DATABASE, "metadata": {**DATABASE["metadata"], "resourceVersion": "8"}, "status": {"ready": True}}
    host.answer("PATCH", f"{DATABASES}/orders/status?fieldManager=db-operator", 200, after)
    db = kube.get(Request("shop", "orders"))
    assert kube.patch_status(db, {"ready": True}) == after
    assert db == after
    assert host.asked[1][3] == b"application/merge-patch+json"
    assert body_of(host.asked[1]) == {"status": {"ready": True}}


def test_create_update_and_update_status_send_the_whole_object(kube: Kube, host: Any) -> None:
    host.answer("POST", f"{SECRETS}?fieldManager=db-operator", 201, SECRET)
    host.answer("PUT", f"{SECRETS}/a?fieldManager=db-operator", 200, {**SECRET, "data": {"v": "2"}})
    host.answer("PUT", f"{SECRETS}/a/status?fieldManager=db-operator", 200, {**SECRET, "status": {}})
    kube.create(SECRET)
    mine = Resource(SECRET)
    kube.update(mine)
    assert mine == {**SECRET, "data": {"v": "2"}}
    kube.update_status(mine)
    assert [body_of(fields) for fields in host.asked] == [SECRET, SECRET, {**SECRET, "data": {"v": "2"}}]


def test_delete_of_an_object_that_was_read_is_of_that_very_one(kube: Kube, host: Any) -> None:
    host.answer("GET", f"{DATABASES}/orders", 200, DATABASE)
    host.answer("DELETE", f"{DATABASES}/orders", 200, DATABASE)
    db = kube.get(Request("shop", "orders"))
    assert kube.delete(db) is True
    assert kube.delete(db, unchanged=True, propagation="Foreground") is True
    assert [body_of(fields)["preconditions"] for fields in host.asked[1:]] == [
        {"uid": "u1"},
        {"uid": "u1", "resourceVersion": "7"},
    ]
    assert body_of(host.asked[2])["propagationPolicy"] == "Foreground"


def test_delete_of_what_has_gone_is_false(kube: Kube, host: Any) -> None:
    host.answer("DELETE", f"{SECRETS}/a", 404, NO_SUCH_SECRET)
    assert kube.delete("v1/secrets", "a", "shop") is False


def test_an_object_without_a_namespace_is_refused_before_it_is_sent(kube: Kube, host: Any) -> None:
    with pytest.raises(ValueError, match=r"Secret a has no metadata.namespace"):
        kube.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}})
    assert host.asked == []


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        ({**DATABASE, "metadata": {"name": "orders", "namespace": "shop"}}, "cannot be an owner: it has no uid"),
        ({**DATABASE, "metadata": {**DATABASE["metadata"], "namespace": "other"}}, "must be in the same namespace"),
    ],
)
def test_an_owner_that_would_delete_its_object_is_refused(kube: Kube, owner: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kube.apply(SECRET, owner=owner)


def test_a_namespaced_owner_of_a_cluster_scoped_object_is_refused(kube: Kube) -> None:
    with pytest.raises(ValueError, match="which is cluster-scoped"):
        kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}}, owner=DATABASE)


def test_a_second_controller_is_refused(kube: Kube) -> None:
    owned = {**SECRET, "metadata": {**SECRET["metadata"], "ownerReferences": [{"uid": "x", "controller": True}]}}
    with pytest.raises(ValueError, match="is controlled by"):
        kube.apply(owned, owner=DATABASE)


def test_modify_reads_changes_and_writes_again_after_a_conflict(kube: Kube, host: Any) -> None:
    host.answer("GET", f"{SECRETS}/a", 200, SECRET)
    host.answer("PUT", f"{SECRETS}/a?fieldManager=db-operator", 409, status("Conflict"))
    host.answer("PUT", f"{SECRETS}/a?fieldManager=db-operator", 200, SECRET)
    kube.modify("v1/secrets", lambda obj: obj.labels.update(x="y"), "a", "shop")
    assert [request.split()[0] for request in host.requests()] == ["GET", "PUT", "GET", "PUT"]
    assert body_of(host.asked[3])["metadata"]["labels"] == {"x": "y"}


def test_modify_that_changes_nothing_writes_nothing(kube: Kube, host: Any) -> None:
    host.answer("GET", f"{SECRETS}/a", 200, SECRET)
    kube.modify("v1/secrets", lambda obj: None, "a", "shop")
    assert host.requests() == [f"GET {SECRETS}/a"]


def test_retry_on_conflict_gives_up_with_the_last_conflict() -> None:
    tries: list[int] = []

    def attempt() -> None:
        tries.append(1)
        raise Conflict(409, "Conflict", f"number {len(tries)}")

    with pytest.raises(Conflict, match="number 3"):
        retry_on_conflict(attempt, attempts=3)


# ---- errors


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (403, "Forbidden", Forbidden),
        (404, "NotFound", NotFound),
        (409, "AlreadyExists", AlreadyExists),
        (409, "Conflict", Conflict),
        (422, "Invalid", Invalid),
        (500, "InternalError", ServerError),
        (418, "Teapot", ApiError),
    ],
)
def test_a_refusal_of_the_api_server_is_an_error_of_its_own_kind(
    kube: Kube, host: Any, code: int, reason: str, error: type[ApiError]
) -> None:
    host.answer("PUT", f"{SECRETS}/a?fieldManager=db-operator", code, status(reason, "because", retryAfterSeconds=2))
    with pytest.raises(error, match=f"PUT {SECRETS}/a: {code} {reason}: because") as caught:
        kube.update(dict(SECRET))
    assert type(caught.value) is error
    assert (caught.value.status, caught.value.reason, caught.value.message) == (code, reason, "because")
    assert caught.value.retry_after_s == 2


def test_a_refusal_that_is_no_status_object_shows_its_text(kube: Kube, host: Any) -> None:
    host.answer("GET", f"{SECRETS}/a", 503, "no leader")
    with pytest.raises(ServerError, match="503 Unknown: "):
        kube.get("v1/secrets", "a", "shop")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("deadline", DeadlineExceeded),
        ("unavailable", Unavailable),
        ("fenced", Fenced),
        ("too-large", CallError),
        ("something-new", CallError),
    ],
)
def test_a_call_without_an_answer_is_an_error_with_the_hosts_code(
    kube: Kube, host: Any, code: str, error: type[CallError]
) -> None:
    host.fail("GET", f"{SECRETS}/a", code, "because")
    with pytest.raises(error, match=f"GET {SECRETS}/a: because") as caught:
        kube.get("v1/secrets", "a", "shop")
    assert caught.value.code == code


def test_an_answer_that_is_no_json_is_an_error(kube: Kube, host: Any) -> None:
    from torpor_sdk import _frames

    host.answers["GET", f"{SECRETS}/a"] = [_frames.encode(200, "application/json", b"{half")]
    with pytest.raises(CallError, match="the answer is no JSON"):
        kube.get("v1/secrets", "a", "shop")


# ---- which resource an object is


def test_built_in_kinds_need_no_discovery(kube: Kube, host: Any) -> None:
    ingress = {"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": {"name": "i", "namespace": "n"}}
    with pytest.raises(NotFound):
        kube.update(ingress)
    assert host.requests() == ["PUT /apis/networking.k8s.io/v1/namespaces/n/ingresses/i?fieldManager=db-operator"]


def test_what_was_read_needs_no_discovery_either(kube: Kube, host: Any) -> None:
    host.answer("GET", f"{DATABASES}/orders", 200, DATABASE)
    kube.get(Request("shop", "orders"))
    with pytest.raises(NotFound):
        kube.patch(DATABASE, {})
    assert host.requests()[1:] == [f"PATCH {DATABASES}/orders?fieldManager=db-operator"]


def test_other_kinds_are_discovered_once(kube: Kube, host: Any) -> None:
    resources = [
        {"name": "meshes/status", "kind": "Mesh", "namespaced": False},
        {"name": "meshes", "kind": "Mesh", "namespaced": False},
    ]
    host.answer("GET", "/apis/net.example.com/v2", 200, {"resources": resources})
    for _ in range(2):
        with pytest.raises(NotFound):
            kube.update({"apiVersion": "net.example.com/v2", "kind": "Mesh", "metadata": {"name": "m"}})
    assert host.requests().count("GET /apis/net.example.com/v2") == 1
    assert host.requests()[-1] == "PUT /apis/net.example.com/v2/meshes/m?fieldManager=db-operator"


def test_a_kind_that_is_not_served_is_not_found_and_asked_for_again_later(kube: Kube, host: Any) -> None:
    for _ in range(2):
        with pytest.raises(NotFound, match=r"serves no kind Mesh in net\.example\.com/v2; is its CRD installed"):
            kube.update({"apiVersion": "net.example.com/v2", "kind": "Mesh", "metadata": {"name": "m"}})
    assert host.requests() == ["GET /apis/net.example.com/v2"] * 2


@pytest.mark.parametrize("text", ["secrets", "", "a/b/c/d", "v1/", "apps/v1/Deployments"])
def test_what_is_no_resource_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not group/version/resource|plural in lower case"):
        Kind.parse(text)
