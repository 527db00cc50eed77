"""Keeps the catalogue in step with the stored CRDs: serves them at once, sets their conditions, and takes them away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torpor_devcluster import crds
from torpor_devcluster.history import Event
from torpor_devcluster.registry import Registry, Write
from torpor_devcluster.resources import CRDS, ResourceKey

Json = dict[str, Any]


class CrdController:
    """Works inside the commit, so that a created CRD is served when its creation is answered."""

    def __init__(self, registry: Registry, *, on_gone: Callable[[ResourceKey], None]) -> None:
        """`on_gone` is called when a resource is no longer served: its watches have to end."""
        self._registry = registry
        self._on_gone = on_gone
        registry.storage.observe(self._on_event)

    def _on_event(self, resource: ResourceKey, event: Event) -> None:
        if resource != CRDS:
            return
        crd = event.current.object
        key = ResourceKey(crd["spec"]["group"], crd["spec"]["names"]["plural"])
        if event.type == "DELETED":
            self._registry.catalogue.replace(key, [])
            self._registry.storage.drop_table(key)
            self._on_gone(key)
            return
        conflict = self._names_conflict(key, crd)
        if conflict is None:
            self._registry.catalogue.replace(key, crds.types_of(crd))
        if event.previous is None or crd["spec"] != event.previous.object["spec"]:
            self._set_status(crd, conflict)

    def _names_conflict(self, key: ResourceKey, crd: Json) -> str | None:
        kind = crd["spec"]["names"]["kind"]
        for other in self._registry.catalogue.types():
            if other.group == key.group and other.key != key and other.kind == kind:
                return f'"{kind}" is already in use'
        return None

    def _set_status(self, crd: Json, conflict: str | None) -> None:
        now_s = self._registry.clock.now_s()
        resource = self._registry.catalogue.by_key(CRDS)
        assert resource is not None, "CRDs are built in"

        def change(obj: Json) -> Json:
            if conflict is None:
                obj["status"] = crds.established_status(obj, now_s)
            else:
                obj["status"] = crds.names_conflict_status(obj, conflict, now_s)
            return obj

        self._registry.update(resource, "", crd["metadata"]["name"], change, Write(), subresource="status")
