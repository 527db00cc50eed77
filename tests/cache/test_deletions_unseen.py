"""Deletions that happen while no host, or no cache, is there: a new holder of the operator is told of them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from torpor.cache.v1 import cache_pb2
from torpor_cache import catch_up
from torpor_cache.apiserver import ApiServer, Credentials
from torpor_cache.config import CacheConfig, WatchChoice
from torpor_cache.kubeconfig import FixedCredentials
from torpor_cache.service import running
from torpor_cache.testing_client import CacheClient
from torpor_cache.testing_cluster import Admin
from torpor_devcluster import Config, DevCluster
from torpor_services.security import Identity

NAMESPACES = ("a", "b")
TAKEOVER = cache_pb2.Resume(from_acknowledged=True)
NARROW = WatchChoice(wide_objects_max=0)


class Mesh:
    """A cluster with one operator in each of two namespaces, each with rights there alone."""

    def __init__(self, cluster, admin, credentials, folder):
        self.cluster, self.admin, self.credentials, self.folder = cluster, admin, credentials, folder
        self.callers = {}

    @contextlib.asynccontextmanager
    async def cache(self, **settings):
        settings.setdefault("watches", NARROW)
        config = CacheConfig(listen=f"unix:{self.folder}/c.sock", state=self.folder / "state", drain_s=0.1, **settings)
        async with running(config, credentials=self.credentials) as service:
            await asyncio.wait_for(service.readiness.wait_ready(), 20)
            yield service

    def client(self, service):
        return CacheClient(service.address, Identity("host", "a"))

    async def subscribe(self, client, number, namespace="a", **more):
        """All that subscription `number` is told up to SYNCED, without it."""
        fields = {"namespace": namespace, "caller": self.callers[namespace], "name": "for"} | more
        await client.subscribe(number, "v1/configmaps", **fields)
        got = await client.until_synced(number)
        return got[-1], [(r.type, r.key[1]) for r in got[:-1]]


@pytest.fixture
async def m(tmp_path):
    async with DevCluster(Config(tls=False)) as cluster:
        credentials = FixedCredentials(Credentials(cluster.url, token=cluster.admin_token))
        async with ApiServer(credentials, user_agent="test") as api:
            admin = Admin(api)
            await admin.install_crds()
            await admin.namespace("torpor-system")
            mesh = Mesh(cluster, admin, credentials, tmp_path)
            for namespace in NAMESPACES:
                await admin.namespace(namespace)
                await admin.account(namespace, "op")
                await admin.allow(namespace, "op", ["configmaps"])
                mesh.callers[namespace] = await admin.operator(namespace, "x")
            yield mesh


async def gone(client, number, name):
    return (await client.until(number, lambda got: any(r.type == "DELETED" and r.key[1] == name for r in got)))[-1]


@pytest.mark.parametrize("watches", [NARROW, WatchChoice()], ids=["narrow", "wide"])
async def test_a_takeover_is_told_no_deletion_of_another_namespace(m, watches):
    async with m.cache(watches=watches) as service, m.client(service) as client:
        await m.admin.config_map("a", "secret-name")
        for number, namespace in enumerate(NAMESPACES, 1):
            await m.subscribe(client, number, namespace)
        await m.admin.delete_config_map("a", "secret-name")
        await gone(client, 1, "secret-name")
        assert await m.subscribe(client, 3, "b", resume=TAKEOVER) == (client.events[3][-1], [])
        assert (await m.subscribe(client, 4, "a", resume=TAKEOVER))[1] == [("DELETED", "secret-name")]


@pytest.mark.parametrize("selector", [{"label_selector": "app=other"}, {"field_selector": "metadata.name=other"}])
async def test_a_takeover_is_told_no_deletion_outside_its_selectors(m, selector):
    async with m.cache() as service, m.client(service) as client:
        await m.admin.config_map("a", "gone", labels={"app": "x"})
        await m.admin.config_map("a", "other", labels={"app": "other"})
        await m.subscribe(client, 1)
        for name in ("gone", "other"):
            await m.admin.delete_config_map("a", name)
        await gone(client, 1, "other")
        # Its own watch is as narrow as its selector, so that nothing is filtered behind it.
        await client.unsubscribe(1)
        service.informers._informers.clear()
        assert (await m.subscribe(client, 2, resume=TAKEOVER, **selector))[1] == [("DELETED", "other")]


async def test_deletions_while_no_host_is_there_are_remembered(m):
    async with m.cache() as service:
        await m.admin.config_map("a", "gone")
        async with m.client(service) as client:
            synced, _ = await m.subscribe(client, 1)
            await client.ack(1, synced)
        await m.admin.delete_config_map("a", "gone")
        await m.admin.config_map("a", "last")
        (informer,) = [i for i in service.informers if i.scope.namespace == "a"]
        async with asyncio.timeout(10):
            while len(informer.store) != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # Its history is of no help to who is told what is remembered beyond it.
        informer.history.begin(informer.history.newest)
        async with m.client(service) as client:
            told = (await m.subscribe(client, 1, resume=TAKEOVER))[1]
            assert told == [("DELETED", "gone"), ("ADDED", "last")]


async def _hold_and_leave(m):
    """An operator that has acknowledged what there is, then neither host nor cache."""
    async with m.cache() as service, m.client(service) as client:
        for name in ("gone", "replaced", "stays"):
            await m.admin.config_map("a", name)
        synced, _ = await m.subscribe(client, 1)
        await client.ack(1, synced)
        await m.admin.config_map("a", "later")  # heard of only if the acknowledgement was
        await client.until(1, lambda got: got[-1].key[1] == "later")


async def test_deletions_while_the_cache_is_down_are_asked_for(m):
    await _hold_and_leave(m)
    for name in ("gone", "replaced"):
        await m.admin.delete_config_map("a", name)
    await m.admin.config_map("a", "replaced")
    await m.admin.config_map("a", "short-lived")
    await m.admin.delete_config_map("a", "short-lived")
    async with m.cache() as service, m.client(service) as client:
        told = (await m.subscribe(client, 1, resume=TAKEOVER))[1]
        assert sorted(told) == [
            ("ADDED", "later"),
            ("ADDED", "replaced"),
            ("ADDED", "stays"),
            ("DELETED", "gone"),
            ("DELETED", "replaced"),
            ("DELETED", "short-lived"),
        ]
        uids = {r.type: r.uid for r in client.events[1] if r.key[1] == "replaced"}
        assert uids["ADDED"] != uids["DELETED"]


async def test_a_crash_while_they_are_asked_for_makes_the_next_cache_ask_again(m, monkeypatch):
    await _hold_and_leave(m)
    await m.admin.delete_config_map("a", "gone")

    async def never(self, since, until):
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(catch_up.CatchUp, "run", never)
        async with m.cache() as service, m.client(service) as client:
            await client.subscribe(1, "v1/configmaps", namespace="a", caller=m.callers["a"], name="for")
            await client.until_synced(1)  # who is no new holder does not wait
    async with m.cache() as service, m.client(service) as client:
        told = (await m.subscribe(client, 1, resume=TAKEOVER))[1]
        assert ("DELETED", "gone") in told


async def test_what_the_api_servers_history_no_longer_has_is_lost_and_said(m, caplog):
    await _hold_and_leave(m)
    await m.admin.delete_config_map("a", "gone")
    m.cluster.faults.compact()
    async with m.cache() as service, m.client(service) as client:
        told = (await m.subscribe(client, 1, resume=TAKEOVER))[1]
        assert sorted(told) == [("ADDED", "later"), ("ADDED", "replaced"), ("ADDED", "stays")]
    assert "while nobody watched may be missing" in caplog.text


async def test_deletions_after_the_watch_has_ended_are_asked_for_by_the_next_one(m):
    async with m.cache() as service:
        await m.admin.config_map("a", "gone")
        async with m.client(service) as client:
            synced, _ = await m.subscribe(client, 1)
            await client.ack(1, synced)
        (informer,) = [i for i in service.informers if i.scope.namespace == "a"]
        informer.stop()  # what the end of its linger does
        service.informers._ended(informer)
        await m.admin.delete_config_map("a", "gone")
        async with m.client(service) as client:
            assert (await m.subscribe(client, 1, resume=TAKEOVER))[1] == [("DELETED", "gone")]


async def test_nobody_is_asked_for_deletions_of_kinds_that_nobody_acknowledges(m):
    for _ in range(2):
        async with m.cache() as service, m.client(service) as client:
            await m.subscribe(client, 1, name="")
            assert not any(i._catching_up for i in service.informers)
