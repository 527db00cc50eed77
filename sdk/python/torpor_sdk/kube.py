"""The Kubernetes API as the operator sees it. Objects are dicts; every call is one request, made as the operator's
ServiceAccount, and blocks the guest only.

Reads that the operator's watches cover are answered from the mesh's memory, and see the operator's own writes.
Calls that write an object that was read (`update`, `patch`, `patch_status`, the finalizers) bring it up to date in
place; a plain dict is a description, and stays as it is. Raises `ApiError` and its kinds for what the API
server refuses, `CallError` where there was no answer.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import urlencode

from . import _host, events
from ._host import Answer
from .errors import AlreadyExists, CallError, Conflict, Expired, NotFound, TorporError, api_error
from .kinds import Kind, Kinds
from .logs import log
from .manifest import Selector, selector
from .objects import (
    Object,
    Resource,
    describe,
    finalizers_of,
    metadata_of,
    name_of,
    namespace_of,
    set_owner,
)
from .requests import Request

JSON = "application/json"
APPLY = "application/apply-patch+yaml"  # JSON is YAML
PATCHES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
}
# client-go's pager.
PAGE_OBJECTS = 500
CONFLICT_ATTEMPTS = 5
# The first pause; doubled after each conflict.
CONFLICT_PAUSE_S = 0.01

Target = Request | str | Mapping[str, Any]
# The method `list` hides the type inside of the class.
Resources = list[Resource]
Names = list[str]
T = TypeVar("T")


class Send(Protocol):
    """How a request gets to the API server."""

    def __call__(
        self, method: str, path: str, *, accept: str, content_type: str, body: bytes, timeout_s: float | None
    ) -> Answer: ...


class Kube:
    """The client that `reconcile` gets.

    A target is a `Request` (the primary of that key), an object that was read or described, or a resource
    (`"v1/secrets"`) with name and namespace.
    """

    def __init__(
        self,
        *,
        primary: Kind | None = None,
        kinds: Kinds | None = None,
        manager: str | Callable[[], str] = "torpor-operator",
        send: Send = _host.kube_request,
    ) -> None:
        self._primary = primary
        self._kinds = kinds or Kinds()
        self._manager = manager
        self._send = send
        self._read_ahead: tuple[Request, Resource | None] | None = None

    # ---- reading

    def get(self, target: Target, name: str = "", namespace: str = "") -> Resource | None:
        """One object, or None if there is no such object.

        >>> kube.get(request)                              # doctest: +SKIP
        >>> kube.get("v1/secrets", "orders", "shop")       # doctest: +SKIP
        """
        if self._read_ahead is not None and self._read_ahead[0] is target:
            (_, ahead), self._read_ahead = self._read_ahead, None
            return ahead
        kind, namespace, name = self._resolve(target, name, namespace)
        path = kind.path(namespace=namespace, name=_required(name, kind))
        try:
            answer = self.request("GET", path)
        except NotFound as exc:
            # Without a name in it the answer is about the resource: a CRD that is not installed is no empty cluster.
            if exc.details.get("name"):
                return None
            raise
        return self._learnt(kind, answer)

    def list(
        self,
        resource: str,
        namespace: str = "",
        *,
        labels: Selector | None = None,
        fields: Selector | None = None,
        owner: Mapping[str, Any] | None = None,
    ) -> Resources:
        """All objects of a resource, in one namespace or all, in pages of 500 underneath.

        >>> kube.list("v1/pods", "shop", labels={"app": "orders"})   # doctest: +SKIP

        With `owner`, only those that have it as an owner.
        """
        kind = Kind.parse(resource)
        path = kind.path(namespace=namespace)
        query = {"labelSelector": selector(labels), "fieldSelector": selector(fields)}
        try:
            found = self._pages(path, {**query, "limit": str(PAGE_OBJECTS)})
        except Expired:
            # The list has changed too much between two pages: once more, in one piece.
            found = self._pages(path, query)
        objects = [self._learnt(kind, obj) for obj in found]
        if owner is None:
            return objects
        uid = metadata_of(owner).get("uid")
        return [obj for obj in objects if any(ref.get("uid") == uid for ref in _owners(obj))]

    def _pages(self, path: str, query: Mapping[str, str]) -> Iterable[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        more: str | None = ""
        while more is not None:
            page = self.request("GET", with_query(path, {**query, "continue": more}))
            # Items of built-in kinds come without apiVersion and kind; the list has them.
            whole = {
                "apiVersion": page.get("apiVersion"),
                "kind": str(page.get("kind") or "").removesuffix("List"),
            }
            found.extend({**whole, **item} for item in page.get("items") or [])
            more = (page.get("metadata") or {}).get("continue") or None
        return found

    def tree(self, target: Target, name: str = "", namespace: str = "", *, timeout_s: float | None = None) -> Any:
        """A primary and all that it owns, in one answer from memory, as JSON. Raises `CallError` (unimplemented) on
        a host that has no trees."""
        kind, namespace, name = self._resolve(target, name, namespace)
        answer = _host.kube_tree(str(kind), namespace, _required(name, kind), timeout_s=timeout_s)
        return _parsed(answer, f"tree of {kind} {namespace}/{name}")

    # ---- writing

    def create(self, obj: Mapping[str, Any], *, owner: Mapping[str, Any] | None = None) -> Resource:
        """Raises `AlreadyExists`, `Invalid`. With `metadata.generateName` the API server picks the name."""
        body, kind, namespace = self._described(obj, owner, controller=True)
        path = with_query(kind.path(namespace=namespace), {"fieldManager": self.manager})
        return self._learnt(kind, self.request("POST", path, body))

    def apply(
        self,
        obj: Mapping[str, Any],
        *,
        owner: Mapping[str, Any] | None = None,
        controller: bool = True,
        force: bool = True,
    ) -> Resource:
        """Makes the object as described: creates it, or changes the fields that are given and drops those that an
        earlier apply of this operator gave (server-side apply). Others' fields stay.

        >>> kube.apply(secret_for(db), owner=db)   # doctest: +SKIP

        With `owner` the object is the owner's (`set_owner`). Without `force` a field that another manager holds is
        a `Conflict`.
        """
        body, kind, namespace = self._described(obj, owner, controller=controller)
        body.get("metadata", {}).pop("managedFields", None)
        path = kind.path(namespace=namespace, name=_required(name_of(body), kind))
        query = {"fieldManager": self.manager, "force": "true" if force else ""}
        return self._learnt(kind, self.request("PATCH", with_query(path, query), body, content_type=APPLY))

    def update(self, obj: Mapping[str, Any]) -> Resource:
        """Replaces an object that was read. Raises `Conflict` if it has changed since: see `modify`."""
        return self._put(obj, "")

    def update_status(self, obj: Mapping[str, Any]) -> Resource:
        """Replaces the status of an object that was read. Raises `Conflict` if it has changed since."""
        return self._put(obj, "status")

    def modify(
        self, target: Target, change: Callable[[Resource], object], name: str = "", namespace: str = ""
    ) -> Resource | None:
        """Reads, changes and updates an object, again after each conflict. None if there is no such object.

        >>> kube.modify(request, lambda db: db.labels.update(tier="gold"))   # doctest: +SKIP

        A `change` that changes nothing writes nothing.
        """

        def once() -> Resource | None:
            obj = self.get(target, name, namespace)
            if obj is None:
                return None
            before = obj.deepcopy()
            change(obj)
            if obj != before:
                self.update(obj)
            return obj

        return retry_on_conflict(once)

    def patch(
        self,
        target: Target,
        patch: Any,
        name: str = "",
        namespace: str = "",
        *,
        type: Literal["merge", "json", "strategic"] = "merge",
        subresource: str = "",
    ) -> Resource:
        """Changes some fields, whatever the rest is. A merge patch: mappings merge, None removes, lists replace.

        >>> kube.patch(db, {"metadata": {"labels": {"tier": "gold"}}})   # doctest: +SKIP
        """
        kind, namespace, name = self._resolve(target, name, namespace)
        path = kind.path(namespace=namespace, name=_required(name, kind), subresource=subresource)
        query = {"fieldManager": self.manager}
        answer = self.request("PATCH", with_query(path, query), patch, content_type=PATCHES[type])
        return self._renewed(target, kind, answer)

    def patch_status(self, target: Target, status: Mapping[str, Any], name: str = "", namespace: str = "") -> Resource:
        """Changes some fields of the status (a merge patch of the status subresource).

        >>> kube.patch_status(db, {"ready": True, "conditions": db.conditions})   # doctest: +SKIP
        """
        return self.patch(target, {"status": dict(status)}, name, namespace, subresource="status")

    def delete(
        self,
        target: Target,
        name: str = "",
        namespace: str = "",
        *,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
        unchanged: bool = False,
    ) -> bool:
        """Asks for deletion; False if there is no such object (any more).

        Of an object that was read, only that very one is deleted, not a later one of the same name; with
        `unchanged`, only if it is still as it was read. Else `Conflict`.
        """
        kind, namespace, name = self._resolve(target, name, namespace)
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        known = {} if isinstance(target, Request | str) else metadata_of(target)
        fields = ("uid", "resourceVersion") if unchanged else ("uid",)
        preconditions = {field: known[field] for field in fields if known.get(field)}
        if preconditions:
            options["preconditions"] = preconditions
        try:
            self.request("DELETE", kind.path(namespace=namespace, name=_required(name, kind)), options)
        except NotFound:
            return False
        return True

    # ---- finalizers

    def add_finalizer(self, obj: Object, finalizer: str) -> bool:
        """Makes deletion of the object wait until `remove_finalizer`; True if it was not there yet."""
        return self._change_finalizers(obj, lambda names: [*names, finalizer] if finalizer not in names else names)

    def remove_finalizer(self, obj: Object, finalizer: str) -> bool:
        """Lets deletion go on; True if the finalizer was there. An object that has gone already is fine."""
        return self._change_finalizers(obj, lambda names: [name for name in names if name != finalizer])

    def _change_finalizers(self, obj: Object, change: Callable[[Names], Names]) -> bool:
        def once() -> bool:
            before = finalizers_of(obj)
            after = change(before)
            if after == before:
                return False
            # With the version read, so that no finalizer of someone else is lost: the list is replaced whole.
            metadata = {"finalizers": after, "resourceVersion": metadata_of(obj).get("resourceVersion")}
            try:
                _renew(obj, self.patch(obj, {"metadata": metadata}))
            except Conflict:
                fresh = self.get(obj)
                if fresh is None or metadata_of(fresh).get("uid") != metadata_of(obj).get("uid"):
                    return False
                _renew(obj, fresh)
                raise
            except NotFound:
                return False
            return True

        return retry_on_conflict(once)

    # ---- events

    def event(
        self,
        obj: Mapping[str, Any],
        reason: str,
        message: str,
        type: Literal["Normal", "Warning"] = "Normal",
    ) -> None:
        """Records a Kubernetes event about an object (`kubectl describe` shows it). The same event again counts up.

        Never fails: what goes wrong is logged. Needs the rights to get, create and patch events.
        """
        event = events.new_event(obj, reason=reason, message=message, type=type, source=self.manager)
        try:
            self._record(event)
        except TorporError as exc:
            log.warning("event %s about %s not recorded: %s", reason, describe(obj), exc)

    def _record(self, event: dict[str, Any]) -> None:
        name, namespace = name_of(event), namespace_of(event)
        existing = self.get("v1/events", name, namespace)
        if existing is None:
            try:
                self.create(event)
            except AlreadyExists:
                existing = self.get("v1/events", name, namespace)
        if existing is not None:
            self.patch("v1/events", events.counted_up(existing), name, namespace)

    # ---- below

    @property
    def manager(self) -> str:
        """The field manager of this operator's writes, and the source of its events."""
        return self._manager if isinstance(self._manager, str) else self._manager()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = JSON,
        timeout_s: float | None = None,
    ) -> Any:
        """Any request with a JSON answer, for what has no method here (subresources, other APIs).

        >>> kube.request("GET", "/api/v1/namespaces/shop/pods/orders-0/log?tailLines=5")   # doctest: +SKIP
        """
        if method != "GET":
            self._read_ahead = None
        answer = self._send(
            method,
            path,
            accept=JSON,
            content_type=content_type if body is not None else "",
            body=b"" if body is None else json.dumps(body, separators=(",", ":")).encode(),
            timeout_s=timeout_s,
        )
        return _parsed(answer, f"{method} {path.partition('?')[0]}")

    def prepare(self, kinds: Iterable[Kind]) -> None:
        """Discovery ahead of time, so that the answers are in the image."""
        self._kinds.read_ahead(kinds, self._discover)

    def hand_on(self, request: Request, obj: Resource | None) -> None:
        """The next `get` of this very request is this object, unless something is written before."""
        self._read_ahead = (request, obj)

    def _discover(self, path: str) -> Any:
        return self.request("GET", path)

    def _resolve(self, target: Target, name: str, namespace: str) -> tuple[Kind, str, str]:
        if isinstance(target, Request):
            if self._primary is None:
                raise ValueError("this operator has no primary resource (for_=...) that a request could mean")
            return self._primary, target.namespace, target.name
        if isinstance(target, str):
            return Kind.parse(target), namespace, name
        served = self._kinds.resource_of(target, self._discover)
        found = namespace_of(target) or namespace
        if served.namespaced and not found:
            raise ValueError(f"{describe(target)} has no metadata.namespace")
        return served.kind, found if served.namespaced else "", name_of(target) or name

    def _described(
        self, obj: Mapping[str, Any], owner: Mapping[str, Any] | None, *, controller: bool
    ) -> tuple[dict[str, Any], Kind, str]:
        """What to send for a description: a copy with the owner in it."""
        body = {**obj, "metadata": dict(metadata_of(obj))}
        if owner is not None:
            namespaced = self._kinds.resource_of(body, self._discover).namespaced
            if not namespaced and namespace_of(owner):
                raise ValueError(f"{describe(owner)} cannot own {describe(obj)}, which is cluster-scoped")
            set_owner(body, owner, controller=controller)
        kind, namespace, _ = self._resolve(body, "", "")
        return body, kind, namespace

    def _put(self, obj: Mapping[str, Any], subresource: str) -> Resource:
        kind, namespace, name = self._resolve(obj, "", "")
        path = kind.path(namespace=namespace, name=_required(name, kind), subresource=subresource)
        answer = self.request("PUT", with_query(path, {"fieldManager": self.manager}), obj)
        return self._renewed(obj, kind, answer)

    def _renewed(self, target: Target, kind: Kind, answer: Any) -> Resource:
        fresh = self._learnt(kind, answer)
        if isinstance(target, Resource):
            _renew(target, fresh)
        return fresh

    def _learnt(self, kind: Kind, answer: Any) -> Resource:
        obj = Resource(answer)
        self._kinds.learn(kind, obj, namespaced=bool(obj.namespace))
        return obj


