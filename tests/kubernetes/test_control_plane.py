"""The real API server that other tests rely on does what they rely on."""

import asyncio
import contextlib
import secrets
from pathlib import Path

import aiohttp
import pytest
from torpor_kubernetes_testing import (
    ApiError,
    ControlPlane,
    ProcessFailed,
    User,
    create_service_account,
    grant,
    install_crd,
    remove_crd,
    temporary_namespace,
    until_allowed,
)
from torpor_kubernetes_testing.audit import cut_unfinished_line, read_events

CONFIG_MAPS = "v1/configmaps"
NOBODY = User("nobody-in-particular")

DATABASE_CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "databases.example.com"},
    "spec": {
        "group": "example.com",
        "scope": "Namespaced",
        "names": {"plural": "databases", "singular": "database", "kind": "Database"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {"type": "object", "properties": {"size": {"type": "integer"}}},
                            "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                        },
                    }
                },
            }
        ],
    },
}


@pytest.fixture
async def own_control_plane(kubernetes_assets):
    """A control plane that a test may break."""
    async with ControlPlane(kubernetes_assets, users=[NOBODY]) as running:
        yield running


@pytest.fixture
async def databases(kube):
    resource = await install_crd(kube, DATABASE_CRD)
    yield resource
    await remove_crd(kube, "databases.example.com")


def config_map(name, namespace, **data):
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": data,
    }


async def test_serves_the_pinned_version(kube):
    version = await kube.request("GET", "/version")
    assert version["gitVersion"] == "v1.36.3"


async def test_custom_resource_round_trip(kube, namespace, databases):
    manifest = {
        "apiVersion": "example.com/v1",
        "kind": "Database",
        "metadata": {"name": "orders", "namespace": namespace},
        "spec": {"size": 1},
    }
    created = await kube.create(databases, manifest)
    assert databases == "example.com/v1/databases"
    assert created["metadata"]["generation"] == 1

    updated = await kube.update(databases, created | {"spec": {"size": 2}})
    assert updated["metadata"]["generation"] == 2
    with pytest.raises(ApiError) as conflict:
        await kube.update(databases, created | {"spec": {"size": 3}})
    assert conflict.value.status == 409

    status = updated | {"status": {"ready": True}, "spec": {"size": 99}}
    await kube.update(databases, status, subresource="status")
    await kube.merge_patch(databases, "orders", {"spec": {"size": 4}}, namespace=namespace)
    operations = [{"op": "test", "path": "/spec/size", "value": 4}, {"op": "replace", "path": "/spec/size", "value": 5}]
    await kube.json_patch(databases, "orders", operations, namespace=namespace)
    found = await kube.get(databases, "orders", namespace=namespace)
    assert (found["spec"], found["status"]) == ({"size": 5}, {"ready": True})

    applied = await kube.apply(databases, manifest | {"spec": {"size": 6}}, field_manager="somebody")
    assert applied["spec"] == {"size": 6}
    assert [f["manager"] for f in applied["metadata"]["managedFields"] if f["operation"] == "Apply"] == ["somebody"]

    await kube.delete(databases, "orders", namespace=namespace)
    assert await kube.find(databases, "orders", namespace=namespace) is None


async def test_watch_gives_each_change_in_order(kube, namespace):
    start = (await kube.list(CONFIG_MAPS, namespace=namespace))["metadata"]["resourceVersion"]
    await kube.create(CONFIG_MAPS, config_map("a", namespace, key="1"))
    await kube.merge_patch(CONFIG_MAPS, "a", {"data": {"key": "x" * 200_000}}, namespace=namespace)
    await kube.delete(CONFIG_MAPS, "a", namespace=namespace)

    seen = []
    watch = kube.watch(CONFIG_MAPS, namespace=namespace, resourceVersion=start, timeoutSeconds=20)
    async with asyncio.timeout(10), contextlib.aclosing(watch) as events:
        async for event in events:
            seen.append((event.type, len(event.object["data"]["key"])))
            if event.type == "DELETED":
                break
    assert seen == [("ADDED", 1), ("MODIFIED", 200_000), ("DELETED", 200_000)]


async def test_unknown_token_is_refused_with_401(control_plane):
    for token in (None, "wrong"):
        async with control_plane.client(token) as stranger:
            with pytest.raises(ApiError) as refused:
                await stranger.items(CONFIG_MAPS, namespace="default")
            assert refused.value.status == 401


