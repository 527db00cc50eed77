"""A Kubernetes API server in memory, good enough to unit-test an operator: HTTP-shaped, so that the operator's own
client is what is tested.

Has: create, read, list (selectors, pages), update, patch (merge, JSON, apply), status apart from the rest,
resourceVersions and conflicts, generations, finalizers, owner garbage collection, discovery, Status errors. Has
not: schemas and defaults, admission, rights, watches, namespaces that must exist. In server-side apply lists are
atomic and only appliers are managers. What it does not have it refuses or leaves out; it never pretends.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from torpor_sdk import clock
from torpor_sdk._host import Answer
from torpor_sdk.errors import ApiError, OperatorError, api_error
from torpor_sdk.kinds import Kind, Served, built_in
from torpor_sdk.objects import child, finalizers_of, metadata_of, name_of, namespace_of

from ._apply import Fields, apply
from ._patches import json_patch, merge_patch
from ._selectors import matches_fields, matches_labels

# Kinds whose objects have no status that a create or update could not set.
_WITHOUT_STATUS = frozenset({"configmaps", "secrets", "events", "serviceaccounts", "leases", "endpoints"})
_READ_ONLY = ("uid", "creationTimestamp", "deletionTimestamp", "generation", "managedFields", "selfLink")
_SUBRESOURCES = ("status", "finalize", "scale")

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that the operator made. `path` is without its query."""

    method: str
    path: str
    query: Mapping[str, str]
    body: Any

    @property
    def is_write(self) -> bool:
        return self.method != "GET"


@dataclass(frozen=True, slots=True)
class _Fault:
    method: str
    path_part: str
    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Place:
    """What a path means."""

    api_version: str
    resource: str
    namespace: str
    name: str
    subresource: str


