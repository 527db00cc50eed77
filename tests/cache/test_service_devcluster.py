"""The whole service over a Unix socket, against the in-memory API server."""

import asyncio
import contextlib
import logging
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torpor.cache.v1 import cache_pb2, cache_pb2_grpc
from torpor_cache.apiserver import ApiServer, Credentials
from torpor_cache.config import AccessLimits, CacheConfig, RequestLimits, RoleAccounts, StreamLimits, WatchChoice
from torpor_cache.kubeconfig import FixedCredentials
from torpor_cache.service import running
from torpor_cache.testing_client import CacheClient
from torpor_cache.testing_cluster import Admin
from torpor_devcluster import Config, DevCluster
from torpor_services.security import Identity

FULL = cache_pb2.PAYLOAD_FULL
NS = "team"
HOST = Identity("host", "a")


class Mesh:
    """A devcluster, its administrator, a cache."""

    def __init__(self, cluster, admin, service, folder):
        self.cluster, self.admin, self.service, self.folder = cluster, admin, service, folder

    def client(self, identity=HOST):
        return CacheClient(self.service.address, identity)


@contextlib.asynccontextmanager
async def prepared_cluster():
    """A devcluster with what every test needs: (cluster, admin, credentials)."""
    async with DevCluster(Config(tls=False)) as cluster:
        credentials = FixedCredentials(Credentials(cluster.url, token=cluster.admin_token))
        async with ApiServer(credentials, user_agent="test") as api:
            admin = Admin(api)
            await admin.install_crds()
            for namespace in ("torpor-system", NS):
                await admin.namespace(namespace)
            await admin.account(NS, "op")
            yield cluster, admin, credentials


@contextlib.asynccontextmanager
async def mesh_on(prepared, folder: Path, **settings):
    cluster, admin, credentials = prepared
    async with running(config(folder, **settings), credentials=credentials) as service:
        await asyncio.wait_for(service.readiness.wait_ready(), 20)
        yield Mesh(cluster, admin, service, folder)


@contextlib.asynccontextmanager
async def mesh(folder: Path, **settings):
    async with prepared_cluster() as prepared, mesh_on(prepared, folder, **settings) as made:
        yield made


def config(folder, **settings):
    return CacheConfig(listen=f"unix:{folder}/cache.sock", state=folder / "state", drain_s=0.1, **settings)


@pytest.fixture
async def m(tmp_path):
    async with mesh(tmp_path) as made:
        yield made


@pytest.fixture
async def narrow(tmp_path):
    """Kinds are watched in the scopes that are asked for."""
    async with mesh(tmp_path, watches=WatchChoice(wide_objects_max=0)) as made:
        yield made


def types(received):
    return [(each.type, each.key[1]) for each in received]


def named(kind, name):
    return lambda got: any(r.type == kind and r.key[1] == name for r in got)


async def test_snapshot_live_and_the_same_after_a_reconnect(m):
    await m.admin.allow(NS, "op", ["configmaps"])
    caller = await m.admin.operator(NS, "x")
    await m.admin.config_map(NS, "before")
    async with m.client() as client:
        fields = {"namespace": NS, "caller": caller, "payload": FULL, "name": "for"}
        await client.subscribe(1, "v1/configmaps", **fields)
        assert types(await client.until_synced(1)) == [("ADDED", "before"), ("SYNCED", "")]
        await m.admin.config_map(NS, "after", {"x": "1"})
        last = (await client.until(1, named("ADDED", "after")))[-1]
        assert b'"x":"1"' in last.event.object
        assert b"managedFields" not in last.event.object
        await client.disconnect()
        await m.admin.delete_config_map(NS, "before")
        position = cache_pb2.Position(history=last.history, resource_version=str(last.version))
        await client.subscribe(2, "v1/configmaps", resume=cache_pb2.Resume(position=position), **fields)
        assert types(await client.until_synced(2)) == [("DELETED", "before"), ("SYNCED", "")]


def _watches_of(m, resource):
    return [i for i in m.service.informers if i.scope.resource.resource == resource]


