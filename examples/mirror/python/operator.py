"""Keeps a ConfigMap beside each object: `NAME-SUFFIX` holds the object's `spec.value`, and goes when the object goes.

`SUFFIX` is the operator's `config.suffix`, so that many copies can run side by side.
"""

from torpor_sdk import Kube, Operator, Request, config

# Replaced when built, so that copies differ.
BUILD = "python"

op = Operator(for_="example.com/v1/widgets", name="mirror")


@op.reconcile
def reconcile(request: Request, kube: Kube) -> None:
    settings = config()
    resource = f"example.com/v1/{settings.get('resource', 'widgets')}"
    copy = f"{request.name}-{settings.get('suffix', 'mirror')}"
    primary = kube.get(resource, request.name, request.namespace)
    if primary is None:
        kube.delete("v1/configmaps", copy, request.namespace)
        return
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": copy, "namespace": request.namespace},
            "data": {"value": primary.get("spec", {}).get("value", ""), "by": "python", "build": BUILD},
        }
    )
