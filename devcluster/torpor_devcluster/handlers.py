"""Which operation a request for a resource is. HTTP stays in `server.py`.

Between reading the body and building the answer nothing awaits, so each request sees and leaves a consistent state.
"""

from __future__ import annotations

import msgspec

from torpor_devcluster import bodies, errors, fields, scale, views
from torpor_devcluster.authn import Authenticator
from torpor_devcluster.calls import Call, Reply
from torpor_devcluster.clock import Clock
from torpor_devcluster.rbac import Authorizer
from torpor_devcluster.reads import Reads, WatchSettings
from torpor_devcluster.registry import Registry
from torpor_devcluster.render import Renderer
from torpor_devcluster.reviews import Reviews
from torpor_devcluster.watch import Watch
from torpor_devcluster.writes import Writes

_REVIEW_VERBS = ("create",)
_NO_SUCH_METHOD = "the server does not allow this method on the requested resource"


class Handlers:
    def __init__(
        self,
        registry: Registry,
        authenticator: Authenticator,
        authorizer: Authorizer,
        clock: Clock,
        watch: WatchSettings,
    ) -> None:
        renderer = Renderer(clock)
        self._registry = registry
        self._reads = Reads(registry, renderer, watch)
        self._writes = Writes(registry, authorizer, renderer)
        self._reviews = Reviews(authenticator, authorizer)
        self._audience = authenticator.issuer

    async def handle(self, call: Call) -> Reply | Watch:
        """Raises ApiError."""
        _check_scope(call)
        if call.info.subresource:
            return await self._subresource(call)
        if call.info.verb not in call.resource.verbs:
            raise errors.method_not_supported(call.resource, call.info.verb)
        match call.info.verb:
            case "get":
                return self._reads.get(call)
            case "list":
                return await self._reads.list(call)
            case "watch":
                return await self._reads.watch(call)
            case "create" if call.resource.verbs == _REVIEW_VERBS:
                return await self._review(call)
            case "create":
                return await self._writes.create(call)
            case "update":
                return await self._writes.update(call)
            case "patch":
                return await self._writes.patch(call)
            case "delete":
                return await self._writes.delete(call)
            case "deletecollection":
                return await self._writes.delete_collection(call)
        raise errors.method_not_allowed(_NO_SUCH_METHOD)

    async def _review(self, call: Call) -> Reply:
        obj = bodies.as_object(call.resource, call.info, await call.body())
        fields.admit(call.resource, obj, "Warn", call.warnings)
        answer = self._reviews.answer(call.resource, call.info.namespace, obj, call.user)
        return Reply(msgspec.json.encode(answer), 201)

    async def _subresource(self, call: Call) -> Reply:
        resource, info = call.resource, call.info
        match info.subresource, info.verb:
            case "status", "get" if resource.has_status:
                return self._reads.get(call)
            case "status", "update" if resource.has_status:
                return await self._writes.update(call)
            case "status", "patch" if resource.has_status:
                return await self._writes.patch(call)
            case "finalize", "update" if resource.qualified == "namespaces":
                return await self._writes.update(call)
            case "scale", "get" if resource.scale is not None:
                stored = self._registry.get(resource, info.namespace, info.name)
                return Reply(msgspec.json.encode(scale.read(resource, views.from_storage(resource, stored))))
            case "scale", "update" | "patch" if resource.scale is not None:
                return await self._writes.scale(call)
            case "token", "create" if resource.qualified == "serviceaccounts":
                return await self._issue_token(call)
        raise _no_subresource(call)

    async def _issue_token(self, call: Call) -> Reply:
        request = fields.admit_token_request(await call.body())
        account = self._registry.get(call.resource, call.info.namespace, call.info.name)
        answer = self._reviews.issue(call.resource, account.object, request, self._audience)
        return Reply(msgspec.json.encode(answer), 201)


def _check_scope(call: Call) -> None:
    """A namespaced resource needs its namespace, a cluster-scoped one has none. Raises 404 and 405."""
    resource, info = call.resource, call.info
    unplaced = resource.namespaced and not info.namespace
    misplaced = info.namespace and not resource.namespaced and resource.qualified != "namespaces"
    if unplaced and info.verb == "create":
        raise errors.method_not_allowed(_NO_SUCH_METHOD)
    if (unplaced and info.name) or misplaced:
        raise errors.no_such_resource(info.path)
    if not info.name and info.verb in ("update", "patch"):
        raise errors.method_not_allowed(_NO_SUCH_METHOD)


def _no_subresource(call: Call) -> errors.ApiError:
    resource, info = call.resource, call.info
    served = {"status": resource.has_status, "scale": resource.scale is not None}
    served["finalize"] = resource.qualified == "namespaces"
    served["token"] = resource.qualified == "serviceaccounts"
    if served.get(info.subresource):
        return errors.method_not_supported(resource, info.verb)
    if any(info.subresource == name for name, _, _ in resource.subresources):
        return errors.not_built(f"the subresource {info.subresource} of {resource.qualified}")
    return errors.no_such_resource(f"{resource.qualified} has no subresource {info.subresource}")
