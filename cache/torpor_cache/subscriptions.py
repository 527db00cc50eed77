"""One subscription: what passes its filter, what waits to be sent, and how far its client has got.

What waits is bounded: one entry a key (plus the deletion of an earlier object of that key), coalesced to the latest
state, deletions kept, keys to reconcile united. Beyond `pending_max` keys the owner starts it anew with RESYNC.

Order and positions. Entries are sent in the order of their *first* unsent change, so a key that changes all the time is
not put off for ever. Each event carries a position after which its client may resume without a gap: never beyond the
first change that is still unsent. With nothing coalesced that is the event's own version. Until the first SYNCED there
is no such position and events carry version 0; resuming from 0 is a RESYNC. A client that resumes keeps its position.

Snapshots hold keys, not objects. A key leaves the snapshot when a live change of it is offered; the keys that remain
have not changed since the snapshot was fixed, so reading their objects late shows the same state.

Pure: no tasks, no clock, no gRPC. Everything happens between two awaits of the one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from torpor_services.telemetry import Span

from torpor_cache.mapping import SELF, CodeMapping, Mapping, keys_of
from torpor_cache.objects import Change, ChangeType, StoredObject
from torpor_cache.predicates import Predicate, passes
from torpor_cache.resources import NO_VERSION, ObjectKey, ResourceVersion
from torpor_cache.selectors import FieldSelector, LabelSelector

TRACES_MAX = 32  # of the contract
KEYS_MAX = 1_024  # united keys of one entry; what the client never saw in between needs no reconcile
CREDIT_DEFAULT = 1_024  # of the contract

SELF_MAPPINGS: tuple[Mapping, ...] = tuple(SELF)

SnapshotReader = Callable[[ObjectKey], StoredObject | None]


class EventType(IntEnum):
    """Numbers of the contract's Event.Type."""

    ADDED = 1
    MODIFIED = 2
    DELETED = 3
    BOOKMARK = 4
    SYNCED = 5
    RESYNC = 6
    ERROR = 7


class Payload(IntEnum):
    """Numbers of the contract's Payload."""

    KEY = 1
    METADATA = 2
    FULL = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a change means behind a filter."""

    type: EventType
    keys: tuple[ObjectKey, ...]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which changes concern a subscription, and which keys they make dirty. Equal filters are evaluated once."""

    namespace: str = ""
    labels: LabelSelector = LabelSelector.parse("")
    fields: FieldSelector = FieldSelector.parse("")
    predicates: tuple[Predicate, ...] = ()
    mappings: tuple[Mapping, ...] = SELF_MAPPINGS

    @property
    def needs_old(self) -> bool:
        return self.mappings is not SELF_MAPPINGS and any(isinstance(m, CodeMapping) for m in self.mappings)

    def selects(self, subject: StoredObject) -> bool:
        if self.namespace and subject.key.namespace != self.namespace:
            return False
        if self.labels and not self.labels.matches(subject.labels):
            return False
        return not self.fields or self.fields.matches(subject.fields(self.fields.paths))

    def outcome(self, change: Change) -> Outcome | None:
        """None where the change does not concern the subscription."""
        kind = self._type(change)
        if kind is None:
            return None
        if not self._passes(kind, change):
            return None
        keys = self._keys(change)
        if not keys and not self.needs_old:
            return None
        return Outcome(kind, keys)

    def snapshot_keys(self, subject: StoredObject) -> tuple[ObjectKey, ...] | None:
        """The keys of an object that is shown for the first time, None where it does not concern the subscription."""
        if not passes(self.predicates, ChangeType.ADDED, None, subject):
            return None
        keys = keys_of(self.mappings, subject)
        return keys if keys or self.needs_old else None

    def _type(self, change: Change) -> EventType | None:
        if self.namespace and change.key.namespace != self.namespace:
            return None
        old, new = change.old, change.new
        if change.type is ChangeType.DELETED:
            last = old or new
            return EventType.DELETED if last is None or self.selects(last) else None
        was_selected = old is not None and self.selects(old)
        if new is not None and self.selects(new):
            entered = change.type is ChangeType.ADDED or (old is not None and not was_selected)
            return EventType.ADDED if entered else EventType.MODIFIED
        # It left the selection: for this subscription it is gone, at the version of the change that took it away.
        return EventType.DELETED if was_selected else None

    def _passes(self, kind: EventType, change: Change) -> bool:
        match kind:
            case EventType.DELETED:
                return True
            case EventType.ADDED:
                # New to this subscription, perhaps not to the cluster.
                return passes(self.predicates, ChangeType.ADDED, None, change.new)
            case _:
                return passes(self.predicates, change.type, change.old, change.new)

    def _keys(self, change: Change) -> tuple[ObjectKey, ...]:
        if self.mappings == SELF_MAPPINGS:
            return (change.key,)
        old = keys_of(self.mappings, change.old) if change.old is not None else ()
        new = keys_of(self.mappings, change.new) if change.new is not None else ()
        return united(old, new)


