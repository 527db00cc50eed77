"""JSON Patch (RFC 6902), JSON Merge Patch (RFC 7386) and Kubernetes' strategic merge patch.

Each takes a document that it may change and returns the new one. Refusals carry the words of the real server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torpor_devcluster.errors import ApiError, bad_request
from torpor_devcluster.shapes import Shape

Json = dict[str, Any]

# apiserver: maxJSONPatchOperations
OPERATIONS_MAX = 10_000


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386. Null removes; anything that is not an object replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = target if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def json_patch(document: Any, operations: Any) -> Any:
    """RFC 6902. A failing `test` and a missing path end in 422, a malformed patch in 400."""
    if not isinstance(operations, list):
        raise bad_request("error decoding patch: json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    if len(operations) > OPERATIONS_MAX:
        message = f"The allowed maximum operations in a JSON patch is {OPERATIONS_MAX}, got {len(operations)}"
        raise ApiError(413, "RequestEntityTooLarge", message, details={})
    for operation in operations:
        if not isinstance(operation, dict) or not isinstance(operation.get("path"), str):
            raise bad_request("error decoding patch: each operation needs op and path")
        document = _apply(document, operation)
    return document


def _apply(document: Any, operation: Json) -> Any:
    path = _pointer(operation["path"])
    match operation.get("op"):
        case "add":
            return _add(document, path, _value(operation))
        case "remove":
            return _remove(document, path)
        case "replace":
            return _replace(document, path, _value(operation))
        case "move":
            source = _pointer(_from(operation))
            value = _get(document, source)
            return _add(_remove(document, source), path, value)
        case "copy":
            return _add(document, path, _deep(_get(document, _pointer(_from(operation)))))
        case "test":
            return _test(document, path, operation)
    raise bad_request(f"error decoding patch: unexpected operation kind {operation.get('op')!r}")


def _deep(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _deep(item) for key, item in value.items()}
    return [_deep(item) for item in value] if isinstance(value, list) else value


def _value(operation: Json) -> Any:
    if "value" not in operation:
        raise bad_request(f"error decoding patch: {operation['op']} operation needs a value")
    return operation["value"]


def _from(operation: Json) -> str:
    source = operation.get("from")
    if not isinstance(source, str):
        raise bad_request(f"error decoding patch: {operation['op']} operation needs from")
    return source


def _pointer(text: str) -> list[str]:
    if text and not text.startswith("/"):
        raise _failed(f"path {text!r} does not begin with a slash")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _failed(why: str) -> ApiError:
    return ApiError(
        422, "Invalid", f"the server rejected our request due to an error in our request: {why}", details={}
    )


def _index(items: list[Any], part: str, *, end: bool = False) -> int:
    if end and part == "-":
        return len(items)
    if not part.isdigit() or (part != "0" and part.startswith("0")):
        raise _failed(f"{part!r} is not an index of an array")
    index = int(part)
    if index > len(items) or (index == len(items) and not end):
        raise _failed(f"index {index} is out of bounds")
    return index


def _child(node: Any, part: str) -> Any:
    if isinstance(node, dict) and part in node:
        return node[part]
    if isinstance(node, list):
        return node[_index(node, part)]
    raise _failed(f"missing path: {part!r}")


def _get(document: Any, path: list[str]) -> Any:
    for part in path:
        document = _child(document, part)
    return document


def _at_parent(document: Any, path: list[str], change: Callable[[Any, str], None]) -> Any:
    change(_get(document, path[:-1]), path[-1])
    return document


def _add(document: Any, path: list[str], value: Any) -> Any:
    def change(parent: Any, part: str) -> None:
        if isinstance(parent, list):
            parent.insert(_index(parent, part, end=True), value)
        elif isinstance(parent, dict):
            parent[part] = value
        else:
            raise _failed(f"missing path: {part!r}")

    return _at_parent(document, path, change) if path else value


def _remove(document: Any, path: list[str]) -> Any:
    def change(parent: Any, part: str) -> None:
        _child(parent, part)
        del parent[int(part) if isinstance(parent, list) else part]

    return _at_parent(document, path, change) if path else None


def _replace(document: Any, path: list[str], value: Any) -> Any:
    def change(parent: Any, part: str) -> None:
        _child(parent, part)
        parent[int(part) if isinstance(parent, list) else part] = value

    return _at_parent(document, path, change) if path else value


def _test(document: Any, path: list[str], operation: Json) -> Any:
    try:
        found = _get(document, path)
    except ApiError:
        found = None
    wanted = operation.get("value")
    if found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
        raise _failed(f"testing path {operation['path']} failed")
    return document


def strategic_merge_patch(target: Json, patch: Json, shape: Shape) -> Json:
    """Kubernetes' own patch of built-in types: maps merge, lists merge where the type says so."""
    merged: Json = _strategic(target, patch, shape)
    return merged


