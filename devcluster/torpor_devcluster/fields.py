"""What an incoming object may contain: unknown fields are dropped (and told), wrong types refused.

Built-in types are checked against the generated table, custom resources against their CRD's schema. Nulls are absent
values, and zero values that Go would not print are dropped, so that an object reads back as the real server gives it.
"""

from __future__ import annotations

from typing import Any

from torpor_devcluster import schema as structural
from torpor_devcluster.errors import Cause, bad_request
from torpor_devcluster.resources import ResourceType
from torpor_devcluster.shapes import OBJECT_META, Shape, built_in, shape_of

Json = dict[str, Any]

# JSON type words of Go's decoder.
_WORDS = {dict: "object", list: "array", str: "string", bool: "bool", int: "number", float: "number"}
_LEAF_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "bytes": (str,),
    "time": (str,),
    "microtime": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "quantity": (str, int, float),
    "intstr": (str, int),
}
_GO_TYPES = {"int": "int64", "float": "float64", "bytes": "[]uint8", "time": "Time", "microtime": "MicroTime"}


def admit(resource: ResourceType, obj: Json, field_validation: str, warnings: list[str]) -> None:
    """Clean `obj` in place. `field_validation` is Strict, Warn or Ignore, as the query says. Raises 400."""
    shape = shape_of(resource)
    if resource.custom:
        unknown = _admit_custom(resource, obj)
    elif shape is not None:
        unknown = _clean(resource, shape, obj, "")
    else:
        unknown = _clean(resource, OBJECT_META, obj["metadata"], "metadata")
    if not unknown:
        return
    found = [f'unknown field "{path}"' for path in unknown]
    if field_validation == "Strict":
        raise _undecodable(resource, f"strict decoding error: {', '.join(found)}")
    if field_validation == "Warn":
        warnings.extend(found)


def admit_options(obj: Any) -> Json:
    """A DeleteOptions body, checked. Raises 400."""
    if not isinstance(obj, dict):
        raise bad_request("DeleteOptions must be an object")
    _clean(_DELETE_OPTIONS, built_in("meta/v1.DeleteOptions"), obj, "")
    return obj


def admit_token_request(obj: Any) -> Json:
    """A TokenRequest body, checked. Raises 400."""
    if not isinstance(obj, dict):
        raise bad_request("a TokenRequest must be an object")
    _clean(_TOKEN_REQUEST, built_in("authentication/v1.TokenRequest"), obj, "")
    return obj


_DELETE_OPTIONS = ResourceType("", "v1", "", "DeleteOptions")
_TOKEN_REQUEST = ResourceType("authentication.k8s.io", "v1", "", "TokenRequest")


def _undecodable(resource: ResourceType, why: str) -> Exception:
    return bad_request(f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: {why}')


def _admit_custom(resource: ResourceType, obj: Json) -> list[str]:
    unknown = _clean(resource, OBJECT_META, obj["metadata"], "metadata")
    if resource.schema is not None:
        unknown += structural.prune(resource.schema, obj)
        structural.default(resource.schema, obj)
        structural.drop_nulls(resource.schema, obj)
    return unknown


def custom_problems(resource: ResourceType, obj: Json) -> list[Cause]:
    """What the schema of a custom resource finds wrong."""
    return structural.validate(resource.schema, obj) if resource.schema is not None else []


def _clean(resource: ResourceType, shape: Shape, value: Any, path: str) -> list[str]:
    """Check and clean one object or map; returns unknown fields."""
    unknown: list[str] = []
    for name in list(value):
        where = f"{path}.{name}" if path else name
        if not shape.has(name):
            unknown.append(where)
            del value[name]
            continue
        child = shape.field(name)
        item = value[name]
        if item is None and child.kind != "any":
            del value[name]
            continue
        unknown += _clean_value(resource, child, item, where)
        if child.omit_zero and item in _ZEROS:
            del value[name]
    return unknown


_ZEROS: tuple[Any, ...] = ("", 0, False, [], {})


def _clean_value(resource: ResourceType, shape: Shape, value: Any, path: str) -> list[str]:
    match shape.kind:
        case "any":
            return []
        case "leaf":
            _check_leaf(resource, shape.leaf, value, path)
            return []
        case "list":
            if not isinstance(value, list):
                raise _mismatch(resource, value, path, "[]" + (shape.items.leaf or "object"))
            return [
                gone
                for index, item in enumerate(value)
                for gone in _clean_value(resource, shape.items, item, f"{path}[{index}]")
                if item is not None
            ]
        case "object" | "map":
            if not isinstance(value, dict):
                raise _mismatch(resource, value, path, "map" if shape.kind == "map" else "object")
            return _clean(resource, shape, value, path)


def _check_leaf(resource: ResourceType, leaf: str, value: Any, path: str) -> None:
    allowed = _LEAF_TYPES.get(leaf)
    if allowed is None:
        return
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise _mismatch(resource, value, path, _GO_TYPES.get(leaf, leaf))


def _mismatch(resource: ResourceType, value: Any, path: str, wanted: str) -> Exception:
    found = _WORDS.get(type(value), "null")
    return _undecodable(
        resource, f"json: cannot unmarshal {found} into Go struct field {resource.kind}.{path} of type {wanted}"
    )
