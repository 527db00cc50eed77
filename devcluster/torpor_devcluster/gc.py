"""What a cluster does by itself: owner garbage collection, emptying namespaces and CRDs, default accounts.

One task works off a queue of things to look at, fed by every commit. Each look is level-triggered: it reads the
present state and does the next step, so a lost or doubled entry does no harm. Nothing here polls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torpor_devcluster import crds
from torpor_devcluster.errors import ApiError
from torpor_devcluster.history import Event, ObjectKey, Stored
from torpor_devcluster.registry import FOREGROUND, ORPHAN, DeleteOptions, Registry, Write
from torpor_devcluster.resources import CRDS, NAMESPACES, SERVICE_ACCOUNTS, ResourceKey, ResourceType

Json = dict[str, Any]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Look:
    """Something to look at again: an object, or (with a uid) the dependents of an owner that is gone."""

    resource: ResourceKey
    key: ObjectKey
    owner_uid: str = ""


class Controllers:
    """`run()` is the task; `idle()` waits until everything there is to do has been done."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._storage = registry.storage
        self._dependents: dict[str, set[tuple[ResourceKey, ObjectKey]]] = {}
        self._uids: set[str] = set()
        self._queue: dict[_Look, None] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._storage.observe(self._on_event)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                look = next(iter(self._queue))
                del self._queue[look]
                try:
                    self._look_at(look)
                except ApiError as error:
                    log.warning("devcluster controllers: %s: %s", look, error)
                # One look is short; requests go in between.
                await asyncio.sleep(0)
            self._idle.set()

    async def idle(self) -> None:
        await self._idle.wait()

    # Intake

    def _on_event(self, resource: ResourceKey, event: Event) -> None:
        ref = (resource, event.key)
        if event.previous is not None:
            for uid in _owner_uids(event.previous.object):
                self._drop_dependent(uid, ref)
        if event.type == "DELETED":
            self._uids.discard(event.current.uid)
            self._enqueue(_Look(resource, event.key, event.current.uid))
            for uid in _owner_uids(event.current.object):
                self._enqueue_owner(uid, event.current)
        else:
            self._uids.add(event.current.uid)
            for uid in _owner_uids(event.current.object):
                self._dependents.setdefault(uid, set()).add(ref)
            if _needs_look(resource, event.current):
                self._enqueue(_Look(resource, event.key))
        self._enqueue_container(resource, event)

    def _drop_dependent(self, uid: str, ref: tuple[ResourceKey, ObjectKey]) -> None:
        refs = self._dependents.get(uid)
        if refs is not None:
            refs.discard(ref)
            if not refs:
                del self._dependents[uid]

    def _enqueue_owner(self, _uid: str, dependent: Stored) -> None:
        """An owner that waits for its dependents (foreground) looks again when one is gone."""
        for owner in dependent.metadata.get("ownerReferences") or []:
            resource = self._resource_of(owner)
            if resource is not None:
                namespace = dependent.metadata.get("namespace", "") if resource.namespaced else ""
                self._enqueue(_Look(resource.key, (namespace, owner["name"])))

    def _enqueue_container(self, resource: ResourceKey, event: Event) -> None:
        """A namespace or CRD that is being deleted looks again when something in it is gone."""
        if event.type != "DELETED":
            return
        if event.key[0]:
            self._enqueue(_Look(NAMESPACES, ("", event.key[0])))
        if resource.group:
            self._enqueue(_Look(CRDS, ("", str(resource))))

    def _enqueue(self, look: _Look) -> None:
        self._queue[look] = None
        self._idle.clear()
        self._wake.set()

    # Work

    def _look_at(self, look: _Look) -> None:
        if look.owner_uid:
            self._owner_gone(look.owner_uid)
            return
        stored = self._storage.get(look.resource, look.key)
        if stored is None:
            return
        if look.resource == NAMESPACES:
            self._namespace(stored)
        if look.resource == CRDS:
            self._crd(stored)
        resource = self._registry.catalogue.by_key(look.resource)
        if resource is None:
            return
        if "deletionTimestamp" in stored.metadata:
            self._work_off_policy(resource, stored)
        elif stored.metadata.get("ownerReferences"):
            self._check_owners(resource, stored)

    def _owner_gone(self, uid: str) -> None:
        for resource_key, key in sorted(self._dependents.get(uid, ())):
            resource = self._registry.catalogue.by_key(resource_key)
            stored = self._storage.get(resource_key, key)
            if resource is not None and stored is not None:
                self._check_owners(resource, stored)

    def _check_owners(self, resource: ResourceType, stored: Stored) -> None:
        """Delete an object whose owners are all gone; drop the references to those that are, if others remain."""
        owners = stored.metadata.get("ownerReferences") or []
        present = [owner for owner in owners if self._present(stored, owner)]
        if len(present) == len(owners):
            return
        namespace, name = stored.key
        if present:
            gone = {owner["uid"] for owner in owners} - {owner["uid"] for owner in present}
            self._remove_owners(resource, stored, gone)
        else:
            options = DeleteOptions(uid=stored.uid, propagation="Background")
            self._registry.delete(resource, namespace, name, options)

    def _present(self, dependent: Stored, owner: Json) -> bool:
        resource = self._resource_of(owner)
        if resource is None:
            # An unknown kind cannot be called absent: the CRD may not be there yet.
            return True
        namespace = dependent.metadata.get("namespace", "")
        if resource.namespaced and not namespace:
            return True
        found = self._storage.get(resource.key, (namespace if resource.namespaced else "", owner["name"]))
        return found is not None and found.uid == owner["uid"]

    def _resource_of(self, owner: Json) -> ResourceType | None:
        group, _, version = str(owner.get("apiVersion", "")).rpartition("/")
        return self._registry.catalogue.by_kind(group, version, str(owner.get("kind", "")))

    def _remove_owners(self, resource: ResourceType, stored: Stored, uids: set[str]) -> None:
        def change(obj: Json) -> Json:
            left = [o for o in obj["metadata"].get("ownerReferences") or [] if o["uid"] not in uids]
            if left:
                obj["metadata"]["ownerReferences"] = left
            else:
                obj["metadata"].pop("ownerReferences", None)
            return obj

        self._registry.update(resource, *stored.key, change, Write())

    def _work_off_policy(self, resource: ResourceType, stored: Stored) -> None:
        finalizers = stored.metadata.get("finalizers") or []
        if ORPHAN in finalizers:
            for dependent_type, dependent in self._dependents_of(stored.uid):
                self._remove_owners(dependent_type, dependent, {stored.uid})
            self._remove_finalizer(resource, stored, ORPHAN)
        elif FOREGROUND in finalizers:
            blocking = False
            for dependent_type, dependent in list(self._dependents_of(stored.uid)):
                blocking |= self._delete_dependent(dependent_type, dependent, stored.uid)
            if not blocking:
                self._remove_finalizer(resource, stored, FOREGROUND)

    def _delete_dependent(self, resource: ResourceType, dependent: Stored, owner_uid: str) -> bool:
        """Delete in the foreground too; returns whether the owner has to wait for it."""
        owners = dependent.metadata.get("ownerReferences") or []
        blocks = any(o["uid"] == owner_uid and o.get("blockOwnerDeletion") for o in owners)
        if any(o["uid"] != owner_uid and self._present(dependent, o) for o in owners):
            self._remove_owners(resource, dependent, {owner_uid})
            return False
        if "deletionTimestamp" not in dependent.metadata:
            options = DeleteOptions(uid=dependent.uid, propagation="Foreground")
            self._registry.delete(resource, *dependent.key, options)
        return blocks and self._storage.get(resource.key, dependent.key) is not None

    def _dependents_of(self, uid: str) -> Iterator[tuple[ResourceType, Stored]]:
        for resource_key, key in sorted(self._dependents.get(uid, ())):
            resource = self._registry.catalogue.by_key(resource_key)
            stored = self._storage.get(resource_key, key)
            if resource is not None and stored is not None:
                yield resource, stored

    def _remove_finalizer(self, resource: ResourceType, stored: Stored, finalizer: str) -> None:
        def change(obj: Json) -> Json:
            obj["metadata"]["finalizers"] = [f for f in obj["metadata"]["finalizers"] if f != finalizer]
            return obj

        self._registry.update(resource, *stored.key, change, Write())

    # Namespaces and CRDs

    def _namespace(self, stored: Stored) -> None:
        name = stored.metadata["name"]
        if "deletionTimestamp" not in stored.metadata:
            self._default_account(name)
            return
        if self._empty(name):
            return
        resource = self._registry.catalogue.by_key(NAMESPACES)
        assert resource is not None, "namespaces are built in"

        def change(obj: Json) -> Json:
            obj["spec"] = {**obj["spec"], "finalizers": []}
            return obj

        if (stored.object.get("spec") or {}).get("finalizers"):
            self._registry.update(resource, "", name, change, Write(), subresource="finalize")

    def _default_account(self, namespace: str) -> None:
        if self._storage.get(SERVICE_ACCOUNTS, (namespace, "default")) is None:
            resource = self._registry.catalogue.by_key(SERVICE_ACCOUNTS)
            assert resource is not None, "ServiceAccounts are built in"
            account = {"kind": "ServiceAccount", "apiVersion": "v1", "metadata": {"name": "default"}}
            self._registry.create(resource, namespace, account, Write())

    def _empty(self, namespace: str) -> bool:
        """Delete what is left in a namespace; returns whether something has to be waited for."""
        left = False
        for table in self._storage.tables():
            resource = self._registry.catalogue.by_key(table.resource)
            if resource is None or not resource.namespaced:
                continue
            for key in list(table.keys(namespace)):
                left |= self._delete_content(resource, key)
        return left

    def _delete_content(self, resource: ResourceType, key: ObjectKey) -> bool:
        stored = self._storage.get(resource.key, key)
        if stored is not None and "deletionTimestamp" not in stored.metadata:
            # No kubelet will end a pod's grace period when its namespace goes.
            self._registry.delete(resource, *key, DeleteOptions(grace_period_s=0, propagation="Background"))
        return self._storage.get(resource.key, key) is not None

    def _crd(self, stored: Stored) -> None:
        if "deletionTimestamp" not in stored.metadata:
            return
        if crds.CLEANUP_FINALIZER not in (stored.metadata.get("finalizers") or []):
            return
        spec = stored.object["spec"]
        key = ResourceKey(spec["group"], spec["names"]["plural"])
        custom = self._registry.catalogue.by_key(key)
        left = False
        if custom is not None:
            for object_key in list(self._storage.table(key).keys(None)):
                left |= self._delete_content(custom, object_key)
        resource = self._registry.catalogue.by_key(CRDS)
        if not left and resource is not None:
            self._remove_finalizer(resource, stored, crds.CLEANUP_FINALIZER)


def _owner_uids(obj: Json) -> list[str]:
    return [owner["uid"] for owner in obj["metadata"].get("ownerReferences") or []]


def _needs_look(resource: ResourceKey, stored: Stored) -> bool:
    metadata = stored.metadata
    return bool(resource == NAMESPACES or metadata.get("ownerReferences") or "deletionTimestamp" in metadata)
