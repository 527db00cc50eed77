"""The whole service against a real kube-apiserver: what an in-memory one could agree with by mistake."""

import asyncio
import contextlib

import grpc
import pytest
from torpor.cache.v1 import cache_pb2
from torpor_cache.apiserver import ApiServer, Credentials
from torpor_cache.config import CacheConfig
from torpor_cache.kubeconfig import FixedCredentials
from torpor_cache.service import running
from torpor_cache.testing_client import CacheClient
from torpor_cache.testing_cluster import Admin
from torpor_kubernetes_testing.control_plane import ControlPlane
from torpor_services.security import Identity

HOST = Identity("host", "a")
FULL = cache_pb2.PAYLOAD_FULL


@contextlib.asynccontextmanager
async def cache_on(plane, folder):
    """(admin, address) of a cache that is ready."""
    ca_pem = await asyncio.to_thread(plane.ca_file.read_text)
    credentials = FixedCredentials(Credentials(plane.url, token=plane.admin_token, ca_pem=ca_pem))
    async with ApiServer(credentials, user_agent="test") as api:
        admin = Admin(api)
        await admin.install_crds()
        await admin.namespace("torpor-system")
        config = CacheConfig(listen=f"unix:{folder}/c.sock", state=folder / "state", drain_s=0.1)
        async with running(config, credentials=credentials) as service:
            await asyncio.wait_for(service.readiness.wait_ready(), 30)
            yield admin, service.address


@pytest.fixture
async def cache(control_plane, tmp_path):
    async with cache_on(control_plane, tmp_path) as made:
        yield made


def named(kind, name):
    return lambda got: any(r.type == kind and r.key[1] == name for r in got)


async def test_watch_write_and_read_as_the_operator(cache, namespace):
    admin, address = cache
    await admin.account(namespace, "op")
    await admin.allow(namespace, "op", ["configmaps"])
    caller = await admin.operator(namespace, "x")
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    async with CacheClient(address, HOST) as client:
        await client.subscribe(1, "v1/configmaps", namespace=namespace, caller=caller, payload=FULL)
        await client.until_synced(1)
        written = await client.request("POST", path, caller=caller, body={"metadata": {"name": "a"}})
        assert written.head.status == 201
        read = await client.request("GET", f"{path}/a", caller=caller, minimum=[written.head.written])
        assert (read.head.status, read.head.source) == (200, cache_pb2.Head.CACHE)
        event = (await client.until(1, named("ADDED", "a")))[-1]
        assert event.version == int(written.head.written.position.resource_version)
        assert b"managedFields" not in event.event.object
        everything = await client.request("GET", path, caller=caller)
        assert everything.head.source == cache_pb2.Head.CACHE
        assert {"ConfigMap"} == {item["kind"] for item in everything.json()["items"]}
        gone = await client.request("DELETE", f"{path}/a", caller=caller)
        assert gone.head.read_live
        await client.until(1, named("DELETED", "a"))


async def test_rights_are_the_accounts_own_until_they_are_taken_away(cache, namespace):
    admin, address = cache
    await admin.account(namespace, "op")
    role = await admin.allow(namespace, "op", ["configmaps"], names=["mine"], role="mine")
    caller = await admin.operator(namespace, "x")
    async with CacheClient(address, HOST) as client:
        await client.subscribe(1, "v1/configmaps", caller=caller)
        await client.subscribe(2, "v1/configmaps", namespace=namespace, caller=caller)
        selector = "metadata.name=mine"
        await client.subscribe(3, "v1/configmaps", namespace=namespace, caller=caller, field_selector=selector)
        for number in (1, 2):
            assert (await client.until(number, lambda got: got))[0].status["code"] == 403
        await client.until_synced(3)
        refused = await client.request("GET", f"/api/v1/namespaces/{namespace}/secrets", caller=caller)
        assert refused.head.status == 403
        assert f"system:serviceaccount:{namespace}:op" in refused.json()["message"]
        await admin.disallow(namespace, role)
        error = (await client.until(3, lambda got: got[-1].type == "ERROR"))[-1]
        assert error.status["code"] == 403 and error.event.error.final


