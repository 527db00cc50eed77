"""Server-side apply, simplified: mappings merge by field, lists are atomic, only appliers are managers."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torpor_sdk.errors import api_error

Path = tuple[str, ...]
Fields = frozenset[Path]
_IDENTITY = {("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")}


def apply(
    live: Mapping[str, Any], wanted: Mapping[str, Any], manager: str, managers: dict[str, Fields], *, force: bool
) -> dict[str, Any]:
    """The live object with what is wanted; `managers` is brought up to date. Raises `Conflict`."""
    merged = copy.deepcopy(dict(live))
    fields = frozenset(path for path, _ in _leaves(wanted)) - _IDENTITY
    taken = {path for other, theirs in managers.items() if other != manager for path in theirs}
    conflicts = sorted(path for path in fields & taken if _at(live, path) != _at(wanted, path))
    if conflicts and not force:
        names = ", ".join("." + ".".join(path) for path in conflicts)
        raise api_error(409, {"reason": "Conflict", "message": f"Apply failed with conflicts: {names}"}, request="")
    for path in managers.get(manager, frozenset()) - fields - taken:
        _drop(merged, path)
    for path, value in _leaves(wanted):
        _put(merged, path, copy.deepcopy(value))
    for other in list(managers):
        managers[other] -= frozenset(conflicts)
    managers[manager] = fields
    return merged


def _leaves(value: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, below in value.items():
        if isinstance(below, Mapping) and below:
            yield from _leaves(below, (*path, key))
        else:
            yield (*path, key), below


def _at(obj: Any, path: Path) -> Any:
    for key in path:
        obj = obj.get(key) if isinstance(obj, Mapping) else None
    return obj


def _put(obj: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        below = obj.get(key)
        if not isinstance(below, dict):
            below = obj[key] = {}
        obj = below
    if value == {} and isinstance(obj.get(path[-1]), dict):
        return
    obj[path[-1]] = value


def _drop(obj: dict[str, Any], path: Path) -> None:
    parents: list[tuple[dict[str, Any], str]] = []
    here: Any = obj
    for key in path[:-1]:
        if not isinstance(here, dict) or key not in here:
            return
        parents.append((here, key))
        here = here[key]
    if isinstance(here, dict):
        here.pop(path[-1], None)
    for parent, key in reversed(parents):
        if parent[key] == {}:
            del parent[key]
