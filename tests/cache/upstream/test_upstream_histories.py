"""Which history of the cluster this is: an id in a ConfigMap, replaced by compare-and-swap."""

from __future__ import annotations

import asyncio
import json

import pytest
from torpor_cache.apiserver import ApiServer, Credentials
from torpor_cache.histories import Histories, HistoryUnknown
from torpor_cache.kubeconfig import FixedCredentials
from torpor_cache.resources import ResourceVersion
from torpor_devcluster import Config, DevCluster, User

PATH = "/api/v1/namespaces/torpor-system/configmaps/torpor-history"
FAR = ResourceVersion(10**9)


def _server(cluster: DevCluster, token: str = "") -> ApiServer:
    credentials = Credentials(cluster.url, token=token or cluster.admin_token, insecure_skip_tls_verify=True)
    return ApiServer(FixedCredentials(credentials), user_agent="test")


async def test_replicas_agree_on_an_id_that_one_of_them_has_made():
    async with DevCluster() as cluster, _server(cluster) as api:
        replicas = [Histories(api) for _ in range(5)]
        ids = set(await asyncio.gather(*(replica.current() for replica in replicas)))
        assert len(ids) == 1 and ids == {json.loads((await api.request("GET", PATH)).body)["data"]["id"]}


async def test_a_version_that_goes_back_gives_one_new_id_whoever_sees_it_first():
    async with DevCluster() as cluster, _server(cluster) as api:
        replicas = [Histories(api) for _ in range(3)]
        told: list[int] = []
        for number, replica in enumerate(replicas):
            await replica.current()
            replica.subscribe(lambda number=number: told.append(number))
        seen = replicas[0].id
        assert all(await asyncio.gather(*(replica.went_back(seen, FAR) for replica in replicas)))
        assert len({replica.id for replica in replicas}) == 1
        assert replicas[0].id != seen and sorted(told) == [0, 1, 2]


async def test_a_resource_that_counts_for_itself_does_not_make_another_history_of_the_cluster():
    async with DevCluster() as cluster, _server(cluster) as api:
        histories = Histories(api)
        seen = await histories.current()
        assert not await histories.went_back(seen, ResourceVersion(1))
        assert histories.id == seen


async def test_without_rights_the_id_is_of_this_process_and_stays(caplog):
    config = Config(tokens={"nobody-token": User("nobody", ())})
    async with DevCluster(config) as cluster, _server(cluster, "nobody-token") as api:
        one, two = Histories(api), Histories(api)
        assert await one.current() != await two.current()
        assert await one.reread() == one.id
        assert caplog.text.count("positions are good for this process only") == 2
        seen = one.id
        assert await one.went_back(seen, FAR) and one.id != seen


async def test_a_config_map_without_an_id_gets_one():
    async with DevCluster() as cluster, _server(cluster) as api:
        await Histories(api).current()
        found = json.loads((await api.request("GET", PATH)).body)
        found["data"] = {"other": "kept"}
        headers = {"Content-Type": "application/json"}
        (await api.request("PUT", PATH, body=json.dumps(found).encode(), headers=headers)).raise_for_status("put")
        made = await Histories(api).current()
        assert json.loads((await api.request("GET", PATH)).body)["data"] == {"other": "kept", "id": made}


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}"])
async def test_an_answer_that_makes_no_sense_is_no_history(kit, monkeypatch, body):
    monkeypatch.setattr(kit.api, "_answer_history", lambda exchange: exchange.reply(200, body))
    with pytest.raises(HistoryUnknown):
        await Histories(kit.server).current()