async def test_operators_in_many_namespaces_with_many_selectors_are_one_watch_and_see_their_own(m):
    async with m.client() as client:
        for number in range(1, 21):
            namespace = f"team-{number % 4}"
            await m.admin.namespace(namespace)
            await m.admin.account(namespace, "op")
            await m.admin.allow(namespace, "op", ["configmaps"])
            caller = await m.admin.operator(namespace, f"x{number}")
            labels = {"label_selector": f"app=x{number}"} if number % 2 else {"field_selector": "metadata.name=shared"}
            await client.subscribe(number, "v1/configmaps", namespace=namespace, caller=caller, **labels)
        for number in range(1, 21):
            await client.until_synced(number)
        (watch,) = _watches_of(m, "configmaps")
        assert (watch.scope.namespace, watch.scope.label_selector) == ("", "")
        assert watch.reason.startswith("watched whole: ")
        assert m.cluster.requests.watches_of("configmaps") == 1
        await m.admin.config_map("team-1", "one", labels={"app": "x1"})
        await m.admin.config_map("team-2", "shared")
        await client.until(1, named("ADDED", "one"))
        await client.until(2, named("ADDED", "shared"))
        for number in range(3, 21):
            seen = {r.key for r in client.events[number] if r.type == "ADDED"}
            assert seen == ({("team-2", "shared")} if number % 4 == 2 else set())


async def test_a_kind_watched_whole_gives_nobody_more_rights(m):
    await m.admin.namespace("other")
    await m.admin.config_map("other", "foreign")
    await m.admin.allow(NS, "op", ["configmaps"])
    caller = await m.admin.operator(NS, "x")
    async with m.client() as client:
        await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller)
        await client.until_synced(1)
        for path in ("/api/v1/configmaps", "/api/v1/namespaces/other/configmaps/foreign"):
            assert (await client.request("GET", path, caller=caller)).head.status == 403
        own = await client.request("GET", f"/api/v1/namespaces/{NS}/configmaps", caller=caller)
        assert (own.head.source, own.json()["items"]) == (cache_pb2.Head.CACHE, [])
        await client.subscribe(2, "v1/configmaps", namespace="other", caller=caller)
        assert (await client.until(2, lambda got: got))[0].status["code"] == 403


async def test_a_kind_with_too_many_objects_is_watched_where_it_is_asked_for(tmp_path):
    async with mesh(tmp_path, watches=WatchChoice(wide_objects_max=2)) as m:
        await m.admin.allow(NS, "op", ["configmaps"])
        caller = await m.admin.operator(NS, "x")
        for name in ("a", "b", "c"):
            await m.admin.config_map("torpor-system", name)
        async with m.client() as client:
            await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller)
            await client.until_synced(1)
        (watch,) = _watches_of(m, "configmaps")
        assert (watch.scope.namespace, len(watch.store)) == (NS, 0)
        assert "too large" in watch.reason


async def test_owners_are_named_by_plural_and_mapped_by_kind(m):
    await m.admin.allow(NS, "op", ["configmaps"])
    caller = await m.admin.operator(NS, "x")
    owner = cache_pb2.Mapping(owner=cache_pb2.OwnerMapping(owner=cache_pb2.Resource(resource="configmaps")))
    web = await m.admin.config_map(NS, "web")
    async with m.client() as client:
        await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller, mappings=[owner])
        await client.until_synced(1)
        uid = web["metadata"]["uid"]
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "web", "uid": uid, "controller": True}
        await m.admin.config_map(NS, "unowned")
        await m.admin.config_map(NS, "owned", ownerReferences=[reference])
        event = (await client.until(1, named("ADDED", "owned")))[-1]
        assert event.keys == ((NS, "web"),)
        assert not named("ADDED", "unowned")(client.events[1])
        nobody = cache_pb2.Mapping(
            owner=cache_pb2.OwnerMapping(owner=cache_pb2.Resource(group="apps", resource="nothings"))
        )
        await client.subscribe(2, "v1/configmaps", namespace=NS, caller=caller, mappings=[nobody])
        assert (await client.until(2, lambda got: got))[0].status["code"] == 404


