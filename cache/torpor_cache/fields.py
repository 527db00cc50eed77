"""What a field selector's paths mean, for the kinds that the cache can judge itself.

The API server gives each kind a list of field labels; most are the JSON path of the same name, a few are not. The
cache evaluates a selector itself only where it is sure (`evaluable`); any other is left to a watch of its own, in which
the API server evaluates it.

Source: the `AddFieldLabelConversionFunc` calls and `ToSelectableFields` functions of kubernetes 1.36.
"""

from __future__ import annotations

from typing import Any

from torpor_cache.resources import ObjectKey, Resource

OF_METADATA = frozenset({"metadata.name", "metadata.namespace"})

_BY_RESOURCE: dict[tuple[str, str], frozenset[str]] = {
    ("", "pods"): frozenset(
        {
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork",
            "status.phase",
            "status.podIP",
            "status.nominatedNodeName",
        }
    ),
    ("", "secrets"): frozenset({"type"}),
    ("", "namespaces"): frozenset({"status.phase"}),
    ("", "nodes"): frozenset({"spec.unschedulable"}),
    ("", "events"): frozenset(
        {
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "type",
        }
    ),
    ("certificates.k8s.io", "certificatesigningrequests"): frozenset({"spec.signerName"}),
}
_BOOLEANS = frozenset({"spec.hostNetwork", "spec.unschedulable"})  # omitted where false


def evaluable(resource: Resource, paths: frozenset[str]) -> bool:
    """Whether `value_of` gives what the API server compares, for all of these paths of this resource."""
    return paths <= OF_METADATA | _BY_RESOURCE.get((resource.group, resource.resource), frozenset())


def value_of(path: str, key: ObjectKey, body: Any) -> str:
    """The field as a text; empty where the object has none. `body` is the parsed object, for paths outside metadata."""
    if path == "metadata.name":
        return key.name
    if path == "metadata.namespace":
        return key.namespace
    for part in path.split("."):
        body = body.get(part) if isinstance(body, dict) else None
    if path in _BOOLEANS:
        return "true" if body is True else "false"
    return body if isinstance(body, str) else ""
