"""Create, update and delete with Kubernetes' rules, over `storage.py`.

Each method is one transaction without an await. What differs between types is in `strategies.py`. Objects go in and
out in the version of the `ResourceType` that is asked; they are stored in one version. Authorisation happened before.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torpor_devcluster import apply, crds, errors, fields, strategies
from torpor_devcluster.authn import User
from torpor_devcluster.catalogue import Catalogue
from torpor_devcluster.clock import Clock, rfc3339
from torpor_devcluster.errors import Cause
from torpor_devcluster.history import ObjectKey, Stored
from torpor_devcluster.managed import Operation, Owners
from torpor_devcluster.metadata import check_metadata, check_metadata_update
from torpor_devcluster.resources import CRDS, NAMESPACES, PODS, SERVICE_ACCOUNTS, ResourceKey, ResourceType
from torpor_devcluster.shapes import shape_of
from torpor_devcluster.storage import Storage
from torpor_devcluster.views import from_storage, to_storage

Json = dict[str, Any]

ORPHAN = "orphan"
FOREGROUND = "foregroundDeletion"
SYSTEM = User("system:apiserver", ("system:masters",))
PROTECTED_NAMESPACES = frozenset({"default", "kube-system", "kube-public"})


@dataclass(frozen=True, slots=True)
class Write:
    """How a write is meant: by whom, and whether for real."""

    user: User = SYSTEM
    dry_run: bool = False
    manager: str = "devcluster"
    field_validation: str = "Warn"
    warnings: list[str] = field(default_factory=list)
    check: Callable[[Json], None] = lambda _: None
    """Called with the object once its types are known to be right; raises to refuse it."""
    owners: Owners | None = None
    """Set by an apply: who owns what after it."""


@dataclass(frozen=True, slots=True)
class DeleteOptions:
    uid: str | None = None
    resource_version: str | None = None
    grace_period_s: int | None = None
    propagation: str | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a DELETE did: the object as it is now (or last was), and whether it is gone."""

    stored: Stored
    gone: bool


def copy_json(obj: Json) -> Json:
    """A deep copy of a JSON object; faster than copy.deepcopy."""
    copied: Json = msgspec.json.decode(msgspec.json.encode(obj))
    return copied