def retry_on_conflict(attempt: Callable[[], T], *, attempts: int = CONFLICT_ATTEMPTS) -> T:
    """Calls again after a `Conflict`, with growing pauses; the last conflict goes through.

    The attempt must read the object anew: after a conflict a read is answered by the API server itself.
    """
    for number in range(attempts - 1):
        try:
            return attempt()
        except Conflict:
            time.sleep(CONFLICT_PAUSE_S * 2**number)
    return attempt()


def with_query(path: str, query: Mapping[str, str]) -> str:
    """The path with a query of all that is not empty."""
    given = {key: value for key, value in query.items() if value}
    return f"{path}?{urlencode(given)}" if given else path


def _parsed(answer: Answer, request: str) -> Any:
    """The JSON of a good answer; the `ApiError` of another. Text that is no JSON comes as text."""
    is_json = JSON in answer.content_type or answer.body[:1] in (b"{", b"[")
    try:
        content = json.loads(answer.body) if is_json else answer.body.decode("utf-8", "replace")
    except ValueError as exc:
        if answer.status < 400:
            raise CallError("invalid", f"the answer is no JSON: {exc}", call=request) from None
        content = answer.body.decode("utf-8", "replace")
    if answer.status >= 400 or answer.status < 200:
        raise api_error(answer.status, content, request=request)
    return content


def _required(name: str, kind: Kind) -> str:
    if not name:
        raise ValueError(f"a name is needed for {kind}")
    return name


def _owners(obj: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(metadata_of(obj).get("ownerReferences") or [])


def _renew(obj: Object, fresh: Mapping[str, Any]) -> None:
    if fresh is not obj:
        obj.clear()
        obj.update(fresh)
