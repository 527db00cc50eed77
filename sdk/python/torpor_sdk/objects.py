"""Kubernetes objects as dicts, with the handles that everyone needs."""

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

# What the API accepts as an object: any JSON mapping. `Resource` is one of them.
Object = MutableMapping[str, Any]


class Resource(dict[str, Any]):
    """A Kubernetes object: a plain dict that also knows its name.

    >>> db = Resource({"metadata": {"name": "orders", "namespace": "shop"}, "spec": {"size": 3}})
    >>> db.name, db.namespace, db["spec"]["size"], db.deleting
    ('orders', 'shop', 3, False)
    """

    @property
    def metadata(self) -> dict[str, Any]:
        return child(self, "metadata")

    @property
    def spec(self) -> dict[str, Any]:
        return child(self, "spec")

    @property
    def status(self) -> dict[str, Any]:
        return child(self, "status")

    @property
    def api_version(self) -> str:
        return str(self.get("apiVersion") or "")

    @property
    def kind(self) -> str:
        return str(self.get("kind") or "")

    @property
    def name(self) -> str:
        return name_of(self)

    @property
    def namespace(self) -> str:
        """Empty for a cluster-scoped object."""
        return namespace_of(self)

    @property
    def uid(self) -> str:
        return str(metadata_of(self).get("uid") or "")

    @property
    def resource_version(self) -> str:
        return str(metadata_of(self).get("resourceVersion") or "")

    @property
    def generation(self) -> int:
        return int(metadata_of(self).get("generation") or 0)

    @property
    def labels(self) -> dict[str, str]:
        """The object's own labels: what is set here is set in the object."""
        return child(self.metadata, "labels")

    @property
    def annotations(self) -> dict[str, str]:
        """The object's own annotations: what is set here is set in the object."""
        return child(self.metadata, "annotations")

    @property
    def finalizers(self) -> list[str]:
        return finalizers_of(self)

    @property
    def conditions(self) -> list[dict[str, Any]]:
        """`status.conditions`; see `set_condition`."""
        return conditions_of(self)

    @property
    def deleting(self) -> bool:
        """A deletion has been asked for; finalizers are what it waits for."""
        return bool(metadata_of(self).get("deletionTimestamp"))

    def deepcopy(self) -> "Resource":
        """A copy that shares nothing with the object."""
        return copy.deepcopy(self)


def child(parent: MutableMapping[str, Any], key: str) -> dict[str, Any]:
    """The mapping below a key, created where there is none (or null)."""
    value = parent.get(key)
    if value is None:
        value = parent[key] = {}
    if not isinstance(value, dict):
        raise TypeError(f"{key} is {type(value).__name__}, not an object")
    return value


def metadata_of(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = obj.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def name_of(obj: Mapping[str, Any]) -> str:
    return str(metadata_of(obj).get("name") or "")


def namespace_of(obj: Mapping[str, Any]) -> str:
    return str(metadata_of(obj).get("namespace") or "")


def finalizers_of(obj: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in metadata_of(obj).get("finalizers") or []]


def conditions_of(obj: Mapping[str, Any]) -> list[dict[str, Any]]:
    status = obj.get("status")
    found = status.get("conditions") if isinstance(status, Mapping) else None
    return found if isinstance(found, list) else []


def owner_reference(owner: Mapping[str, Any], *, controller: bool = True) -> dict[str, Any]:
    """An owner reference to an object that was read from the cluster.

    With `controller` it is the one controller of its dependents, which `owns` maps back to the owner. Raises
    `ValueError` for an owner without uid: it has not been read, or not been created yet.
    """
    fields = {
        "apiVersion": owner.get("apiVersion"),
        "kind": owner.get("kind"),
        "name": name_of(owner),
        "uid": metadata_of(owner).get("uid"),
    }
    missing = [field for field, value in fields.items() if not value]
    if missing:
        raise ValueError(f"{describe(owner)} cannot be an owner: it has no {', '.join(missing)}")
    reference: dict[str, Any] = {field: str(value) for field, value in fields.items()}
    if controller:
        reference |= {"controller": True, "blockOwnerDeletion": True}
    return reference


def set_owner(obj: Object, owner: Mapping[str, Any], *, controller: bool = True) -> None:
    """Makes `owner` an owner of `obj`; the garbage collector then deletes it with its owners.

    An object without a namespace takes its owner's. Raises `ValueError` where Kubernetes would delete the object at
    once (an owner in another namespace) or where another controller owns it already.
    """
    reference = owner_reference(owner, controller=controller)
    metadata = child(obj, "metadata")
    if namespace_of(owner):
        metadata.setdefault("namespace", namespace_of(owner))
        if namespace_of(obj) != namespace_of(owner):
            raise ValueError(
                f"{describe(owner)} cannot own {describe(obj)}: an owner must be in the same namespace or "
                "cluster-scoped. Use a label, and a finalizer that deletes it"
            )
    references = [ref for ref in metadata.get("ownerReferences") or [] if ref.get("uid") != reference["uid"]]
    other = next((ref for ref in references if ref.get("controller")), None)
    if controller and other is not None:
        raise ValueError(
            f"{describe(obj)} is controlled by {other.get('kind')} {other.get('name')} already; "
            "pass controller=False to be one of several owners"
        )
    metadata["ownerReferences"] = [*references, reference]


def describe(obj: Mapping[str, Any]) -> str:
    """An object for a message: `Secret shop/orders`."""
    namespace = namespace_of(obj)
    return f"{obj.get('kind') or 'object'} {namespace + '/' if namespace else ''}{name_of(obj) or '(no name)'}"