async def test_what_a_subscription_may_not_see_fails_alone(m):
    role = await m.admin.allow(NS, "op", ["configmaps"], names=["mine"], role="mine")
    caller = await m.admin.operator(NS, "x")
    async with m.client() as client:
        await client.subscribe(1, "v1/configmaps", caller=caller)
        await client.subscribe(2, "v1/configmaps", caller=caller, namespace=NS)
        await client.subscribe(3, "v1/configmaps", caller=caller, namespace=NS, field_selector="metadata.name=mine")
        for number in (1, 2):
            (error,) = await client.until(number, lambda got: got)
            assert (error.type, error.status["code"], error.event.error.final) == ("ERROR", 403, True)
        assert types(await client.until_synced(3)) == [("SYNCED", "")]
        await m.admin.config_map(NS, "mine")
        await client.until(3, named("ADDED", "mine"))
        await m.admin.disallow(NS, role)
        got = await client.until(3, lambda got: got[-1].type == "ERROR")
        assert got[-1].status["code"] == 403
        assert not any(r.type == "DELETED" for r in got)


async def test_refused_by_name(m):
    caller = await m.admin.operator(NS, "x")
    tree = cache_pb2.Mapping(tree=cache_pb2.TreeMapping())
    async with m.client() as client:
        await client.subscribe(1, "v1/configmaps", caller=caller, mappings=[tree])
        await client.subscribe(2, "v1/configmaps", caller=caller, predicates=[cache_pb2.PREDICATE_NOT_OWN_WRITE])
        await client.subscribe(3, "v1/configmaps", caller=caller, label_selector="a in (")
        await client.subscribe(4, "v1/../secrets", caller=caller)
        await client.subscribe(5, "v1/configmaps", caller=caller, mappings=[cache_pb2.Mapping()])
        codes = [(await client.until(n, lambda got: got))[0].status["code"] for n in range(1, 6)]
        assert codes == [501, 501, 400, 400, 400]
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await client.stub.Tree(cache_pb2.TreeRequest())
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "Tree" in failed.value.details()


@pytest.mark.parametrize("broken", ["zero", "twice", "empty"])
async def test_a_client_that_breaks_the_protocol_loses_its_stream(m, broken):
    await m.admin.allow(NS, "op", ["configmaps"])
    caller = await m.admin.operator(NS, "x")
    async with m.client() as client:
        match broken:
            case "empty":
                await client.send(cache_pb2.WatchRequest())
            case "zero":
                await client.subscribe(0, "v1/configmaps", caller=caller)
            case "twice":
                await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller)
                await client.until_synced(1)  # it lives: one that has failed would free its number
                await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller)
        with pytest.raises(AssertionError, match="INVALID_ARGUMENT"):
            await client.until(99, lambda got: got)


