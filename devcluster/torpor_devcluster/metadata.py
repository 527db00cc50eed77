"""What is wrong with an object's metadata: names, labels, annotations, finalizers, owners.

The messages are those of apimachinery's validation. Types of JSON values are checked too: input is not trusted.
"""

from __future__ import annotations

from typing import Any

from torpor_devcluster.errors import Cause
from torpor_devcluster.names import label_key_problem, label_value_problem, name_problem
from torpor_devcluster.resources import ResourceType

Json = dict[str, Any]

# apimachinery: TotalAnnotationSizeLimitB
ANNOTATIONS_BYTES_MAX = 256 * 1024

_SHAPES: dict[str, type] = {
    "name": str,
    "generateName": str,
    "namespace": str,
    "uid": str,
    "resourceVersion": str,
    "labels": dict,
    "annotations": dict,
    "finalizers": list,
    "ownerReferences": list,
}


def shape_problem(obj: Any) -> str | None:
    """Why `obj` cannot be an API object at all: its metadata has members of the wrong JSON type. None if it can."""
    metadata = obj.get("metadata")
    if not isinstance(metadata, dict):
        return "metadata must be an object"
    for name, expected in _SHAPES.items():
        value = metadata.get(name)
        if value is None:
            metadata.pop(name, None)
        elif not isinstance(value, expected):
            return f"metadata.{name} has the wrong type: {type(value).__name__}"
    for name in ("labels", "annotations"):
        for key, value in (metadata.get(name) or {}).items():
            if not isinstance(value, str):
                return f"metadata.{name}[{key}] must be a string, not {type(value).__name__}"
    if not all(isinstance(value, str) for value in metadata.get("finalizers") or []):
        return "metadata.finalizers must be strings"
    if not all(isinstance(value, dict) for value in metadata.get("ownerReferences") or []):
        return "metadata.ownerReferences must be objects"
    return None


def check_metadata(resource: ResourceType, obj: Json) -> list[Cause]:
    metadata = obj["metadata"]
    causes: list[Cause] = []
    name = metadata.get("name", "")
    problem = name_problem(resource.name_rule, name)
    if problem:
        causes.append(Cause("metadata.name", f'Invalid value: "{name}": {problem}'))
    causes += _label_causes(metadata.get("labels") or {})
    causes += _annotation_causes(metadata.get("annotations") or {})
    causes += _finalizer_causes(metadata.get("finalizers") or [])
    causes += _owner_causes(metadata.get("ownerReferences") or [])
    return causes


def _label_causes(labels: Json) -> list[Cause]:
    causes = []
    for key, value in labels.items():
        problem = label_key_problem(key)
        if problem:
            causes.append(Cause("metadata.labels", f'Invalid value: "{key}": {problem}'))
        problem = label_value_problem(value)
        if problem:
            causes.append(Cause("metadata.labels", f'Invalid value: "{value}": {problem}'))
    return causes


def _annotation_causes(annotations: Json) -> list[Cause]:
    causes = []
    for key in annotations:
        problem = label_key_problem(key.lower())
        if problem:
            causes.append(Cause("metadata.annotations", f'Invalid value: "{key}": {problem}'))
    if sum(len(key) + len(value) for key, value in annotations.items()) > ANNOTATIONS_BYTES_MAX:
        message = f"Too long: may not be more than {ANNOTATIONS_BYTES_MAX} bytes"
        causes.append(Cause("metadata.annotations", message, "FieldValueTooLong"))
    return causes


def _finalizer_causes(finalizers: list[str]) -> list[Cause]:
    causes = []
    for index, finalizer in enumerate(finalizers):
        problem = label_key_problem(finalizer)
        if problem:
            causes.append(Cause(f"metadata.finalizers[{index}]", f'Invalid value: "{finalizer}": {problem}'))
    if "orphan" in finalizers and "foregroundDeletion" in finalizers:
        quoted = "[" + ", ".join(f'"{finalizer}"' for finalizer in finalizers) + "]"
        message = f"Invalid value: {quoted}: finalizer orphan and foregroundDeletion cannot be both set"
        causes.append(Cause("metadata.finalizers", message))
    return causes


def _owner_causes(owners: list[Json]) -> list[Cause]:
    causes = []
    controllers = 0
    for owner in owners:
        for name in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(name):
                field = f"metadata.ownerReferences.{name}"
                if name == "apiVersion":
                    causes.append(Cause(field, 'Invalid value: "": version must not be empty'))
                else:
                    causes.append(Cause(field, 'Invalid value: "": must not be empty'))
        controllers += bool(owner.get("controller"))
    if controllers > 1:
        message = "Invalid value: Only one reference can have Controller set to true"
        causes.append(Cause("metadata.ownerReferences", message))
    return causes


def check_metadata_update(old: Json, new: Json) -> list[Cause]:
    """What an update may not do to the metadata of an object that is being deleted."""
    if "deletionTimestamp" not in old["metadata"]:
        return []
    known = set(old["metadata"].get("finalizers") or [])
    added = [name for name in new["metadata"].get("finalizers") or [] if name not in known]
    if not added:
        return []
    quoted = ", ".join(f'"{name}"' for name in added)
    message = (
        "Forbidden: no new finalizers can be added if the object is being deleted, "
        f"found new finalizers []string{{{quoted}}}"
    )
    return [Cause("metadata.finalizers", message, "FieldValueForbidden")]
