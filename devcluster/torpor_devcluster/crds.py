"""CustomResourceDefinitions: what a stored CRD means as resource types, and what is wrong with one.

Versions convert by `None` only (apiVersion changes, nothing else). Refused by name: conversion webhooks, selectable
fields. Not validated: CEL rules (x-kubernetes-validations); see `schema.py` for the rest.
"""

from __future__ import annotations

from typing import Any

from torpor_devcluster import schema as structural
from torpor_devcluster.clock import rfc3339
from torpor_devcluster.errors import Cause, invalid, not_built
from torpor_devcluster.resources import PrinterColumn, ResourceType, Scale

Json = dict[str, Any]

KIND = "CustomResourceDefinition"
GROUP = "apiextensions.k8s.io"
CLEANUP_FINALIZER = "customresourcecleanup.apiextensions.k8s.io"


def types_of(crd: Json) -> list[ResourceType]:
    """The served versions, newest first as `priority_of` orders them."""
    return [_type_of(crd, version) for version in crd["spec"]["versions"] if version.get("served")]


def storage_version(crd: Json) -> str:
    return next(str(version["name"]) for version in crd["spec"]["versions"] if version.get("storage"))


def _type_of(crd: Json, version: Json) -> ResourceType:
    spec, names = crd["spec"], crd["spec"]["names"]
    status = "status" in (version.get("subresources") or {})
    return ResourceType(
        group=spec["group"],
        version=version["name"],
        plural=names["plural"],
        kind=names["kind"],
        namespaced=spec["scope"] == "Namespaced",
        singular=names.get("singular") or names["kind"].lower(),
        short_names=tuple(names.get("shortNames") or ()),
        categories=tuple(names.get("categories") or ()),
        has_status=status,
        has_generation=True,
        scale=_scale(version),
        custom=True,
        unconditional_update=False,
        columns=tuple(_column(column) for column in version.get("additionalPrinterColumns") or ()),
        schema=(version.get("schema") or {}).get("openAPIV3Schema"),
        storage_version=storage_version(crd),
    )


def _scale(version: Json) -> Scale | None:
    scale = (version.get("subresources") or {}).get("scale")
    if not scale:
        return None
    return Scale(scale["specReplicasPath"], scale["statusReplicasPath"], scale.get("labelSelectorPath", ""))


def _column(column: Json) -> PrinterColumn:
    return PrinterColumn(
        name=column["name"],
        type=column["type"],
        json_path=column["jsonPath"],
        description=column.get("description", ""),
        format=column.get("format", ""),
        priority=int(column.get("priority", 0)),
    )


def check(crd: Json) -> None:
    """Refuse a CRD that could not be served. Raises 422 with the fields, or 501 for what is not built."""
    causes = _problems(crd)
    if causes:
        raise invalid(KIND, GROUP, crd["metadata"].get("name", ""), causes)
    spec = crd["spec"]
    if (spec.get("conversion") or {}).get("strategy", "None") != "None":
        raise not_built("conversion webhooks: use spec.conversion.strategy None")
    for version in spec["versions"]:
        if version.get("selectableFields"):
            raise not_built("spec.versions[].selectableFields")


def _problems(crd: Json) -> list[Cause]:
    causes = structural.validate(_CRD_SCHEMA, crd)
    if causes:
        return causes
    spec = crd["spec"]
    expected = f"{spec['names']['plural']}.{spec['group']}"
    if crd["metadata"].get("name") != expected:
        message = f'Invalid value: "{crd["metadata"].get("name")}": must be spec.names.plural+"."+spec.group'
        causes.append(Cause("metadata.name", message))
    if sum(1 for version in spec["versions"] if version.get("storage")) != 1:
        message = "Invalid value: must have exactly one version marked as storage version"
        causes.append(Cause("spec.versions", message))
    for index, version in enumerate(spec["versions"]):
        field = f"spec.versions[{index}].schema.openAPIV3Schema"
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema is None:
            causes.append(Cause(field, "Required value: schemas are required", "FieldValueRequired"))
            continue
        if schema.get("type") != "object":
            causes.append(Cause(f"{field}.type", "Invalid value: must be object at the root"))
        causes += _schema_problems(schema, field, 0)
    return causes


