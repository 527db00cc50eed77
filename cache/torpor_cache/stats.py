"""The answer to Stats: every upstream watch and every subscriber."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torpor.cache.v1 import cache_pb2

from torpor_cache.fanout import Feed
from torpor_cache.informers import Informer, Informers
from torpor_cache.streams import WatchStream


def collect(informers: Informers, feeds: Iterable[Feed], streams: Iterable[WatchStream]) -> cache_pb2.StatsResponse:
    """A snapshot of now."""
    subscriptions = Counter({feed.informer: len(feed) for feed in feeds})
    return cache_pb2.StatsResponse(
        kinds=[_kind(informer, subscriptions[informer]) for informer in informers],
        subscribers=[stream.stats() for stream in streams],
        history=informers.history_id,
    )


def _kind(informer: Informer, subscriptions: int) -> cache_pb2.KindStats:
    scope = informer.scope
    resource = scope.resource
    return cache_pb2.KindStats(
        resource=cache_pb2.Resource(group=resource.group, version=resource.version, resource=resource.resource),
        namespace=scope.namespace,
        label_selector=scope.label_selector,
        field_selector=scope.field_selector,
        state=informer.state.value,
        resource_version=str(informer.position.resource_version),
        objects=len(informer.store),
        bytes=informer.store.bytes,
        subscriptions=subscriptions,
        events=informer.events,
        relists=informer.relists,
        reason=informer.reason,
    )