EVERYTHING = Filter()


def united(first: tuple[ObjectKey, ...], second: tuple[ObjectKey, ...]) -> tuple[ObjectKey, ...]:
    """Both, each key once; the oldest KEYS_MAX - len(second) and all of the second."""
    if first == second or not second:
        return first
    if not first:
        return second
    return (*dict.fromkeys((*first[: max(KEYS_MAX - len(second), 1)], *second)),)


class Occurrence:
    """A change on its way to subscribers: shared by all of them."""

    __slots__ = ("_span", "change", "offered_s", "traceparent")

    def __init__(self, change: Change, *, offered_s: float = 0.0, span: Span | None = None) -> None:
        self.change = change
        self.offered_s = offered_s
        # What subscribers go on from: the fan-out, or the change itself where telemetry is off.
        self.traceparent = span.traceparent if span is not None else change.traceparent
        self._span = span

    def finish(self) -> None:
        """The first subscriber has been sent it, or a newer change has taken its place."""
        if self._span is not None:
            self._span.end()
            self._span = None


class Pending:
    """The unsent changes of one key, coalesced."""

    __slots__ = ("floor", "gone", "keys", "occurrence", "offered_s", "old", "traces", "type")

    def __init__(self, occurrence: Occurrence, outcome: Outcome, floor: ResourceVersion) -> None:
        self.occurrence = occurrence
        self.type = outcome.type
        self.keys = outcome.keys
        self.old = occurrence.change.old  # of the oldest unsent change
        self.traces: tuple[str, ...] = (occurrence.traceparent,) if occurrence.traceparent else ()
        self.floor = floor  # a client that stands here has missed nothing before this entry
        self.offered_s = occurrence.offered_s
        self.gone: Pending | None = None  # the deletion of an earlier object of the same name

    def absorb(self, occurrence: Occurrence, outcome: Outcome) -> None:
        """Goes on to a newer change of the same key."""
        if self.type is EventType.DELETED and occurrence.change.uid != self.occurrence.change.uid:
            self._succeed(occurrence, outcome)
            return
        self.type = _merged(self.type, outcome.type)
        self.keys = united(self.keys, outcome.keys)
        self._follow(occurrence)

    def _succeed(self, occurrence: Occurrence, outcome: Outcome) -> None:
        """Same key, new uid: DELETED of the old one stays, and goes first."""
        if self.gone is None:
            gone = Pending(self.occurrence, Outcome(EventType.DELETED, self.keys), self.floor)
            gone.old, gone.traces = self.old, self.traces
            self.gone = gone
        else:
            self.gone.keys = united(self.gone.keys, self.keys)
        self.type, self.keys, self.old = outcome.type, outcome.keys, occurrence.change.old
        self.traces = ()
        self._follow(occurrence)

    def _follow(self, occurrence: Occurrence) -> None:
        self.occurrence.finish()
        self.occurrence = occurrence
        if occurrence.traceparent:
            self.traces = (*self.traces[-(TRACES_MAX - 1) :], occurrence.traceparent)


