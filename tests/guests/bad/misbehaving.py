"""Does what its configuration says, all of it bad; `spec.value` of its objects is the material."""

import json
import time

from torpor_sdk import Kube, Operator, Request, config

op = Operator(for_="example.com/v1/widgets")


@op.reconcile
def reconcile(request: Request, kube: Kube) -> None:
    obj = kube.get(request)
    if obj is None:
        return
    match config()["does"]:
        case "loops":
            while True:
                pass
        case "sleeps":
            time.sleep(3600)
        case "eats memory":
            eaten = []
            while True:
                eaten.append(bytearray(1 << 20))
        case "reads deep JSON":
            json.loads(obj["spec"]["value"])
        case "raises":
            raise ValueError("this operator is wrong")
        case "may not":
            kube.apply(
                {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": request.namespace}}
            )
