"""POST, PUT, PATCH and DELETE: from a body to one transaction of the registry, and its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from torpor_devcluster import apply, bodies, errors, escalation, fields, listing, patch, scale, views
from torpor_devcluster.calls import Call, Reply
from torpor_devcluster.errors import Cause
from torpor_devcluster.rbac import Attributes, Authorizer
from torpor_devcluster.reads import selector_of
from torpor_devcluster.registry import Deleted, DeleteOptions, Registry, Write, copy_json
from torpor_devcluster.render import Renderer
from torpor_devcluster.requestinfo import flag, number
from torpor_devcluster.resources import ResourceType
from torpor_devcluster.shapes import Shape, shape_of

Json = dict[str, Any]

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class Writes:
    def __init__(self, registry: Registry, authorizer: Authorizer, renderer: Renderer) -> None:
        self._registry = registry
        self._storage = registry.storage
        self._authorizer = authorizer
        self._renderer = renderer

    def _write(self, call: Call) -> Write:
        def check(obj: Json) -> None:
            escalation.check(self._authorizer, call.user, call.resource, call.info.namespace, obj)

        return Write(
            user=call.user,
            dry_run=call.dry_run,
            manager=call.manager,
            field_validation=call.query.get("fieldValidation") or "Warn",
            warnings=call.warnings,
            check=check,
        )

    async def create(self, call: Call) -> Reply:
        if call.info.name:
            raise errors.method_not_allowed("POST to a named resource is not allowed: create at its collection")
        return self._create(call, bodies.as_object(call.resource, call.info, await call.body()), self._write(call))

    def _create(self, call: Call, obj: Json, write: Write) -> Reply:
        return self._renderer.object(call, self._registry.create(call.resource, call.info.namespace, obj, write), 201)

    async def update(self, call: Call) -> Reply:
        resource, info = call.resource, call.info
        obj = bodies.as_object(resource, info, await call.body())
        if resource.create_on_update and not info.subresource and self._absent(call):
            self._require_create(call)
            obj["metadata"].pop("resourceVersion", None)
            return self._create(call, obj, self._write(call))
        stored = self._registry.update(
            resource,
            info.namespace,
            info.name,
            lambda _: obj,
            self._write(call),
            subresource=info.subresource,
            conditional=True,
        )
        return self._renderer.object(call, stored)

    def _absent(self, call: Call) -> bool:
        key = (call.info.namespace if call.resource.namespaced else "", call.info.name)
        return self._storage.get(call.resource.key, key) is None

    def _require_create(self, call: Call) -> None:
        """A PUT or an apply that creates needs that right too."""
        info = call.info
        asked = Attributes("create", info.group, info.version, info.plural, "", info.namespace, info.name)
        self._authorizer.require(call.user, asked)

    # Patches

    async def patch(self, call: Call) -> Reply:
        resource, info = call.resource, call.info
        if call.media_type == APPLY_PATCH:
            return self._apply(call, await call.body())
        body = await self._patch_body(call)

        def change(current: Json) -> Json:
            return bodies.as_object(resource, info, _patched(resource, call.media_type, current, body))

        stored = self._registry.update(
            resource, info.namespace, info.name, change, self._write(call), subresource=info.subresource
        )
        return self._renderer.object(call, stored)

    async def _patch_body(self, call: Call) -> Any:
        """Raises 415 for a kind of patch that the type does not take."""
        kinds = [JSON_PATCH, MERGE_PATCH, *([] if call.resource.custom else [STRATEGIC_MERGE_PATCH])]
        if call.media_type not in kinds:
            accepted = ", ".join([*kinds, APPLY_PATCH])
            raise errors.unsupported_media_type(
                f"the body of the request was in an unknown format - accepted media types include: {accepted}"
            )
        return await call.body(media_type="application/json")

    def _apply(self, call: Call, body: Any) -> Reply:
        resource, info = call.resource, call.info
        shape = shape_of(resource)
        if shape is None or resource.view_of is not None:
            raise errors.unsupported_media_type(f"the devcluster has no server-side apply for {resource.qualified}")
        applied, write = _applied(call, body), self._write(call)
        if self._absent(call):
            if info.subresource:
                raise errors.not_found(resource, info.name)
            self._require_create(call)
            skeleton: Json = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": {}}
            obj, write = self._merged(call, shape, skeleton, applied, write)
            return self._create(call, obj, write)
        present = self._registry.get(resource, info.namespace, info.name)
        live = copy_json(views.from_storage(resource, present))
        obj, write = self._merged(call, shape, live, applied, write)
        stored = self._registry.update(
            resource, info.namespace, info.name, lambda _: obj, write, subresource=info.subresource
        )
        return self._renderer.object(call, stored)

    def _merged(self, call: Call, shape: Shape, live: Json, applied: Json, write: Write) -> tuple[Json, Write]:
        author = self._registry.author(call.resource, write, "Apply", call.info.subresource)
        force = "force" in call.query and flag(call.query, "force")
        obj, owners = apply.apply(shape, live, applied, author, force=force)
        return obj, replace(write, owners=owners)

    async def scale(self, call: Call) -> Reply:
        """PUT and PATCH of the scale: as the Scale that GET shows, then written back as replicas of the object."""
        resource, info = call.resource, call.info
        updating = info.verb == "update"
        body = await (call.body() if updating else self._patch_body(call))
        stored = self._registry.get(resource, info.namespace, info.name)
        shown = scale.read(resource, views.from_storage(resource, stored))
        wanted = body if updating else _patched(resource, call.media_type, shown, body)
        stored = self._registry.update(
            resource,
            info.namespace,
            info.name,
            lambda obj: scale.write(resource, obj, wanted),
            self._write(call),
            subresource="scale",
        )
        return Reply(msgspec.json.encode(scale.read(resource, views.from_storage(resource, stored))))

    # Deleting

    async def delete(self, call: Call) -> Reply:
        options = await _delete_options(call)
        deleted = self._registry.delete(call.resource, call.info.namespace, call.info.name, options)
        if not deleted.gone or call.resource.returns_deleted:
            return self._renderer.object(call, deleted.stored)
        return Reply(msgspec.json.encode(_success(call, deleted)))

    async def delete_collection(self, call: Call) -> Reply:
        options = await _delete_options(call)
        every = listing.ListOptions(selector_of(call), 0, "", "", "")
        page = listing.list_page(self._storage, call.resource, call.info.namespace or None, every)
        for stored in page.objects:
            self._registry.delete(call.resource, *stored.key, options)
        return self._renderer.list(call, page)


def _patched(resource: ResourceType, media_type: str, current: Json, body: Any) -> Any:
    if media_type == JSON_PATCH:
        return patch.json_patch(current, body)
    if not isinstance(body, dict):
        raise errors.bad_request("a merge patch must be an object")
    if media_type == MERGE_PATCH:
        return patch.merge_patch(current, body)
    shape = shape_of(resource)
    if shape is None:
        raise errors.unsupported_media_type(
            f"the devcluster has no merge keys for {resource.qualified}: use a merge patch"
        )
    return patch.strategic_merge_patch(current, body, shape)


def _applied(call: Call, body: Any) -> Json:
    """The configuration of an apply, checked. Raises 400 and 422."""
    if not call.query.get("fieldManager"):
        cause = Cause("fieldManager", "Required value: is required for apply patch", "FieldValueRequired")
        raise errors.invalid("PatchOptions", "meta.k8s.io", "", [cause])
    if not isinstance(body, dict) or not body.get("kind") or not body.get("apiVersion"):
        raise errors.bad_request("an apply patch needs apiVersion, kind and metadata")
    applied = bodies.as_object(call.resource, call.info, body)
    if applied["metadata"].get("managedFields"):
        raise errors.bad_request("metadata.managedFields must be nil")
    applied["metadata"].pop("managedFields", None)
    return applied


async def _delete_options(call: Call) -> DeleteOptions:
    """From the body, and from the query where the body is silent. Raises 400 and 422."""
    data = await bodies.read_body(call.request)
    body = fields.admit_options(bodies.decode(data, call.media_type) if data.strip() else {})
    preconditions = body.get("preconditions") or {}
    return DeleteOptions(
        uid=preconditions.get("uid"),
        resource_version=preconditions.get("resourceVersion"),
        grace_period_s=body.get("gracePeriodSeconds", number(call.query, "gracePeriodSeconds")),
        propagation=_propagation(call, body),
        dry_run=call.dry_run or body.get("dryRun") == ["All"],
    )


def _propagation(call: Call, body: Json) -> str | None:
    orphan = body.get("orphanDependents")
    if orphan is None and "orphanDependents" in call.query:
        orphan = flag(call.query, "orphanDependents")
    named: str | None = body.get("propagationPolicy") or call.query.get("propagationPolicy")
    if named is None and orphan is not None:
        return "Orphan" if orphan else "Background"
    if named not in (None, "Orphan", "Background", "Foreground"):
        message = f'Unsupported value: "{named}": supported values: "Background", "Foreground", "Orphan"'
        cause = Cause("propagationPolicy", message, "FieldValueNotSupported")
        raise errors.invalid("DeleteOptions", "meta.k8s.io", "", [cause])
    return named


def _success(call: Call, deleted: Deleted) -> Json:
    resource = call.resource
    details: Json = {"name": call.info.name}
    if resource.group:
        details["group"] = resource.group
    details.update({"kind": resource.plural, "uid": deleted.stored.uid})
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
