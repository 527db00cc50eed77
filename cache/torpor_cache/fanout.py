"""From one informer to many subscriptions, and from the subscriptions of one stream to batches of bytes.

`Feed` is the informer's listener. Dispatch runs inside the informer's own step, so a snapshot and the live changes
after it have no gap; it never awaits, blocks or encodes. Subscriptions with equal filters are evaluated once.

`StreamQueue` belongs to one client's stream. Its writer pulls: nothing is encoded before it can be sent, so a client
that stops reading costs one entry a key and subscription (see `subscriptions.py` for the bound) and nobody else any
time. A batch is bounded in events and bytes; live changes go before snapshots, and while live changes alone would fill
it, an eighth is left to snapshots so that they end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torpor_services import telemetry
from torpor_services.clock import Clock

from torpor_cache.encoding import EventEncoder, encode_delivery, encode_keys, encode_target, identity_of
from torpor_cache.history import Expired
from torpor_cache.informers import Informer
from torpor_cache.objects import Change, ChangeType
from torpor_cache.resources import NO_VERSION, ObjectKey, Position, ResourceVersion
from torpor_cache.statuses import status_json
from torpor_cache.subscriptions import Emission, EventType, Filter, Occurrence, Outcome, State, Subscription

log = logging.getLogger(__name__)

KnownObjects = Sequence[tuple[ObjectKey, str]]


@dataclass(frozen=True, slots=True)
class Afresh:
    """Begin with a snapshot."""


@dataclass(frozen=True, slots=True)
class After:
    """Go on after a position; where that is impossible, RESYNC, a snapshot, and what of `known` is gone."""

    position: Position
    known: KnownObjects = ()


@dataclass(frozen=True, slots=True)
class Takeover:
    """Begin as a new holder: a snapshot, and the deletions since `acknowledged` (None: all that are still known).

    `deletions`: those that are remembered beyond the informer's history, oldest first.
    """

    acknowledged: Position | None = None
    deletions: Sequence[Change] = ()


Resume = Afresh | After | Takeover


@dataclass(slots=True, eq=False)
class Member:
    """A subscription, the stream it is sent on, and the feed it hangs on."""

    subscription: Subscription
    queue: StreamQueue
    on_ended: Callable[[Member], None] = field(default=lambda _: None)  # after its last event was taken
    feed: Feed | None = None

    def ready(self) -> None:
        """There may be something to send."""
        self.queue.mark(self)

    def fail(self, status: bytes, *, final: bool) -> None:
        """Tells the client; final: takes the subscription off its feed."""
        self.subscription.fail(status, final=final)
        if final and self.feed is not None:
            self.feed.remove(self)
        self.ready()


class _Group:
    """Members with equal filters."""

    __slots__ = ("filter", "members")

    def __init__(self, wanted: Filter) -> None:
        self.filter = wanted
        self.members: dict[Member, None] = {}


class Feed:
    """Fan-out of one informer: a `Listener`."""

    def __init__(
        self,
        informer: Informer,
        clock: Clock,
        on_empty: Callable[[Feed], None] = lambda _: None,
        encoder: EventEncoder | None = None,
    ) -> None:
        self.informer = informer
        self.encoder = encoder or EventEncoder()
        self._clock = clock
        self._on_empty = on_empty
        self._expected: dict[Member, None] = {}
        self._groups: dict[str, dict[Filter, _Group]] = {}
        self._last_version = informer.position.resource_version

    # ---- members

    def expect(self, member: Member) -> None:
        """Holds the feed for a member that will begin, and tells it the informer's errors."""
        self._expected[member] = None
        member.feed = self

    def begin(self, member: Member, resume: Resume) -> None:
        """Snapshot or replay, then live; the informer is synced. Takes effect at once, with no gap."""
        self._expected.pop(member, None)
        wanted = member.subscription.filter
        group = self._groups.setdefault(wanted.namespace, {}).setdefault(wanted, _Group(wanted))
        group.members[member] = None
        member.feed = self
        match resume:
            case Afresh():
                self._start_snapshot(member.subscription)
            case After(position, known):
                if not self._replay(member.subscription, position):
                    member.subscription.resync()
                    self._start_snapshot(member.subscription, known)
            case Takeover(acknowledged, remembered):
                self._start_snapshot(member.subscription)
                self._offer_gone(member.subscription, (*remembered, *self._deletions_after(acknowledged)))
        member.ready()

    def remove(self, member: Member) -> None:
        self._expected.pop(member, None)
        wanted = member.subscription.filter
        groups = self._groups.get(wanted.namespace, {})
        group = groups.get(wanted)
        if group is not None:
            group.members.pop(member, None)
            if not group.members:
                del groups[wanted]
                if not groups:
                    del self._groups[wanted.namespace]
        member.feed = None
        if not self._groups and not self._expected:
            self._on_empty(self)

    def __len__(self) -> int:
        return len(self._expected) + sum(
            len(group.members) for groups in self._groups.values() for group in groups.values()
        )

    def members(self) -> Iterator[Member]:
        """Those that have begun."""
        for groups in tuple(self._groups.values()):
            for group in tuple(groups.values()):
                yield from tuple(group.members)

    # ---- the informer's listener

    def on_change(self, change: Change) -> None:
        version = change.resource_version
        floor = ResourceVersion(min(self._last_version, version - 1))
        self._last_version = max(self._last_version, version)
        occurrence: Occurrence | None = None
        overflown: list[Member] = []
        for group in self._groups_of(change.key.namespace):
            outcome = self._outcome(group, change)
            if outcome is None:
                continue
            if occurrence is None:
                occurrence = self._occurrence(change)
            for member in group.members:
                if not self._offer(member, occurrence, outcome, floor):
                    overflown.append(member)
        for member in overflown:
            self._restart(member)

    def on_synced(self) -> None:
        self._last_version = max(self._last_version, self.informer.position.resource_version)
        for member in self.members():
            if member.subscription.state is State.WAITING:
                self._start_snapshot(member.subscription)
                member.ready()

    def on_bookmark(self, position: Position) -> None:
        self._last_version = max(self._last_version, position.resource_version)

    def on_resync(self) -> None:
        self._last_version = NO_VERSION
        for member in self.members():
            member.subscription.resync()
            member.ready()

    def on_error(self, status: bytes, final: bool) -> None:
        for member in (*self._expected, *self.members()):
            member.fail(status, final=final)

    # ---- time

    def bookmark(self) -> None:
        """Tells every idle member how far the kind has got."""
        for member in self.members():
            member.subscription.bookmark(self.informer.position.resource_version)
            member.ready()

    # ---- how

    def _groups_of(self, namespace: str) -> Iterator[_Group]:
        # Copies: a member that fails on the way takes its group with it.
        yield from tuple(self._groups.get("", {}).values())
        if namespace:
            yield from tuple(self._groups.get(namespace, {}).values())

    def _outcome(self, group: _Group, change: Change) -> Outcome | None:
        try:
            return group.filter.outcome(change)
        except Exception as exc:
            log.exception("a filter failed", extra={"key": str(change.key)})
            status = status_json(500, "InternalError", f"the filter failed on {change.key}: {type(exc).__name__}")
            for member in tuple(group.members):
                member.fail(status, final=True)
            return None

    def _occurrence(self, change: Change) -> Occurrence:
        now_s = self._clock.monotonic_s()
        if not telemetry.enabled():
            return Occurrence(change, offered_s=now_s)
        attributes = {"torpor.key": str(change.key), "torpor.resource": str(self.informer.scope.resource)}
        span = telemetry.start(
            "cache.fan_out",
            parent=change.traceparent,
            attributes=attributes,
            start_unix_ns=change.received_unix_ns or None,
        )
        return Occurrence(change, offered_s=now_s, span=span)

    def _offer(self, member: Member, occurrence: Occurrence, outcome: Outcome, floor: ResourceVersion) -> bool:
        subscription = member.subscription
        if subscription.state is State.WAITING and outcome.type is not EventType.DELETED:
            return True  # the snapshot after the resync will hold it
        kept = subscription.offer(occurrence, outcome, floor)
        member.ready()
        return kept

    def _start_snapshot(self, subscription: Subscription, known: KnownObjects = ()) -> None:
        wanted = subscription.filter
        found = self.informer.store.select(wanted.namespace, wanted.labels, wanted.fields)
        subscription.start((subject.key for subject in found), self.informer.position.resource_version)
        if known:
            present = {subject.key: subject.uid for subject in found}
            self._offer_gone(subscription, self._gone(known, present))

    def _gone(self, known: KnownObjects, present: dict[ObjectKey, str]) -> Iterator[Change]:
        last_states = {(change.key, change.uid): change for change in self.informer.history.deletions()}
        for key, uid in known:
            if present.get(key) == uid:
                continue
            yield last_states.get((key, uid)) or Change(
                type=ChangeType.DELETED,
                key=key,
                uid=uid,
                resource_version=self.informer.position.resource_version,
                old=None,
                new=None,
                final_state_unknown=True,
                received_unix_ns=0,
                traceparent="",
            )

    def _replay(self, subscription: Subscription, position: Position) -> bool:
        present = self.informer.position
        if position.history != present.history:
            return False
        try:
            changes = self.informer.history.since(position.resource_version)
        except Expired:
            return False
        subscription.resume(position.resource_version, present.resource_version)
        floor = position.resource_version
        for change in changes:
            outcome = subscription.filter.outcome(change)
            if outcome is not None and not subscription.offer(self._replayed(change), outcome, floor):
                return False
            floor = max(floor, change.resource_version)
        return True

    def _deletions_after(self, acknowledged: Position | None) -> Iterable[Change]:
        if acknowledged is None or acknowledged.history != self.informer.position.history:
            return self.informer.history.deletions()
        try:
            return self.informer.history.since(acknowledged.resource_version)
        except Expired:
            return self.informer.history.deletions()

    def _offer_gone(self, subscription: Subscription, changes: Iterable[Change]) -> None:
        """Of past changes, what the snapshot cannot show: deletions, and keys that only the old object mapped to."""
        for change in changes:
            outcome = self._past_outcome(subscription.filter, change)
            if outcome is not None:
                subscription.offer_gone(self._replayed(change), outcome)

    def _past_outcome(self, wanted: Filter, change: Change) -> Outcome | None:
        outcome = wanted.outcome(change)
        is_elsewhere = wanted.namespace not in ("", change.key.namespace)
        if outcome is None and change.type is ChangeType.DELETED and change.old is None and not is_elsewhere:
            # Without the last state only the client can know whose it was.
            return Outcome(EventType.DELETED, ())
        if outcome is None or outcome.type is EventType.ADDED:
            return None
        present = self.informer.store.get(change.key)
        if outcome.type is EventType.DELETED:
            is_back = present is not None and present.uid == change.uid and wanted.selects(present)
            return None if is_back else outcome
        if present is None or present.uid != change.uid:
            return None  # its deletion is told instead
        shown = wanted.snapshot_keys(present) or ()
        return outcome if any(key not in shown for key in outcome.keys) else None

    def _replayed(self, change: Change) -> Occurrence:
        return Occurrence(change, offered_s=self._clock.monotonic_s())

    def _restart(self, member: Member) -> None:
        """Too much is unsent: what the client has not been sent is dropped, and shown by a snapshot and deletions."""
        subscription = member.subscription
        reached = Position(self.informer.position.history, subscription.resume_point)
        log.warning("a subscription was not read in time and starts anew", extra={"subscription": subscription.id})
        subscription.resync()
        self._start_snapshot(subscription)
        self._offer_gone(subscription, self._deletions_after(reached))
        member.ready()


