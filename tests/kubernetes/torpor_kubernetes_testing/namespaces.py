"""A namespace of a test's own that leaves nothing behind.

A later test's cluster-wide watch must not meet an earlier test's objects, and a control plane without
controllers empties no namespace, so the objects are deleted here, finalizers or not.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

from torpor_kubernetes_testing.client import ApiError, KubeClient

AGGREGATED_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


@contextlib.asynccontextmanager
async def temporary_namespace(kube: KubeClient, prefix: str = "test") -> AsyncIterator[str]:
    """The name of a new namespace; on leaving, it and all that is in it are gone. `kube` must be an admin."""
    name = f"{prefix}-{secrets.token_hex(4)}"
    await kube.create("v1/namespaces", {"metadata": {"name": name}})
    try:
        yield name
    finally:
        await remove_namespace(kube, name)


async def remove_namespace(kube: KubeClient, name: str) -> None:
    # First the namespace, so that nothing new is created in it while it is emptied.
    namespace = await kube.delete("v1/namespaces", name)
    resources = await deletable_resources(kube)
    await asyncio.gather(*(_empty(kube, resource, name) for resource in resources))
    if namespace.get("kind") != "Namespace":
        return
    with contextlib.suppress(ApiError):  # A running namespace controller may have been faster.
        await kube.update(
            "v1/namespaces",
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": name},
                "spec": {"finalizers": []},
            },
            subresource="finalize",
        )


async def deletable_resources(kube: KubeClient) -> list[str]:
    """All namespaced resources that the server stores, in their preferred version: "v1/secrets", …"""
    found: list[str] = []
    for root in ("/api", "/apis"):
        groups = await kube.request("GET", root, headers={"Accept": AGGREGATED_DISCOVERY})
        for group in groups["items"]:
            found += _deletable(group)
    return found


def _deletable(group: dict[str, Any]) -> list[str]:
    preferred = group["versions"][0]
    prefix = "/".join(part for part in (group["metadata"].get("name"), preferred["version"]) if part)
    return [
        f"{prefix}/{resource['resource']}"
        for resource in preferred.get("resources", [])
        if resource["scope"] == "Namespaced" and "deletecollection" in resource["verbs"]
    ]


async def _empty(kube: KubeClient, resource: str, namespace: str) -> None:
    options = {"propagationPolicy": "Background", "gracePeriodSeconds": 0}
    try:
        answer = await kube.delete_all(resource, namespace=namespace, **options)
    except ApiError as error:
        if error.status == 404:  # A CRD that was deleted meanwhile took its objects along.
            return
        raise
    for item in answer.get("items") or []:
        if item["metadata"].get("finalizers"):
            await _release(kube, resource, namespace, item["metadata"]["name"])


async def _release(kube: KubeClient, resource: str, namespace: str, name: str) -> None:
    patch = {"metadata": {"finalizers": None}}
    try:
        await kube.merge_patch(resource, name, patch, namespace=namespace)
    except ApiError as error:
        if error.status not in (404, 409):
            raise