def _merged(unsent: EventType, latest: EventType) -> EventType:
    if latest is EventType.DELETED:
        return EventType.DELETED
    if unsent is EventType.DELETED:
        return EventType.MODIFIED  # left the selection and came back: the client knows it
    return unsent if unsent is EventType.ADDED else latest


@dataclass(slots=True, eq=False)  # not frozen: one is made for each event and subscription, at half the cost
class Emission:
    """One event to one subscription, ready to be encoded. `source` is what subscribers share."""

    type: EventType
    source: Occurrence | StoredObject | None
    resource_version: ResourceVersion
    keys: tuple[ObjectKey, ...] = ()
    traces: tuple[str, ...] = ()
    old: StoredObject | None = None
    status: bytes = b""
    final: bool = False


class State(Enum):
    """Where a subscription stands."""

    WAITING = "waiting"  # for rights, or for the first list of its kind
    SNAPSHOT = "snapshot"  # the snapshot or the replay is under way; live changes pass it
    LIVE = "live"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Subscription:
    """The state of one subscription; `id` is the client's number for it. Idle ones hold no table that was ever full."""

    id: int
    filter: Filter = EVERYTHING  # set before it begins
    payload: Payload = Payload.KEY
    credit: int = CREDIT_DEFAULT
    pending_max: int = 100_000
    state: State = field(default=State.WAITING, init=False)
    pending: dict[ObjectKey, Pending] = field(default_factory=dict, init=False)
    remaining: dict[ObjectKey, None] = field(default_factory=dict, init=False)
    sent: int = field(default=0, init=False)
    coalesced: int = field(default=0, init=False)
    # Of the snapshot, to be shown by unsent live changes.
    _overtaken: dict[ObjectKey, None] = field(default_factory=dict, init=False)
    _controls: list[Emission] = field(default_factory=list, init=False)  # three at most
    _resumable: bool = field(default=False, init=False)
    _sent_version: ResourceVersion = field(default=NO_VERSION, init=False)
    _sync_version: ResourceVersion = field(default=NO_VERSION, init=False)

    # ---- what arrives

    def offer(self, occurrence: Occurrence, outcome: Outcome, floor: ResourceVersion) -> bool:
        """Takes a change in; `floor` is the version before it. False: too much is unsent, start anew."""
        key = occurrence.change.key
        if key in self.remaining:
            del self.remaining[key]
            self._overtaken[key] = None
        return self._keep(key, occurrence, outcome, floor)

    def offer_gone(self, occurrence: Occurrence, outcome: Outcome) -> bool:
        """Takes in a deletion from before the snapshot, which may hold a new object of that name."""
        return self._keep(occurrence.change.key, occurrence, outcome, NO_VERSION)

    def _keep(self, key: ObjectKey, occurrence: Occurrence, outcome: Outcome, floor: ResourceVersion) -> bool:
        entry = self.pending.get(key)
        if entry is not None:
            entry.absorb(occurrence, outcome)
            self.coalesced += 1
            return True
        self.pending[key] = Pending(occurrence, outcome, floor)
        return len(self.pending) <= self.pending_max

    def start(self, keys: Iterable[ObjectKey], at: ResourceVersion) -> None:
        """Fixes the snapshot: these keys as of version `at`. What is offered from now on is newer."""
        self.state = State.SNAPSHOT
        self.remaining = dict.fromkeys(keys)
        self._sync_version = at

    def resume(self, after: ResourceVersion, at: ResourceVersion) -> None:
        """The client stands at `after`; all changes up to `at` are offered next, then live ones."""
        self.state = State.SNAPSHOT
        self._resumable = True
        self._sent_version = after
        self._sync_version = at

    def resync(self) -> None:
        """The client's knowledge is void: RESYNC goes out first, a snapshot is to follow."""
        self._clear()
        self.state = State.WAITING
        self._resumable = False
        self._sent_version = NO_VERSION
        self._controls.append(Emission(EventType.RESYNC, None, NO_VERSION))

    def fail(self, status: bytes, *, final: bool) -> None:
        """Tells an error; after a final one nothing else is sent."""
        if self.state is State.ENDED:
            return
        if final:
            self.end()
        if self._controls and self._controls[-1].type is EventType.ERROR:
            self._controls.pop()  # the latest says it all, to a client that does not read
        self._controls.append(Emission(EventType.ERROR, None, NO_VERSION, status=status, final=final))

    def end(self) -> None:
        """Nothing more is to be sent."""
        self._clear()
        self.state = State.ENDED

    def bookmark(self, version: ResourceVersion) -> None:
        """Tells an idle client how far its kind has got; nothing where events say it anyway."""
        if self.state is State.LIVE and not self.pending and not self._controls:
            self._sent_version = max(self._sent_version, version)
            self._controls.append(Emission(EventType.BOOKMARK, None, self._sent_version))

    def _clear(self) -> None:
        self.pending, self.remaining, self._overtaken = {}, {}, {}
        self._controls.clear()

    # ---- what leaves

    @property
    def has_control(self) -> bool:
        return bool(self._controls) or self._sync_due()

    @property
    def has_live(self) -> bool:
        return self.credit > 0 and bool(self.pending)

    @property
    def has_snapshot(self) -> bool:
        return self.credit > 0 and bool(self.remaining)

    @property
    def resume_point(self) -> ResourceVersion:
        """A client that stands here has been sent everything up to it; 0 before the first SYNCED."""
        if not self._resumable:
            return NO_VERSION
        if not self.pending:
            return self._sent_version
        return min(self._sent_version, next(iter(self.pending.values())).floor)

    def oldest_offered_s(self) -> float | None:
        """When the change that has waited longest was offered."""
        return next(iter(self.pending.values())).offered_s if self.pending else None

    def take_control(self) -> Emission | None:
        if self._controls:
            return self._controls.pop(0)
        if self._sync_due():
            self.state = State.LIVE
            # Emptied dictionaries keep the table they have grown to; new ones have none.
            self.remaining, self._overtaken = {}, {}
            self._resumable = True
            self._sent_version = max(self._sent_version, self._sync_version)
            return Emission(EventType.SYNCED, None, self.resume_point)
        return None

    def take_live(self) -> Emission | None:
        """The entry that has waited longest."""
        return self._take(next(iter(self.pending))) if self.has_live else None

    def take_snapshot(self, get: SnapshotReader) -> Emission | None:
        """The next object of the snapshot that concerns the subscription."""
        while self.has_snapshot:
            key = next(iter(self.remaining))
            if key in self.pending:
                return self._take(key)  # the deletion of an earlier object of that name
            del self.remaining[key]
            subject = get(key)
            keys = self.filter.snapshot_keys(subject) if subject is not None else None
            if keys is None:
                continue
            self._spend()
            return Emission(EventType.ADDED, subject, self.resume_point, keys)
        return None

    def _take(self, key: ObjectKey) -> Emission:
        entry = self.pending[key]
        if entry.gone is not None:
            entry, self.pending[key].gone = entry.gone, None
        else:
            del self.pending[key]
            if not self.pending:
                self.pending = {}
            if self._overtaken:
                self._overtaken.pop(key, None)
            version = entry.occurrence.change.resource_version
            if version > self._sent_version:
                self._sent_version = version
        self._spend()
        old = entry.old if self.filter.needs_old else None
        return Emission(entry.type, entry.occurrence, self.resume_point, entry.keys, entry.traces, old)

    def _spend(self) -> None:
        self.credit -= 1
        self.sent += 1

    def _sync_due(self) -> bool:
        """SYNCED says that the client has seen every key: those too that live changes took out of the snapshot."""
        if self.state is not State.SNAPSHOT or self.remaining or self._overtaken:
            return False
        return not self.pending or next(iter(self.pending.values())).floor >= self._sync_version