class StreamQueue:
    """What one stream has to send. `build` makes the next batch; `wait` returns when there may be one."""

    def __init__(self, *, events_max: int = 500, bytes_max: int = 256 * 1024) -> None:
        self.events_max = events_max
        self.bytes_max = bytes_max
        self.sent = 0  # events, each once for all its targets
        self._ready: dict[Member, None] = {}
        self._wake = asyncio.Event()

    def mark(self, member: Member) -> None:
        self._ready[member] = None
        self._wake.set()

    def discard(self, member: Member) -> None:
        self._ready.pop(member, None)

    async def wait(self) -> None:
        await self._wake.wait()

    def build(self) -> bytes:
        """A WatchBatch, empty where nothing may be sent; spends the credit of what is in it."""
        batch = _Batch()
        self._controls(batch)
        reserve = 8 if any(member.subscription.has_snapshot for member in self._ready) else 0
        self._rotate(batch, _take_live, reserve)
        self._rotate(batch, _take_snapshot, 0)
        self._controls(batch)
        self._settle()
        self.sent += batch.events
        return batch.encode()

    def lag_s(self, now_s: float) -> float:
        """How long the oldest change has waited that may be sent."""
        waiting = (m.subscription.oldest_offered_s() for m in self._ready if m.subscription.has_live)
        return max((now_s - offered_s for offered_s in waiting if offered_s is not None), default=0.0)

    def _controls(self, batch: _Batch) -> None:
        for member in tuple(self._ready):
            while (emission := member.subscription.take_control()) is not None:
                batch.add(member, emission)

    def _rotate(self, batch: _Batch, take: Callable[[Member], Emission | None], reserve: int) -> None:
        """One event of each subscription in turn. Subscriptions of a kind are in step, so they share deliveries."""
        events_max = self.events_max - (self.events_max // reserve if reserve else 0)
        bytes_max = self.bytes_max - (self.bytes_max // reserve if reserve else 0)
        ring = deque(self._ready)
        while ring and batch.events < events_max and batch.bytes < bytes_max:
            member = ring.popleft()
            emission = take(member)
            if emission is not None:
                batch.add(member, emission)
                ring.append(member)
        if ring and ring[0] is not next(iter(self._ready)):
            # Whose turn is next comes first in the next batch.
            self._ready = dict.fromkeys((*ring, *self._ready))

    def _settle(self) -> None:
        for member in tuple(self._ready):
            subscription = member.subscription
            if not (subscription.has_control or subscription.has_live or subscription.has_snapshot):
                del self._ready[member]
                if subscription.state is State.ENDED:
                    member.on_ended(member)
        if not self._ready:
            self._wake.clear()


def _take_live(member: Member) -> Emission | None:
    return member.subscription.take_live()


def _take_snapshot(member: Member) -> Emission | None:
    feed = member.feed
    return member.subscription.take_snapshot(feed.informer.store.get) if feed is not None else None


class _Batch:
    """A WatchBatch in the making. Each event is there once, unless a subscription's own order forbids it."""

    def __init__(self) -> None:
        self.events = 0
        self.bytes = 0
        self._deliveries: list[tuple[bytes, dict[tuple[ObjectKey, ...], list[int]]]] = []
        self._index: dict[object, int] = {}
        self._last: dict[Member, int] = {}

    def add(self, member: Member, emission: Emission) -> None:
        subscription = member.subscription
        history = member.feed.informer.position.history if member.feed is not None else ""
        identity = identity_of(emission, subscription.payload, history)
        index = self._index.get(identity)
        if index is None or index <= self._last.get(member, -1):
            index = self._append(member, emission, identity, history)
        self._last[member] = index
        targets = self._deliveries[index][1]
        if emission.keys in targets:
            targets[emission.keys].append(subscription.id)
        else:
            targets[emission.keys] = [subscription.id]
            self.bytes += len(encode_keys(emission.keys)) + 6
        self.bytes += 5  # a subscription's number as a varint has at most 5 bytes

    def _append(self, member: Member, emission: Emission, identity: object, history: str) -> int:
        encoder = member.feed.encoder if member.feed is not None else EventEncoder(0)
        event = encoder.encode(identity, emission, member.subscription.payload, history)
        if isinstance(emission.source, Occurrence):
            emission.source.finish()
        self._deliveries.append((event, {}))
        self._index[identity] = len(self._deliveries) - 1
        self.events += 1
        self.bytes += len(event) + 6
        return len(self._deliveries) - 1

    def encode(self) -> bytes:
        return b"".join(
            encode_delivery(b"".join(encode_target(ids, keys) for keys, ids in targets.items()), event)
            for event, targets in self._deliveries
        )