# What this server reads of a CRD. Members that are not named here are kept as they are.
_TEXT: Json = {"type": "string"}
_TEXTS: Json = {"type": "array", "items": _TEXT}
_CRD_SCHEMA: Json = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["group", "names", "scope", "versions"],
            "properties": {
                "group": {"type": "string", "minLength": 1},
                "scope": {"type": "string", "enum": ["Cluster", "Namespaced"]},
                "conversion": {"type": "object", "properties": {"strategy": _TEXT}},
                "names": {
                    "type": "object",
                    "required": ["plural", "kind"],
                    "properties": {
                        "plural": {"type": "string", "minLength": 1},
                        "kind": {"type": "string", "minLength": 1},
                        "singular": _TEXT,
                        "listKind": _TEXT,
                        "shortNames": _TEXTS,
                        "categories": _TEXTS,
                    },
                },
                "versions": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["name", "served", "storage"],
                        "properties": {
                            "name": {"type": "string", "minLength": 1},
                            "served": {"type": "boolean"},
                            "storage": {"type": "boolean"},
                            "schema": {"type": "object", "properties": {"openAPIV3Schema": {"type": "object"}}},
                            "subresources": {
                                "type": "object",
                                "properties": {
                                    "status": {"type": "object"},
                                    "scale": {
                                        "type": "object",
                                        "required": ["specReplicasPath", "statusReplicasPath"],
                                        "properties": {
                                            "specReplicasPath": _TEXT,
                                            "statusReplicasPath": _TEXT,
                                            "labelSelectorPath": _TEXT,
                                        },
                                    },
                                },
                            },
                            "additionalPrinterColumns": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "required": ["name", "type", "jsonPath"],
                                    "properties": {
                                        "name": _TEXT,
                                        "type": _TEXT,
                                        "jsonPath": _TEXT,
                                        "description": _TEXT,
                                        "format": _TEXT,
                                        "priority": {"type": "integer"},
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
        "status": {"type": "object"},
    },
}
# One node of an openAPIV3Schema, as far as it is read; the nodes below it are visited one by one.
_NUMBER: Json = {"type": "number"}
_COUNT: Json = {"type": "integer"}
_FLAG: Json = {"type": "boolean"}
_NODE_SCHEMA: Json = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["array", "boolean", "integer", "number", "object", "string"]},
        "properties": {"type": "object"},
        "required": _TEXTS,
        "enum": {"type": "array"},
        "pattern": _TEXT,
        "nullable": _FLAG,
        **dict.fromkeys(("minimum", "maximum", "multipleOf"), _NUMBER),
        **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _FLAG),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _COUNT),
        **dict.fromkeys(("minProperties", "maxProperties"), _COUNT),
        **{name: {"type": "array"} for name in ("allOf", "anyOf", "oneOf")},
        "x-kubernetes-list-type": {"type": "string", "enum": ["atomic", "map", "set"]},
        "x-kubernetes-list-map-keys": _TEXTS,
        "x-kubernetes-map-type": {"type": "string", "enum": ["atomic", "granular"]},
        "x-kubernetes-preserve-unknown-fields": _FLAG,
        "x-kubernetes-int-or-string": _FLAG,
        "x-kubernetes-embedded-resource": _FLAG,
    },
}
_DEPTH_MAX = 64


def _schema_problems(node: Any, path: str, depth: int) -> list[Cause]:
    if depth > _DEPTH_MAX:
        return [Cause(path, f"Invalid value: nested more than {_DEPTH_MAX} deep")]
    causes = structural.validate(_NODE_SCHEMA, node, path)
    if causes:
        return causes
    children = [(f"{path}.properties[{name}]", child) for name, child in (node.get("properties") or {}).items()]
    children += [(f"{path}.{name}", node[name]) for name in ("items", "not") if name in node]
    if not isinstance(node.get("additionalProperties", True), bool):
        children.append((f"{path}.additionalProperties", node["additionalProperties"]))
    for name in ("allOf", "anyOf", "oneOf"):
        children += [(f"{path}.{name}[{index}]", child) for index, child in enumerate(node.get(name) or ())]
    return [cause for where, child in children for cause in _schema_problems(child, where, depth + 1)]


def with_defaults(crd: Json) -> None:
    """Fill in, in place, what the server would: names, conversion."""
    spec = crd["spec"]
    names = spec["names"]
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", f"{names['kind']}List")
    spec.setdefault("conversion", {"strategy": "None"})


def established_status(crd: Json, now_s: float) -> Json:
    """The status of a CRD whose names are accepted and which is served."""
    previous = crd.get("status") or {}
    stored_versions = list(previous.get("storedVersions") or [])
    current = storage_version(crd)
    if current not in stored_versions:
        stored_versions.append(current)
    conditions = list(previous.get("conditions") or []) or [
        _condition("NamesAccepted", "NoConflicts", "no conflicts found", now_s),
        _condition("Established", "InitialNamesAccepted", "the initial names have been accepted", now_s),
    ]
    return {
        "conditions": conditions,
        "acceptedNames": crd["spec"]["names"],
        "storedVersions": stored_versions,
    }


def names_conflict_status(crd: Json, message: str, now_s: float) -> Json:
    """The status of a CRD whose kind or names another one of its group already has: it is not served."""
    return {
        "conditions": [
            {**_condition("NamesAccepted", "NameConflict", message, now_s), "status": "False"},
            {
                **_condition("Established", "NotAccepted", "not all names are accepted", now_s),
                "status": "False",
            },
        ],
        "acceptedNames": {"plural": "", "kind": ""},
        "storedVersions": [storage_version(crd)],
    }


def _condition(kind: str, reason: str, message: str, now_s: float) -> Json:
    return {
        "type": kind,
        "status": "True",
        "lastTransitionTime": rfc3339(now_s),
        "reason": reason,
        "message": message,
    }
