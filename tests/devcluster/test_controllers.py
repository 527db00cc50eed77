"""What the cluster does by itself: owners, namespaces, CRDs, default accounts."""

from typing import Any

import pytest
from torpor_devcluster import Config, DevCluster
from torpor_kubernetes_testing import ApiError, KubeClient

CONFIGMAPS = "v1/configmaps"
Json = dict[str, Any]


def configmap(name: str, *owners: Json, namespace: str = "default", **metadata: Any) -> Json:
    return {"metadata": {"name": name, "namespace": namespace, "ownerReferences": list(owners), **metadata}}


def owner(of: Json, **more: Any) -> Json:
    return {
        "apiVersion": of["apiVersion"],
        "kind": of["kind"],
        "name": of["metadata"]["name"],
        "uid": of["metadata"]["uid"],
        **more,
    }


async def names(dev: KubeClient, namespace: str = "default") -> list[str]:
    return [item["metadata"]["name"] for item in await dev.items(CONFIGMAPS, namespace=namespace)]


async def test_dependents_go_with_their_last_owner(cluster: DevCluster, dev: KubeClient) -> None:
    one, two = await dev.create(CONFIGMAPS, configmap("one")), await dev.create(CONFIGMAPS, configmap("two"))
    await dev.create(CONFIGMAPS, configmap("only-one", owner(one)))
    await dev.create(CONFIGMAPS, configmap("both", owner(one), owner(two)))
    await dev.delete(CONFIGMAPS, "one", namespace="default")
    await cluster.settle()
    assert await names(dev) == ["both", "two"]
    both = await dev.get(CONFIGMAPS, "both", namespace="default")
    assert [ref["name"] for ref in both["metadata"]["ownerReferences"]] == ["two"]
    await dev.delete(CONFIGMAPS, "two", namespace="default")
    await cluster.settle()
    assert await names(dev) == []


async def test_a_chain_of_owners_goes_to_the_end(cluster: DevCluster, dev: KubeClient) -> None:
    last = await dev.create(CONFIGMAPS, configmap("c0"))
    for index in range(1, 5):
        last = await dev.create(CONFIGMAPS, configmap(f"c{index}", owner(last)))
    await dev.delete(CONFIGMAPS, "c0", namespace="default")
    await cluster.settle()
    assert await names(dev) == []


async def test_a_dependent_of_an_owner_that_never_was_goes_too(cluster: DevCluster, dev: KubeClient) -> None:
    ghost = {"apiVersion": "v1", "kind": "Secret", "name": "ghost", "uid": "none"}
    unknown = {"apiVersion": "nowhere.dev/v1", "kind": "Ghost", "name": "ghost", "uid": "none"}
    await dev.create(CONFIGMAPS, configmap("of-ghost", ghost))
    await dev.create(CONFIGMAPS, configmap("of-unknown-kind", unknown))
    await cluster.settle()
    assert await names(dev) == ["of-unknown-kind"]


async def test_orphans_stay_without_the_reference(cluster: DevCluster, dev: KubeClient) -> None:
    one = await dev.create(CONFIGMAPS, configmap("one"))
    await dev.create(CONFIGMAPS, configmap("child", owner(one)))
    await dev.delete(CONFIGMAPS, "one", namespace="default", options={"propagationPolicy": "Orphan"})
    await cluster.settle()
    assert await names(dev) == ["child"]
    child = await dev.get(CONFIGMAPS, "child", namespace="default")
    assert "ownerReferences" not in child["metadata"]


async def test_a_foreground_owner_waits_for_dependents_that_block_it(cluster: DevCluster, dev: KubeClient) -> None:
    one = await dev.create(CONFIGMAPS, configmap("one"))
    held = configmap("held", owner(one, blockOwnerDeletion=True), finalizers=["torpor.dev/hold"])
    await dev.create(CONFIGMAPS, held)
    await dev.delete(CONFIGMAPS, "one", namespace="default", options={"propagationPolicy": "Foreground"})
    await cluster.settle()
    assert await names(dev) == ["held", "one"]
    await dev.merge_patch(CONFIGMAPS, "held", {"metadata": {"finalizers": None}}, namespace="default")
    await cluster.settle()
    assert await names(dev) == []


