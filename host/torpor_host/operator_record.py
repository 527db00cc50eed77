"""One operator on this host: everything that is kept of it while it sleeps, in slots.

The loop changes it, except where a worker owns something for the length of a turn (an instance it has taken) or a lock
guards it (the work queue). Aim: 8 KiB asleep.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, assert_never

from torpor.cache.v1 import cache_pb2
from torpor_services.errors import shortened

from torpor_host.install import InstalledModule
from torpor_host.known_objects import KnownSet
from torpor_host.limits import Deadline
from torpor_host.map_queue import MapQueue
from torpor_host.operator_spec import MappingKind, OperatorId, OperatorSpec, WatchSpec
from torpor_host.own_writes import OwnWrites
from torpor_host.read_positions import ReadPositions
from torpor_host.requests import Actor, GuestCalls
from torpor_host.residency import HELD, Advice, Costs, Phase, Residency
from torpor_host.snapshots import Expected
from torpor_host.subscriber import Event, Subscription
from torpor_host.timers import Timer
from torpor_host.work_queue import Key, WorkQueue

if TYPE_CHECKING:
    from torpor_host.operators import Operators

LATENCIES_MAX = 256
MESSAGE_CHARACTERS_MAX = 1000  # of a condition or the last error


class GuestInstance(Protocol):
    """What the runtime needs of `instance.Instance`."""

    @property
    def alive(self) -> bool: ...

    def reconcile(self, message: bytes, *, deadline: Deadline) -> bytes: ...

    def map(self, message: bytes, *, deadline: Deadline) -> bytes: ...

    def stop(self, reason: str) -> None: ...

    def private_bytes(self) -> int: ...

    def snapshot(self, path: Path, *, epoch: int, wake: int) -> int: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Loaded:
    """An instance and what it calls its host by."""

    instance: GuestInstance
    calls: GuestCalls

    def stop(self, reason: str) -> None:
        """From any thread: what runs ends now, whatever it waits for."""
        self.instance.stop(reason)
        self.calls.stop()


@dataclass(frozen=True, slots=True)
class Condition:
    """Of a WasmOperator's status. `since_unix_ns`: when `status` last changed."""

    type: str
    status: str
    reason: str
    message: str
    since_unix_ns: int


@dataclass(frozen=True, slots=True)
class Installation:
    """What came out of installing: enough to run."""

    spec: OperatorSpec
    installed: InstalledModule
    cluster_scoped: bool  # the primary's kind has no namespaces