class Registry:
    def __init__(self, storage: Storage, catalogue: Catalogue, clock: Clock) -> None:
        self.storage = storage
        self.catalogue = catalogue
        self.clock = clock
        self.strategies = strategies.Strategies(storage, clock)

    # Reading

    def get(self, resource: ResourceType, namespace: str, name: str) -> Stored:
        stored = self.storage.get(resource.key, (namespace if resource.namespaced else "", name))
        if stored is None:
            raise errors.not_found(resource, name)
        return stored

    # Creating

    def create(self, resource: ResourceType, namespace: str, obj: Json, write: Write) -> Stored:
        """Store a new object, which the registry takes over. Raises ApiError."""
        fields.admit(resource, obj, write.field_validation, write.warnings)
        write.check(obj)
        metadata = obj["metadata"]
        self._name(resource, metadata)
        if metadata.get("resourceVersion"):
            # The real server's words and code; it takes this for a bug of its own.
            raise errors.ApiError(500, "", "resourceVersion should not be set on objects to be created")
        self._require_namespace(resource, namespace, metadata["name"])
        if resource.key == PODS:
            self._require_account(resource, namespace, obj)
        key = (namespace if resource.namespaced else "", str(metadata["name"]))
        self._stamp_new(resource, namespace, metadata)
        self.strategies.before_create(resource, obj)
        self._check(resource, obj, check_metadata(resource, obj))
        if self.storage.get(resource.key, key) is not None:
            raise errors.already_exists(resource, metadata["name"])
        self._track(resource, None, obj, write, "")
        return self._put(resource, key, obj, write.dry_run)

    def _name(self, resource: ResourceType, metadata: Json) -> None:
        if metadata.get("name"):
            return
        prefix = metadata.get("generateName")
        if not prefix:
            cause = Cause("metadata.name", "Required value: name or generateName is required", "FieldValueRequired")
            raise errors.invalid_object(resource, "", [cause])
        # 58 = 63 - 5, as the real server cuts the prefix.
        metadata["name"] = prefix[:58] + "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))

    def _stamp_new(self, resource: ResourceType, namespace: str, metadata: Json) -> None:
        for field_name in ("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "generation"):
            metadata.pop(field_name, None)
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = rfc3339(self.clock.now_s())
        if resource.namespaced:
            metadata["namespace"] = namespace
        else:
            metadata.pop("namespace", None)
        if resource.has_generation:
            metadata["generation"] = 1

    def _require_namespace(self, resource: ResourceType, namespace: str, name: str) -> None:
        if resource.custom and self._crd_terminating(resource.key):
            raise errors.method_not_allowed("create not allowed while custom resource definition is terminating")
        if not resource.namespaced:
            return
        stored = self.storage.get(NAMESPACES, ("", namespace))
        if stored is None:
            raise errors.not_found(_NAMESPACE, namespace)
        if stored.metadata.get("deletionTimestamp"):
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            cause = {
                "reason": "NamespaceTerminating",
                "message": f"namespace {namespace} is being terminated",
                "field": "metadata.namespace",
            }
            raise errors.forbidden(resource, name, why, causes=[cause])

    def _require_account(self, resource: ResourceType, namespace: str, pod: Json) -> None:
        """As the ServiceAccount admission does: a pod runs as an account that exists."""
        name = (pod.get("spec") or {}).get("serviceAccountName") or "default"
        if self.storage.get(SERVICE_ACCOUNTS, (namespace, name)) is None:
            why = f'error looking up service account {namespace}/{name}: serviceaccount "{name}" not found'
            raise errors.forbidden(resource, pod["metadata"]["name"], why)

    def _crd_terminating(self, key: ResourceKey) -> bool:
        crd = self.storage.get(CRDS, ("", str(key)))
        return crd is not None and "deletionTimestamp" in crd.metadata

    # Updating

    def update(
        self,
        resource: ResourceType,
        namespace: str,
        name: str,
        change: Callable[[Json], Json],
        write: Write,
        *,
        subresource: str = "",
        conditional: bool = False,
    ) -> Stored:
        """Replace an object by `change(current)`, both in the version of `resource`. An equal result is no write.

        `change` gets a copy of its own. `conditional` demands a resourceVersion where the type does (PUT). Raises
        ApiError.
        """
        stored = self.get(resource, namespace, name)
        old = from_storage(resource, stored)
        new = change(copy_json(old))
        fields.admit(resource, new, write.field_validation, write.warnings)
        write.check(new)
        self._check_identity(resource, stored, new, conditional=conditional)
        self._settle(resource, old, new, subresource)
        causes = check_metadata(resource, new) + check_metadata_update(old, new)
        self._check(resource, new, causes)
        self._track(resource, old, new, write, subresource)
        if new == old:
            return stored
        if "deletionTimestamp" in new["metadata"] and self._may_vanish(resource, new):
            return self._remove(resource, stored, new, write.dry_run)
        return self._put(resource, stored.key, new, write.dry_run)

    def _track(self, resource: ResourceType, old: Json | None, new: Json, write: Write, subresource: str) -> None:
        """Keep the books of managedFields; an apply has brought its own."""
        if write.owners is not None:
            apply.store(new, write.owners)
            return
        shape = shape_of(resource)
        if shape is None or resource.view_of is not None:
            new["metadata"].pop("managedFields", None)
            return
        apply.track(shape, old, new, self.author(resource, write, "Update", subresource))

    def author(self, resource: ResourceType, write: Write, operation: Operation, subresource: str) -> apply.Author:
        time = rfc3339(self.clock.now_s())
        return apply.Author(write.manager, operation, subresource, resource.api_version, time)

    def _check_identity(self, resource: ResourceType, stored: Stored, new: Json, *, conditional: bool) -> None:
        metadata = new["metadata"]
        name = stored.metadata["name"]
        if metadata.get("uid", stored.uid) not in ("", stored.uid):
            why = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {stored.uid}"
            raise errors.conflict(resource, name, why)
        version = metadata.get("resourceVersion") or ""
        if version not in ("", "0") and version != str(stored.revision):
            if not version.isdigit():
                cause = Cause("metadata.resourceVersion", f'Invalid value: "{version}": must be an unsigned integer')
                raise errors.invalid_object(resource, name, [cause])
            raise errors.conflict(resource, name)
        if version in ("", "0") and conditional and not resource.unconditional_update:
            cause = Cause("metadata.resourceVersion", "Invalid value: 0: must be specified for an update")
            # The real server names the resource here, not the kind.
            raise errors.invalid(resource.plural, resource.group, name, [cause])

    def _settle(self, resource: ResourceType, old: Json, new: Json, subresource: str) -> None:
        """Bring `new` to what this write may change: identity, status and generation come from `old`."""
        kept = old["metadata"]
        if subresource == "status":
            status = new.get("status")
            metadata = dict(kept) if resource.custom else _status_metadata(resource, kept, new["metadata"])
            new.clear()
            new.update(old)
            new["metadata"] = metadata
            new.pop("status", None)
            if status is not None:
                new["status"] = status
        elif resource.has_status:
            new.pop("status", None)
            if "status" in old:
                new["status"] = old["status"]
        metadata = new["metadata"]
        for field_name in _SERVER_FIELDS:
            metadata.pop(field_name, None)
            if field_name in kept:
                metadata[field_name] = kept[field_name]
        self.strategies.before_update(resource, old, new, subresource)
        if (
            resource.has_generation
            and subresource in ("", "scale")
            and _spec_of(resource, old) != _spec_of(resource, new)
        ):
            metadata["generation"] = kept.get("generation", 0) + 1

    def _check(self, resource: ResourceType, obj: Json, causes: list[Cause]) -> None:
        causes = causes + self.strategies.problems(resource, obj)
        if resource.custom:
            causes += fields.custom_problems(resource, obj)
        if causes:
            raise errors.invalid_object(resource, obj["metadata"].get("name", ""), causes)
        if resource.key == CRDS:
            crds.check(obj)

    # Deleting

    def delete(self, resource: ResourceType, namespace: str, name: str, options: DeleteOptions) -> Deleted:
        """Begin or finish the deletion of an object. Raises ApiError."""
        stored = self.get(resource, namespace, name)
        self._check_preconditions(resource, stored, options)
        if resource.key == NAMESPACES and name in PROTECTED_NAMESPACES:
            raise errors.forbidden(resource, name, "this namespace may not be deleted")
        obj = copy_json(from_storage(resource, stored))
        metadata = obj["metadata"]
        self._set_propagation(metadata, options.propagation)
        if resource.key == CRDS and "deletionTimestamp" not in metadata:
            metadata.setdefault("finalizers", []).append(crds.CLEANUP_FINALIZER)
        grace_s = self.strategies.deletion_grace_s(resource, obj, options.grace_period_s)
        if "deletionTimestamp" not in metadata:
            self._mark_deleted(metadata, grace_s)
        elif grace_s < metadata.get("deletionGracePeriodSeconds", 0):
            metadata["deletionGracePeriodSeconds"] = grace_s
        if resource.key == NAMESPACES:
            metadata.pop("deletionGracePeriodSeconds", None)
            obj["status"] = {**(obj.get("status") or {}), "phase": "Terminating"}
        if self._may_vanish(resource, obj):
            # What goes at once was never marked as going; pods are, because their deletion is graceful.
            last = obj if resource.graceful else copy_json(from_storage(resource, stored))
            return Deleted(self._remove(resource, stored, last, options.dry_run), gone=True)
        if obj == from_storage(resource, stored):
            return Deleted(stored, gone=False)
        return Deleted(self._put(resource, stored.key, obj, options.dry_run), gone=False)

    def _check_preconditions(self, resource: ResourceType, stored: Stored, options: DeleteOptions) -> None:
        name, version = stored.metadata["name"], str(stored.revision)
        if options.uid is not None and options.uid != stored.uid:
            why = (
                f"the UID in the precondition ({options.uid}) does not match the UID in record ({stored.uid}). "
                "The object might have been deleted and then recreated"
            )
            raise errors.conflict(resource, name, why)
        if options.resource_version is not None and options.resource_version != version:
            why = (
                f"the ResourceVersion in the precondition ({options.resource_version}) does not match the "
                f"ResourceVersion in record ({version}). The object might have been modified"
            )
            raise errors.conflict(resource, name, why)

    def _set_propagation(self, metadata: Json, propagation: str | None) -> None:
        """The policy is kept as a finalizer, which the garbage collector (`gc.py`) works off."""
        if propagation is None:
            return
        finalizers = [f for f in metadata.get("finalizers") or [] if f not in (ORPHAN, FOREGROUND)]
        wanted = {"Orphan": ORPHAN, "Foreground": FOREGROUND}.get(propagation)
        if wanted:
            finalizers.append(wanted)
        if finalizers:
            metadata["finalizers"] = finalizers
        else:
            metadata.pop("finalizers", None)

    def _mark_deleted(self, metadata: Json, grace_s: int) -> None:
        metadata["deletionTimestamp"] = rfc3339(self.clock.now_s() + grace_s)
        metadata["deletionGracePeriodSeconds"] = grace_s
        if metadata.get("generation"):
            metadata["generation"] += 1

    def _may_vanish(self, resource: ResourceType, obj: Json) -> bool:
        """Whether nothing holds an object that is being deleted: finalizers, a grace period, a namespace's content."""
        metadata = obj["metadata"]
        if metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds", 0) > 0:
            return False
        return not (resource.key == NAMESPACES and (obj.get("spec") or {}).get("finalizers"))

    # Storing

    def _put(self, resource: ResourceType, key: ObjectKey, obj: Json, dry_run: bool) -> Stored:
        stored_form = to_storage(resource, obj)
        if dry_run:
            previous = self.storage.get(resource.key, key)
            if previous is not None:
                stored_form["metadata"]["resourceVersion"] = str(previous.revision)
            return Stored.of(stored_form, previous.revision if previous else 0)
        return self.storage.put(resource.key, key, stored_form)

    def _remove(self, resource: ResourceType, stored: Stored, last: Json, dry_run: bool) -> Stored:
        """Take the object out; its last state is `last` (say, without its last finalizer)."""
        if dry_run:
            return stored
        return self.storage.delete(resource.key, stored.key, to_storage(resource, last))


_SERVER_FIELDS = (
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "selfLink",
    "resourceVersion",
)
_NAMESPACE = ResourceType("", "v1", "namespaces", "Namespace", namespaced=False)


def _status_metadata(resource: ResourceType, kept: Json, given: Json) -> Json:
    """A status write of a built-in type may change metadata too, but for what its strategy keeps."""
    held = {"deployments.apps": "labels", "pods": "ownerReferences"}.get(resource.qualified)
    if held is not None:
        given.pop(held, None)
        if held in kept:
            given[held] = kept[held]
    return given


def _spec_of(resource: ResourceType, obj: Json) -> Json:
    """What generation counts: everything but metadata, and but status where that is a subresource."""
    ignored = ("metadata", "status") if resource.has_status else ("metadata",)
    return {key: value for key, value in obj.items() if key not in ignored}