async def test_service_account_may_do_what_rbac_says_and_no_more(control_plane, kube, namespace):
    await create_service_account(kube, namespace, "reader")
    token = await control_plane.service_account_token(namespace, "reader")
    async with control_plane.client(token) as reader:
        with pytest.raises(ApiError) as forbidden:
            await reader.items(CONFIG_MAPS, namespace=namespace)
        assert (forbidden.value.status, forbidden.value.reason) == (403, "Forbidden")

        rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list"]}]
        await grant(kube, namespace, "reader", rules)
        await until_allowed(reader, "list", "configmaps", namespace=namespace)
        assert await reader.items(CONFIG_MAPS, namespace=namespace) == []
        with pytest.raises(ApiError) as forbidden:
            await reader.create(CONFIG_MAPS, config_map("a", namespace))
        assert forbidden.value.status == 403


async def test_audit_log_tells_user_agent_user_and_target_of_a_write(control_plane, namespace):
    agent = f"torpor-cache/1 (operator=ns/o; host=h; epoch={secrets.randbelow(10**9)})"
    async with control_plane.admin_client(user_agent=agent) as kube:
        await kube.create(CONFIG_MAPS, config_map("audited", namespace))
        await kube.get(CONFIG_MAPS, "audited", namespace=namespace)

    mine = [event for event in control_plane.audit_events() if event.user_agent == agent]
    assert [(e.verb, e.resource, e.namespace, e.name, e.code) for e in mine] == [
        ("create", "configmaps", namespace, "audited", 201),
        ("get", "configmaps", namespace, "audited", 200),
    ]
    assert [e.is_write for e in mine] == [True, False]
    assert {e.user for e in mine} == {"torpor-test-admin"}


async def test_half_written_audit_line_is_left_for_later(control_plane, tmp_path, kube):
    await kube.list(CONFIG_MAPS)
    whole = control_plane.audit_log.read_bytes()
    copy = tmp_path / "audit.log"
    copy.write_bytes(whole[: whole.rindex(b"\n") - 5])
    assert len(list(read_events(copy))) == whole.count(b"\n") - 1

    # A server that is started again appends to the file that a killed one left.
    cut_unfinished_line(copy)
    with copy.open("ab") as log:
        log.write(whole[whole[:-1].rindex(b"\n") + 1 :])
    assert len(list(read_events(copy))) == whole.count(b"\n")


async def test_open_watches_are_counted_by_the_server(control_plane, kube, namespace):
    before = (await control_plane.metrics()).watches().get("configmaps", 0)
    bookmarks = {"namespace": namespace, "allowWatchBookmarks": True, "sendInitialEvents": True}
    watch = kube.watch(CONFIG_MAPS, resourceVersionMatch="NotOlderThan", **bookmarks)
    async with contextlib.aclosing(watch) as events:
        assert (await anext(events)).type == "BOOKMARK"
        metrics = await control_plane.metrics()
        assert metrics.watches()["configmaps"] == before + 1
        assert metrics.value("apiserver_longrunning_requests", resource="configmaps", verb="WATCH") == before + 1


async def test_namespace_is_emptied_of_objects_with_finalizers_too(kube):
    async with temporary_namespace(kube) as name:
        held = config_map("held", name)
        held["metadata"]["finalizers"] = ["example.com/never-removed"]
        await kube.create(CONFIG_MAPS, held)
        await kube.create(CONFIG_MAPS, config_map("free", name))
    assert await kube.find("v1/namespaces", name) is None
    assert await kube.items(CONFIG_MAPS, fieldSelector=f"metadata.namespace={name}") == []


async def test_kubectl_works_with_the_admin_kubeconfig(control_plane, namespace):
    await control_plane.kubectl("create", "configmap", "made", "--from-literal=a=b", "-n", namespace)
    assert await control_plane.kubectl("get", "cm", "made", "-n", namespace, "-o=jsonpath={.data.a}") == "b"
    with pytest.raises(ProcessFailed, match="NotFound"):
        await control_plane.kubectl("get", "configmap", "missing", "-n", namespace)


async def test_kubeconfig_of_a_user_without_rights_is_refused_with_403(own_control_plane, tmp_path):
    kubeconfig = own_control_plane.kubeconfig_for(NOBODY.name, tmp_path / "kubeconfig")
    assert kubeconfig.stat().st_mode & 0o077 == 0
    with pytest.raises(ProcessFailed, match="nobody-in-particular"):
        await own_control_plane.kubectl("--kubeconfig", str(kubeconfig), "get", "secrets")
    with pytest.raises(LookupError, match="no user 'stranger'"):
        own_control_plane.kubeconfig_for("stranger", tmp_path / "other")


