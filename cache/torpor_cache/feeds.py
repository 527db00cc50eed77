"""One feed for each informer that somebody subscribes to.

A subscription joins the feed of whatever informer covers its scope and leaves it when it ends; a feed without
subscriptions lets its informer go.
"""

from __future__ import annotations

from collections.abc import Iterator

from torpor_services.clock import Clock

from torpor_cache.encoding import EventEncoder
from torpor_cache.fanout import Feed, Member
from torpor_cache.informers import Informer, Informers, WatchScope
from torpor_cache.objects import Change
from torpor_cache.resources import Position


class Feeds:
    """All feeds."""

    def __init__(self, informers: Informers, clock: Clock) -> None:
        self._informers = informers
        self._clock = clock
        self._feeds: dict[Informer, Feed] = {}
        self._encoder = EventEncoder()  # one for all: its bound is the process's

    def __iter__(self) -> Iterator[Feed]:
        return iter(tuple(self._feeds.values()))

    def join(self, member: Member, scope: WatchScope, reason: str = "") -> Feed:
        """Hangs the member on a feed that covers `scope`; it is begun by `Feed.begin`. Raises InvalidSelector.

        `reason`: why this scope is watched, where none covers it yet.
        """
        seeker = _Nobody()
        informer = self._informers.acquire(scope, seeker, reason)
        feed = self._feeds.get(informer)
        if feed is None:
            feed = self._feeds[informer] = Feed(informer, self._clock, self._forget, self._encoder)
            informer.attach(feed)
        feed.expect(member)
        self._informers.release(seeker)
        return feed

    def quiet(self) -> None:
        """Called every now and then: what only recent changes need is not kept for nobody."""
        self._encoder.forget()
        for feed in self:
            feed.informer.history.trim()

    def _forget(self, feed: Feed) -> None:
        if self._feeds.pop(feed.informer, None) is not None:
            self._informers.release(feed)


class _Nobody:
    """Holds an informer while its feed is looked up."""

    def on_change(self, change: Change) -> None:
        pass

    def on_synced(self) -> None:
        pass

    def on_bookmark(self, position: Position) -> None:
        pass

    def on_resync(self) -> None:
        pass

    def on_error(self, status: bytes, final: bool) -> None:
        pass
