"""From a changed object to the keys that an operator reconciles.

A mapping looks at one object. Who dispatches unites the keys of the old and the new one, so that a controller reference
moved from A to B makes both dirty. References that make no sense (no name, `namespace/name` with more slashes) map to
nothing: they are other people's data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from torpor_cache.objects import StoredObject
from torpor_cache.resources import ObjectKey


@dataclass(frozen=True, slots=True)
class SelfMapping:
    """The object itself."""


@dataclass(frozen=True, slots=True)
class OwnerMapping:
    """Owners of a kind: the controller only, or any. The API version of a reference is ignored."""

    group: str
    kind: str
    any_owner: bool = False
    cluster_scoped: bool = False


@dataclass(frozen=True, slots=True)
class LabelMapping:
    """The label's value is the name, in the object's namespace."""

    label: str


@dataclass(frozen=True, slots=True)
class AnnotationMapping:
    """The annotation's value is `name`, in the object's namespace, or `namespace/name`."""

    annotation: str


@dataclass(frozen=True, slots=True)
class CodeMapping:
    """The client maps; it is sent both objects and no keys."""


Mapping = SelfMapping | OwnerMapping | LabelMapping | AnnotationMapping | CodeMapping

SELF: Sequence[Mapping] = (SelfMapping(),)


def keys_of(mappings: Sequence[Mapping], subject: StoredObject) -> tuple[ObjectKey, ...]:
    """The keys that the object maps to, each once."""
    if len(mappings) == 1 and isinstance(mappings[0], SelfMapping):
        return (subject.key,)
    return tuple(dict.fromkeys(key for mapping in mappings for key in _keys(mapping, subject)))


def _keys(mapping: Mapping, subject: StoredObject) -> Iterator[ObjectKey]:
    namespace = subject.key.namespace
    match mapping:
        case SelfMapping():
            yield subject.key
        case OwnerMapping():
            for owner in subject.metadata.owner_references:
                if owner.kind != mapping.kind or not (mapping.any_owner or owner.controller):
                    continue
                if _group_of(owner.api_version) == mapping.group and owner.name:
                    yield ObjectKey("" if mapping.cluster_scoped else namespace, owner.name)
        case LabelMapping():
            if name := subject.metadata.labels.get(mapping.label):
                yield ObjectKey(namespace, name)
        case AnnotationMapping():
            yield from _annotated(subject.metadata.annotations.get(mapping.annotation, ""), namespace)
        case CodeMapping():
            pass
        case _:
            assert_never(mapping)


def _annotated(value: str, namespace: str) -> Iterator[ObjectKey]:
    match value.strip().split("/"):
        case [name] if name:
            yield ObjectKey(namespace, name)
        case [other, name] if other and name:
            yield ObjectKey(other, name)


def _group_of(api_version: str) -> str:
    group, slash, _ = api_version.rpartition("/")
    return group if slash else ""
