"""Service accounts and their rights, as a cluster's admin makes them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from torpor_kubernetes_testing.client import Json, KubeClient

RBAC = "rbac.authorization.k8s.io"
POLL_S = 0.02  # A grant has no event that says it is in force.


async def create_service_account(kube: KubeClient, namespace: str, name: str, rules: Sequence[Json] = ()) -> None:
    """Create the account and, with `rules` (RBAC PolicyRules), what it may do in its namespace."""
    await kube.create("v1/serviceaccounts", {"metadata": {"name": name, "namespace": namespace}})
    if rules:
        await grant(kube, namespace, name, rules)


async def grant(kube: KubeClient, namespace: str, account: str, rules: Sequence[Json]) -> None:
    """Give an account of this namespace more rights in it. In force a little later: see `until_allowed`."""
    metadata = {"generateName": f"{account}-", "namespace": namespace}
    role = await kube.create(f"{RBAC}/v1/roles", {"metadata": metadata, "rules": list(rules)})
    await kube.create(
        f"{RBAC}/v1/rolebindings",
        {
            "metadata": metadata,
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
            "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": role["metadata"]["name"]},
        },
    )


async def until_allowed(
    client: KubeClient,
    verb: str,
    resource: str,
    *,
    group: str = "",
    namespace: str | None = None,
    timeout_s: float = 10.0,
) -> None:
    """Wait until the authorizer has seen a grant: `client`'s own user may `verb` the resource.

    Kubernetes' authorizer works from a cache of roles and bindings that follows writes by some milliseconds.
    """
    attributes: dict[str, Any] = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
    }
    async with asyncio.timeout(timeout_s):
        while True:
            answer = await client.create("authorization.k8s.io/v1/selfsubjectaccessreviews", review)
            if answer["status"]["allowed"]:
                return
            await asyncio.sleep(POLL_S)
