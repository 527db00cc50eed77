"""Informers against the in-memory cluster: whole flows, with faults on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torpor_cache.apiserver import ApiServer, Credentials
from torpor_cache.histories import Histories
from torpor_cache.informers import Informer, Informers, InformerState, WatchScope
from torpor_cache.kubeconfig import FixedCredentials
from torpor_cache.resources import Resource, ResourceVersion
from torpor_devcluster import DevCluster

CONFIG_MAPS = WatchScope(Resource.parse("v1/configmaps"), "default")
JSON = {"Content-Type": "application/json"}
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "things.example.com"},
    "spec": {
        "group": "example.com",
        "scope": "Namespaced",
        "names": {"plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class Listener:
    def __init__(self) -> None:
        self.told: list = []
        self.news = asyncio.Event()

    def _note(self, *what) -> None:
        self.told.append(what)
        self.news.set()

    def on_change(self, change) -> None:
        self._note(change.type.value, change.key.name)

    def on_synced(self) -> None:
        self._note("synced")

    def on_bookmark(self, position) -> None:
        self._note("bookmark")

    def on_resync(self) -> None:
        self._note("resync")

    def on_error(self, status, final) -> None:
        self._note("error", json.loads(status)["code"], final)

    async def until(self, *what) -> None:
        async with asyncio.timeout(10):
            while what not in self.told:
                self.news.clear()
                await self.news.wait()


@asynccontextmanager
async def _mesh() -> AsyncIterator[tuple[DevCluster, ApiServer, Informers]]:
    async with DevCluster() as cluster:
        credentials = Credentials(cluster.url, token=cluster.admin_token, insecure_skip_tls_verify=True)
        async with ApiServer(FixedCredentials(credentials), user_agent="test") as api:
            async with Informers(api, Histories(api)) as informers:
                yield cluster, api, informers


async def _write(api: ApiServer, method: str, path: str, body: dict | None = None) -> ResourceVersion:
    data = None if body is None else json.dumps(body).encode()
    reply = (await api.request(method, path, body=data, headers=JSON)).raise_for_status(f"{method} {path}")
    return ResourceVersion(int(reply.json().get("metadata", {}).get("resourceVersion", 0)))


async def _make(api: ApiServer, name: str) -> ResourceVersion:
    return await _write(api, "POST", "/api/v1/namespaces/default/configmaps", {"metadata": {"name": name}})


async def test_changes_missed_behind_a_compacted_history_are_found_as_a_difference():
    async with _mesh() as (cluster, api, informers):
        for name in ("kept", "gone"):
            await _make(api, name)
        listener = Listener()
        informer = informers.acquire(CONFIG_MAPS, listener)
        await informer.wait_synced(10)
        cluster.faults.answer(1, verb="watch", code=410)
        await _write(api, "DELETE", "/api/v1/namespaces/default/configmaps/gone")
        cluster.faults.close_watches()
        version = await _make(api, "new")
        await informer.wait_at_least(version, 10)
        assert {item.key.name for item in informer.store} >= {"kept", "new"}
        assert ("DELETED", "gone") in listener.told and ("ADDED", "new") in listener.told


async def test_a_crd_that_comes_goes_and_comes_back():
    async with _mesh() as (_, api, informers):
        listener = Listener()
        informer: Informer = informers.acquire(WatchScope(Resource.parse("example.com/v1/things")), listener)
        await listener.until("error", 404, False)
        assert informer.state is InformerState.FAILED
        await _write(api, "POST", CRDS, CRD)
        informers.hurry()
        await informer.wait_synced(40)
        things = "/apis/example.com/v1/namespaces/default/things"
        thing = {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "a"}}
        await informer.wait_at_least(await _write(api, "POST", things, thing), 10)
        assert (informer.kind, informer.list_kind) == ("Thing", "ThingList")
        listener.told.clear()
        await _write(api, "DELETE", f"{CRDS}/things.example.com")
        await listener.until("error", 404, False)
        assert informer.state is InformerState.FAILED
        await _write(api, "POST", CRDS, CRD)
        informers.hurry()
        await informer.wait_at_least(await _write(api, "POST", things, thing | {"metadata": {"name": "b"}}), 40)
        assert [item.key.name for item in informer.store] == ["b"]


async def test_sixty_listeners_are_one_watch_upstream():
    async with _mesh() as (cluster, _, informers):
        listeners = [Listener() for _ in range(60)]
        (informer,) = {informers.acquire(CONFIG_MAPS, listener) for listener in listeners}
        await informer.wait_synced(10)
        watches = [each for each in cluster.faults._watches() if each[0].plural == "configmaps"]
        assert len(watches) == 1


async def test_an_api_server_that_is_down_at_the_start_is_waited_for():
    async with DevCluster() as cluster:
        address = cluster.url
    credentials = Credentials(address, token="t", insecure_skip_tls_verify=True)
    async with ApiServer(FixedCredentials(credentials), user_agent="test") as api:
        async with Informers(api, Histories(api)) as informers:
            troubled = asyncio.Event()
            informers.on_readiness(lambda: troubled.set() if any(each.trouble for each in informers) else None)
            informer = informers.acquire(CONFIG_MAPS, Listener())
            async with asyncio.timeout(10):
                await troubled.wait()
            assert "cannot be reached" in informer.trouble
            assert informer.state is InformerState.STARTING and not informers.ready
