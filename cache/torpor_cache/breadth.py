"""How wide a kind is watched: one watch of the whole kind, or one for each scope that is asked for.

One watch serves every operator, whatever their namespaces and selectors, and costs the objects that nobody asked for.
So a kind of up to `objects_max` objects is watched whole; one with more, one that cannot be counted, and one that the
cache's own account may not list cluster-wide are watched in the scopes that are asked for. The kind is counted once,
when it is first subscribed to (a list of one object; the server says how many remain), and the choice holds as long as
the kind is watched. Of fields that only the API server can judge a scope always needs a watch of its own.

Whose rights count is another matter: every subscriber's, for its own scope, whatever is watched.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from torpor_cache.apiserver import ApiServer, ApiUnavailable, Reply
from torpor_cache.informers import Informer, Informers, InformerState, WatchScope
from torpor_cache.resources import Resource

COUNT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Breadth:
    """Whether a kind is watched whole, and why (not)."""

    whole: bool
    reason: str


class _ListMetadata(msgspec.Struct, rename={"continue_token": "continue", "remaining": "remainingItemCount"}):
    continue_token: str = ""
    remaining: int | None = None


class _List(msgspec.Struct):
    metadata: _ListMetadata = msgspec.field(default_factory=_ListMetadata)
    items: list[msgspec.Raw] | None = None


_list = msgspec.json.Decoder(_List)


class Breadths:
    """The choice for each kind that is watched."""

    def __init__(self, api: ApiServer, informers: Informers, objects_max: int) -> None:
        self._api = api
        self._informers = informers
        self._objects_max = objects_max
        self._chosen: dict[Resource, Breadth] = {}
        self._counting: dict[Resource, asyncio.Task[Breadth]] = {}

    async def scope_for(self, asked: WatchScope) -> tuple[WatchScope, str]:
        """What to watch for somebody who asks for `asked`, and the reason. Raises ApiUnavailable, InvalidSelector."""
        whole = WatchScope(asked.resource)
        if asked == whole:
            return asked, "the whole kind is asked for"
        if not whole.covers(asked):
            return asked, "only the API server can judge its field selector"
        breadth = await self._breadth(asked.resource)
        return (whole if breadth.whole else asked), breadth.reason

    async def _breadth(self, resource: Resource) -> Breadth:
        watched = [informer for informer in self._informers if informer.scope.resource == resource]
        if any(_is_whole(informer) for informer in watched):
            return Breadth(True, "")  # its informer has the reason
        known = self._chosen.get(resource)
        if known is not None and watched and not known.whole:
            return known
        breadth = self._chosen[resource] = await self._counted(resource)
        return breadth

    async def _counted(self, resource: Resource) -> Breadth:
        """One count of a kind at a time, whoever asks; it goes on when the one who asked first gives up."""
        counting = self._counting.get(resource)
        if counting is None:
            counting = self._counting[resource] = asyncio.create_task(self._count(resource))
            counting.add_done_callback(lambda _: self._counting.pop(resource, None))
        return await asyncio.shield(counting)

    async def _count(self, resource: Resource) -> Breadth:
        if self._objects_max == 0:
            return Breadth(False, "kinds are not watched whole: TORPOR_CACHE_WIDE_OBJECTS_MAX is 0")
        reply = await self._api.request(
            "GET",
            resource.path(),
            query={"limit": "1"},
            headers={"Accept": "application/json"},
            timeout_s=COUNT_TIMEOUT_S,
        )
        if reply.status == 429 or reply.status >= 500:
            raise ApiUnavailable(
                f"{resource} cannot be counted: {reply.status}", retryable=True, retry_after_s=reply.retry_after_s
            )
        return self._chosen_for(reply)

    def _chosen_for(self, reply: Reply) -> Breadth:
        if reply.status == 404:
            return Breadth(True, "watched whole: the kind was not served yet, so that it has few objects")
        if reply.status != 200:
            said = reply.kubernetes_status().get("message", "")
            return Breadth(False, f"the whole kind may not be listed ({reply.status}): {said}"[:300])
        count = _count_in(reply)
        if count is None:
            return Breadth(False, "the API server does not say how many objects there are")
        if count > self._objects_max:
            return Breadth(False, f"too large to be watched whole: {count} objects, of {self._objects_max} at most")
        return Breadth(True, f"watched whole: {count} objects when first asked for, of {self._objects_max} at most")


def _is_whole(informer: Informer) -> bool:
    return informer.scope == WatchScope(informer.scope.resource) and informer.state is not InformerState.FAILED


def _count_in(reply: Reply) -> int | None:
    try:
        found = _list.decode(reply.body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if found.metadata.remaining is not None:
        return found.metadata.remaining + len(found.items or ())
    return None if found.metadata.continue_token else len(found.items or ())