async def test_group_rights_reach_a_service_account_and_a_missing_one_gets_none(cache, namespace):
    admin, address = cache
    await admin.account(namespace, "op")
    role = {"metadata": {"name": "all"}, "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["*"]}]}
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    await admin.ensure(f"{rbac}/roles", role)
    group = {"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": f"system:serviceaccounts:{namespace}"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "all"}
    await admin.ensure(f"{rbac}/rolebindings", {"metadata": {"name": "all"}, "roleRef": reference, "subjects": [group]})
    caller = await admin.operator(namespace, "x")
    homeless = await admin.operator(namespace, "y", account="missing")
    path = f"/api/v1/namespaces/{namespace}/secrets"
    async with CacheClient(address, HOST) as client:
        await client.subscribe(1, "v1/secrets", namespace=namespace, caller=caller)
        await client.until_synced(1)
        assert (await client.request("GET", path, caller=caller)).head.source == cache_pb2.Head.CACHE
        assert (await client.request("GET", path, caller=caller, live=True)).head.status == 200
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await client.request("GET", path, caller=homeless)
        assert failed.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_nothing_is_missed_while_the_api_server_is_killed_and_comes_back(kubernetes_assets, tmp_path):
    async with ControlPlane(kubernetes_assets) as plane, cache_on(plane, tmp_path) as (admin, address):
        await admin.namespace("team")
        await admin.account("team", "op")
        await admin.allow("team", "op", ["configmaps"])
        caller = await admin.operator("team", "x")
        path = "/api/v1/namespaces/team/configmaps"
        async with CacheClient(address, HOST) as client:
            await client.subscribe(1, "v1/configmaps", namespace="team", caller=caller, payload=FULL)
            await client.until_synced(1)
            await admin.config_map("team", "a")
            await client.until(1, named("ADDED", "a"))
            await plane.kill_apiserver()
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await client.request("POST", path, caller=caller, body={"metadata": {"name": "b"}})
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            await plane.restart_apiserver()
            await admin.config_map("team", "c")
            await admin.delete_config_map("team", "a")
            got = await client.until(1, named("DELETED", "a"), timeout_s=40)
            assert [(r.type, r.key[1]) for r in got if r.key[1]] == [
                ("ADDED", "a"),
                ("ADDED", "c"),
                ("DELETED", "a"),
            ]


async def test_deletions_while_the_cache_is_down_are_told_to_a_new_holder(control_plane, namespace, tmp_path):
    """Also where nothing happens afterwards: the server's bookmark says that all is told."""
    takeover = cache_pb2.Resume(from_acknowledged=True)
    fields = {"namespace": namespace, "name": "for"}
    async with cache_on(control_plane, tmp_path) as (admin, address), CacheClient(address, HOST) as client:
        await admin.account(namespace, "op")
        await admin.allow(namespace, "op", ["configmaps"])
        caller = await admin.operator(namespace, "x")
        for name in ("gone", "stays"):
            await admin.config_map(namespace, name, labels={"app": "x"})
        await client.subscribe(1, "v1/configmaps", caller=caller, **fields)
        await client.ack(1, (await client.until_synced(1))[-1])
        await admin.config_map(namespace, "heard-of")
        await client.until(1, named("ADDED", "heard-of"))
    await _as_admin(control_plane, lambda admin: admin.delete_config_map(namespace, "gone"))
    await _as_admin(control_plane, lambda admin: admin.delete_config_map(namespace, "heard-of"))
    async with cache_on(control_plane, tmp_path) as (_, address), CacheClient(address, HOST) as client:
        await client.subscribe(1, "v1/configmaps", caller=caller, resume=takeover, **fields)
        got = await client.until_synced(1)
        told = {(r.type, r.key[1]) for r in got if r.key[1] != "kube-root-ca.crt"}
        assert told == {("DELETED", "gone"), ("DELETED", "heard-of"), ("ADDED", "stays"), ("SYNCED", "")}


async def _as_admin(plane, act):
    ca_pem = await asyncio.to_thread(plane.ca_file.read_text)
    credentials = FixedCredentials(Credentials(plane.url, token=plane.admin_token, ca_pem=ca_pem))
    async with ApiServer(credentials, user_agent="test") as api:
        await act(Admin(api))


async def test_many_selectors_of_a_kind_are_one_watch_whose_reason_counts_the_objects(cache, namespace):
    admin, address = cache
    await admin.account(namespace, "op")
    await admin.allow(namespace, "op", ["configmaps"])
    caller = await admin.operator(namespace, "x")
    for name in ("a", "b", "c"):
        await admin.config_map(namespace, name, labels={"app": name})
    async with CacheClient(address, HOST) as client:
        for number, name in enumerate(("a", "b", "c"), 1):
            selector = f"app={name}"
            await client.subscribe(number, "v1/configmaps", namespace=namespace, caller=caller, label_selector=selector)
            got = await client.until_synced(number)
            assert [(r.type, r.key[1]) for r in got] == [("ADDED", name), ("SYNCED", "")]
        stats = await client.stub.Stats(cache_pb2.StatsRequest())
        (kind,) = [k for k in stats.kinds if k.resource.resource == "configmaps"]
        assert (kind.namespace, kind.label_selector, kind.subscriptions) == ("", "", 3)
        assert int(kind.reason.split()[2]) == kind.objects >= 3, kind.reason


async def test_an_object_nested_deep_disturbs_nobody_who_watches_its_kind(cache, namespace):
    admin, address = cache
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    crd = {
        "metadata": {"name": "nests.example.com"},
        "spec": {
            "group": "example.com",
            "scope": "Namespaced",
            "names": {"plural": "nests", "singular": "nest", "kind": "Nest", "listKind": "NestList"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }
    await admin.ensure("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    await admin.account(namespace, "op")
    await admin.allow(namespace, "op", ["nests"], groups=["example.com"])
    caller = await admin.operator(namespace, "x")
    path = f"/apis/example.com/v1/namespaces/{namespace}/nests"
    async with CacheClient(address, HOST) as client:
        await client.subscribe(1, "example.com/v1/nests", namespace=namespace, caller=caller, payload=FULL)
        await client.until_synced(1, timeout_s=30)
        deep = b'{"apiVersion":"example.com/v1","kind":"Nest","metadata":{"name":"deep"},"spec":%s1%s}'
        body = deep % (b'{"a":' * 5_000, b"}" * 5_000)
        written = await client.request("POST", path, caller=caller, body=body)
        assert written.head.status == 201 and written.head.HasField("written")
        flat = {"apiVersion": "example.com/v1", "kind": "Nest", "metadata": {"name": "flat"}}
        assert (await client.request("POST", path, caller=caller, body=flat)).head.status == 201
        await client.until(1, named("ADDED", "flat"))
        assert named("ADDED", "deep")(client.events[1])
        again = await client.request("GET", f"{path}/deep", caller=caller, minimum=[written.head.written])
        assert again.body.count(b'{"a":') == 5_000
