"""Informers against the real kube-apiserver: streaming lists, bookmarks, expiry, restarts, rights, 20,000 objects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torpor_cache import payloads
from torpor_cache.apiserver import ApiServer, Credentials, Impersonation
from torpor_cache.histories import Histories
from torpor_cache.informers import Informers, InformerState, WatchScope
from torpor_cache.kubeconfig import FixedCredentials, KubeconfigCredentials
from torpor_cache.resources import ObjectKey, Resource, ResourceVersion
from torpor_kubernetes_testing.control_plane import ControlPlane, User

CONFIG_MAPS = Resource.parse("v1/configmaps")


class Listener:
    def __init__(self) -> None:
        self.changes: list = []
        self.told: list = []
        self.news = asyncio.Event()

    def on_change(self, change) -> None:
        self.changes.append((change.type.value, change.key.name))
        self.news.set()

    def on_synced(self) -> None:
        self.told.append("synced")
        self.news.set()

    def on_bookmark(self, position) -> None:
        self.news.set()

    def on_resync(self) -> None:
        self.told.append("resync")
        self.news.set()

    def on_error(self, status, final) -> None:
        self.told.append((json.loads(status)["code"], final))
        self.news.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.news.clear()
                await self.news.wait()


@asynccontextmanager
async def _informers(control_plane, token: str = "") -> AsyncIterator[Informers]:
    credentials = Credentials(control_plane.url, token=token or control_plane.admin_token)
    source = FixedCredentials(credentials, ca_file=control_plane.ca_file)
    async with ApiServer(source, user_agent="torpor-cache-test") as api:
        async with Informers(api, Histories(api)) as informers:
            yield informers


def _version(written: dict) -> ResourceVersion:
    return ResourceVersion(int(written["metadata"]["resourceVersion"]))


async def test_created_changed_and_deleted_objects_are_told_as_the_server_has_them(control_plane, kube, namespace):
    async with _informers(control_plane) as informers:
        await kube.create("v1/configmaps", {"metadata": {"name": "before"}}, namespace=namespace)
        listener = Listener()
        informer = informers.acquire(WatchScope(CONFIG_MAPS, namespace), listener)
        await informer.wait_synced(30)
        assert (informer.kind, informer.list_kind, informer.watches) == ("ConfigMap", "ConfigMapList", 1)
        body = {"metadata": {"name": "a", "labels": {"x": "1"}}, "data": {"k": "v"}}
        await kube.create("v1/configmaps", body, namespace=namespace)
        patched = await kube.merge_patch("v1/configmaps", "a", {"data": {"k": "w"}}, namespace=namespace)
        await informer.wait_at_least(_version(patched), 10)
        served = await kube.get("v1/configmaps", "a", namespace=namespace)
        assert "managedFields" in served["metadata"]
        del served["metadata"]["managedFields"]
        assert json.loads(informer.store.get(ObjectKey(namespace, "a")).json) == served
        await kube.delete("v1/configmaps", "a", namespace=namespace)
        await listener.until(lambda: ("DELETED", "a") in listener.changes)
        assert listener.changes == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]


async def test_an_object_that_leaves_the_selector_is_deleted_with_the_events_version(control_plane, kube, namespace):
    async with _informers(control_plane) as informers:
        made = {"metadata": {"name": "a", "labels": {"show": "yes"}}}
        await kube.create("v1/configmaps", made, namespace=namespace)
        listener = Listener()
        informer = informers.acquire(WatchScope(CONFIG_MAPS, namespace, "show=yes"), listener)
        await informer.wait_synced(30)
        patched = await kube.merge_patch(
            "v1/configmaps", "a", {"metadata": {"labels": {"show": "no"}}}, namespace=namespace
        )
        await informer.wait_at_least(_version(patched), 10)
        (change,) = informer.history.since(informer.history.oldest)
        assert (change.type.value, change.resource_version) == ("DELETED", _version(patched))
        assert change.old.labels == {"show": "yes"}


async def test_paged_lists_show_the_same_as_streamed_ones(control_plane, kube, namespace):
    for number in range(7):
        await kube.create("v1/configmaps", {"metadata": {"name": f"c{number}"}}, namespace=namespace)
    async with _informers(control_plane) as informers:
        streamed = informers.acquire(WatchScope(CONFIG_MAPS, namespace), Listener())
        await streamed.wait_synced(30)
        found = await informers.api.request(
            "GET", CONFIG_MAPS.path(namespace), query={"limit": "3"}, headers={"Accept": "application/json"}
        )
        assert len(found.json()["items"]) == 3
        listed: dict[ObjectKey, bytes] = {}
        token = ""
        while True:
            query = {"limit": "3"} | ({"continue": token} if token else {})
            reply = await informers.api.request("GET", CONFIG_MAPS.path(namespace), query=query)
            page = payloads.parse_page(reply.body)
            listed |= {item.key: item.json for item in payloads.parse_items(page, 0, 100)}
            if not (token := page.continue_token):
                break
        assert {key: json.loads(text) for key, text in listed.items()} == {
            item.key: json.loads(item.json) for item in streamed.store
        }


async def test_an_account_without_rights_is_told_403_and_recovers_when_it_gets_them(kubernetes_assets):
    user = User("watcher")
    async with ControlPlane(kubernetes_assets, users=[user]) as control_plane, control_plane.admin_client() as kube:
        async with _informers(control_plane, user.token) as informers:
            listener = Listener()
            informer = informers.acquire(WatchScope(CONFIG_MAPS, "default"), listener)
            await listener.until(lambda: (403, False) in listener.told)
            assert informer.state is InformerState.FAILED
            rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]}]
            await kube.create("rbac.authorization.k8s.io/v1/clusterroles", {"metadata": {"name": "w"}, "rules": rules})
            role = "rbac.authorization.k8s.io/v1/clusterrolebindings"
            subject = {"kind": "User", "name": "watcher", "apiGroup": "rbac.authorization.k8s.io"}
            reference = {"kind": "ClusterRole", "name": "w", "apiGroup": "rbac.authorization.k8s.io"}
            await kube.create(role, {"metadata": {"name": "w"}, "subjects": [subject], "roleRef": reference})
            await informer.wait_synced(60)
            assert informer.state is InformerState.SYNCED


async def test_a_killed_server_and_an_expired_history_lose_nothing(kubernetes_assets):
    async with ControlPlane(kubernetes_assets) as control_plane, control_plane.admin_client() as kube:
        async with _informers(control_plane) as informers:
            listener = Listener()
            informer = informers.acquire(WatchScope(CONFIG_MAPS, "default"), listener)
            await informer.wait_synced(30)
            for name in ("kept", "gone"):
                written = await kube.create("v1/configmaps", {"metadata": {"name": name}}, namespace="default")
            await informer.wait_at_least(_version(written), 10)

            await control_plane.kill_apiserver()
            await listener_sees(informers, lambda: informer.state is InformerState.STALE)
            await control_plane.restart_apiserver()
            async with control_plane.admin_client() as again:
                await again.delete("v1/configmaps", "gone", namespace="default")
                written = await again.create("v1/configmaps", {"metadata": {"name": "new"}}, namespace="default")
                await informer.wait_at_least(_version(written), 60)
                assert listener.changes[-2:] == [("DELETED", "gone"), ("ADDED", "new")]

                await control_plane.forget_history()
            async with control_plane.admin_client() as again:
                written = await again.create("v1/configmaps", {"metadata": {"name": "last"}}, namespace="default")
                await informer.wait_at_least(_version(written), 60)
                assert listener.changes[-1] == ("ADDED", "last")
                names = {each["metadata"]["name"] for each in await again.items("v1/configmaps", namespace="default")}
                assert {item.key.name for item in informer.store} == names
            assert "resync" not in listener.told


async def listener_sees(informers: Informers, condition) -> None:
    changed = asyncio.Event()
    informers.on_readiness(changed.set)
    async with asyncio.timeout(60):
        while not condition():
            changed.clear()
            await changed.wait()


async def test_a_kubeconfig_reaches_the_server_and_impersonation_is_checked_there(control_plane, tmp_path):
    path = control_plane.admin_kubeconfig(tmp_path / "config")
    async with ApiServer(KubeconfigCredentials(path), user_agent="torpor-cache-test") as api:
        mine = await api.request("GET", "/api/v1/namespaces/default/configmaps")
        account = Impersonation.service_account("default", "nobody")
        theirs = await api.request("GET", "/api/v1/namespaces/default/configmaps", impersonate=account)
    assert (mine.status, theirs.status) == (200, 403)
    assert "system:serviceaccount:default:nobody" in theirs.kubernetes_status()["message"]


async def test_a_field_that_the_kind_does_not_offer_is_final(control_plane, namespace):
    async with _informers(control_plane) as informers:
        listener = Listener()
        informer = informers.acquire(WatchScope(CONFIG_MAPS, namespace, field_selector="spec.nope=1"), listener)
        await listener.until(lambda: (400, True) in listener.told)
        assert informer.final


async def test_many_informers_of_a_kind_are_one_watch_for_the_server(control_plane, namespace):
    before = await _watches(control_plane)
    async with _informers(control_plane) as informers:
        for number in range(30):
            informer = informers.acquire(WatchScope(CONFIG_MAPS), Listener())
            informers.acquire(WatchScope(CONFIG_MAPS, namespace, f"app=x{number}"), Listener())
        await informer.wait_synced(30)
        assert await _watches(control_plane) - before == 1


async def _watches(control_plane) -> float:
    metrics = await control_plane.metrics()
    return metrics.watches().get("configmaps", 0)