async def test_a_kind_that_is_not_served_is_an_error_and_comes_alive_when_it_is(m):
    await m.admin.allow(NS, "op", ["things"], groups=["example.com"])
    caller = await m.admin.operator(NS, "x")
    crd = {
        "metadata": {"name": "things.example.com"},
        "spec": {
            "group": "example.com",
            "scope": "Namespaced",
            "names": {"plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList"},
            "versions": [
                {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
            ],
        },
    }
    async with m.client() as client:
        await client.subscribe(1, "example.com/v1/things", caller=caller, namespace=NS)
        first = (await client.until(1, lambda got: got))[0]
        assert (first.type, first.event.error.final) == ("ERROR", False)
        assert first.status["code"] == 404
        await m.admin.do("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        await client.until_synced(1, timeout_s=20)
        thing = {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "t"}}
        await m.admin.do("POST", f"/apis/example.com/v1/namespaces/{NS}/things", thing)
        await client.until(1, named("ADDED", "t"))
        await m.admin.do("DELETE", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/things.example.com")
        last = (await client.until(1, lambda got: got[-1].type == "ERROR", timeout_s=20))[-1]
        assert (last.status["code"], last.event.error.final) == (404, False)
        await client.subscribe(2, "example.com/v1/things", caller=caller, namespace=NS)
        (late,) = await client.until(2, lambda got: got)
        assert (late.type, late.status["code"]) == ("ERROR", 404)


async def test_reads_are_answered_from_memory_where_a_watch_covers_them(narrow):
    m = narrow
    await m.admin.allow(NS, "op", ["configmaps", "secrets"])
    caller = await m.admin.operator(NS, "x")
    await m.admin.config_map(NS, "a", labels={"app": "x"})
    path = f"/api/v1/namespaces/{NS}/configmaps"
    async with m.client() as client:
        source = cache_pb2.Head.UPSTREAM
        assert (await client.request("GET", f"{path}/a", caller=caller)).head.source == source
        await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller, label_selector="app=x")
        await client.until_synced(1)
        selected = await client.request("GET", f"{path}?labelSelector=app%3Dx&limit=1", caller=caller)
        assert selected.head.source == cache_pb2.Head.CACHE
        assert [item["metadata"]["name"] for item in selected.json()["items"]] == ["a"]
        assert (selected.json()["kind"], selected.json()["apiVersion"]) == ("ConfigMapList", "v1")
        # Watched with app=x: whether another object exists only the API server knows.
        assert (await client.request("GET", f"{path}/a", caller=caller)).head.source == source
        await client.subscribe(2, "v1/configmaps", namespace=NS, caller=caller)
        await client.until_synced(2)
        found = await client.request("GET", f"{path}/a", caller=caller)
        assert (found.head.source, found.head.status) == (cache_pb2.Head.CACHE, 200)
        assert found.json()["kind"] == "ConfigMap"
        missing = await client.request("GET", f"{path}/b", caller=caller)
        assert (missing.head.source, missing.head.status) == (cache_pb2.Head.CACHE, 404)
        assert missing.json()["reason"] == "NotFound"
        for query in ("?resourceVersion=1&resourceVersionMatch=Exact", "?limit=1&continue=x"):
            assert (await client.request("GET", path + query, caller=caller)).head.source == source
        table = "application/json;as=Table;v=v1;g=meta.k8s.io"
        assert (await client.request("GET", path, caller=caller, accept=table)).json()["kind"] == "Table"
        assert (await client.request("GET", f"{path}/a", caller=caller, live=True)).head.source == source


async def test_a_read_from_memory_is_checked_as_its_reader(m):
    await m.admin.account(NS, "other")
    await m.admin.allow(NS, "op", ["secrets"])
    caller = await m.admin.operator(NS, "x")
    nosy = await m.admin.operator(NS, "nosy", account="other")
    await m.admin.do("POST", f"/api/v1/namespaces/{NS}/secrets", {"metadata": {"name": "s"}})
    async with m.client() as client:
        await client.subscribe(1, "v1/secrets", namespace=NS, caller=caller)
        await client.until_synced(1)
        path = f"/api/v1/namespaces/{NS}/secrets"
        assert (await client.request("GET", f"{path}/s", caller=caller)).head.source == cache_pb2.Head.CACHE
        for target in (f"{path}/s", path):
            refused = await client.request("GET", target, caller=nosy)
            assert refused.head.status == 403
            assert "system:serviceaccount:team:other" in refused.json()["message"]


async def test_an_operator_reads_its_own_writes(m):
    await m.admin.allow(NS, "op", ["configmaps"])
    caller = await m.admin.operator(NS, "x")
    path = f"/api/v1/namespaces/{NS}/configmaps"
    async with m.client() as client:
        await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller)
        await client.until_synced(1)
        for number in range(20):
            name = f"n{number}"
            written = (await client.request("POST", path, caller=caller, body={"metadata": {"name": name}})).head
            assert written.written.position.history == client.events[1][0].history
            read = await client.request("GET", f"{path}/{name}", caller=caller, minimum=[written.written])
            assert (read.head.status, read.head.source) == (200, cache_pb2.Head.CACHE)


