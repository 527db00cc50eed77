"""Which WasmOperators are this host's: read from the watch, claimed by compare-and-swap when nobody else decides.

A host adopts an operator only at an epoch that was made for this incarnation: one that the scheduler assigned on this
incarnation's stream, or one that it has just claimed itself. What its name still stands beside from an earlier life is
claimed anew, with the next epoch (after a grace in which the scheduler may do it).

Without the scheduler it claims what nobody has, and what belongs to a host whose Lease has stood still, as seen from
here, for its duration plus the longest write deadline. Hosts that are up agree on an order for each operator
(rendezvous hashing) and the later ones wait, so that claims spread and rarely collide; a collision costs a 409.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from torpor.cache.v1 import cache_pb2
from torpor_services import crd
from torpor_services.clock import Clock

from torpor_host import operator_spec
from torpor_host.api import MERGE_PATCH, ApiUnavailable, KubeApi
from torpor_host.lease import NAME_PREFIX, Observation
from torpor_host.operator_spec import OperatorId
from torpor_host.subscriber import Event, Subscriber, Subscription, describe_status
from torpor_host.timers import Timer, Timers
from torpor_host.work_queue import Key

log = logging.getLogger(__name__)

CLAIM_STAGGER_S = 2.0  # between the hosts that might claim an operator
SCHEDULER_GRACE_S = 5.0  # for the scheduler to assign what stands beside our name, before we claim it
_RETRY_S = 2.0
_CLAIMS_AT_ONCE = 8


class OperatorRegistry(Protocol):
    """What `operators.Operators` does with them."""

    def adopt(self, obj: Mapping[str, Any], epoch: int) -> object: ...

    def update(self, obj: Mapping[str, Any]) -> None: ...

    def drop(self, operator_id: OperatorId, reason: str) -> None: ...

    def drop_all(self, reason: str) -> None: ...

    def confirmed(self, operator_id: OperatorId) -> None: ...

    def forget_logs(self, operator_id: OperatorId) -> None: ...


@dataclass(slots=True)
class Entry:
    """A WasmOperator of the cluster, whoever runs it."""

    uid: str
    resource_version: str
    generation: int
    host: str
    epoch: int
    claim: Timer | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision depends on."""

    me: str
    lease_held: bool
    scheduler_decides: bool
    mine: int | None  # the epoch at which it runs here now
    assigned: int | None  # the epoch the scheduler told this incarnation
    holder_expired: bool
    rank: int  # of this host among those that are up, for this operator


@dataclass(frozen=True, slots=True)
class Run:
    """It is ours at the entry's epoch."""


@dataclass(frozen=True, slots=True)
class Leave:
    """It is another's, or will be."""


