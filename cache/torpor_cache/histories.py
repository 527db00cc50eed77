"""Which history of the cluster this is.

Kubernetes has no id for one: after etcd is restored from a backup the same versions are given out again, with other
content. So the cache keeps a random id in an object of the cluster, a ConfigMap; versions are comparable only under
the same id. When a version goes back, the id is replaced by compare-and-swap, and whoever kept anything under the old
one starts anew. A restored backup brings an old id with it; the first cache that sees a version go back replaces it.

All replicas read the same object, so they agree. Without the right to it the id is this process's own: then positions
are not understood by other replicas or after a restart, which costs resyncs and loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from torpor_services.errors import TorporError

from torpor_cache.apiserver import ApiServer, Reply
from torpor_cache.resources import ResourceVersion

logger = logging.getLogger(__name__)

NAMESPACE = "torpor-system"
NAME = "torpor-history"
SWAP_TRIES_MAX = 10


class HistoryUnknown(TorporError):
    """The API server's answer about the id makes no sense; retried by whoever asks next."""


class Histories:
    """The id in force. `subscribe` to hear of another one."""

    def __init__(self, api: ApiServer, *, namespace: str = NAMESPACE, name: str = NAME) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._collection = f"/api/v1/namespaces/{namespace}/configmaps"
        self._lock = asyncio.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._own = False  # no rights: an id of this process
        self.id = ""

    def subscribe(self, on_changed: Callable[[], None]) -> None:
        """Called on the loop each time another id takes the place of a known one."""
        self._listeners.append(on_changed)

    async def current(self) -> str:
        """The id, read or made at the first call. Raises ApiUnavailable, HistoryUnknown."""
        if not self.id:
            async with self._lock:
                if not self.id:
                    await self._learn()
        return self.id

    async def reread(self) -> str:
        """The id as another replica may have replaced it. Raises ApiUnavailable, HistoryUnknown."""
        async with self._lock:
            if not self._own:
                await self._learn()
        return self.id

    async def went_back(self, seen: str, version: ResourceVersion) -> bool:
        """A list was older than `version`, seen under the id `seen`: has the cluster gone back?

        True: another id is in force now. False: the cluster's own store is past that version, so the resource is one of
        an API server that counts for itself. Raises ApiUnavailable, HistoryUnknown.
        """
        async with self._lock:
            if not self._own:
                await self._learn()
            if self.id != seen:
                return True
            if await self._newest() >= version:
                return False
            await self._replace(seen)
            return True

    # Under the lock

    async def _learn(self) -> None:
        found = await self._read() or await self._create()
        self._adopt(found)

    def _adopt(self, found: str) -> None:
        known, self.id = self.id, found
        if known and known != found:
            logger.warning("the cluster has another history now: everything is listed anew")
            for on_changed in self._listeners:
                on_changed()

    async def _read(self) -> str | None:
        reply = await self._api.request("GET", f"{self._collection}/{self._name}")
        if reply.status == 404:
            return None
        if _denied(reply):
            return self._id_of_this_process(reply)
        return _id_in(self._object(reply)) or await self._swap("")

    async def _create(self) -> str:
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": self._name}, "data": {"id": _new_id()}}
        reply = await self._send("POST", self._collection, body)
        if reply.status == 404 and await self._make_namespace():
            reply = await self._send("POST", self._collection, body)
        if reply.status == 409:
            # Another replica was faster.
            return await self._read() or self._id_of_this_process(reply)
        if _denied(reply) or reply.status == 404:
            return self._id_of_this_process(reply)
        return _id_in(self._object(reply))

    async def _make_namespace(self) -> bool:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self._namespace}}
        return (await self._send("POST", "/api/v1/namespaces", body)).status in (200, 201, 409)

    async def _replace(self, seen: str) -> None:
        if self._own:
            self._adopt(_new_id())
        else:
            self._adopt(await self._swap(seen))

    async def _swap(self, seen: str) -> str:
        """Another id in place of `seen`, or what someone else has put there."""
        for _ in range(SWAP_TRIES_MAX):
            reply = await self._api.request("GET", f"{self._collection}/{self._name}")
            if reply.status == 404:
                return await self._create()
            if _denied(reply):
                return self._id_of_this_process(reply)
            config_map = self._object(reply)
            if (found := _id_in(config_map)) != seen:
                return found
            config_map["data"] = {**(config_map.get("data") or {}), "id": _new_id()}
            reply = await self._send("PUT", f"{self._collection}/{self._name}", config_map)
            if _denied(reply):
                return self._id_of_this_process(reply)
            if reply.status != 409:
                return _id_in(self._object(reply))
        raise HistoryUnknown(f"{self._namespace}/{self._name} was changed by others {SWAP_TRIES_MAX} times in a row")

    async def _newest(self) -> int:
        """The version of the cluster's own store."""
        reply = await self._api.request("GET", self._collection, query={"limit": "1"})
        if reply.status >= 400:
            return 0
        try:
            return int(self._object(reply)["metadata"]["resourceVersion"])
        except (KeyError, TypeError, ValueError) as exc:
            raise HistoryUnknown(f"{self._collection}: a list without a version") from exc

    def _id_of_this_process(self, reply: Reply) -> str:
        if not self._own:
            message = reply.kubernetes_status().get("message")
            logger.warning(
                "no right to the ConfigMap %s/%s (%s): positions are good for this process only; grant get, list and "
                "update on it, and create",
                *(self._namespace, self._name, message),
            )
        self._own = True
        return self.id or _new_id()

    async def _send(self, method: str, path: str, body: Any) -> Reply:
        headers = {"Content-Type": "application/json"}
        return await self._api.request(method, path, headers=headers, body=msgspec.json.encode(body))

    def _object(self, reply: Reply) -> dict[str, Any]:
        what = f"the ConfigMap {self._namespace}/{self._name}"
        if reply.status >= 400:
            raise HistoryUnknown(f"{what}: {reply.status} {reply.kubernetes_status().get('message')}")
        try:
            found = reply.json()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise HistoryUnknown(f"{what}: the answer is no JSON") from exc
        if not isinstance(found, dict):
            raise HistoryUnknown(f"{what}: the answer is no object")
        return found


def _new_id() -> str:
    return secrets.token_hex(8)


def _denied(reply: Reply) -> bool:
    return reply.status in (401, 403)


def _id_in(config_map: dict[str, Any]) -> str:
    data = config_map.get("data")
    found = data.get("id") if isinstance(data, dict) else None
    return found if isinstance(found, str) and len(found) <= 64 else ""
