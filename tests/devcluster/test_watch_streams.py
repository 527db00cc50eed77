"""Watches end, expire and are counted as clients rely on. What they tell of changes is in the conformance test."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from torpor_devcluster import DevCluster
from torpor_devcluster.registry import Write
from torpor_kubernetes_testing import ApiError, KubeClient, WatchEvent

CONFIGMAPS = "v1/configmaps"


def configmap(name: str, **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "default"}, "data": data}


async def collect(client: KubeClient, count: int, **query: Any) -> list[WatchEvent]:
    """The first `count` events of a watch of ConfigMaps, or all if it ends before."""
    events: list[WatchEvent] = []
    async with asyncio.timeout(5), aclosing(client.watch(CONFIGMAPS, **query)) as watch:
        async for event in watch:
            events.append(event)
            if len(events) == count:
                break
    return events


async def until_watching(cluster: DevCluster, count: int) -> None:
    async with asyncio.timeout(5):
        for _ in range(1000):
            if cluster.requests.watches_of("configmaps") == count:
                return
            await asyncio.sleep(0.002)


async def test_a_quiet_watch_gets_bookmarks_at_the_present_revision(cluster: DevCluster, dev: KubeClient) -> None:
    version = str(cluster.storage.revision)
    await dev.create("v1/secrets", {"metadata": {"name": "elsewhere", "namespace": "default"}})
    (event,) = await collect(dev, 1, resourceVersion=version, allowWatchBookmarks=True)
    assert event.type == "BOOKMARK"
    assert event.object["metadata"]["resourceVersion"] == str(cluster.storage.revision)
    assert event.object["kind"] == "ConfigMap"


async def test_a_watch_that_did_not_ask_gets_no_bookmark_and_ends_in_time(dev: KubeClient) -> None:
    assert await collect(dev, 1, resourceVersion="1", timeoutSeconds=1) == []


async def test_a_watch_from_before_the_window_ends_at_once_in_a_410_event(cluster: DevCluster, dev: KubeClient) -> None:
    await dev.create(CONFIGMAPS, configmap("a"))
    cluster.faults.compact()
    (event,) = await collect(dev, 9, resourceVersion="1")
    assert (event.type, event.object["code"], event.object["reason"]) == ("ERROR", 410, "Expired")


async def test_a_watch_can_be_refused_with_410_as_a_status(cluster: DevCluster, dev: KubeClient) -> None:
    cluster.faults.answer(1, 410, verb="watch")
    with pytest.raises(ApiError) as error:
        await collect(dev, 1)
    assert (error.value.status, error.value.reason) == (410, "Expired")


async def test_a_watch_that_falls_out_of_the_window_ends_in_a_410_event(cluster: DevCluster, dev: KubeClient) -> None:
    watching = asyncio.create_task(collect(dev, 9, resourceVersion=str(cluster.storage.revision)))
    await until_watching(cluster, 1)
    # In one step of the loop: the watch has no chance to read the event before it is compacted away.
    resource = cluster.registry.catalogue.find("", "v1", "configmaps")
    assert resource is not None
    cluster.registry.create(resource, "default", {"kind": "ConfigMap", "apiVersion": "v1", **configmap("a")}, Write())
    cluster.faults.compact()
    (event,) = await watching
    assert event.type == "ERROR"
    assert (event.object["code"], event.object["reason"]) == (410, "Expired")


async def test_a_watch_that_is_up_to_date_survives_compaction(cluster: DevCluster, dev: KubeClient) -> None:
    watching = asyncio.create_task(collect(dev, 1, resourceVersion=str(cluster.storage.revision)))
    await until_watching(cluster, 1)
    cluster.faults.compact()
    await dev.create(CONFIGMAPS, configmap("a"))
    (event,) = await watching
    assert event.type == "ADDED"


async def test_an_expired_continue_token_comes_with_one_to_go_on_with(cluster: DevCluster, dev: KubeClient) -> None:
    for name in "abcd":
        await dev.create(CONFIGMAPS, configmap(name))
    page = await dev.list(CONFIGMAPS, limit=2)
    await dev.create(CONFIGMAPS, configmap("e"))
    cluster.faults.compact()
    with pytest.raises(ApiError) as error:
        await dev.list(CONFIGMAPS, limit=9, **{"continue": page["metadata"]["continue"]})
    assert error.value.status == 410
    rest = await dev.list(CONFIGMAPS, limit=9, **{"continue": error.value.body["metadata"]["continue"]})
    assert [item["metadata"]["name"] for item in rest["items"]] == ["c", "d", "e"]


async def test_live_watches_are_counted_and_leave_no_trace(cluster: DevCluster, dev: KubeClient) -> None:
    watching = [asyncio.create_task(collect(dev, 1, resourceVersion="5")) for _ in range(3)]
    await until_watching(cluster, 3)
    assert 'resource="configmaps",scope="cluster",subresource="",verb="WATCH",version="v1"} 3' in await dev.text(
        "/metrics"
    )
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    await until_watching(cluster, 0)
    assert cluster.requests.watches_of("configmaps") == 0
    assert not cluster.storage.table(
        next(t.resource for t in cluster.storage.tables() if t.resource.plural == "configmaps")
    ).wakes


async def test_closed_watches_end_for_the_client(cluster: DevCluster, dev: KubeClient) -> None:
    watching = asyncio.create_task(collect(dev, 9, resourceVersion="5"))
    await until_watching(cluster, 1)
    assert cluster.faults.close_watches("secrets") == 0
    assert cluster.faults.close_watches("configmaps") == 1
    assert await watching == []


async def test_a_muted_watch_stays_open_and_says_nothing(cluster: DevCluster, dev: KubeClient) -> None:
    watching = asyncio.create_task(collect(dev, 1, resourceVersion="5", allowWatchBookmarks=True))
    await until_watching(cluster, 1)
    cluster.faults.mute_watches()
    await dev.create(CONFIGMAPS, configmap("a"))
    done, _ = await asyncio.wait([watching], timeout=0.3)
    assert not done
    assert cluster.requests.watches_of("configmaps") == 1
    watching.cancel()


async def test_the_end_of_initial_events_is_marked_at_the_revision_they_were_taken(dev: KubeClient) -> None:
    await dev.create(CONFIGMAPS, configmap("a"))
    query = {"sendInitialEvents": True, "resourceVersionMatch": "NotOlderThan", "allowWatchBookmarks": True}
    first, mark = await collect(dev, 2, **query)
    assert (first.type, first.object["metadata"]["name"]) == ("ADDED", "a")
    assert mark.object["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert mark.object["metadata"]["resourceVersion"] == first.object["metadata"]["resourceVersion"]