@dataclass(frozen=True, slots=True)
class Claim:
    after_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until something changes."""


def decide(entry: Entry, now: Situation) -> Run | Leave | Claim | Wait:
    """Pure. What this host does about a WasmOperator."""
    if not now.lease_held:
        return Wait()
    if entry.host == now.me:
        if entry.epoch in {now.mine, now.assigned}:
            return Run()
        # Of an earlier life, or written by hand: an epoch is never shared by two incarnations.
        return Claim(SCHEDULER_GRACE_S if now.scheduler_decides else 0.0)
    if now.mine is not None:
        return Leave()
    if now.scheduler_decides or (entry.host and not now.holder_expired):
        return Wait()
    return Claim(now.rank * CLAIM_STAGGER_S)


class Assignments:
    """Owner of two subscriptions of the host's own: all WasmOperators, and the Leases of all hosts."""

    def __init__(
        self,
        *,
        host: str,
        namespace: str,
        clock: Clock,
        timers: Timers,
        subscriber: Subscriber,
        api: KubeApi,
        registry: OperatorRegistry,
        lease_held: Callable[[], bool],
        scheduler_decides: Callable[[], bool],
        spawn: Callable[[Any], object],
    ) -> None:
        self._host = host
        self._namespace = namespace
        self._clock = clock
        self._timers = timers
        self._subscriber = subscriber
        self._api = api
        self._registry = registry
        self._lease_held = lease_held
        self._scheduler_decides = scheduler_decides
        self._spawn = spawn
        self._entries: dict[OperatorId, Entry] = {}
        self._mine: dict[OperatorId, int] = {}
        self._assigned: dict[OperatorId, int] = {}
        self._claiming: set[OperatorId] = set()
        self._claims = asyncio.Semaphore(_CLAIMS_AT_ONCE)
        self._hosts: dict[str, Observation] = {}
        self._host_timers: dict[str, Timer] = {}
        self._leases_synced_s: float | None = None
        self._seen: set[OperatorId] | None = None
        self._operators_watch: Subscription | None = None
        self._leases_watch: Subscription | None = None
        self.problem = "the first list of WasmOperators is under way"
        self.on_synced_changed: Callable[[bool], None] = lambda synced: None

    def start(self) -> None:
        """Begins to watch."""
        self._operators_watch = self._subscriber.subscribe(self, "")
        self._leases_watch = self._subscriber.subscribe(self, "")

    def __len__(self) -> int:
        return len(self._entries)

    def resource_version(self, operator_id: OperatorId) -> tuple[str, str] | None:
        """(uid, resourceVersion) as last seen; what a status write is conditional on."""
        entry = self._entries.get(operator_id)
        return None if entry is None else (entry.uid, entry.resource_version)

    def version_seen(self, operator_id: OperatorId, resource_version: str) -> None:
        """Our own write moved it there."""
        entry = self._entries.get(operator_id)
        if entry is not None and _version(resource_version) > _version(entry.resource_version):
            entry.resource_version = resource_version

    # -- what others decide ------------------------------------------------------------------------------------------

    def assign(self, operator_id: OperatorId, epoch: int) -> None:
        """The scheduler has written that it is ours."""
        if self._assigned.get(operator_id) == epoch == self._mine.get(operator_id):
            return
        self._assigned[operator_id] = epoch
        self.verify(operator_id)

    def revoke(self, operator_id: OperatorId, epoch: int) -> None:
        """The scheduler gives it to another."""
        if self._mine.get(operator_id) == epoch:
            self._leave(operator_id, "the scheduler has given it to another host")

    def verify(self, operator_id: OperatorId) -> None:
        """Reads the object anew and acts on what it says."""
        self._spawn(self._verify(operator_id))

    def lease_acquired(self) -> None:
        """A new incarnation: nothing is ours yet."""
        self._assigned.clear()
        for operator_id in list(self._entries):
            self.consider(operator_id)

    def lease_lost(self, reason: str) -> None:
        self._mine.clear()
        self._assigned.clear()
        self._registry.drop_all(reason)

    def reconsider(self) -> None:
        """The scheduler came or went."""
        for operator_id in list(self._entries):
            self.consider(operator_id)

    # -- SubscriptionOwner -------------------------------------------------------------------------------------------

    def subscribe_request(self, subscription: Subscription) -> cache_pb2.Subscribe:
        if subscription is self._leases_watch:
            resource = cache_pb2.Resource(group="coordination.k8s.io", version="v1", resource="leases")
            return cache_pb2.Subscribe(resource=resource, namespace=self._namespace, payload=cache_pb2.PAYLOAD_FULL)
        resource = cache_pb2.Resource(group=crd.GROUP, version=crd.VERSION, resource=crd.PLURAL)
        return cache_pb2.Subscribe(resource=resource, payload=cache_pb2.PAYLOAD_FULL)

    def known_objects(self, subscription: Subscription) -> Iterable[tuple[Key, str]]:
        if subscription is self._leases_watch:
            return ()
        return [(Key(*operator_id), entry.uid) for operator_id, entry in self._entries.items()]

    def on_event(self, subscription: Subscription, keys: Sequence[Key], event: Event, sequence: int) -> None:
        if subscription is self._leases_watch:
            self._lease_event(event)
            return
        operator_id = operator_spec.operator_id(event.key.namespace, event.key.name)
        if event.type == Event.DELETED:
            self._deleted(operator_id, event.uid)
        else:
            self._take(operator_id, event.object)

    def on_synced(self, subscription: Subscription) -> None:
        if subscription is self._leases_watch:
            self._leases_synced_s = self._clock.monotonic_s()
            self.reconsider()
            return
        if self._seen is not None:
            for operator_id in [known for known in self._entries if known not in self._seen]:
                self._deleted(operator_id, "")
            self._seen = None
        self.problem = ""
        self.on_synced_changed(True)

    def on_resync(self, subscription: Subscription, sequence: int) -> None:
        if subscription is not self._leases_watch:
            self._seen = set()

    def on_error(self, subscription: Subscription, status: bytes, final: bool) -> None:
        reason, message = describe_status(status)
        what = "Leases" if subscription is self._leases_watch else "WasmOperators"
        log.error("%s cannot be watched: %s", what, message, extra={"reason": reason})
        if subscription is not self._leases_watch:
            self.problem = f"WasmOperators cannot be watched: {message}"
            self.on_synced_changed(False)

    def oldest_sequence(self) -> int:
        return 0

    def owned_subscriptions(self) -> Sequence[Subscription]:
        return ()

    # -- WasmOperators -----------------------------------------------------------------------------------------------

    def _take(self, operator_id: OperatorId, text: bytes) -> None:
        try:
            obj = msgspec.json.decode(text)
            metadata, status = obj["metadata"], obj.get("status") or {}
            entry = Entry(
                uid=str(metadata["uid"]),
                resource_version=str(metadata["resourceVersion"]),
                generation=int(metadata.get("generation", 0)),
                host=sys.intern(str(status.get("host") or "")),
                epoch=int(status.get("epoch") or 0),
            )
        except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError, AttributeError) as exc:
            log.warning("a WasmOperator cannot be read: %s", exc, extra={"operator": "/".join(operator_id)})
            return
        if self._seen is not None:
            self._seen.add(operator_id)
        known = self._entries.get(operator_id)
        if known is not None:
            if known.uid == entry.uid:
                entry.uid = known.uid  # one text
            if known.uid == entry.uid and _version(entry.resource_version) < _version(known.resource_version):
                return
            if known.uid != entry.uid:
                self._leave(operator_id, "it was deleted and made anew")
            self._timers.cancel(known.claim)
        self._entries[operator_id] = entry
        self.consider(operator_id, obj)

    def _deleted(self, operator_id: OperatorId, uid: str) -> None:
        entry = self._entries.get(operator_id)
        if entry is None or (uid and entry.uid != uid):
            return
        del self._entries[operator_id]
        self._timers.cancel(entry.claim)
        self._assigned.pop(operator_id, None)
        self._leave(operator_id, "it was deleted")
        self._registry.forget_logs(operator_id)

    def _leave(self, operator_id: OperatorId, reason: str) -> None:
        if self._mine.pop(operator_id, None) is not None:
            self._registry.drop(operator_id, reason)

    def consider(self, operator_id: OperatorId, obj: Mapping[str, Any] | None = None) -> None:
        """Decides about one, from what is known; `obj` if it was just read."""
        entry = self._entries.get(operator_id)
        if entry is None:
            return
        match decide(entry, self._situation(operator_id, entry)):
            case Run():
                self._run(operator_id, entry, obj)
            case Leave():
                self._leave(operator_id, f"it was assigned to {entry.host or 'nobody'} at epoch {entry.epoch}")
            case Claim(after_s):
                if self._mine.get(operator_id) is not None:
                    self._leave(operator_id, f"its epoch was moved to {entry.epoch}")
                self._plan_claim(operator_id, entry, after_s)
            case Wait():
                pass

    def _situation(self, operator_id: OperatorId, entry: Entry) -> Situation:
        return Situation(
            me=self._host,
            lease_held=self._lease_held(),
            scheduler_decides=self._scheduler_decides(),
            mine=self._mine.get(operator_id),
            assigned=self._assigned.get(operator_id),
            holder_expired=self._expired(entry.host),
            rank=self._rank(operator_id),
        )

    def _run(self, operator_id: OperatorId, entry: Entry, obj: Mapping[str, Any] | None) -> None:
        first = self._mine.get(operator_id) != entry.epoch
        if obj is None:
            if first:
                self.verify(operator_id)
            return
        self._mine[operator_id] = entry.epoch
        if first:
            self._registry.adopt(obj, entry.epoch)
        else:
            self._registry.update(obj)
        self._registry.confirmed(operator_id)

    async def _verify(self, operator_id: OperatorId) -> None:
        try:
            answer = await self._api.request("GET", _path(operator_id))
        except ApiUnavailable as exc:
            log.warning("a WasmOperator cannot be read: %s", exc, extra={"operator": "/".join(operator_id)})
            if operator_id in self._assigned:
                self._timers.after(_RETRY_S, self.verify, operator_id)
            return
        if answer.status == 404:
            self._deleted(operator_id, "")
        elif answer.ok:
            self._take(operator_id, answer.body)

    # -- claiming ----------------------------------------------------------------------------------------------------

    def _plan_claim(self, operator_id: OperatorId, entry: Entry, after_s: float) -> None:
        if operator_id in self._claiming or (entry.claim is not None and entry.claim.pending):
            return
        if after_s <= 0:
            self._claim_due(operator_id)
        else:
            entry.claim = self._timers.after(after_s, self._claim_due, operator_id)

    def _claim_due(self, operator_id: OperatorId) -> None:
        entry = self._entries.get(operator_id)
        if entry is None or operator_id in self._claiming:
            return
        # After its grace the scheduler no longer stands in the way of what bears our own name.
        situation = self._situation(operator_id, entry)
        if entry.host == self._host and situation.scheduler_decides and situation.lease_held:
            if entry.epoch in {situation.mine, situation.assigned}:
                return
        elif not isinstance(decide(entry, situation), Claim):
            return
        self._claiming.add(operator_id)
        self._spawn(self._claim(operator_id, entry))

    async def _claim(self, operator_id: OperatorId, entry: Entry) -> None:
        retry_s = 0.0
        try:
            async with self._claims:
                retry_s = await self._write_claim(operator_id, entry)
        finally:
            self._claiming.discard(operator_id)
        if retry_s:
            self._timers.after(retry_s, self._claim_again, operator_id)

    def _claim_again(self, operator_id: OperatorId) -> None:
        self.consider(operator_id)

    async def _write_claim(self, operator_id: OperatorId, entry: Entry) -> float:
        """The seconds until another try, 0 for none."""
        epoch = entry.epoch + 1
        body = {
            "metadata": {"resourceVersion": entry.resource_version, "uid": entry.uid},
            "status": {"host": self._host, "epoch": epoch},
        }
        try:
            answer = await self._api.request(
                "PATCH", f"{_path(operator_id)}/status", body=body, content_type=MERGE_PATCH
            )
        except ApiUnavailable as exc:
            log.warning("an operator could not be claimed: %s", exc, extra={"operator": "/".join(operator_id)})
            return _RETRY_S
        if answer.status == 404:
            return 0.0  # the watch will say that it is gone
        if answer.status == 409:
            await self._verify(operator_id)
            return _RETRY_S
        if not answer.ok:
            log.warning(
                "an operator could not be claimed: %s", answer.message, extra={"operator": "/".join(operator_id)}
            )
            return _RETRY_S * 5
        if not self._lease_held():
            return 0.0
        self._assigned[operator_id] = epoch
        self._take(operator_id, answer.body)
        return 0.0

    # -- Leases ------------------------------------------------------------------------------------------------------

    def _lease_event(self, event: Event) -> None:
        if not event.key.name.startswith(NAME_PREFIX):
            return
        host = event.key.name.removeprefix(NAME_PREFIX)
        self._timers.cancel(self._host_timers.pop(host, None))
        if event.type == Event.DELETED:
            self._hosts.pop(host, None)
            return
        try:
            lease = msgspec.json.decode(event.object)
            observation = self._hosts.setdefault(host, Observation())
            observation.see(lease, self._clock.monotonic_s())
        except (msgspec.DecodeError, RecursionError, TypeError, AttributeError) as exc:
            log.warning("a Lease cannot be read: %s", exc, extra={"lease": event.key.name})
            return
        if host != self._host:
            due_s = observation.expires_s() + 0.01
            self._host_timers[host] = self._timers.schedule(due_s, self._host_expired, host)

    def _host_expired(self, host: str) -> None:
        for operator_id, entry in list(self._entries.items()):
            if entry.host == host:
                self.consider(operator_id)

    def _expired(self, host: str) -> bool:
        """Whether nobody can act under that host's Lease any more."""
        if not host:
            return True
        if self._leases_synced_s is None:
            return False
        observation = self._hosts.get(host)
        if observation is None:
            # It has no Lease: it counts from when we first could have seen one.
            observation = self._hosts[host] = Observation((host, ""), self._leases_synced_s, 15.0)
            self._host_timers[host] = self._timers.schedule(observation.expires_s() + 0.01, self._host_expired, host)
        return self._clock.monotonic_s() >= observation.expires_s()

    def _rank(self, operator_id: OperatorId) -> int:
        """This host's place in the order of those that are up; 0 is first."""
        up = [host for host, seen in self._hosts.items() if not seen.released and not self._expired(host)]
        mine = _weight(self._host, operator_id)
        return sum(1 for host in up if host != self._host and _weight(host, operator_id) > mine)


def _weight(host: str, operator_id: OperatorId) -> bytes:
    return hashlib.sha256("\0".join((host, *operator_id)).encode()).digest()


def _version(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _path(operator_id: OperatorId) -> str:
    namespace, name = operator_id
    return f"/apis/{crd.GROUP}/{crd.VERSION}/namespaces/{namespace}/{crd.PLURAL}/{name}"