async def test_a_write_says_who_wrote_and_a_delete_is_read_live(m):
    await m.admin.allow(NS, "op", ["configmaps"])
    caller = await m.admin.operator(NS, "x", epoch=7)
    path = f"/api/v1/namespaces/{NS}/configmaps"
    async with m.client() as client:
        body = {"metadata": {"name": "a", "finalizers": ["example.com/x"]}}
        assert (await client.request("POST", path, caller=caller, body=body)).head.status == 201
        held = (await client.request("DELETE", f"{path}/a", caller=caller)).head
        assert held.read_live and not held.HasField("written")
        patch = {"metadata": {"finalizers": []}}
        kind = "application/merge-patch+json"
        gone = await client.request("PATCH", f"{path}/a", caller=caller, body=patch, content_type=kind)
        assert gone.head.read_live and not gone.head.HasField("written")
        dry = await client.request("POST", f"{path}?dryRun=All", caller=caller, body={"metadata": {"name": "b"}})
        assert dry.head.status == 201 and not dry.head.HasField("written")
    agents = {r.user_agent for r in m.cluster.requests.records if r.verb in ("create", "patch", "delete")}
    assert "torpor-operator/team/x host/a epoch/7" in agents


async def test_a_read_ahead_of_the_cache_is_to_be_retried(tmp_path):
    async with mesh(tmp_path, requests=RequestLimits(fresh_wait_s=0.1)) as m:
        await m.admin.allow(NS, "op", ["configmaps"])
        caller = await m.admin.operator(NS, "x")
        async with m.client() as client:
            await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller)
            history = (await client.until_synced(1))[-1].history
            ahead = cache_pb2.MinimumVersion(
                resource=cache_pb2.Resource(version="v1", resource="configmaps"),
                position=cache_pb2.Position(history=history, resource_version="99999999"),
            )
            path = f"/api/v1/namespaces/{NS}/configmaps/a"
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await client.request("GET", path, caller=caller, minimum=[ahead])
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            assert int(dict(failed.value.trailing_metadata())["retry-after-ms"]) > 0
            ahead.position.history = "another"
            answer = await client.request("GET", path, caller=caller, minimum=[ahead])
            assert answer.head.source == cache_pb2.Head.UPSTREAM


async def test_who_may_ask_for_whom(m):
    await m.admin.allow(NS, "op", ["configmaps"])
    caller = await m.admin.operator(NS, "x", epoch=5)
    path = f"/api/v1/namespaces/{NS}/configmaps"

    async def code(identity, **changed):
        asked = cache_pb2.Caller()
        asked.CopyFrom(caller)
        for field, value in changed.items():
            setattr(asked, field, value)
        async with m.client(identity) as client:
            try:
                await client.request("GET", path, caller=asked)
            except grpc.aio.AioRpcError as failed:
                return failed.code()
        return None

    assert await code(HOST) is None
    assert await code(Identity("host", "b")) is grpc.StatusCode.PERMISSION_DENIED
    assert await code(Identity("host", "b"), host="b") is grpc.StatusCode.PERMISSION_DENIED
    assert await code(Identity("client", "a")) is grpc.StatusCode.PERMISSION_DENIED
    assert await code(HOST, name="nobody") is grpc.StatusCode.PERMISSION_DENIED
    assert await code(HOST, epoch=4) is grpc.StatusCode.FAILED_PRECONDITION
    assert await code(HOST, epoch=6) is grpc.StatusCode.FAILED_PRECONDITION
    assert await code(HOST, name="../x") is grpc.StatusCode.INVALID_ARGUMENT
    await m.admin.assign(NS, "x", host="a", epoch=6)
    assert await code(HOST, epoch=6) is None  # at once, whether or not the watch has shown it
    await m.admin.operator(NS, "homeless", account="missing")
    assert await code(HOST, name="homeless", epoch=1) is grpc.StatusCode.PERMISSION_DENIED


async def test_another_assignment_ends_the_old_hosts_subscriptions(m):
    await m.admin.allow(NS, "op", ["configmaps"])
    caller = await m.admin.operator(NS, "x")
    other = await m.admin.operator(NS, "y")
    async with m.client() as client:
        await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller)
        await client.subscribe(2, "v1/configmaps", namespace=NS, caller=other)
        await client.until_synced(1)
        await client.until_synced(2)
        await m.admin.assign(NS, "x", host="b", epoch=2)
        error = (await client.until(1, lambda got: got[-1].type == "ERROR"))[-1]
        assert error.event.error.final and error.status["code"] == 403
        await m.admin.config_map(NS, "a")
        await client.until(2, named("ADDED", "a"))
        assert not named("ADDED", "a")(client.events[1])


