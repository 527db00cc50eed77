"""The shape of an object: its fields, and how its lists and maps merge.

One interface over two sources: the generated table of built-in types (`data/types.json`, see
`tools/generate_types.py`) and the structural schemas of CRDs. Server-side apply, strategic merge patches, protobuf
and the checks of incoming objects all walk shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Literal

import msgspec

from torpor_devcluster.resources import ResourceType

Json = dict[str, Any]
Kind = Literal["object", "map", "list", "leaf", "any"]
ListKind = Literal["atomic", "set", "map"]

# The Go package of each API group.
_PACKAGES = {
    "": "core",
    "rbac.authorization.k8s.io": "rbac",
    "coordination.k8s.io": "coordination",
    "networking.k8s.io": "networking",
    "discovery.k8s.io": "discovery",
    "events.k8s.io": "events",
    "scheduling.k8s.io": "scheduling",
    "storage.k8s.io": "storage",
    "authorization.k8s.io": "authorization",
    "authentication.k8s.io": "authentication",
}


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """What may stand at one place of an object. An `any` place is not described: maps merge, lists are atomic."""

    kind: Kind = "any"
    leaf: str = ""
    """string, int, bool, float, bytes, time, microtime, quantity, intstr, raw; for leaves."""
    atomic: bool = False
    """An object or map that server-side apply owns as a whole."""
    list_kind: ListKind = "atomic"
    keys: tuple[str, ...] = ()
    key_defaults: Mapping[str, Any] | None = None
    omit_zero: bool = False
    """An empty or zero value is not printed (Go's omitempty on a field that is no pointer)."""
    merge_key: str | None = None
    """Strategic merge patch: None replaces, empty merges by value, else by this member."""
    _source: Any = None

    def field(self, name: str) -> Shape:
        """The shape of a member; `any` where it is not described."""
        if isinstance(self._source, Shape):
            return self._source
        if self.kind == "object" and self._source is not None:
            found: Shape | None = self._source.get(name)
            return found or ANY
        return ANY

    def has(self, name: str) -> bool:
        return self.kind != "object" or name in self._source

    @property
    def fields(self) -> Mapping[str, Shape]:
        return self._source if self.kind == "object" and self._source is not None else {}

    @property
    def items(self) -> Shape:
        return self._source if isinstance(self._source, Shape) else ANY


ANY = Shape()


def shape_of(resource: ResourceType) -> Shape | None:
    """The shape of a resource's objects; None for a built-in type that the table does not list."""
    if resource.custom:
        return _custom(resource)
    name = f"{_PACKAGES.get(resource.group, resource.group)}/{resource.version}.{resource.kind}"
    return built_in(name) if name in table() else None


@cache
def table() -> Json:
    """The generated table: type name → its description."""
    data = (files("torpor_devcluster") / "data" / "types.json").read_bytes()
    types: Json = msgspec.json.decode(data)["types"]
    return types


class _Fields(Mapping[str, Shape]):
    """The members of a built-in struct, made into shapes when they are first looked at (types may recurse)."""

    def __init__(self, name: str) -> None:
        self._described = described_fields(name)
        self._shapes: dict[str, Shape] = {}

    def __getitem__(self, name: str) -> Shape:
        shape = self._shapes.get(name)
        if shape is None:
            shape = self._shapes[name] = _typed(self._described[name]["t"], self._described[name])
        return shape

    def __iter__(self) -> Any:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def __contains__(self, name: object) -> bool:
        return name in self._described


@cache
def described_fields(name: str) -> dict[str, Json]:
    """JSON name → row of the table, with the members of inlined structs."""
    entry = table()[name]
    fields = dict(entry["fields"])
    for inline in entry.get("inline", ()):
        fields.update(described_fields(inline["t"][1:]))
    return fields


@cache
def built_in(name: str) -> Shape:
    fields: Json | _Fields = _Fields(name)
    return Shape("object", _source=fields)


def _typed(text: str, row: Json) -> Shape:
    if text.startswith("[]"):
        items = _typed(text[2:], {})
        kind = row.get("l", "atomic")
        return Shape(
            "list",
            list_kind=kind,
            keys=tuple(row.get("k", ())),
            key_defaults=_key_defaults(text[2:], row.get("k", ())),
            omit_zero="z" in row,
            merge_key=row.get("m"),
            _source=items,
        )
    atomic = row.get("l") == "atomic"
    if text.startswith("{}"):
        return Shape("map", atomic=atomic, omit_zero="z" in row, _source=_typed(text[2:], {}))
    if text.startswith("@"):
        if atomic:
            return Shape("object", atomic=True, _source=_Fields(text[1:]))
        return built_in(text[1:])
    return Shape("any") if text == "any" else Shape("leaf", leaf=text, omit_zero="z" in row)


def _key_defaults(item_type: str, keys: list[str]) -> Json:
    if not item_type.startswith("@"):
        return {}
    fields = described_fields(item_type[1:])
    return {key: fields[key]["d"] for key in keys if "d" in fields.get(key, {})}


@lru_cache(maxsize=256)
def _custom(resource: ResourceType) -> Shape:
    """The schema's root, where metadata is always ObjectMeta, whatever the schema says of it."""
    root = from_schema(resource.schema or {})
    metadata = {"metadata": built_in("meta/v1.ObjectMeta"), "apiVersion": _STRING, "kind": _STRING}
    if root.kind != "object":
        return root
    return Shape("object", _source={**root.fields, **metadata})


_STRING = Shape("leaf", leaf="string")
OBJECT_META = built_in("meta/v1.ObjectMeta")


def from_schema(schema: Json) -> Shape:
    """The shape that a structural schema describes (x-kubernetes-list-type and friends)."""
    atomic = "atomic" in (schema.get("x-kubernetes-map-type"), schema.get("x-kubernetes-struct-type"))
    if schema.get("x-kubernetes-embedded-resource"):
        properties = {name: from_schema(child) for name, child in (schema.get("properties") or {}).items()}
        metadata = {"metadata": built_in("meta/v1.ObjectMeta"), "apiVersion": _STRING, "kind": _STRING}
        return Shape("object", atomic=atomic, _source={**properties, **metadata})
    match schema.get("type"):
        case "object" if schema.get("properties"):
            properties = {name: from_schema(child) for name, child in schema["properties"].items()}
            return Shape("object", atomic=atomic, _source=properties)
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return Shape("map", atomic=atomic, _source=from_schema(schema["additionalProperties"]))
        case "object":
            return Shape("any", atomic=atomic)
        case "array":
            return _schema_list(schema)
        case None:
            return ANY
        case leaf:
            return Shape("leaf", leaf=str(leaf))


def _schema_list(schema: Json) -> Shape:
    items = schema.get("items") or {}
    keys = tuple(schema.get("x-kubernetes-list-map-keys") or ())
    properties = items.get("properties") or {}
    defaults = {key: properties[key]["default"] for key in keys if "default" in properties.get(key, {})}
    return Shape(
        "list",
        list_kind=schema.get("x-kubernetes-list-type", "atomic"),
        keys=keys,
        key_defaults=defaults,
        _source=from_schema(items),
    )
