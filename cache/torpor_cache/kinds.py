"""The kind of a resource, from discovery: owner references and lists name kinds, subscriptions name plurals.

Answers are kept for good: a kind never changes under the same group, version and plural. What is not there is asked
for again.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from torpor_services.errors import TorporError, one_line

from torpor_cache.apiserver import ApiServer, ApiUnavailable
from torpor_cache.resources import Resource


class UnknownResource(TorporError):
    """The API server does not serve it (now)."""


class _ApiResource(msgspec.Struct):
    name: str
    kind: str
    namespaced: bool = True


class _ResourceList(msgspec.Struct):
    resources: list[_ApiResource] = []


class _GroupVersion(msgspec.Struct, frozen=True):
    version: str = ""


class _Group(msgspec.Struct):
    preferredVersion: _GroupVersion = _GroupVersion()  # noqa: N815 - Kubernetes' name


Found = TypeVar("Found")

_resources = msgspec.json.Decoder(_ResourceList)
_group = msgspec.json.Decoder(_Group)


class Kinds:
    """Looked up as the cache itself; at most one request per group and version at a time."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._known: dict[Resource, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def known(self, resource: Resource) -> str | None:
        return self._known.get(resource)

    async def kind_of(self, resource: Resource) -> str:
        """Raises UnknownResource, or ApiUnavailable where discovery cannot be asked."""
        if not resource.version:
            resource = Resource(resource.group, await self._preferred_version(resource.group), resource.resource)
        if resource not in self._known:
            path = f"/apis/{resource.group}/{resource.version}" if resource.group else f"/api/{resource.version}"
            async with self._locks.setdefault(path, asyncio.Lock()):
                if resource not in self._known:
                    await self._load(resource, path)
        try:
            return self._known[resource]
        except KeyError:
            raise UnknownResource(f"the API server does not serve {resource}") from None

    async def _load(self, resource: Resource, path: str) -> None:
        for found in (await self._discovered(path, _resources, f"serves no {resource}")).resources:
            if "/" not in found.name:
                self._known[Resource(resource.group, resource.version, found.name)] = found.kind

    async def _preferred_version(self, group: str) -> str:
        if not group:
            return "v1"
        return (await self._discovered(f"/apis/{group}", _group, f"has no group {group}")).preferredVersion.version

    async def _discovered(self, path: str, decoder: msgspec.json.Decoder[Found], otherwise: str) -> Found:
        """Only a 404 says that there is nothing; a server in trouble is to be asked again."""
        reply = await self._api.request("GET", path, headers={"Accept": "application/json"}, timeout_s=10.0)
        if reply.status == 404:
            raise UnknownResource(f"the API server {otherwise}")
        if reply.status != 200:
            raise ApiUnavailable(f"{path}: {reply.status}", retry_after_s=reply.retry_after_s)
        try:
            return decoder.decode(reply.body)
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise ApiUnavailable(f"{path}: no discovery: {one_line(exc, 200)}") from exc