async def test_services_speak_as_their_role(tmp_path):
    async with mesh(tmp_path, accounts=RoleAccounts(host=f"{NS}/op", client="")) as m:
        await m.admin.allow(NS, "op", ["configmaps"])
        path = f"/api/v1/namespaces/{NS}/configmaps"
        async with m.client() as client:
            assert (await client.request("GET", path)).head.status == 200
            assert (await client.request("GET", "/api/v1/secrets")).head.status == 403
            await client.subscribe(1, "v1/configmaps", namespace=NS)
            await client.until_synced(1)
        async with m.client(Identity("client", "cli")) as client:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await client.request("GET", path)
            assert failed.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "TORPOR_CACHE_ACCOUNT_CLIENT" in failed.value.details()


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/api/v1/namespaces/team/../kube-system/secrets", 400),
        ("GET", "/api/v1/namespaces/team/%2e%2e/secrets", 400),
        ("GET", "/api/v1/namespaces/te%2fam/secrets", 400),
        ("GET", "/metrics", 403),
        ("GET", "//evil.example/api/v1", 400),
        ("GET", "/api/v1/configmaps?watch=true", 405),
        ("GET", "/api/v1/watch/configmaps", 405),
        ("POST", "/api/v1/namespaces/team/pods/x/exec?command=sh", 405),
        ("GET", "/api/v1/namespaces/team/services/x/proxy/path", 405),
        ("CONNECT", "/api/v1/nodes", 405),
        ("GET", "/api/v1/configmaps HTTP/1.1\r\nX: y", 400),
    ],
)
async def test_requests_that_are_not_forwarded(m, method, path, code):
    caller = await m.admin.operator(NS, "x")
    async with m.client() as client:
        answer = await client.request(method, path, caller=caller)
        assert (answer.head.status, answer.head.source) == (code, cache_pb2.Head.CACHE)
        assert answer.json()["kind"] == "Status"


async def test_large_bodies_come_in_chunks(m):
    await m.admin.allow(NS, "op", ["configmaps"])
    caller = await m.admin.operator(NS, "x")
    path = f"/api/v1/namespaces/{NS}/configmaps"
    for number in range(6):
        await m.admin.config_map(NS, f"n{number}", {"x": "y" * 200_000})
    async with m.client() as client:
        upstream = await client.request("GET", path, caller=caller)
        await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller)
        await client.until_synced(1)
        cached = await client.request("GET", path, caller=caller)
        assert (upstream.chunks, cached.chunks) == (5, 5)
        assert [i["data"] for i in cached.json()["items"]] == [i["data"] for i in upstream.json()["items"]]


async def test_a_new_holder_is_told_what_was_deleted_since_also_after_a_restart_of_the_cache(tmp_path):
    takeover = cache_pb2.Resume(from_acknowledged=True)
    async with prepared_cluster() as prepared:
        async with mesh_on(prepared, tmp_path) as m:
            await m.admin.allow(NS, "op", ["configmaps"])
            caller = await m.admin.operator(NS, "x")
            fields = {"namespace": NS, "caller": caller, "name": "for"}
            await m.admin.config_map(NS, "kept")
            async with m.client() as client:
                await client.subscribe(1, "v1/configmaps", **fields)
                await client.until_synced(1)
                for name in ("first", "second"):
                    await m.admin.config_map(NS, name)
                    await m.admin.delete_config_map(NS, name)
                got = await client.until(1, named("DELETED", "second"))
                await client.ack(1, next(r for r in got if r.type == "DELETED" and r.key[1] == "first"))
                await client.subscribe(2, "v1/configmaps", resume=takeover, **(fields | {"name": "other"}))
                await client.until_synced(2)
            expected = [("DELETED", "second"), ("ADDED", "kept"), ("SYNCED", "")]
            async with m.client() as client:
                await client.subscribe(3, "v1/configmaps", resume=takeover, **fields)
                assert types(await client.until_synced(3)) == expected
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
        async with mesh_on(prepared, tmp_path) as m, m.client() as client:
            await client.subscribe(1, "v1/configmaps", resume=takeover, **fields)
            assert types(await client.until_synced(1)) == expected