class Operator:
    """The record. A `SubscriptionOwner`, a `QueueListener` and a `Fence`, which it hands on to `Operators`."""

    __slots__ = (
        "actor",
        "advice",
        "arrival_sequence",
        "cluster_scoped",
        "conditions",
        "costs",
        "crashes",
        "epoch",
        "errors",
        "failures",
        "fence_timer",
        "fenced",
        "first_read",
        "generation",
        "gone",
        "id",
        "install_attempts",
        "install_token",
        "installed",
        "instances",
        "known",
        "last_error",
        "last_event_unix_ns",
        "latencies",
        "latency_at",
        "map_timer",
        "mapper",
        "mapping",
        "object",
        "observed_generation",
        "own_writes",
        "positions",
        "preload_timer",
        "queue",
        "reason",
        "reconciles",
        "replacement",
        "residency",
        "rest_s",
        "rest_timer",
        "resync_timer",
        "retry_timer",
        "running",
        "runtime",
        "snapshot",
        "spec",
        "stale",
        "subscriptions",
        "turn_round",
        "uid",
        "unload_timer",
        "wakes",
    )

    def __init__(self, operator_id: OperatorId, uid: str, epoch: int, *, runtime: Operators, known: KnownSet) -> None:
        self.id = operator_id
        self.uid = uid
        self.epoch = epoch
        self.runtime = runtime
        self.queue: WorkQueue
        self.residency: Residency = HELD
        # what is declared, and what of it runs
        self.object: dict[str, Any] | None = None  # while it is being installed
        self.generation = 0
        self.observed_generation = 0
        self.spec: OperatorSpec | None = None
        self.installed: InstalledModule | None = None
        self.cluster_scoped = False
        self.actor: Actor | None = None
        self.replacement: Installation | None = None
        self.install_token = 0
        self.install_attempts = 0
        self.gone = ""  # why it is no longer this host's
        self.fenced = ""  # why it must not act, until the assignment is read again
        # what it watches
        self.subscriptions: tuple[Subscription, ...] = ()
        self.known = known
        self.stale: set[Key] | None = None  # of what is known, what a snapshot has not shown yet
        self.positions = ReadPositions()
        self.first_read: str | None = None
        self.own_writes = OwnWrites()
        # what is in memory
        self.instances: list[Loaded] = []
        self.running: set[Loaded] = set()
        self.turn_round = False
        self.snapshot: Expected | None = None
        # what its code is to map
        self.mapping: MapQueue | None = None  # only with a mapping in code
        self.mapper: Loaded | None = None  # between two turns that follow each other
        self.map_timer: Timer | None = None
        # when it leaves and comes
        self.costs = Costs()
        self.advice: Advice | None = None
        self.reason = ""
        self.arrival_sequence = 0
        self.rest_s = 0.0
        self.unload_timer: Timer | None = None
        self.preload_timer: Timer | None = None
        self.resync_timer: Timer | None = None
        self.retry_timer: Timer | None = None
        self.rest_timer: Timer | None = None
        self.fence_timer: Timer | None = None
        # what has happened
        self.crashes = 0
        self.failures = 0  # reconciles that failed since one succeeded
        self.last_event_unix_ns = 0
        self.wakes = 0
        self.reconciles = 0
        self.errors = 0
        self.last_error = ""
        self.latencies: array[float] | None = None
        self.latency_at = 0
        self.conditions: tuple[Condition, ...] = ()

    @property
    def text(self) -> str:
        return "/".join(self.id)

    def condition(self, condition_type: str) -> Condition | None:
        return next((c for c in self.conditions if c.type == condition_type), None)

    def is_true(self, condition_type: str) -> bool:
        condition = self.condition(condition_type)
        return condition is not None and condition.status == "True"

    @property
    def degraded(self) -> bool:
        """Reconcile after reconcile failed, and none has succeeded since."""
        return self.is_true("Degraded")

    @property
    def wakes_itself(self) -> bool:
        """Its own writes brought reconcile after reconcile."""
        return self.is_true("WakesItself")

    @property
    def refused(self) -> Condition | None:
        """Why it could not be installed, if it could not and no earlier generation runs."""
        installed = self.condition("Installed")
        failed = self.installed is None and installed is not None and installed.status == "False"
        return installed if failed else None

    @property
    def shown_phase(self) -> Phase:
        """As people are told: what could not be installed has failed, and is not asleep."""
        return Phase.FAILED if self.refused else self.residency.phase

    @property
    def shown_error(self) -> str:
        """Of the last reconcile that failed, or why there can be none."""
        return self.refused.message if self.refused else self.last_error

    def set_condition(self, condition_type: str, status: str, reason: str, message: str, unix_ns: int) -> bool:
        """Says whether anything changed."""
        old = self.condition(condition_type)
        if old is not None and (old.status, old.reason, old.message) == (status, reason, message):
            return False
        since = old.since_unix_ns if old is not None and old.status == status else unix_ns
        others = tuple(c for c in self.conditions if c.type != condition_type)
        self.conditions = (
            *others,
            Condition(condition_type, status, reason, shortened(message, MESSAGE_CHARACTERS_MAX), since),
        )
        return True

    def entered(self, seconds: float) -> None:
        """A wake took this long, from the event in the host to the guest's first instruction."""
        if self.latencies is None:
            self.latencies = array("f")
        if len(self.latencies) < LATENCIES_MAX:
            self.latencies.append(seconds)
        else:
            self.latencies[self.latency_at] = seconds
            self.latency_at = (self.latency_at + 1) % LATENCIES_MAX

    def latency(self, quantile: float) -> float:
        """Of the last wakes; 0 if there was none."""
        if not self.latencies:
            return 0.0
        ordered = sorted(self.latencies)
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]

    def watch_of(self, name: str) -> WatchSpec | None:
        """The subscription of that name, as the spec that runs has it."""
        watches = () if self.spec is None else self.spec.subscriptions
        return next((watch for watch in watches if watch.name == name), None)

    # -- SubscriptionOwner -------------------------------------------------------------------------------------------

    def subscribe_request(self, subscription: Subscription) -> cache_pb2.Subscribe:
        assert self.spec is not None and self.actor is not None
        watch = self.watch_of(subscription.name)
        assert watch is not None
        return subscribe_request(watch, self.spec.primary, self.actor, cluster_scoped=self.cluster_scoped)

    def known_objects(self, subscription: Subscription) -> Iterable[tuple[Key, str]]:
        return self.known if subscription.name == "for" else ()

    def on_event(self, subscription: Subscription, keys: Sequence[Key], event: Event, sequence: int) -> None:
        self.runtime.on_event(self, subscription, keys, event, sequence)

    def on_synced(self, subscription: Subscription) -> None:
        self.runtime.on_synced(self, subscription)

    def on_resync(self, subscription: Subscription, sequence: int) -> None:
        self.runtime.on_resync(self, subscription, sequence)

    def on_error(self, subscription: Subscription, status: bytes, final: bool) -> None:
        self.runtime.on_watch_error(self, subscription, status, final)

    def oldest_sequence(self) -> int:
        sequences = (self.queue.oldest_sequence(), 0 if self.mapping is None else self.mapping.oldest_sequence())
        return min((sequence for sequence in sequences if sequence), default=0)

    def owned_subscriptions(self) -> Sequence[Subscription]:
        return self.subscriptions

    # -- QueueListener -----------------------------------------------------------------------------------------------

    def work_ready(self) -> None:
        self.runtime.work_arrived(self)

    # -- Fence -------------------------------------------------------------------------------------------------------

    def refusal(self) -> str:
        return self.gone or self.fenced or self.runtime.lease_refusal()

    def report_fenced(self, reason: str) -> None:
        self.runtime.post(lambda: self.runtime.was_fenced(self, reason))


