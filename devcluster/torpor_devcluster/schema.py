"""Structural schemas of CRDs: pruning of unknown fields, default values, validation.

Validated: types, required, enum, ranges, lengths, patterns, item counts, unique keys of list maps and sets, and
anyOf/oneOf/allOf/not. Not validated: CEL rules (x-kubernetes-validations), `format`, `uniqueItems`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from torpor_devcluster.errors import Cause

Json = dict[str, Any]

_OBJECT_META = ("apiVersion", "kind", "metadata")


def _preserves(schema: Json) -> bool:
    return bool(schema.get("x-kubernetes-preserve-unknown-fields"))


def prune(schema: Json, value: Any, path: str = "", *, root: bool = True) -> list[str]:
    """Remove, in place, what the schema does not know; returns the paths that were removed."""
    if isinstance(value, list):
        items = schema.get("items") or {}
        return [gone for index, item in enumerate(value) for gone in prune(items, item, f"{path}[{index}]", root=False)]
    if not isinstance(value, dict):
        return []
    properties, additional = schema.get("properties") or {}, schema.get("additionalProperties")
    implicit = _OBJECT_META if root or schema.get("x-kubernetes-embedded-resource") else ()
    pruned: list[str] = []
    for name in list(value):
        where = f"{path}.{name}" if path else name
        if name in implicit:
            continue
        if name in properties:
            pruned += prune(properties[name], value[name], where, root=False)
        elif isinstance(additional, dict):
            pruned += prune(additional, value[name], where, root=False)
        elif not (additional is True or _preserves(schema)):
            del value[name]
            pruned.append(where)
    return pruned


def default(schema: Json, value: Any) -> None:
    """Fill in, in place, the defaults of what is absent; a null that is not nullable gives way to its default."""
    if isinstance(value, list):
        for item in value:
            default(schema.get("items") or {}, item)
    if not isinstance(value, dict):
        return
    for name, child in (schema.get("properties") or {}).items():
        if value.get(name, _ABSENT) is None and not child.get("nullable") and "default" in child:
            del value[name]
        if name not in value and "default" in child:
            value[name] = msgspec.json.decode(msgspec.json.encode(child["default"]))
        if name in value:
            default(child, value[name])
    additional = schema.get("additionalProperties")
    if isinstance(additional, dict):
        for name, item in value.items():
            if name not in (schema.get("properties") or {}):
                default(additional, item)


_ABSENT = object()


def drop_nulls(schema: Json, value: Any) -> None:
    """Remove nulls of members that are known and not nullable: the server treats them as absent."""
    if isinstance(value, list):
        for item in value:
            drop_nulls(schema.get("items") or {}, item)
    if not isinstance(value, dict):
        return
    for name, child in (schema.get("properties") or {}).items():
        if value.get(name, _ABSENT) is None and not child.get("nullable"):
            del value[name]
        elif name in value:
            drop_nulls(child, value[name])


def validate(schema: Json, value: Any, path: str = "") -> list[Cause]:
    """What is wrong with a value, in the words of the real server."""
    if value is None and schema.get("nullable"):
        return []
    wanted = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            return [_type_cause(path, value, "integer,string")]
        wanted = None
    if wanted and not _is(value, wanted):
        return [_type_cause(path, value, wanted)]
    return [*_scalar(schema, value, path), *_container(schema, value, path), *_combined(schema, value, path)]


def _is(value: Any, wanted: str) -> bool:
    match wanted:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return (isinstance(value, int) and not isinstance(value, bool)) or (
                isinstance(value, float) and value.is_integer()
            )
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
    return True


_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def _type_cause(path: str, value: Any, wanted: str) -> Cause:
    found = "null" if value is None else _NAMES[type(value)]
    message = f'Invalid value: "{found}": {path} in body must be of type {wanted}: "{found}"'
    return Cause(path, message, "FieldValueTypeInvalid")


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _scalar(schema: Json, value: Any, path: str) -> Iterator[Cause]:
    if "enum" in schema and value not in schema["enum"]:
        supported = ", ".join(_shown(item) for item in schema["enum"])
        message = f"Unsupported value: {_shown(value)}: supported values: {supported}"
        yield Cause(path, message, "FieldValueNotSupported")
    if isinstance(value, str):
        yield from _text(schema, value, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _range(schema, value, path)


def _text(schema: Json, value: str, path: str) -> Iterator[Cause]:
    if len(value) > schema.get("maxLength", len(value)):
        message = f"Too long: may not be more than {schema['maxLength']} bytes"
        yield Cause(path, message, "FieldValueTooLong")
    if len(value) < schema.get("minLength", 0):
        message = f"{path} in body should be at least {schema['minLength']} chars long"
        yield Cause(path, f"Invalid value: {_shown(value)}: {message}")
    if "pattern" in schema and not _matches(schema["pattern"], value):
        message = f"{path} in body should match '{schema['pattern']}'"
        yield Cause(path, f"Invalid value: {_shown(value)}: {message}")


def _matches(pattern: str, value: str) -> bool:
    """Go's regular expressions are close to Python's; one that Python cannot read lets everything pass."""
    try:
        return re.search(pattern, value) is not None
    except re.error:
        return True


def _range(schema: Json, value: float, path: str) -> Iterator[Cause]:
    for bound, exclusive, words in (
        ("minimum", "exclusiveMinimum", "greater than"),
        ("maximum", "exclusiveMaximum", "less than"),
    ):
        if bound not in schema:
            continue
        limit, strict = schema[bound], bool(schema.get(exclusive))
        below = value < limit if bound == "minimum" else value > limit
        if below or (strict and value == limit):
            text = f"{words} {'' if strict else 'or equal to '}{limit}"
            yield Cause(path, f"Invalid value: {_shown(value)}: {path} in body should be {text}")
    multiple = schema.get("multipleOf")
    if multiple and value % multiple:
        yield Cause(path, f"Invalid value: {_shown(value)}: {path} in body should be a multiple of {multiple}")


def _container(schema: Json, value: Any, path: str) -> Iterator[Cause]:
    if isinstance(value, dict):
        yield from _members(schema, value, path)
    elif isinstance(value, list):
        yield from _items(schema, value, path)


def _members(schema: Json, value: Json, path: str) -> Iterator[Cause]:
    for name in schema.get("required") or ():
        if name not in value:
            yield Cause(f"{path}.{name}" if path else name, "Required value", "FieldValueRequired")
    properties, additional = schema.get("properties") or {}, schema.get("additionalProperties")
    for name, item in value.items():
        child = properties.get(name, additional if isinstance(additional, dict) else None)
        if child is not None and not (not path and name == "metadata"):
            yield from validate(child, item, f"{path}.{name}" if path else name)
    if len(value) > schema.get("maxProperties", len(value)):
        yield Cause(path, f"Too many: {len(value)}: must have at most {schema['maxProperties']} items")
    if len(value) < schema.get("minProperties", 0):
        message = f"{path} in body should have at least {schema['minProperties']} properties"
        yield Cause(path, f"Invalid value: {len(value)}: {message}")


def _items(schema: Json, value: list[Any], path: str) -> Iterator[Cause]:
    for index, item in enumerate(value):
        yield from validate(schema.get("items") or {}, item, f"{path}[{index}]")
    if len(value) > schema.get("maxItems", len(value)):
        yield Cause(path, f"Too many: {len(value)}: must have at most {schema['maxItems']} items")
    if len(value) < schema.get("minItems", 0):
        message = f"{path} in body should have at least {schema['minItems']} items"
        yield Cause(path, f"Invalid value: {len(value)}: {message}")
    yield from _unique(schema, value, path)


def _unique(schema: Json, value: list[Any], path: str) -> Iterator[Cause]:
    keys = schema.get("x-kubernetes-list-map-keys") or ()
    match schema.get("x-kubernetes-list-type"):
        case "set":
            shown = [_shown(item) for item in value]
        case "map":
            shown = [_shown({key: item.get(key) for key in keys}) for item in value if isinstance(item, dict)]
        case _:
            return
    for index, text in enumerate(shown):
        if text in shown[:index]:
            yield Cause(f"{path}[{index}]", f"Duplicate value: {text}", "FieldValueDuplicate")


def _combined(schema: Json, value: Any, path: str) -> Iterator[Cause]:
    for part in schema.get("allOf") or ():
        yield from validate(part, value, path)
    where = path or "<nil>"
    if schema.get("anyOf") and all(validate(part, value, path) for part in schema["anyOf"]):
        yield Cause(path, f"Invalid value: {where} in body must validate at least one schema (anyOf)")
    if schema.get("oneOf") and sum(not validate(part, value, path) for part in schema["oneOf"]) != 1:
        yield Cause(path, f"Invalid value: {where} in body must validate one and only one schema (oneOf)")
    if schema.get("not") and not validate(schema["not"], value, path):
        yield Cause(path, f"Invalid value: {where} in body must not validate the schema (not)")