async def test_health_follows_the_watches(tmp_path):
    async with DevCluster(Config(tls=False)) as cluster:
        credentials = FixedCredentials(Credentials(cluster.url, token=cluster.admin_token))
        async with ApiServer(credentials, user_agent="test") as api:
            async with running(config(tmp_path), credentials=credentials) as service:
                async with asyncio.timeout(10):
                    while "install-crds" not in service.readiness.missing.get("operators", ""):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                await Admin(api).install_crds()
                await asyncio.wait_for(service.readiness.wait_ready(), 20)
                async with CacheClient(service.address, HOST) as client:
                    stub = health_pb2_grpc.HealthStub(client.channel)
                    answer = await stub.Check(health_pb2.HealthCheckRequest())
                    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_it_starts_without_an_api_server_and_says_so(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    credentials = FixedCredentials(Credentials("http://127.0.0.1:1", token="x"))
    async with running(config(tmp_path), credentials=credentials) as service:
        assert not service.readiness.ready
        async with CacheClient(service.address, Identity("host", "torpor")) as client:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await client.request("GET", "/api/v1/pods")
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            await client.subscribe(1, "v1/configmaps")
            error = (await client.until(1, lambda got: got))[0]
            assert (error.status["code"], error.event.error.final) == (503, False)


async def test_idle_subscriptions_get_bookmarks(tmp_path):
    async with mesh(tmp_path, streams=StreamLimits(bookmark_s=0.1)) as m:
        await m.admin.allow(NS, "op", ["configmaps"])
        caller = await m.admin.operator(NS, "x")
        async with m.client() as client:
            await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller)
            got = await client.until(1, lambda got: any(r.type == "BOOKMARK" for r in got))
            assert got[-1].version >= got[0].version > 0


async def test_rights_that_are_taken_away_end_watches_without_an_rbac_watch(tmp_path):
    async with mesh(tmp_path, access=AccessLimits(allowed_s=1.0, watch_rbac=False)) as m:
        role = await m.admin.allow(NS, "op", ["configmaps"])
        caller = await m.admin.operator(NS, "x")
        async with m.client() as client:
            await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller)
            await client.until_synced(1)
            await m.admin.disallow(NS, role)
            error = (await client.until(1, lambda got: got[-1].type == "ERROR"))[-1]
            assert error.event.error.final and error.status["code"] == 403


async def test_an_account_that_is_deleted_ends_its_watches(tmp_path):
    async with mesh(tmp_path, access=AccessLimits(allowed_s=1.0)) as m:
        await m.admin.allow(NS, "op", ["configmaps"])
        caller = await m.admin.operator(NS, "x")
        async with m.client() as client:
            await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller)
            await client.until_synced(1)
            await m.admin.do("DELETE", f"/api/v1/namespaces/{NS}/serviceaccounts/op")
            error = (await client.until(1, lambda got: got[-1].type == "ERROR"))[-1]
            assert error.event.error.final and "does not exist" in error.status["message"]


async def test_a_conflict_is_to_be_read_live(m):
    await m.admin.allow(NS, "op", ["configmaps"])
    caller = await m.admin.operator(NS, "x")
    path = f"/api/v1/namespaces/{NS}/configmaps"
    async with m.client() as client:
        for status, read_live in ((201, False), (409, True)):
            head = (await client.request("POST", path, caller=caller, body={"metadata": {"name": "a"}})).head
            assert (head.status, head.read_live) == (status, read_live)


