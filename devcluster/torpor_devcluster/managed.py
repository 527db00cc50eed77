"""metadata.managedFields: who owns which fields. Read, compared, written as FieldsV1.

A field is a path: `f:name` into an object or map, `k:{…}` to the item of a list by its keys, `v:…` to the item of a
set. A set of paths is a Python set of tuples; as FieldsV1 it is a tree in which `.` marks a member that has children.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from torpor_devcluster.shapes import Shape

Json = dict[str, Any]
Path = tuple[str, ...]
Operation = Literal["Apply", "Update"]

# Identity and bookkeeping belong to nobody.
_UNOWNED = frozenset(
    {"apiVersion", "kind", "metadata.name", "metadata.namespace", "metadata.uid", "metadata.resourceVersion",
     "metadata.generation", "metadata.creationTimestamp", "metadata.selfLink", "metadata.managedFields",
     "metadata.deletionTimestamp", "metadata.deletionGracePeriodSeconds"}
)  # fmt: skip
_UNOWNED_PATHS = frozenset(tuple(f"f:{part}" for part in text.split(".")) for text in _UNOWNED) | {("f:metadata",)}


@dataclass(frozen=True, slots=True)
class Owner:
    """One entry's identity: a manager may own by Apply and by Update, and for each subresource apart."""

    manager: str
    operation: Operation
    subresource: str = ""


@dataclass(slots=True)
class Owned:
    api_version: str
    time: str
    paths: set[Path] = field(default_factory=set)


Owners = dict[Owner, Owned]


def parse(entries: Any) -> Owners:
    """The owners of an object's managedFields; entries that make no sense are left out."""
    owners: Owners = {}
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or entry.get("operation") not in ("Apply", "Update"):
            continue
        owner = Owner(str(entry.get("manager", "")), entry["operation"], str(entry.get("subresource", "")))
        paths = set(_flatten(entry.get("fieldsV1") or {}, ()))
        owners[owner] = Owned(str(entry.get("apiVersion", "")), str(entry.get("time", "")), paths)
    return owners


def to_json(owners: Owners) -> list[Json]:
    return [
        {
            "manager": owner.manager,
            "operation": owner.operation,
            "apiVersion": owned.api_version,
            "time": owned.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": _tree(owned.paths),
            **({"subresource": owner.subresource} if owner.subresource else {}),
        }
        for owner, owned in sorted(owners.items(), key=_order)
        if owned.paths
    ]


def _order(item: tuple[Owner, Owned]) -> tuple[bool, str, str]:
    """Apply before Update, older before newer, as the server sorts."""
    owner, owned = item
    return owner.operation != "Apply", owned.time, owner.manager


def _flatten(tree: Any, at: Path) -> Iterable[Path]:
    if not isinstance(tree, dict):
        return
    for name, child in tree.items():
        if name == ".":
            yield at
        elif not child:
            yield (*at, name)
        else:
            yield from _flatten(child, (*at, name))


def _tree(paths: set[Path]) -> Json:
    root: Json = {}
    for path in sorted(paths):
        node = root
        for part in path:
            node = node.setdefault(part, {})
    for path in paths:
        node = root
        for part in path:
            node = node[part]
        if node:
            node.setdefault(".", {})
    return root


def shown(path: Path) -> str:
    """`.spec.containers[name="web"].image`, as the server prints a path."""
    text = ""
    for part in path:
        kind, _, rest = part.partition(":")
        if kind == "f":
            text += f".{rest}"
        elif kind == "v":
            text += f"[={rest}]"
        else:
            keys = msgspec.json.decode(rest)
            text += "[" + ",".join(f"{key}={msgspec.json.encode(keys[key]).decode()}" for key in sorted(keys)) + "]"
    return text


class KeyMissing(Exception):
    """An item of a keyed list lacks a key."""


def item_part(shape: Shape, item: Any) -> str:
    """The path element of an item of a set or keyed list. Raises KeyMissing."""
    if shape.list_kind == "set":
        return "v:" + msgspec.json.encode(item).decode()
    defaults = shape.key_defaults or {}
    if not isinstance(item, dict):
        raise KeyMissing("an element is not an object")
    keys = {}
    for key in sorted(shape.keys):
        value = item.get(key, defaults.get(key))
        if value is None:
            raise KeyMissing(f'an element omits key field "{key}" (and has no default value)')
        keys[key] = value
    return "k:" + msgspec.json.encode(keys).decode()


def granular(shape: Shape, value: Any) -> bool:
    """Whether the parts of a value are owned one by one."""
    if isinstance(value, dict):
        return shape.kind in ("object", "map", "any") and not shape.atomic
    return isinstance(value, list) and shape.kind == "list" and shape.list_kind != "atomic"


def children(shape: Shape, value: Any) -> dict[str, tuple[Shape, Any]]:
    """The parts of a granular value by path element. Raises KeyMissing."""
    if isinstance(value, dict):
        return {f"f:{name}": (shape.field(name), item) for name, item in value.items()}
    return {item_part(shape, item): (shape.items, item) for item in value}


def applied_paths(shape: Shape, value: Any, at: Path = ()) -> set[Path]:
    """What an applied configuration claims: its leaves, and the items of its lists. Raises KeyMissing."""
    if not granular(shape, value) or not value:
        return {at}
    claimed: set[Path] = set()
    for part, (child_shape, child) in children(shape, value).items():
        path = (*at, part)
        if path in _UNOWNED_PATHS and path != ("f:metadata",):
            continue
        if part.startswith("k:"):
            claimed.add(path)
        claimed |= applied_paths(child_shape, child, path)
    claimed.discard(("f:metadata",))
    return claimed


@dataclass(slots=True)
class Difference:
    """Paths that a write changed: `changed` were added or modified, `removed` are gone."""

    changed: set[Path] = field(default_factory=set)
    removed: set[Path] = field(default_factory=set)


def compare(shape: Shape, old: Any, new: Any) -> Difference:
    difference = Difference()
    _compare(shape, old, new, (), difference)
    difference.changed -= _UNOWNED_PATHS
    difference.removed -= _UNOWNED_PATHS
    return difference


_ABSENT = object()


def _compare(shape: Shape, old: Any, new: Any, at: Path, found: Difference) -> None:
    if old is new or (old == new and type(old) is type(new)):
        return
    old_parts = _parts(shape, old)
    new_parts = _parts(shape, new)
    if new is not _ABSENT and (old is _ABSENT or new_parts is None or old_parts is None):
        found.changed.add(at)
    if new is _ABSENT:
        found.removed.add(at)
    for part in {**(old_parts or {}), **(new_parts or {})}:
        path = (*at, part)
        if path in _UNOWNED_PATHS and path != ("f:metadata",):
            continue
        before = (old_parts or {}).get(part)
        after = (new_parts or {}).get(part)
        child_shape = (after or before or (shape, None))[0]
        _compare(
            child_shape,
            before[1] if before is not None else _ABSENT,
            after[1] if after is not None else _ABSENT,
            path,
            found,
        )


def _parts(shape: Shape, value: Any) -> dict[str, tuple[Shape, Any]] | None:
    if value is _ABSENT or not granular(shape, value):
        return None
    try:
        return children(shape, value)
    except KeyMissing:
        return None
