"""JSON merge patch (RFC 7386) and JSON patch (RFC 6902: add, remove, replace, test)."""

import copy
from typing import Any

from torpor_sdk.errors import api_error


def merge_patch(target: Any, patch: Any) -> Any:
    """The patched copy."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged: dict[str, Any] = copy.deepcopy(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def json_patch(target: Any, operations: Any) -> Any:
    """The patched copy. Raises `Invalid` where an operation does not fit."""
    patched = copy.deepcopy(target)
    for operation in operations:
        try:
            _operate(patched, operation)
        except (KeyError, IndexError, ValueError, TypeError) as exc:
            raise api_error(
                422, {"reason": "Invalid", "message": f"{operation}: {type(exc).__name__} {exc}"}, request=""
            ) from None
    return patched


def _operate(document: Any, operation: dict[str, Any]) -> None:
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    parent = document
    for part in path:
        parent = parent[int(part)] if isinstance(parent, list) else parent[part]
    at: Any = last
    if isinstance(parent, list):
        at = len(parent) if last == "-" else int(last)
    match operation["op"]:
        case "add" if isinstance(parent, list):
            parent.insert(at, operation["value"])
        case "add":
            parent[at] = operation["value"]
        case "replace":
            parent[at]  # must exist
            parent[at] = operation["value"]
        case "remove":
            del parent[at]
        case "test":
            if parent[at] != operation["value"]:
                raise ValueError(f"is {parent[at]!r}")
        case other:
            raise ValueError(f"FakeKube has no {other!r}")