async def test_a_peer_without_an_identity_gets_nothing(m):
    async with grpc.aio.insecure_channel(m.service.address) as channel:
        stub = cache_pb2_grpc.ResourceCacheStub(channel)
        calls = (
            lambda: stub.Stats(cache_pb2.StatsRequest()),
            lambda: stub.Request(cache_pb2.HttpRequest(method="GET", path="/version")).read(),
            lambda: stub.Watch(iter(())).read(),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call()
            assert failed.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_stats(narrow):
    m = narrow
    await m.admin.allow(NS, "op", ["configmaps"])
    caller = await m.admin.operator(NS, "x")
    await m.admin.config_map(NS, "a")
    async with m.client() as client:
        await client.subscribe(1, "v1/configmaps", namespace=NS, caller=caller)
        await client.subscribe(2, "v1/configmaps", namespace=NS, caller=caller, label_selector="app=x")
        await client.until_synced(1)
        await client.until_synced(2)
        stats = await client.stub.Stats(cache_pb2.StatsRequest())
        (kind,) = [k for k in stats.kinds if k.resource.resource == "configmaps"]
        assert (kind.state, kind.subscriptions, kind.namespace) == ("synced", 2, NS)
        assert "TORPOR_CACHE_WIDE_OBJECTS_MAX" in kind.reason
        assert stats.history
        (subscriber,) = stats.subscribers
        assert (subscriber.subscriptions, subscriber.peer.split()[0]) == (2, "host/a")
        assert (subscriber.queued, subscriber.lag_s) == (0, 0)


async def test_a_stream_of_requests_answers_as_single_requests_do(m):
    await m.admin.allow(NS, "op", ["configmaps"], verbs=["get", "list", "watch", "create"])
    caller = await m.admin.operator(NS, "x")
    await m.admin.config_map(NS, "a", {"x": "1" * 700_000})
    path = f"/api/v1/namespaces/{NS}/configmaps"
    asked = [
        cache_pb2.HttpRequest(caller=caller, method="GET", path=f"{path}/a"),
        cache_pb2.HttpRequest(caller=caller, method="GET", path=f"{path}/missing"),
        cache_pb2.HttpRequest(caller=caller, method="GET", path=f"/api/v1/namespaces/{NS}/secrets/s"),
        cache_pb2.HttpRequest(
            caller=caller, method="POST", path=path, content_type="application/json", body=b'{"metadata":{"name":"a"}}'
        ),
        cache_pb2.HttpRequest(
            caller=cache_pb2.Caller(namespace=NS, name="x", host="b", epoch=1), method="GET", path=f"{path}/a"
        ),
        cache_pb2.HttpRequest(
            caller=cache_pb2.Caller(namespace=NS, name="x", host="a", epoch=0), method="GET", path=f"{path}/a"
        ),
    ]
    async with m.client() as client:
        for number, message in enumerate(asked, 1):
            streamed = client.stub.RequestStream(None)
            batch = cache_pb2.RequestBatch(requests=[cache_pb2.StreamedRequest(id=number, request=message)])
            await streamed.write(batch)
            await streamed.done_writing()
            responses = [response async for batch in streamed for response in batch.responses]
            assert {response.id for response in responses} == {number}
            assert [response.last for response in responses] == [False] * (len(responses) - 1) + [True]
            try:
                single = [response async for response in client.stub.Request(message)]
            except grpc.aio.AioRpcError as exc:
                assert responses[0].error.code == exc.code().value[0]
                assert responses[0].error.message == exc.details()
            else:
                assert [r.response for r in responses] == single


async def test_a_client_that_breaks_the_protocol_of_requests_is_told(m):
    async with m.client() as client:
        streamed = client.stub.RequestStream(None)
        await streamed.write(cache_pb2.RequestBatch(requests=[cache_pb2.StreamedRequest()]))
        with pytest.raises(grpc.aio.AioRpcError) as told:
            async for _ in streamed:
                pass
        assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "request 0" in told.value.details()


async def test_a_cache_that_ends_says_so_on_a_stream_of_requests_at_once(m):
    async with m.client() as client:
        streamed = client.stub.RequestStream(None)
        missing = cache_pb2.StreamedRequest(id=1, request=cache_pb2.HttpRequest(method="GET", path="/version"))
        await streamed.write(cache_pb2.RequestBatch(requests=[missing]))
        assert [response.id for _ in range(2) for response in (await streamed.read()).responses] == [1]
        m.service.servicer.close_streams()
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await streamed.read()
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE
