"""Server-side apply, and the bookkeeping of owners at every other write.

An apply merges the configuration into the live object, refuses what others own with other values (or takes it, with
force), and removes what this manager applied before and no longer does, unless someone else owns it. Lists merge as
their shape says; a list of a custom resource is atomic unless its schema says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from torpor_devcluster.errors import ApiError, bad_request
from torpor_devcluster.managed import (
    KeyMissing,
    Operation,
    Owned,
    Owner,
    Owners,
    Path,
    applied_paths,
    children,
    compare,
    granular,
    item_part,
    parse,
    shown,
    to_json,
)
from torpor_devcluster.shapes import Shape

Json = dict[str, Any]

BEFORE_FIRST_APPLY = "before-first-apply"


@dataclass(frozen=True, slots=True)
class Author:
    """Who writes, how, and when (RFC 3339)."""

    manager: str
    operation: Operation
    subresource: str
    api_version: str
    time: str

    @property
    def owner(self) -> Owner:
        return Owner(self.manager, self.operation, self.subresource)


def apply(shape: Shape, live: Json, applied: Json, author: Author, *, force: bool) -> tuple[Json, Owners]:
    """The merged object (without managedFields) and its owners. `live` is an own copy. Raises 400 and 409."""
    owners = parse(live["metadata"].pop("managedFields", None))
    if not owners and live["metadata"].get("uid"):
        owners[Owner(BEFORE_FIRST_APPLY, "Update")] = Owned(author.api_version, author.time, _everything(shape, live))
    try:
        claimed = applied_paths(shape, applied)
        before = msgspec.json.decode(msgspec.json.encode(live))
        merged = _merge(shape, live, applied)
    except KeyMissing as error:
        raise bad_request(f"failed to create typed patch object: {error}") from None
    if author.subresource:
        claimed = {path for path in claimed if path[0] == f"f:{author.subresource}"}
    mine = owners.pop(author.owner, None)
    _settle_conflicts(owners, compare(shape, before, merged).changed & claimed, author, force=force)
    if mine is not None:
        kept = set().union(*(owned.paths for owned in owners.values()))
        _remove(shape, merged, mine.paths - claimed - kept, claimed | kept)
    owners[author.owner] = Owned(author.api_version, author.time, claimed)
    if mine is not None and mine.paths == claimed and before == merged:
        owners[author.owner].time = mine.time
    return merged, owners


def _everything(shape: Shape, live: Json) -> set[Path]:
    try:
        return applied_paths(shape, live)
    except KeyMissing:
        return set()


def _settle_conflicts(owners: Owners, changed: set[Path], author: Author, *, force: bool) -> None:
    """Take changed fields from their owners if forced, else refuse."""
    conflicts = {owner: owned.paths & changed for owner, owned in owners.items() if owned.paths & changed}
    if conflicts and not force:
        raise _conflict_error(conflicts, owners)
    for owner, paths in conflicts.items():
        owners[owner].paths -= paths
        if not owners[owner].paths:
            del owners[owner]


def _conflict_error(conflicts: dict[Owner, set[Path]], owners: Owners) -> ApiError:
    causes: list[Json] = []
    parts: list[str] = []
    for owner, paths in sorted(conflicts.items(), key=lambda item: item[0].manager):
        who = _described(owner, owners[owner])
        names = [shown(path) for path in sorted(paths)]
        causes += [
            {"reason": "FieldManagerConflict", "message": f"conflict with {who}", "field": name} for name in names
        ]
        parts += [f"conflicts with {who}:", *(f"- {name}" for name in names)]
    if len(causes) == 1:
        message = f"Apply failed with 1 conflict: {causes[0]['message']}: {causes[0]['field']}"
    else:
        message = f"Apply failed with {len(causes)} conflicts: " + "\n".join(parts)
    return ApiError(409, "Conflict", message, details={"causes": causes})


def _described(owner: Owner, owned: Owned) -> str:
    text = f'"{owner.manager}"'
    if owner.subresource:
        text += f' with subresource "{owner.subresource}"'
    return f"{text} using {owned.api_version}" if owner.operation == "Update" else text


def _merge(shape: Shape, live: Any, applied: Any) -> Any:
    """`applied` over `live`; both may be changed. Raises KeyMissing."""
    if not granular(shape, applied) or type(live) is not type(applied):
        return applied
    if isinstance(applied, dict):
        for name, value in applied.items():
            child = shape.field(name)
            live[name] = _merge(child, live[name], value) if name in live else value
        return live
    return _merge_list(shape, live, applied)


def _merge_list(shape: Shape, live: list[Any], applied: list[Any]) -> list[Any]:
    places = {item_part(shape, item): index for index, item in enumerate(live)}
    for item in applied:
        part = item_part(shape, item)
        place = places.get(part)
        if place is None:
            places[part] = len(live)
            live.append(item)
        else:
            live[place] = _merge(shape.items, live[place], item)
    return live


def _remove(shape: Shape, obj: Any, gone: set[Path], owned: set[Path]) -> None:
    """Take fields out of an object, whole items before their parts; what others own inside them stays."""
    needed = {path[:length] for path in owned for length in range(1, len(path) + 1)}
    removed: set[Path] = set()
    for path in sorted(gone, key=len):
        if path not in needed and not any(path[:length] in removed for length in range(1, len(path))):
            _remove_path(shape, obj, path, needed)
            removed.add(path)


def _remove_path(shape: Shape, obj: Any, path: Path, needed: set[Path]) -> None:
    """Remove one place, and then the maps and lists around it that it leaves empty and nobody owns."""
    chain: list[tuple[Shape, Any]] = []
    for part in path:
        if not granular(shape, obj):
            return
        chain.append((shape, obj))
        found = children(shape, obj).get(part)
        if found is None:
            return
        shape, obj = found
    if len(path) > 1 and path[-2].startswith("k:") and path[-1][2:] in chain[-2][0].keys:
        # The item stays, and with it the key that it is known by.
        return
    for length in range(len(path), 0, -1):
        parent_shape, parent = chain[length - 1]
        if length < len(path) and (path[:length] in needed or chain[length][1]):
            return
        _take_out(parent_shape, parent, path[length - 1])


def _take_out(shape: Shape, parent: Any, part: str) -> None:
    if isinstance(parent, dict):
        parent.pop(part[2:], None)
    else:
        parent[:] = [item for item in parent if item_part(shape, item) != part]


def track(shape: Shape, old: Json | None, new: Json, author: Author) -> None:
    """Set, in place, the managedFields of `new` after a write that is no apply: what changed belongs to its author."""
    previous = (old or {}).get("metadata", {}).get("managedFields")
    given = new["metadata"].pop("managedFields", None)
    # An empty list is how a client clears the bookkeeping.
    owners = {} if old is not None and given in ([], [{}]) else parse(previous)
    difference = compare(shape, old or {}, new)
    difference.changed.discard(())
    for owner, owned in list(owners.items()):
        if owner != author.owner:
            owned.paths -= difference.changed
        owned.paths -= difference.removed
        if not owned.paths:
            del owners[owner]
    if difference.changed:
        mine = owners.setdefault(author.owner, Owned(author.api_version, author.time))
        mine.paths |= difference.changed
        mine.api_version, mine.time = author.api_version, author.time
    store(new, owners)


def store(obj: Json, owners: Owners) -> None:
    entries = to_json(owners)
    if entries:
        obj["metadata"]["managedFields"] = entries
    else:
        obj["metadata"].pop("managedFields", None)
