"""The scale subresource: an object's replicas as an autoscaling/v1 Scale."""

from __future__ import annotations

from typing import Any

from torpor_devcluster.errors import Cause, bad_request, invalid
from torpor_devcluster.resources import ResourceType
from torpor_devcluster.table import find

Json = dict[str, Any]


def read(resource: ResourceType, obj: Json) -> Json:
    """What GET of the subresource shows of an object."""
    assert resource.scale is not None, "only asked of types with a scale"
    metadata = obj["metadata"]
    shown = {
        key: metadata[key]
        for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        if key in metadata
    }
    status: Json = {"replicas": _number(obj, resource.scale.status_path)}
    selector = _selector(obj, resource.scale.selector_path)
    if selector:
        status["selector"] = selector
    replicas = _number(obj, resource.scale.spec_path)
    spec = {"replicas": replicas} if replicas else {}
    return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": shown, "spec": spec, "status": status}


def write(resource: ResourceType, obj: Json, scale: Any) -> Json:
    """The object with the replicas (and the version, where given) of a Scale. Raises 400 and 422."""
    assert resource.scale is not None, "only asked of types with a scale"
    if not isinstance(scale, dict) or not isinstance(scale.get("spec", {}), dict):
        raise bad_request("the body must be a Scale")
    replicas = scale.get("spec", {}).get("replicas", 0)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
        message = f"Invalid value: {replicas}: must be greater than or equal to 0"
        raise invalid("Scale", "autoscaling", obj["metadata"]["name"], [Cause("spec.replicas", message)])
    place = obj
    *parents, last = resource.scale.spec_path.strip(".").split(".")
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = replicas
    version = (scale.get("metadata") or {}).get("resourceVersion")
    if version:
        obj["metadata"]["resourceVersion"] = version
    return obj


def _number(obj: Json, path: str) -> int:
    found = find(obj, path)
    return int(found[0]) if found and isinstance(found[0], int) else 0


def _selector(obj: Json, path: str) -> str:
    found = find(obj, path) if path else []
    if not found:
        return ""
    if isinstance(found[0], str):
        return found[0]
    return ",".join(f"{key}={value}" for key, value in sorted((found[0].get("matchLabels") or {}).items()))
