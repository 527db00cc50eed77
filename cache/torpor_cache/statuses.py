"""Kubernetes Status objects as JSON, for errors that the cache itself finds."""

from __future__ import annotations

import msgspec

from torpor_cache.apiserver import make_status
from torpor_cache.resources import Resource


def status_json(code: int, reason: str, message: str, *, retry_after_s: int = 0) -> bytes:
    """A failure as the API server would write it. `reason` is one of metav1's StatusReasons."""
    status = make_status(code, message, reason)
    if retry_after_s:
        status["details"] = {"retryAfterSeconds": retry_after_s}
    return msgspec.json.encode(status)


def not_built(what: str) -> bytes:
    """501 for a part of the contract that this version refuses by name."""
    return status_json(501, "NotImplemented", f"{what} is not built yet")


def not_found(resource: Resource, name: str) -> bytes:
    """As the API server words it for a missing object."""
    qualified = f"{resource.resource}.{resource.group}" if resource.group else resource.resource
    status = make_status(404, f'{qualified} "{name}" not found', "NotFound")
    details = {"name": name, "kind": resource.resource}
    status["details"] = details | ({"group": resource.group} if resource.group else {})
    return msgspec.json.encode(status)


def forbidden(user: str, verb: str, resource: Resource, namespace: str, reason: str = "") -> bytes:
    """As the API server words a refusal by its authorizer."""
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    qualified = f"{resource.resource}.{resource.group}" if resource.group else resource.resource
    message = (
        f'{qualified} is forbidden: User "{user}" cannot {verb} resource "{resource.resource}" '
        f'in API group "{resource.group}" {where}'
    )
    return status_json(403, "Forbidden", f"{message}: {reason}" if reason else message)
