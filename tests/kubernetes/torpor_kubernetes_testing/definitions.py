"""CustomResourceDefinitions, installed so that their objects can be created at once."""

from torpor_kubernetes_testing.client import Json, KubeClient

CRDS = "apiextensions.k8s.io/v1/customresourcedefinitions"


async def install_crd(kube: KubeClient, crd: Json) -> str:
    """Create the definition and wait until its storage version is served: "example.com/v1/databases".

    kube-apiserver holds back POSTs of a kind in its first 2 s, for the sake of its replicas; install it early
    where time is measured. Raises TimeoutError, with the definition's conditions, where its names are not accepted.
    """
    created = await kube.create(CRDS, crd)
    await kube.until(CRDS, created["metadata"]["name"], is_established)
    return resource_of(crd)


async def remove_crd(kube: KubeClient, name: str) -> None:
    """Delete the definition with all its objects; returns when they are gone."""
    await kube.delete(CRDS, name)
    await kube.until(CRDS, name, lambda crd: crd is None)


def resource_of(crd: Json) -> str:
    spec = crd["spec"]
    version = next(v["name"] for v in spec["versions"] if v["storage"])
    return f"{spec['group']}/{version}/{spec['names']['plural']}"


def is_established(crd: Json | None) -> bool:
    # A definition that was just created has `conditions: null`.
    conditions = (crd or {}).get("status", {}).get("conditions") or []
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)