async def test_data_and_address_outlive_a_killed_apiserver(own_control_plane):
    url = own_control_plane.url
    async with own_control_plane.admin_client() as kube:
        created = await kube.create(CONFIG_MAPS, config_map("kept", "default", key="value"))
        await own_control_plane.kill_apiserver()
        with pytest.raises(aiohttp.ClientError):
            await kube.get(CONFIG_MAPS, "kept", namespace="default")

        await own_control_plane.restart_apiserver()
        assert own_control_plane.url == url
        found = await kube.get(CONFIG_MAPS, "kept", namespace="default")
        assert found == created


async def test_paused_apiserver_answers_when_it_is_resumed(own_control_plane):
    async with own_control_plane.admin_client() as kube:
        own_control_plane.pause_apiserver()
        pending = asyncio.create_task(kube.items(CONFIG_MAPS, namespace="default"))
        done, _ = await asyncio.wait([pending], timeout=0.5)
        assert not done
        own_control_plane.resume_apiserver()
        assert await asyncio.wait_for(pending, 10) == []


async def test_watch_from_a_forgotten_version_gets_410(own_control_plane):
    async with own_control_plane.admin_client() as kube:
        old = (await kube.list(CONFIG_MAPS))["metadata"]["resourceVersion"]
        for number in range(3):
            await kube.create(CONFIG_MAPS, config_map(f"c{number}", "default"))
        await own_control_plane.forget_history()

        watch = kube.watch(CONFIG_MAPS, resourceVersion=old, timeoutSeconds=5)
        async with contextlib.aclosing(watch) as events:
            first = await anext(events)
        assert (first.type, first.object["code"], first.object["reason"]) == ("ERROR", 410, "Expired")


async def test_continuing_a_list_after_compaction_gets_410(own_control_plane):
    async with own_control_plane.admin_client() as kube:
        for number in range(3):
            await kube.create(CONFIG_MAPS, config_map(f"c{number}", "default"))
        page = await kube.list(CONFIG_MAPS, namespace="default", limit=1)
        await kube.create(CONFIG_MAPS, config_map("later", "default"))
        await own_control_plane.forget_history()

        with pytest.raises(ApiError) as expired:
            await kube.list(CONFIG_MAPS, namespace="default", limit=1, **{"continue": page["metadata"]["continue"]})
        assert (expired.value.status, expired.value.reason) == (410, "Expired")


async def test_short_compaction_interval_makes_versions_expire_by_themselves(kubernetes_assets):
    # Else the list is served from a cache that looks for compactions every 15 s.
    flags = ["--feature-gates=ListFromCacheSnapshot=false"]
    control_plane = ControlPlane(kubernetes_assets, compaction_interval_s=1, apiserver_flags=flags)
    async with control_plane, control_plane.admin_client() as kube:
        old = (await kube.list(CONFIG_MAPS))["metadata"]["resourceVersion"]
        await kube.create(CONFIG_MAPS, config_map("newer", "default"))
        exact = {"resourceVersion": old, "resourceVersionMatch": "Exact"}
        with pytest.raises(ApiError) as expired:
            async with asyncio.timeout(30):
                while True:
                    await kube.list(CONFIG_MAPS, **exact)
                    await asyncio.sleep(0.2)
        assert expired.value.status == 410


async def test_controllers_collect_what_an_owner_leaves(own_control_plane):
    await own_control_plane.start_controller_manager()
    async with own_control_plane.admin_client() as kube:
        owner = await kube.create(CONFIG_MAPS, config_map("owner", "default"))
        owned = config_map("owned", "default")
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
        owned["metadata"]["ownerReferences"] = [reference]
        await kube.create(CONFIG_MAPS, owned)
        await kube.delete(CONFIG_MAPS, "owner", namespace="default")
        gone = await kube.until(CONFIG_MAPS, "owned", lambda o: o is None, namespace="default", timeout_s=60)
        assert gone is None
        account = await kube.until("v1/serviceaccounts", "default", bool, namespace="default", timeout_s=60)
        assert account is not None


async def test_wrong_flag_fails_at_once_with_the_servers_own_words(kubernetes_assets):
    broken = ControlPlane(kubernetes_assets, apiserver_flags=["--no-such-flag"])
    with pytest.raises(ProcessFailed, match="unknown flag: --no-such-flag"):
        await broken.start()


async def test_folder_without_binaries_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ProcessFailed, match="has no etcd"):
        await ControlPlane(tmp_path).start()