class Cluster:
    """The objects and what can be asked of them."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.version = 0
        self.changes = 0
        self._served = built_in()
        self._objects: dict[tuple[str, str], dict[Key, dict[str, Any]]] = {}
        self._applied: dict[tuple[str, str, Key], dict[str, Fields]] = {}
        self._faults: list[_Fault] = []
        self._uids = 0

    # ---- the test's side

    def define(self, resource: str, *, kind: str, namespaced: bool = True) -> None:
        """Serves a resource, as a CRD would."""
        served = Served(Kind.parse(resource), namespaced)
        for key, known in list(self._served.items()):
            if known.kind == served.kind:
                del self._served[key]
        self._served[served.kind.api_version, kind] = served

    def define_for(self, obj: Mapping[str, Any]) -> None:
        """Serves an object's kind under the plural that it most likely has, unless it is known."""
        api_version, kind = str(obj.get("apiVersion") or ""), str(obj.get("kind") or "")
        if (api_version, kind) not in self._served and api_version and kind:
            self.define(f"{api_version}/{plural(kind)}", kind=kind, namespaced=bool(namespace_of(obj)))

    def define_resource(self, kind: Kind) -> None:
        """Serves a resource of an unknown kind, unless it is known."""
        if not any(served.kind == kind for served in self._served.values()):
            singular = kind.resource.removesuffix("s")
            self.define(str(kind), kind=singular[:1].upper() + singular[1:])

    def put(self, obj: Mapping[str, Any]) -> None:
        """Stores an object as it is, status and all."""
        self.define_for(obj)
        served = self._served.get((str(obj.get("apiVersion")), str(obj.get("kind"))))
        if served is None or not name_of(obj):
            raise OperatorError("an object needs apiVersion, kind and metadata.name")
        key = (namespace_of(obj) if served.namespaced else "", name_of(obj))
        stored = copy.deepcopy(dict(obj))
        before = self._store(served.kind).get(key)
        metadata = child(stored, "metadata")
        for field in ("uid", "creationTimestamp"):
            if not metadata.get(field):
                metadata[field] = (metadata_of(before or {})).get(field) or self._new(field)
        if served.kind.group:
            metadata.setdefault("generation", 1)
        self._save(served.kind, key, stored)

    def fail_next(self, method: str, path_part: str, status: int, reason: str) -> None:
        """The operator's next request of this method whose path contains `path_part` is answered with an error."""
        self._faults.append(_Fault(method, path_part, status, reason))

    def all(self) -> Iterator[dict[str, Any]]:
        for store in self._objects.values():
            yield from store.values()

    # ---- the operator's side

    def send(
        self, method: str, path: str, *, accept: str, content_type: str, body: bytes, timeout_s: float | None
    ) -> Answer:
        """One request of the operator: recorded, and subject to faults."""
        parts = urlsplit(path)
        self.sent.append(Sent(method, parts.path, dict(parse_qsl(parts.query)), json.loads(body) if body else None))
        for fault in self._faults:
            if fault.method == method and fault.path_part in parts.path:
                self._faults.remove(fault)
                error = _error(fault.status, fault.reason, "as the test asked for")
                return Answer(fault.status, "application/json", json.dumps(_status_object(error)).encode())
        return self.send_unseen(method, path, accept=accept, content_type=content_type, body=body, timeout_s=timeout_s)

    def send_unseen(
        self, method: str, path: str, *, accept: str, content_type: str, body: bytes, timeout_s: float | None
    ) -> Answer:
        """One request of the test. Never raises because of what is asked."""
        parts = urlsplit(path)
        content = json.loads(body) if body else None
        try:
            status, answer = self._answer(method, parts.path, dict(parse_qsl(parts.query)), content, content_type)
        except ApiError as exc:
            status, answer = exc.status, _status_object(exc)
        return Answer(status, "application/json", json.dumps(answer).encode())

    def _answer(
        self, method: str, path: str, query: Mapping[str, str], body: Any, content_type: str
    ) -> tuple[int, dict[str, Any]]:
        segments = [unquote(segment) for segment in path.strip("/").split("/")]
        depth = 2 if segments[0] == "api" else 3
        if segments[0] not in ("api", "apis") or len(segments) < depth:
            raise _error(404, "NotFound", f"the server could not find the requested resource {path}")
        api_version = "/".join(segments[1:depth])
        if len(segments) == depth:
            return 200, self._discovery(api_version)
        place = _place(api_version, segments[depth:])
        kind_name, served = self._find(place)
        match method:
            case "GET" if place.name:
                return 200, copy.deepcopy(self._existing(served.kind, place))
            case "GET":
                return 200, self._list(kind_name, served, place.namespace, query)
            case "POST":
                return 201, self._create(kind_name, served, place, body, query)
            case "PUT":
                return 200, self._replace(served, place, body)
            case "PATCH" if content_type == "application/apply-patch+yaml":
                return self._apply(kind_name, served, place, body, query)
            case "PATCH":
                return 200, self._patch(served, place, body, content_type)
            case "DELETE":
                return 200, self._delete(served.kind, place, body or {})
            case _:
                raise _error(405, "MethodNotAllowed", f"{method} {path}")

    def _find(self, place: _Place) -> tuple[str, Served]:
        for (api_version, kind_name), served in self._served.items():
            if api_version == place.api_version and served.kind.resource == place.resource:
                if served.namespaced and place.name and not place.namespace:
                    break
                return kind_name, served
        raise _error(404, "NotFound", "the server could not find the requested resource")

    def _discovery(self, api_version: str) -> dict[str, Any]:
        resources = [
            {"name": served.kind.resource, "kind": kind, "namespaced": served.namespaced}
            for (version, kind), served in self._served.items()
            if version == api_version
        ]
        if not resources:
            raise _error(404, "NotFound", "the server could not find the requested resource")
        return {"kind": "APIResourceList", "groupVersion": api_version, "resources": resources}

    def _list(self, kind_name: str, served: Served, namespace: str, query: Mapping[str, str]) -> dict[str, Any]:
        found = [
            copy.deepcopy(obj)
            for (where, _), obj in sorted(self._store(served.kind).items())
            if (not namespace or where == namespace)
            and matches_labels(obj, query.get("labelSelector", ""))
            and matches_fields(obj, query.get("fieldSelector", ""))
        ]
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or 0)
        end = start + limit if limit else len(found)
        metadata: dict[str, Any] = {"resourceVersion": str(self.version)}
        if end < len(found):
            metadata["continue"] = str(end)
        items = found[start:end]
        for item in items:
            if not served.kind.group:
                # As the real one: items of built-in lists do not say what they are.
                item.pop("apiVersion", None), item.pop("kind", None)
        return {"apiVersion": served.kind.api_version, "kind": f"{kind_name}List", "metadata": metadata, "items": items}

    def _create(
        self, kind_name: str, served: Served, place: _Place, body: Any, query: Mapping[str, str]
    ) -> dict[str, Any]:
        obj = self._accepted(kind_name, served, place, body)
        metadata = child(obj, "metadata")
        if not metadata.get("name") and metadata.get("generateName"):
            self._uids += 1
            metadata["name"] = f"{metadata['generateName']}{self._uids:05d}"
        key = (place.namespace if served.namespaced else "", name_of(obj))
        if not key[1]:
            raise _error(422, "Invalid", "metadata.name: Required value: name or generateName is required")
        if key in self._store(served.kind):
            raise _error(409, "AlreadyExists", f'{served.kind.resource} "{key[1]}" already exists', name=key[1])
        return self._insert(served, key, obj)

    def _insert(self, served: Served, key: Key, obj: dict[str, Any]) -> dict[str, Any]:
        metadata = child(obj, "metadata")
        for field in (*_READ_ONLY, "resourceVersion"):
            metadata.pop(field, None)
        metadata |= {"name": key[1], "uid": self._new("uid"), "creationTimestamp": clock.timestamp()}
        if served.namespaced:
            metadata["namespace"] = key[0]
        if served.kind.group:
            metadata["generation"] = 1
        if served.kind.resource not in _WITHOUT_STATUS:
            obj.pop("status", None)
        return self._save(served.kind, key, obj)

    def _replace(self, served: Served, place: _Place, body: Any) -> dict[str, Any]:
        before = self._existing(served.kind, place)
        self._check_version(served.kind, place, before, body)
        return self._change(served, place, before, copy.deepcopy(body))

    def _patch(self, served: Served, place: _Place, body: Any, content_type: str) -> dict[str, Any]:
        before = self._existing(served.kind, place)
        match content_type:
            case "application/merge-patch+json":
                self._check_version(served.kind, place, before, body)
                after = merge_patch(before, body)
            case "application/json-patch+json":
                after = json_patch(before, body)
            case _:
                raise _error(415, "UnsupportedMediaType", f"FakeKube takes no {content_type or 'patch of no type'}")
        return self._change(served, place, before, after)

    def _apply(
        self, kind_name: str, served: Served, place: _Place, body: Any, query: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        manager = query.get("fieldManager")
        if not manager:
            raise _error(400, "BadRequest", "fieldManager is required for apply patch")
        if metadata_of(body).get("managedFields"):
            raise _error(400, "BadRequest", "metadata.managedFields must be nil")
        wanted = self._accepted(kind_name, served, place, body)
        key = (place.namespace if served.namespaced else "", place.name)
        before = self._store(served.kind).get(key)
        managers = self._applied.setdefault((served.kind.group, served.kind.resource, key), {})
        after = apply(before or {}, wanted, manager, managers, force=query.get("force") == "true")
        if before is None:
            return 201, self._insert(served, key, after)
        return 200, self._change(served, place, before, after)

    def _accepted(self, kind_name: str, served: Served, place: _Place, body: Any) -> dict[str, Any]:
        """A copy of a body that fits its path."""
        if not isinstance(body, dict):
            raise _error(400, "BadRequest", "the body is no object")
        if (body.get("apiVersion"), body.get("kind")) != (served.kind.api_version, kind_name):
            raise _error(
                400,
                "BadRequest",
                f"{body.get('apiVersion')} {body.get('kind')} is no {served.kind.api_version} {kind_name}",
            )
        if served.namespaced and not place.namespace:
            raise _error(400, "BadRequest", "an empty namespace may not be set during creation")
        if namespace_of(body) and namespace_of(body) != place.namespace:
            raise _error(400, "BadRequest", "the namespace of the object does not match the namespace of the request")
        return copy.deepcopy(body)

    def _change(self, served: Served, place: _Place, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """Stores what a write may change: the status, or all but the status."""
        if place.subresource not in ("", "status"):
            raise _error(404, "NotFound", f"FakeKube has no {place.subresource} of {place.resource}")
        if place.subresource == "status":
            status = after.get("status")
            after = copy.deepcopy(before)
            after["status"] = status
        elif served.kind.resource not in _WITHOUT_STATUS:
            after.pop("status", None)
            if "status" in before:
                after["status"] = copy.deepcopy(before["status"])
        self._keep_read_only(before, after)
        if _content(before) != _content(after) and served.kind.group:
            metadata = child(after, "metadata")
            metadata["generation"] = int(metadata.get("generation") or 0) + 1
        if before == after:
            return copy.deepcopy(before)
        key = (place.namespace if served.namespaced else "", place.name)
        if metadata_of(after).get("deletionTimestamp") and not finalizers_of(after):
            return self._remove(served.kind, key)
        return self._save(served.kind, key, after)

    @staticmethod
    def _keep_read_only(before: Mapping[str, Any], after: dict[str, Any]) -> None:
        metadata, known = child(after, "metadata"), metadata_of(before)
        for field in (*_READ_ONLY, "name", "namespace", "resourceVersion"):
            metadata.pop(field, None)
            if field in known:
                metadata[field] = known[field]

    def _delete(self, kind: Kind, place: _Place, options: Mapping[str, Any]) -> dict[str, Any]:
        obj = self._existing(kind, place)
        for field, wanted in (options.get("preconditions") or {}).items():
            if metadata_of(obj).get(field) != wanted:
                raise _error(
                    409, "Conflict", f"the {field} in the precondition ({wanted}) does not match that of the object"
                )
        key = (namespace_of(obj), name_of(obj))
        if finalizers_of(obj):
            if not metadata_of(obj).get("deletionTimestamp"):
                obj = copy.deepcopy(obj)
                metadata = child(obj, "metadata")
                metadata |= {"deletionTimestamp": clock.timestamp()}
                if kind.group:
                    metadata["generation"] = int(metadata.get("generation") or 0) + 1
                self._save(kind, key, obj)
            return copy.deepcopy(obj)
        return self._remove(kind, key, orphan=options.get("propagationPolicy") == "Orphan")

    def _remove(self, kind: Kind, key: Key, *, orphan: bool = False) -> dict[str, Any]:
        gone = self._store(kind).pop(key)
        self._applied.pop((kind.group, kind.resource, key), None)
        self._count(kind)
        if not orphan:
            self._collect(str(metadata_of(gone).get("uid")))
        if kind == Kind("", "v1", "namespaces"):
            self._empty_namespace(key[1])
        return gone

    def _collect(self, uid: str) -> None:
        """Deletes the dependents of an owner that has gone, if no other owner is left."""
        living = {str(metadata_of(obj).get("uid")) for obj in self.all()}
        for (group, resource), store in list(self._objects.items()):
            for key, obj in list(store.items()):
                owners = {str(ref.get("uid")) for ref in metadata_of(obj).get("ownerReferences") or []}
                if uid in owners and not owners & living and key in store:
                    place = _Place("", resource, *key, "")
                    self._delete(Kind(group, "", resource), place, {})

    def _empty_namespace(self, namespace: str) -> None:
        for (group, resource), store in list(self._objects.items()):
            for key in [key for key in store if key[0] == namespace]:
                if key in store:
                    self._delete(Kind(group, "", resource), _Place("", resource, *key, ""), {})

    # ---- storage

    def _store(self, kind: Kind) -> dict[Key, dict[str, Any]]:
        return self._objects.setdefault((kind.group, kind.resource), {})

    def _existing(self, kind: Kind, place: _Place) -> dict[str, Any]:
        found = self._store(kind).get((place.namespace, place.name))
        if found is None:
            raise _error(404, "NotFound", f'{kind.resource} "{place.name}" not found', name=place.name)
        return found

    def _save(self, kind: Kind, key: Key, obj: dict[str, Any]) -> dict[str, Any]:
        self._count(kind)
        child(obj, "metadata")["resourceVersion"] = str(self.version)
        self._store(kind)[key] = obj
        return copy.deepcopy(obj)

    def _count(self, kind: Kind) -> None:
        self.version += 1
        # An event says that something happened, and is no change of what the operator is for.
        self.changes += kind.resource != "events"

    def _check_version(self, kind: Kind, place: _Place, before: Mapping[str, Any], body: Any) -> None:
        asked = metadata_of(body).get("resourceVersion") if isinstance(body, dict) else None
        if asked and asked != metadata_of(before).get("resourceVersion"):
            raise _error(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on {kind.resource} "{place.name}": the object has been modified',
                name=place.name,
            )

    def _new(self, field: str) -> str:
        if field != "uid":
            return clock.timestamp()
        self._uids += 1
        return f"00000000-0000-4000-8000-{self._uids:012d}"


def plural(kind: str) -> str:
    """The plural that a kind most likely has.

    >>> plural("Database"), plural("NetworkPolicy"), plural("Ingress")
    ('databases', 'networkpolicies', 'ingresses')
    """
    lower = kind.lower()
    if lower.endswith(("s", "x", "ch", "sh")):
        return f"{lower}es"
    if lower.endswith("y") and lower[-2:-1] not in "aeiou":
        return f"{lower[:-1]}ies"
    return f"{lower}s"


def _place(api_version: str, rest: list[str]) -> _Place:
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in _SUBRESOURCES:
        namespace, rest = rest[1], rest[2:]
    resource, name, subresource = [*rest, "", ""][:3]
    return _Place(api_version, resource, namespace, name, subresource)


def _content(obj: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in obj.items() if key not in ("metadata", "status")} | {
        "deleting": metadata_of(obj).get("deletionTimestamp")
    }


def _error(status: int, reason: str, message: str, *, name: str = "") -> ApiError:
    body: dict[str, Any] = {"reason": reason, "message": message, "details": {"name": name} if name else {}}
    return api_error(status, body, request="")


def _status_object(exc: ApiError) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "reason": exc.reason,
        "message": exc.message,
        "details": dict(exc.details),
        "code": exc.status,
    }
