"""Which resources are served now: the built-in table plus the CRDs, and the discovery documents of both."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torpor_devcluster.resources import BUILT_IN, ResourceKey, ResourceType

Json = dict[str, Any]


class Catalogue:
    """Resource types by (group, version, plural). CRD types come and go; built-in ones stay."""

    def __init__(self) -> None:
        self._types: dict[tuple[str, str, str], ResourceType] = {}
        for resource in BUILT_IN:
            self._types[resource.group, resource.version, resource.plural] = resource

    def find(self, group: str, version: str, plural: str) -> ResourceType | None:
        return self._types.get((group, version, plural))

    def by_kind(self, group: str, version: str, kind: str) -> ResourceType | None:
        for resource in self._types.values():
            if (resource.group, resource.version, resource.kind) == (group, version, kind):
                return resource
        return None

    def by_key(self, key: ResourceKey) -> ResourceType | None:
        """A served type of a resource: the one whose version is stored, if that is served."""
        found = [r for r in self._types.values() if r.key == key and r.view_of is None]
        return next((r for r in found if r.storage_version in ("", r.version)), found[0] if found else None)

    def types(self) -> Iterable[ResourceType]:
        return self._types.values()

    def has_group(self, group: str) -> bool:
        return any(resource.group == group for resource in self._types.values())

    def has_version(self, group: str, version: str) -> bool:
        return any((r.group, r.version) == (group, version) for r in self._types.values())

    def replace(self, key: ResourceKey, types: Iterable[ResourceType]) -> None:
        """Serve exactly `types` for a custom resource (none: it is gone)."""
        for name, resource in list(self._types.items()):
            if resource.custom and resource.key == key:
                del self._types[name]
        for resource in types:
            self._types[resource.group, resource.version, resource.plural] = resource

    def groups(self) -> dict[str, list[str]]:
        """Group → versions, the preferred one first; the core group is not among them."""
        groups: dict[str, set[str]] = {}
        for resource in self._types.values():
            if resource.group:
                groups.setdefault(resource.group, set()).add(resource.version)
        return {group: sorted(versions, key=version_priority) for group, versions in groups.items()}

    def group_list(self) -> Json:
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [self._group(group, versions) for group, versions in self.groups().items()],
        }

    def group(self, group: str) -> Json | None:
        versions = self.groups().get(group)
        if versions is None:
            return None
        return {"kind": "APIGroup", "apiVersion": "v1", **self._group(group, versions)}

    def _group(self, group: str, versions: list[str]) -> Json:
        entries = [{"groupVersion": f"{group}/{version}", "version": version} for version in versions]
        return {"name": group, "versions": entries, "preferredVersion": entries[0]}

    def resource_list(self, group: str, version: str) -> Json | None:
        types = self._of(group, version)
        if not types:
            return None
        entries = [entry for resource in types for entry in _resource_entries(resource)]
        group_version = f"{group}/{version}" if group else version
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": group_version,
            "resources": entries,
        }

    def _of(self, group: str, version: str) -> list[ResourceType]:
        types = [r for r in self._types.values() if (r.group, r.version) == (group, version)]
        return sorted(types, key=lambda resource: resource.plural)

    def aggregated(self, *, core: bool) -> Json:
        """APIGroupDiscoveryList v2: everything that the lists say, in one document."""
        groups = {"": ["v1"]} if core else self.groups()
        items = [
            {
                "metadata": {"name": group} if group else {},
                "versions": [
                    {
                        "version": version,
                        "resources": [_discovery(resource) for resource in self._of(group, version)],
                        "freshness": "Current",
                    }
                    for version in versions
                ],
            }
            for group, versions in groups.items()
        ]
        return {
            "kind": "APIGroupDiscoveryList",
            "apiVersion": "apidiscovery.k8s.io/v2",
            "metadata": {},
            "items": items,
        }


def version_priority(version: str) -> tuple[int, int, int, str]:
    """Sort key: v2, v1, v1beta2, v1beta1, v1alpha1, then the rest by name."""
    match = re.fullmatch(r"v(\d+)(?:(alpha|beta)(\d+))?", version)
    if match is None:
        return (3, 0, 0, version)
    stage = {None: 0, "beta": 1, "alpha": 2}[match.group(2)]
    return (stage, -int(match.group(1)), -int(match.group(3) or 0), version)


def _resource_entries(resource: ResourceType) -> list[Json]:
    main: Json = {
        "name": resource.plural,
        "singularName": resource.singular_name,
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": sorted(resource.verbs),
    }
    if resource.short_names:
        main["shortNames"] = list(resource.short_names)
    if resource.categories:
        main["categories"] = list(resource.categories)
    return [main] + [
        {
            "name": f"{resource.plural}/{name}",
            "singularName": "",
            "namespaced": resource.namespaced,
            **_foreign_kind(kind),
            "kind": kind,
            "verbs": list(verbs),
        }
        for name, kind, verbs in _subresources(resource)
    ]


def _foreign_kind(kind: str) -> Json:
    """Group and version of a subresource's kind that is not of its resource's own."""
    group = {"Scale": "autoscaling", "TokenRequest": "authentication.k8s.io", "Eviction": "policy"}.get(kind)
    return {} if group is None else {"group": group, "version": "v1"}


def _subresources(resource: ResourceType) -> list[tuple[str, str, tuple[str, ...]]]:
    verbs = ("get", "patch", "update")
    status = [("status", resource.kind, verbs)] if resource.has_status else []
    scale = [("scale", "Scale", verbs)] if resource.scale is not None else []
    return status + scale + list(resource.subresources)


def _discovery(resource: ResourceType) -> Json:
    entry: Json = {
        "resource": resource.plural,
        "responseKind": {"group": resource.group, "version": resource.version, "kind": resource.kind},
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular_name,
        "verbs": sorted(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    subresources = [
        {
            "subresource": name,
            "responseKind": {"group": resource.group, "version": resource.version, **_foreign_kind(kind), "kind": kind},
            "verbs": list(verbs),
        }
        for name, kind, verbs in _subresources(resource)
    ]
    if subresources:
        entry["subresources"] = subresources
    return entry
