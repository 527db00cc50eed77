"""What a path of the Kubernetes API names. Says nothing about whether it exists."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

# Reads that are as these: nobody's objects.
_NOT_A_RESOURCE = frozenset({"", "watch", "proxy"})


@dataclass(frozen=True, slots=True)
class ApiPath:
    """`name` is empty for a collection, `namespace` for all namespaces and for cluster-scoped kinds."""

    group: str
    version: str
    resource: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def parse(path: str) -> ApiPath | None:
    """The resource that the path (with or without query) names; None for discovery and everything else."""
    parts = [unquote(part) for part in path.partition("?")[0].strip("/").split("/")]
    if parts[0] == "api" and len(parts) >= 3:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) >= 4:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    if rest[0] == "namespaces" and len(rest) >= 3 and rest[2] not in {"status", "finalize"}:
        namespace, rest = rest[1], rest[2:]
    if rest[0] in _NOT_A_RESOURCE or (len(rest) > 3 and rest[2] != "proxy"):
        return None
    name = rest[1] if len(rest) > 1 else ""
    return ApiPath(group, version, rest[0], namespace, name, "/".join(rest[2:]))
