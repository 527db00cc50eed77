"""The clients people use: kubernetes_asyncio, and a kopf operator."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kopf
import pytest
import pytest_asyncio
from kubernetes_asyncio import client, config, watch
from torpor_devcluster import DevCluster
from torpor_kubernetes_testing import KubeClient

Json = dict[str, Any]


@pytest_asyncio.fixture
async def api(cluster: DevCluster, tmp_path: Path) -> AsyncIterator[client.ApiClient]:
    configuration = client.Configuration()
    path = cluster.write_kubeconfig(tmp_path / "kubeconfig")
    await config.load_kube_config(str(path), client_configuration=configuration)
    async with client.ApiClient(configuration) as api_client:
        yield api_client


async def test_kubernetes_asyncio_creates_patches_and_watches_typed_objects(api: client.ApiClient) -> None:
    core, apps = client.CoreV1Api(api), client.AppsV1Api(api)
    created = await core.create_namespaced_config_map(
        "default", client.V1ConfigMap(metadata=client.V1ObjectMeta(name="a"), data={"k": "v"})
    )
    await core.patch_namespaced_config_map("a", "default", {"data": {"k": "w"}})
    events = []
    async with watch.Watch().stream(
        core.list_namespaced_config_map,
        "default",
        resource_version=created.metadata.resource_version,
        timeout_seconds=5,
    ) as stream:
        async for event in stream:
            events.append((event["type"], event["object"].data))
            break
    assert events == [("MODIFIED", {"k": "w"})]
    with pytest.raises(client.ApiException) as error:
        await core.read_namespaced_config_map("missing", "default")
    assert error.value.status == 404
    container = client.V1Container(name="web", image="web:1")
    template = client.V1PodTemplateSpec(
        metadata=client.V1ObjectMeta(labels={"a": "b"}), spec=client.V1PodSpec(containers=[container])
    )
    spec = client.V1DeploymentSpec(selector=client.V1LabelSelector(match_labels={"a": "b"}), template=template)
    body = client.V1Deployment(metadata=client.V1ObjectMeta(name="web"), spec=spec)
    deployment = await apps.create_namespaced_deployment("default", body)
    assert (deployment.spec.replicas, deployment.metadata.generation) == (1, 1)
    listed = await apps.list_deployment_for_all_namespaces(label_selector="!x")
    assert [item.metadata.name for item in listed.items] == ["web"]
    await core.delete_namespaced_config_map("a", "default")


def crd() -> Json:
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema, "subresources": {"status": {}}}
    return {
        "metadata": {"name": "greetings.torpor.dev"},
        "spec": {
            "group": "torpor.dev",
            "scope": "Namespaced",
            "names": {"plural": "greetings", "kind": "Greeting"},
            "versions": [version],
        },
    }


async def test_a_kopf_operator_reconciles_and_finalizes(cluster: DevCluster, dev: KubeClient) -> None:
    await dev.create("apiextensions.k8s.io/v1/customresourcedefinitions", crd())
    registry = kopf.OperatorRegistry()
    deleted = asyncio.Event()

    @kopf.on.create("torpor.dev", "v1", "greetings", registry=registry)
    async def greet(spec: Json, patch: kopf.Patch, **_: Any) -> None:
        patch.status["said"] = f"hello {spec['name']}"

    @kopf.on.delete("torpor.dev", "v1", "greetings", registry=registry)
    async def leave(**_: Any) -> None:
        deleted.set()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=cluster.url, ca_path=str(cluster.ca_file), token=cluster.admin_token)

    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    stop, ready = asyncio.Event(), asyncio.Event()
    operator = asyncio.create_task(
        kopf.operator(registry=registry, settings=settings, namespaces=["default"], stop_flag=stop, ready_flag=ready)
    )
    try:
        greeting = {
            "apiVersion": "torpor.dev/v1",
            "kind": "Greeting",
            "metadata": {"name": "a"},
            "spec": {"name": "you"},
        }
        await asyncio.wait_for(ready.wait(), 10)
        await dev.create("torpor.dev/v1/greetings", greeting, namespace="default")

        def said(obj: Json | None) -> bool:
            return ((obj or {}).get("status") or {}).get("said") == "hello you"

        shown = await dev.until("torpor.dev/v1/greetings", "a", said, namespace="default")
        assert shown is not None and shown["metadata"]["finalizers"] == ["kopf.zalando.org/KopfFinalizerMarker"]
        await dev.delete("torpor.dev/v1/greetings", "a", namespace="default")
        await dev.until("torpor.dev/v1/greetings", "a", lambda obj: obj is None, namespace="default")
        assert deleted.is_set()
    finally:
        stop.set()
        await asyncio.wait_for(operator, 10)