_PREDICATES = {
    "generation": cache_pb2.PREDICATE_GENERATION,
    "labels": cache_pb2.PREDICATE_LABELS,
    "annotations": cache_pb2.PREDICATE_ANNOTATIONS,
    "deletion": cache_pb2.PREDICATE_DELETION,
    "notOwnWrite": cache_pb2.PREDICATE_NOT_OWN_WRITE,
}


def subscribe_request(
    watch: WatchSpec, primary: WatchSpec, actor: Actor, *, cluster_scoped: bool
) -> cache_pb2.Subscribe:
    """What the cache is asked for a watch; id, resume and credit are the subscriber's."""
    resource = watch.resource
    return cache_pb2.Subscribe(
        caller=actor.caller(),
        name=watch.name,
        resource=cache_pb2.Resource(group=resource.group, version=resource.version, resource=resource.resource),
        namespace=watch.namespace,
        label_selector=watch.label_selector,
        field_selector=watch.field_selector,
        predicates=[_PREDICATES[predicate] for predicate in watch.predicates],
        mappings=[_mapping(watch, primary, cluster_scoped)],
        payload=cache_pb2.PAYLOAD_FULL if watch.coded else cache_pb2.PAYLOAD_KEY,
    )


def _mapping(watch: WatchSpec, primary: WatchSpec, cluster_scoped: bool) -> cache_pb2.Mapping:
    match watch.mapping:
        case MappingKind.LABEL:
            return cache_pb2.Mapping(label=watch.mapping_key)
        case MappingKind.ANNOTATION:
            return cache_pb2.Mapping(annotation=watch.mapping_key)
        case MappingKind.OWNER_CONTROLLER | MappingKind.OWNER_ANY:
            owner = primary.resource
            return cache_pb2.Mapping(
                owner=cache_pb2.OwnerMapping(
                    owner=cache_pb2.Resource(group=owner.group, version=owner.version, resource=owner.resource),
                    any_owner=watch.mapping is MappingKind.OWNER_ANY,
                    cluster_scoped=cluster_scoped,
                )
            )
        case MappingKind.CODE:
            return cache_pb2.Mapping(code=True)
        case MappingKind.SELF:
            return cache_pb2.Mapping(self=True)
        case _:
            assert_never(watch.mapping)
