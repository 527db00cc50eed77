"""GET, LIST and WATCH: which objects, from which revision on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from torpor_devcluster import errors, listing
from torpor_devcluster.calls import Call, Reply
from torpor_devcluster.errors import Cause
from torpor_devcluster.registry import Registry
from torpor_devcluster.render import Renderer
from torpor_devcluster.requestinfo import flag, number
from torpor_devcluster.selectors import Selector, parse_selector
from torpor_devcluster.watch import Watch, WatchOptions

# How long a read waits for a revision that does not exist yet (apiserver: blockTimeout).
TOO_LARGE_WAIT_S = 3.0


@dataclass(frozen=True, slots=True)
class WatchSettings:
    bookmark_interval_s: float
    timeout_s_default: float


def selector_of(call: Call) -> Selector:
    """What the query selects. Raises 400."""
    return parse_selector(call.resource, call.query.get("labelSelector", ""), call.query.get("fieldSelector", ""))


class Reads:
    def __init__(self, registry: Registry, renderer: Renderer, settings: WatchSettings) -> None:
        self._registry = registry
        self._storage = registry.storage
        self._renderer = renderer
        self._settings = settings

    def get(self, call: Call) -> Reply:
        return self._renderer.object(call, self._registry.get(call.resource, call.info.namespace, call.info.name))

    async def list(self, call: Call) -> Reply:
        options = listing.parse_list_options(selector_of(call), call.query)
        if not options.continue_token:
            await self._wait_for(listing.parse_revision(options.resource_version))
        page = listing.list_page(self._storage, call.resource, call.info.namespace or None, options)
        return self._renderer.list(call, page)

    async def watch(self, call: Call) -> Watch:
        """A watch that has its place in the history already; its events wait until it is streamed."""
        query = call.query
        initial = query.get("sendInitialEvents")
        _check_watch_options(initial, query.get("resourceVersionMatch", ""))
        from_present = initial is not None and flag(query, "sendInitialEvents")
        start = listing.parse_revision(query.get("resourceVersion", ""))
        if from_present:
            await self._wait_for(start)
        elif initial is not None and start == 0:
            # sendInitialEvents=false: nothing of the present.
            start = self._storage.revision
        bookmarks = flag(query, "allowWatchBookmarks")
        options = WatchOptions(
            namespace=call.info.namespace or None,
            selector=selector_of(call),
            start_revision=None if from_present else start,
            bookmarks=bookmarks,
            initial_events_end=from_present and bookmarks,
            timeout_s=float(number(query, "timeoutSeconds") or self._settings.timeout_s_default),
            bookmark_interval_s=self._settings.bookmark_interval_s,
        )
        return Watch(self._storage, call.resource, options, self._renderer.encoder(call))

    async def _wait_for(self, revision: int) -> None:
        """A read of a version that is not there yet waits a little, then says so."""
        if revision <= self._storage.revision:
            return
        reached = asyncio.Event()

        def on_event(*_: object) -> None:
            if self._storage.revision >= revision:
                reached.set()

        self._storage.observe(on_event)
        try:
            async with asyncio.timeout(TOO_LARGE_WAIT_S):
                await reached.wait()
        except TimeoutError:
            raise errors.too_large(revision, self._storage.revision) from None
        finally:
            self._storage.unobserve(on_event)


def _check_watch_options(initial: str | None, match: str) -> None:
    if match and initial is None:
        message = "Forbidden: resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided"
    elif initial is not None and match != "NotOlderThan":
        message = "Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
    else:
        return
    cause = Cause("resourceVersionMatch", message, "FieldValueForbidden")
    raise errors.invalid("ListOptions", "meta.k8s.io", "", [cause])
