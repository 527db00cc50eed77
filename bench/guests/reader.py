"""Reads its object once a reconcile, and does what the object's value says.

`read`: nothing more. `spin MS`: look again after MS milliseconds. `write …`: put the value into a ConfigMap, which
shows from outside that the operator works.
"""

from torpor_sdk import Kube, Operator, Request, requeue_after

# Replaced when built, so that copies differ.
BUILD = "python"

op = Operator(for_="example.com/v1/widgets", name="reader")


@op.reconcile
def reconcile(request: Request, kube: Kube):
    widget = kube.get("example.com/v1/widgets", request.name, request.namespace)
    if widget is None:
        return None
    value = widget["spec"]["value"]
    if value.startswith("spin "):
        return requeue_after(seconds=int(value[5:]) / 1000)
    if value.startswith("write"):
        kube.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": request.name, "namespace": request.namespace},
                "data": {"value": value, "build": BUILD},
            }
        )
    return None
