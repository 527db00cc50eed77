"""Deletions of the time when nobody watched: a list shows what is there, not what has gone.

The API server's own history (etcd keeps about 5 minutes) still has them. After the first list of a scope, a short watch
from where the scope was last watched up to the list's version tells them; everything else it tells is older than the
list. Nothing waits for it but those who begin as a new holder of an operator. What is older than the server's history
is lost, and said in the log: finalizers are for what must outlive that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from torpor_services.backoff import Backoff
from torpor_services.clock import Clock

from torpor_cache.apiserver import ApiServer, ApiUnavailable, parse_retry_after_s, status_of
from torpor_cache.deadline import within
from torpor_cache.objects import Change, ChangeType, StoredObject
from torpor_cache.resources import ResourceVersion
from torpor_cache.watch_protocol import BookmarkArrived, Ended, Failure, FailureKind, ObjectArrived, classify
from torpor_cache.watcher import Scope, WatchLimits, WatchStream

logger = logging.getLogger(__name__)

# The server ends the watch by itself then. Kubernetes sends a bookmark 2 s before that, which says that all is told.
WINDOW_S = 3
PATIENCE_S = 5.0  # of ours, beyond which a server that does not end it is not waited for
EVENTS_MAX = 10_000
TRIES_MAX = 3

OnDeleted = Callable[[StoredObject], None]


class CatchUp:
    """Of one scope. `run` tells each deletion after one of `since` up to `until`, oldest first, and returns."""

    def __init__(
        self, api: ApiServer, scope: Scope, tell: OnDeleted, *, clock: Clock, limits: WatchLimits | None = None
    ) -> None:
        self._api = api
        self._scope = scope
        self._tell = tell
        self._clock = clock
        self._limits = limits or WatchLimits()
        self.events = 0

    async def run(self, since: Sequence[ResourceVersion], until: ResourceVersion) -> bool:
        """From the first of `since` that the server still knows. False: deletions may be missing."""
        for version in since:
            failure = await self._tries(version, until)
            if failure is None:
                return version == since[0]
            lost = f"deletions after version {version} that happened while nobody watched may be missing"
            logger.warning("%s: %s: %s", self._scope.resource, lost, failure.message)
            if failure.kind is not FailureKind.GONE:
                return False
        return False

    async def _tries(self, version: ResourceVersion, until: ResourceVersion) -> Failure | None:
        backoff = Backoff(self._clock, initial_s=0.2)
        failure: Failure | None = None
        for _ in range(TRIES_MAX):
            failure = await self._once(version, until)
            if failure is None or failure.kind not in (
                FailureKind.UNREACHABLE,
                FailureKind.BUSY,
                FailureKind.SERVER,
            ):
                return failure
            await self._clock.sleep(backoff.next_delay_s())
        return failure

    async def _once(self, version: ResourceVersion, until: ResourceVersion) -> Failure | None:
        query = self._scope.query() | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(version),
            "timeoutSeconds": str(WINDOW_S),
        }
        path = self._scope.resource.path(self._scope.namespace)
        try:
            async with AsyncExitStack() as stack:
                reply = await within(
                    self._clock,
                    self._limits.open_timeout_s,
                    stack.enter_async_context(
                        self._api.stream("GET", path, query=query, headers={"Accept": "application/json"})
                    ),
                )
                if reply.status != 200:
                    status = status_of(reply.status, await reply.read(bytes_max=1024 * 1024))
                    return classify(reply.status, status, parse_retry_after_s(reply.headers))
                stream = WatchStream(reply, stack.pop_all(), self._clock, self._limits)
                try:
                    stream.limit_silence(PATIENCE_S)
                    return await self._read(stream, until)
                finally:
                    await stream.close()
        except (ApiUnavailable, TimeoutError) as exc:
            return Failure(FailureKind.UNREACHABLE, str(exc))

    async def _read(self, stream: WatchStream, until: ResourceVersion) -> Failure | None:
        while True:
            match await stream.next_event():
                case ObjectArrived(type=kind, item=item):
                    if item.resource_version > until:
                        return None
                    if kind is ChangeType.DELETED:
                        self._tell(item)
                    self.events += 1
                    if item.resource_version == until:
                        return None
                    if self.events >= EVENTS_MAX:
                        return Failure(FailureKind.TOO_LARGE, f"more than {EVENTS_MAX} changes have happened since")
                case BookmarkArrived(resource_version=version):
                    if version >= until:
                        return None
                case Ended(failure=failure):
                    return failure
                case _:
                    return None  # silent: it has told what it had


def deletion(item: StoredObject, received_unix_ns: int) -> Change:
    """As the watch would have told it: the object as it was at its end, at the version of its deletion."""
    return Change(
        type=ChangeType.DELETED,
        key=item.key,
        uid=item.uid,
        resource_version=item.resource_version,
        old=item,
        new=None,
        final_state_unknown=False,
        received_unix_ns=received_unix_ns,
        traceparent="",
    )
