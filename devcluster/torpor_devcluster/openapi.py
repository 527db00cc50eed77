"""A minimal OpenAPI v3: which parameters PATCH takes, and which kinds there are.

kubectl looks here whether the server validates fields (`fieldValidation`) and knows `dryRun`. Schemas are not
described: `kubectl explain` finds nothing, and says so.
"""

from __future__ import annotations

from typing import Any

from torpor_devcluster.catalogue import Catalogue
from torpor_devcluster.resources import ResourceType

Json = dict[str, Any]


def document(catalogue: Catalogue, path: str) -> Json | None:
    """`path` is what follows /openapi/v3/; empty is the index. None when there is no such group version."""
    versions = {_path_of(resource) for resource in catalogue.types()}
    if not path:
        index: Json = {name: {"serverRelativeURL": f"/openapi/v3/{name}"} for name in sorted(versions)}
        return {"paths": index}
    if path not in versions:
        return None
    paths: Json = {}
    for resource in catalogue.types():
        if _path_of(resource) == path and "patch" in resource.verbs:
            paths[_item_url(resource)] = {"patch": _patch_operation(resource)}
    return {"openapi": "3.0.0", "info": {"title": "torpor-devcluster", "version": "v1"}, "paths": paths}


def _path_of(resource: ResourceType) -> str:
    return f"apis/{resource.api_version}" if resource.group else f"api/{resource.version}"


def _item_url(resource: ResourceType) -> str:
    scope = "namespaces/{namespace}/" if resource.namespaced else ""
    return f"/{_path_of(resource)}/{scope}{resource.plural}/{{name}}"


def _patch_operation(resource: ResourceType) -> Json:
    names = ("dryRun", "fieldManager", "fieldValidation", "force")
    return {
        "operationId": f"patch{resource.kind}",
        "parameters": [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names],
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": {
            "group": resource.group,
            "version": resource.version,
            "kind": resource.kind,
        },
    }