def _strategic(target: Any, patch: Any, shape: Shape) -> Any:
    if not isinstance(patch, dict):
        return patch
    directive = patch.get("$patch")
    if directive == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    if directive == "delete":
        return {}
    merged = target if isinstance(target, dict) else {}
    retained = patch.get("$retainKeys")
    if isinstance(retained, list):
        merged = {key: value for key, value in merged.items() if key in retained}
    for key, value in patch.items():
        if key.startswith("$"):
            _directive(merged, key, value)
        elif value is None:
            merged.pop(key, None)
        elif isinstance(value, list):
            order = patch.get(f"$setElementOrder/{key}")
            merged[key] = _strategic_list(merged.get(key), value, shape.field(key), order)
        else:
            merged[key] = _strategic(merged.get(key), value, shape.field(key))
    for key in patch:
        name = key.removeprefix("$setElementOrder/")
        if name != key and name not in patch and isinstance(merged.get(name), list):
            merged[name] = _strategic_list(merged[name], [], shape.field(name), patch[key])
    return merged


def _directive(merged: Json, key: str, value: Any) -> None:
    """`$deleteFromPrimitiveList/x` takes values out of x."""
    if key.startswith("$deleteFromPrimitiveList/"):
        name = key.partition("/")[2]
        if isinstance(merged.get(name), list) and isinstance(value, list):
            merged[name] = [item for item in merged[name] if item not in value]


def _strategic_list(target: Any, patch: list[Any], shape: Shape, order: Any) -> list[Any]:
    key = shape.merge_key
    if key is None or any(_asks(item, "replace") for item in patch):
        return [item for item in patch if not _asks(item, "replace")]
    live = list(target) if isinstance(target, list) else []
    merged = list(live)
    for item in patch:
        if key != "":
            _merge_item(merged, item, key, shape.items)
        elif item not in merged:
            merged.append(item)

    def identity(item: Any) -> Any:
        return item.get(key) if key and isinstance(item, dict) else item

    wanted = [identity(item) for item in (order if isinstance(order, list) else patch)]
    return _ordered(merged, wanted, [identity(item) for item in live], identity)


def _ordered(merged: list[Any], wanted: list[Any], live: list[Any], identity: Callable[[Any], Any]) -> list[Any]:
    """The patch's items in the patch's order, the server's own between them where they stood before."""
    ours = sorted((i for i in merged if identity(i) in wanted), key=lambda item: wanted.index(identity(item)))
    others = [item for item in merged if identity(item) not in wanted]
    ordered: list[Any] = []
    for item in ours:
        place = live.index(identity(item)) if identity(item) in live else -1
        while others and place >= 0 and identity(others[0]) in live and live.index(identity(others[0])) < place:
            ordered.append(others.pop(0))
        ordered.append(item)
    return ordered + others


def _asks(item: Any, directive: str) -> bool:
    return isinstance(item, dict) and item.get("$patch") == directive


def _merge_item(merged: list[Any], item: Any, key: str, shape: Shape) -> None:
    if not isinstance(item, dict) or key not in item:
        raise bad_request(f"map: {item!r} does not contain declared merge key: {key}")
    place = next((at for at, present in enumerate(merged) if present.get(key) == item[key]), None)
    if _asks(item, "delete"):
        merged[:] = [present for present in merged if present.get(key) != item[key]]
    elif place is None:
        merged.append(_strategic({}, item, shape))
    else:
        merged[place] = _strategic(merged[place], item, shape)
