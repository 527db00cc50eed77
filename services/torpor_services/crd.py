"""The WasmOperator definition, and checking an object against its schema.

The API server drops unknown fields silently unless asked to be strict, and a file in a folder has met no API server
at all; so whoever reads a WasmOperator checks it here first. Only the parts of OpenAPI that the definition uses are
understood: type, properties, required, items, maxItems, enum, pattern, minimum, maximum, minLength,
x-kubernetes-preserve-unknown-fields.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

GROUP = "torpor.dev"
VERSION = "v1alpha1"
PLURAL = "wasmoperators"
KIND = "WasmOperator"
API_VERSION = f"{GROUP}/{VERSION}"

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


@functools.cache
def definition() -> dict[str, Any]:
    """The CustomResourceDefinition as an object."""
    import yaml

    text = resources.files("torpor_services.manifests").joinpath("wasmoperator-crd.yaml").read_bytes()
    decoded: dict[str, Any] = yaml.safe_load(text)
    return decoded


def violations(obj: Mapping[str, Any]) -> list[str]:
    """What is wrong with a WasmOperator, a line each with the field's path; empty if nothing is."""
    problems = []
    if obj.get("apiVersion") != API_VERSION or obj.get("kind") != KIND:
        problems.append(
            f"apiVersion, kind: are {obj.get('apiVersion')!r}, {obj.get('kind')!r}, not {API_VERSION}, {KIND}"
        )
    schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    problems += _check(obj, schema, "")
    return problems


def spec_violations(spec: Any, *, required: bool = True) -> list[str]:
    """The same for a `spec` alone; `required=False` for a manifest, which need not say everything."""
    schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    if not required:
        schema = {key: value for key, value in schema.items() if key != "required"}
    return list(_check(spec, schema, "spec"))


def _check(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    expected = schema.get("type")
    if expected and not _is(value, expected):
        yield f"{path or 'object'}: is {_name(value)}, not {expected}"
        return
    if isinstance(value, dict):
        yield from _check_object(value, schema, path)
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            yield f"{path}: has {len(value)} items, more than {schema['maxItems']}"
            return
        for index, item in enumerate(value):
            yield from _check(item, schema.get("items", {}), f"{path}[{index}]")
    else:
        yield from _check_scalar(value, schema, path)


def _check_object(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    properties = schema.get("properties")
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{_join(path, name)}: is missing"
    if properties is None or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    for name, item in value.items():
        if name in properties:
            yield from _check(item, properties[name], _join(path, name))
        else:
            yield f"{_join(path, str(name))}: unknown field; known are {', '.join(sorted(properties))}"


def _check_scalar(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: is {value!r}, not one of {', '.join(schema['enum'])}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: {value!r} does not match {schema['pattern']}"
    if len(str(value)) < schema.get("minLength", 0):
        yield f"{path}: is empty"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{path}: {value} is below {schema['minimum']}"
    if "maximum" in schema and value > schema["maximum"]:
        yield f"{path}: {value} is above {schema['maximum']}"


def _is(value: Any, expected: str) -> bool:
    if isinstance(value, bool):
        return expected == "boolean"
    return isinstance(value, _TYPES[expected])


def _name(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        int: "an integer",
        float: "a number",
        bool: "a boolean",
    }
    return names.get(type(value), type(value).__name__)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
