"""Faults on demand, and the log of requests."""

import asyncio

import pytest
from torpor_devcluster import DevCluster
from torpor_kubernetes_testing import ApiError, KubeClient

CONFIGMAPS = "v1/configmaps"


async def test_the_next_matching_requests_are_answered_as_told(cluster: DevCluster, dev: KubeClient) -> None:
    rule = cluster.faults.answer(2, 429, verb="list", resource="configmaps", retry_after_s=1)
    await dev.list("v1/secrets")
    for _ in range(2):
        with pytest.raises(ApiError) as error:
            await dev.list(CONFIGMAPS)
        assert (error.value.status, error.value.reason) == (429, "TooManyRequests")
        assert error.value.body["details"]["retryAfterSeconds"] == 1
    await dev.list(CONFIGMAPS)
    assert rule.hits == 2


async def test_a_lost_reply_leaves_the_write_done(cluster: DevCluster, dev: KubeClient) -> None:
    cluster.faults.answer(1, 503, verb="create", after_write=True)
    with pytest.raises(ApiError):
        await dev.create(CONFIGMAPS, {"metadata": {"name": "a", "namespace": "default"}})
    assert await dev.find(CONFIGMAPS, "a", namespace="default") is not None


async def test_a_hanging_request_is_served_when_released(cluster: DevCluster, dev: KubeClient) -> None:
    rule = cluster.faults.hang(1, verb="list", resource="configmaps")
    hanging = asyncio.create_task(dev.list(CONFIGMAPS))
    done, _ = await asyncio.wait([hanging], timeout=0.2)
    assert not done
    rule.released.set()
    assert (await hanging)["kind"] == "ConfigMapList"


async def test_requests_are_logged_with_user_and_agent(cluster: DevCluster) -> None:
    headers = {"Impersonate-User": "alice"}
    async with KubeClient(
        cluster.url, token=cluster.admin_token, ca_file=cluster.ca_file, user_agent="torpor-host/1", headers=headers
    ) as dev:
        with pytest.raises(ApiError):
            await dev.get(CONFIGMAPS, "a", namespace="default")
    record = cluster.requests.records[-1]
    assert (record.user, record.impersonated, record.code) == ("devcluster-admin", "alice", 403)
    assert (record.verb, record.resource, record.name, record.user_agent) == ("get", "configmaps", "a", "torpor-host/1")