async def test_a_namespace_takes_its_content_along_and_waits_for_finalizers(
    cluster: DevCluster, dev: KubeClient
) -> None:
    await dev.create("v1/namespaces", {"metadata": {"name": "ns"}})
    await cluster.settle()
    await dev.create(CONFIGMAPS, configmap("plain", namespace="ns"))
    await dev.create(CONFIGMAPS, configmap("held", namespace="ns", finalizers=["torpor.dev/hold"]))
    await dev.delete("v1/namespaces", "ns")
    await cluster.settle()
    assert await names(dev, "ns") == ["held"]
    assert (await dev.get("v1/namespaces", "ns"))["status"]["phase"] == "Terminating"
    with pytest.raises(ApiError) as error:
        await dev.create(CONFIGMAPS, configmap("late", namespace="ns"))
    assert error.value.status == 403
    await dev.merge_patch(CONFIGMAPS, "held", {"metadata": {"finalizers": None}}, namespace="ns")
    await cluster.settle()
    assert await dev.find("v1/namespaces", "ns") is None


async def test_each_namespace_has_a_default_account_again_when_deleted(cluster: DevCluster, dev: KubeClient) -> None:
    await cluster.settle()
    first = await dev.get("v1/serviceaccounts", "default", namespace="default")
    await dev.delete("v1/serviceaccounts", "default", namespace="default")
    await cluster.settle()
    second = await dev.get("v1/serviceaccounts", "default", namespace="default")
    assert first["metadata"]["uid"] != second["metadata"]["uid"]


async def test_without_controllers_nothing_happens_by_itself() -> None:
    async with (
        DevCluster(Config(controllers=False)) as cluster,
        KubeClient(cluster.url, token=cluster.admin_token, ca_file=cluster.ca_file) as dev,
    ):
        assert await dev.items("v1/serviceaccounts", namespace="default") == []


def crd() -> Json:
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.torpor.dev"},
        "spec": {
            "group": "torpor.dev",
            "scope": "Cluster",
            "names": {"plural": "things", "kind": "Thing"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }


CRDS = "apiextensions.k8s.io/v1/customresourcedefinitions"


async def test_a_crd_is_served_at_once_and_takes_its_objects_along(cluster: DevCluster, dev: KubeClient) -> None:
    await dev.create(CRDS, crd())
    await dev.create(
        "torpor.dev/v1/things", {"apiVersion": "torpor.dev/v1", "kind": "Thing", "metadata": {"name": "a"}}
    )
    version = str(cluster.storage.revision)
    events = []
    watch = dev.watch("torpor.dev/v1/things", resourceVersion=version)
    await dev.delete(CRDS, "things.torpor.dev")
    try:
        events = [event.type async for event in watch]
    except ApiError as error:
        assert error.status == 404
    await cluster.settle()
    assert events in (["DELETED"], [])
    with pytest.raises(ApiError) as error_info:
        await dev.list("torpor.dev/v1/things")
    assert error_info.value.status == 404
    await dev.create(CRDS, crd())
    assert await dev.items("torpor.dev/v1/things") == []


async def test_a_second_crd_with_the_same_kind_is_not_established(dev: KubeClient) -> None:
    await dev.create(CRDS, crd())
    other = crd()
    other["metadata"]["name"] = "others.torpor.dev"
    other["spec"]["names"]["plural"] = "others"
    await dev.create(CRDS, other)
    status = (await dev.get(CRDS, "others.torpor.dev"))["status"]
    assert {c["type"]: c["status"] for c in status["conditions"]} == {"NamesAccepted": "False", "Established": "False"}
    with pytest.raises(ApiError):
        await dev.list("torpor.dev/v1/others")
