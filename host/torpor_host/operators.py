"""Every operator that this host runs, and what follows from what happens to them. Loop only, except where it says so.

Takes WasmOperators that `assignments` has made this host's, installs them, watches for them, carries out what the
residency step decides, and keeps the memory of loaded guests within the budget. A new generation is installed beside
the running one, which is drained only when the new one is ready; if it cannot be installed the old one goes on and the
status says so. One operator's trouble stays its own: every callback ends in its record or in its status.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torpor_services.clock import Clock

from torpor_host import operator_spec
from torpor_host.guest_logs import GuestLogs
from torpor_host.hostcalls import CallResponse, KubeRequest
from torpor_host.installation import Installer, Problem
from torpor_host.known_objects import KnownSet, ObjectTable
from torpor_host.limits import Deadline
from torpor_host.mappings import Mappings, MapReport
from torpor_host.operator_record import Installation, Operator
from torpor_host.operator_spec import OperatorId, OperatorSpec, UnloadPolicy, WatchSpec
from torpor_host.own_writes import PAUSE_S, RUN_MAX
from torpor_host.read_positions import ReadPositions
from torpor_host.reconciler import Reconciler, TurnReport, UnloadReport
from torpor_host.requests import Actor, CacheRequests
from torpor_host.residency import (
    Advice,
    BackoffEnded,
    Effect,
    Hold,
    Keep,
    Loaded,
    Phase,
    Preload,
    Price,
    Release,
    TurnEnded,
    TurnFailed,
    UnloadAt,
    UnloadDue,
    UnloadEnded,
    WorkArrived,
    step,
    unload_time_s,
)
from torpor_host.residency import Event as ResidencyEvent
from torpor_host.subscriber import Event, Subscriber, Subscription, describe_status
from torpor_host.timers import Timers
from torpor_host.work_queue import Cause, Key, WorkQueue
from torpor_host.workers import Workers

log = logging.getLogger(__name__)

CRASHES_MAX = 5  # in a row; beyond this the whole operator rests
DEGRADED_AFTER = 5  # reconciles that failed with none between them that succeeded
_REST_S = (1.0, 300.0)
_INSTALL_RETRY_S = (1.0, 60.0)
_VERIFY_S = 2.0
_RESYNC_JITTER = 0.1
_WARNING = 2  # the level of a guest's log line


class Observer(Protocol):
    """Who is told of what changes: status, scheduler, state watchers. Must not block or raise."""

    def phase_changed(self, operator: Operator) -> None: ...

    def changed(self, operator: Operator, *, urgent: bool) -> None:
        """Something of its status; `urgent` for what a person waits to see."""

    def turn_began(self, operator: Operator, report: TurnReport) -> None: ...

    def idle(self, operator: Operator) -> None:
        """Its timers and costs are up to date."""

    def removed(self, operator: Operator) -> None: ...


class Operators:
    """The registry."""

    def __init__(
        self,
        *,
        host: str,
        clock: Clock,
        timers: Timers,
        subscriber: Subscriber,
        workers: Workers,
        install_workers: Workers,
        installer: Installer,
        requests: CacheRequests,
        logs: GuestLogs,
        post: Callable[[Callable[[], None]], None],
        lease_refusal: Callable[[], str],
        memory_budget_bytes: int,
        price: Price | None = None,
        rand: Callable[[], float] = random.random,
    ) -> None:
        self.host = host
        self.post = post
        self.lease_refusal = lease_refusal
        self.memory_budget_bytes = memory_budget_bytes
        self.observers: list[Observer] = []
        self.verify_assignment: Callable[[OperatorId], None] = lambda operator_id: None
        self.advised: Callable[[Operator], bool] = lambda operator: False
        self.reconciler: Reconciler
        self._clock = clock
        self._timers = timers
        self._subscriber = subscriber
        self._workers = workers
        self._install_workers = install_workers
        self._installer = installer
        self._requests = requests
        self._logs = logs
        self._price = price or Price()
        self._random = rand
        self._operators: dict[OperatorId, Operator] = {}
        self._leaving: set[Operator] = set()
        self._tables: dict[str, ObjectTable] = {}
        self._in_memory: dict[Operator, None] = {}  # least recently used first
        self._queue_lock = threading.Lock()
        self._draining = False
        self.mappings = Mappings(workers=workers, timers=timers, clock=clock, lock=self._queue_lock, owner=self)

    # -- what others ask ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._operators)

    def get(self, operator_id: OperatorId) -> Operator | None:
        return self._operators.get(operator_id)

    def all(self) -> Sequence[Operator]:
        return list(self._operators.values())

    @property
    def used_bytes(self) -> int:
        """What loaded guests hold privately, as last measured."""
        return sum(self.private_bytes(operator) for operator in {*self._in_memory, *self.mappings.instances})

    @staticmethod
    def private_bytes(operator: Operator) -> int:
        instances = len(operator.instances) + len(operator.running)
        return instances * operator.costs.resident_bytes

    def next_wake_s(self, operator: Operator) -> float | None:
        """The next known timer, on the monotonic clock."""
        due = [due_s for _, _, due_s in operator.queue.timers()]
        if operator.resync_timer is not None and operator.resync_timer.pending:
            due.append(operator.resync_timer.due_s)
        return min(due, default=None)

    # -- coming and going --------------------------------------------------------------------------------------------

    def adopt(self, obj: Mapping[str, Any], epoch: int) -> Operator:
        """The WasmOperator is this host's, at this epoch. Installs it, or what is new in it."""
        metadata = obj["metadata"]
        operator_id = operator_spec.operator_id(metadata["namespace"], metadata["name"])
        uid = str(metadata.get("uid", ""))
        operator = self._operators.get(operator_id)
        if operator is not None and (operator.uid, operator.epoch) != (uid, epoch):
            self.drop(operator_id, "it was replaced")
            operator = None
        if operator is None:
            operator = Operator(operator_id, uid, epoch, runtime=self, known=KnownSet(ObjectTable()))
            operator.queue = WorkQueue(self._timers, self._queue_lock, operator)
            self._operators[operator_id] = operator
            log.info("operator adopted", extra={"operator": operator.text, "epoch": epoch})
            # Before it is installed, which may take minutes: the scheduler must know that its assignment was taken up.
            for observer in self.observers:
                observer.phase_changed(operator)
        self.update(obj)
        return operator

    def update(self, obj: Mapping[str, Any]) -> None:
        """A newer version of an adopted WasmOperator; does nothing unless its spec has changed."""
        metadata = obj["metadata"]
        operator = self._operators.get(OperatorId((metadata["namespace"], metadata["name"])))
        generation = metadata.get("generation", 0)
        if operator is None or generation == operator.generation:
            return
        operator.generation = generation
        operator.install_attempts = 0
        operator.object = dict(obj)
        self._install(operator)

    def drop(self, operator_id: OperatorId, reason: str) -> None:
        """It is no longer this host's: stops its guests, forgets its keys. What runs ends with `fenced` calls."""
        operator = self._operators.pop(operator_id, None)
        if operator is None:
            return
        log.info("operator dropped", extra={"operator": operator.text, "reason": reason})
        operator.gone = f"{operator.text}: {reason}"
        operator.object = operator.replacement = None
        for subscription in operator.subscriptions:
            self._subscriber.unsubscribe(subscription)
        operator.subscriptions = ()
        for timer in (
            operator.unload_timer,
            operator.preload_timer,
            operator.resync_timer,
            operator.retry_timer,
            operator.rest_timer,
            operator.fence_timer,
        ):
            self._timers.cancel(timer)
        operator.queue.pause()
        operator.queue.clear()
        operator.known.clear()
        self.mappings.dropped(operator)
        self._leaving.add(operator)
        self.stop_guests(operator, reason)
        self._apply(operator, Hold())
        for observer in self.observers:
            observer.removed(operator)

    def drop_all(self, reason: str) -> None:
        """The Lease is lost."""
        for operator_id in list(self._operators):
            self.drop(operator_id, reason)

    @staticmethod
    def stop_guests(operator: Operator, reason: str) -> None:
        for loaded in list(operator.running):
            loaded.stop(reason)

    def forget_logs(self, operator_id: OperatorId) -> None:
        """The WasmOperator was deleted."""
        self._logs.forget(operator_id)

    def hold_all(self) -> None:
        """Shutdown: what runs may end, nothing new starts."""
        self._draining = True
        for operator in self.all():
            operator.queue.pause()
            self.mappings.hold(operator)
            self._apply(operator, Hold())

    @property
    def moving(self) -> int:
        """Operators with a worker in flight."""
        everyone = (*self._operators.values(), *self._leaving)
        return sum(
            1 for o in everyone if o.residency.turns or o.residency.phase is Phase.UNLOADING or self.mappings.busy(o)
        )

    # -- installing --------------------------------------------------------------------------------------------------

    def _install(self, operator: Operator) -> None:
        self._timers.cancel(operator.retry_timer)
        operator.install_token += 1
        token, obj = operator.install_token, operator.object
        assert obj is not None
        spec = obj.get("spec")
        actor = Actor(operator.id, self.host, operator.epoch, (), b"{}")
        if operator.spec is None:
            account = spec.get("serviceAccountName", "") if isinstance(spec, dict) else ""
            self._condition(operator, "Installed", "Unknown", "Installing", f"as {account}")

        def ask(request: KubeRequest, deadline: Deadline) -> CallResponse:
            return self._requests.request(actor, ReadPositions(), operator, request, deadline, "")

        def job() -> None:
            outcome = self._installer.install(obj, ask)
            self.post(lambda: self._installed(operator, token, outcome))

        self._install_workers.submit(job)

    def _installed(self, operator: Operator, token: int, outcome: Installation | Problem) -> None:
        if operator.gone or self._draining or token != operator.install_token:
            return
        if isinstance(outcome, Problem):
            self._install_failed(operator, outcome)
            return
        operator.install_attempts = 0
        operator.object = None
        operator.replacement = outcome
        if operator.spec is not None and not operator.residency.held:
            operator.queue.pause()
            self.mappings.hold(operator)
            self._apply(operator, Hold())
        elif operator.residency.phase is Phase.COLD and not self.mappings.busy(operator):
            self._replace(operator)

    def _install_failed(self, operator: Operator, problem: Problem) -> None:
        message = problem.message
        if operator.spec is not None:
            message += f" (generation {operator.spec.generation} goes on running)"
        log.warning("operator cannot be installed: %s", message, extra={"operator": operator.text})
        operator.observed_generation = operator.generation
        self._condition(operator, "Installed", "False", problem.reason, message)
        self._judge(operator)
        if problem.final:
            operator.object = None
            return
        first_s, longest_s = _INSTALL_RETRY_S
        delay_s = min(first_s * 2.0 ** min(operator.install_attempts, 10), longest_s)
        operator.install_attempts += 1
        operator.retry_timer = self._timers.after(delay_s, self._install_again, operator)

    def _install_again(self, operator: Operator) -> None:
        if not operator.gone and operator.object is not None:
            self._install(operator)

    def _replace(self, operator: Operator) -> None:
        """Nothing of it is in memory: what was installed takes its place."""
        outcome, operator.replacement = operator.replacement, None
        assert outcome is not None
        before, spec = operator.spec, outcome.spec
        operator.spec, operator.installed = spec, outcome.installed
        operator.cluster_scoped = outcome.cluster_scoped
        operator.observed_generation = spec.generation
        operator.snapshot = None
        operator.crashes = operator.failures = 0
        operator.own_writes.run = 0
        operator.actor = Actor(operator.id, self.host, operator.epoch, spec.limits.outbound_hosts, spec.settings)
        refusal = outcome.installed.image_refusal
        self._condition(
            operator, "Installed", "True", "Image" if refusal is None else "NoImage", refusal or "wakes from its image"
        )
        if before is None or before.primary.resource != spec.primary.resource:
            self._watch_primary(operator, spec)
        self._watch(operator, before, spec)
        self._plan_resync(operator)
        if before is not None:
            self._mark(operator, operator.known.keys(), Cause.START, 0)
        operator.queue.resume()
        self._judge(operator)
        for observer in self.observers:
            observer.phase_changed(operator)
        self._apply(operator, Release(work_left=operator.queue.ready))

    def _watch_primary(self, operator: Operator, spec: OperatorSpec) -> None:
        operator.queue.clear()
        operator.known.clear()
        operator.stale = None
        operator.known = KnownSet(self._tables.setdefault(str(spec.primary.resource), ObjectTable()))

    def _watch(self, operator: Operator, before: OperatorSpec | None, spec: OperatorSpec) -> None:
        """Keeps the subscriptions that ask for the same, ends and begins the others."""
        same_primary = before is not None and before.primary.resource == spec.primary.resource
        old = {watch.name: watch for watch in before.subscriptions} if before is not None else {}
        present = {subscription.name: subscription for subscription in operator.subscriptions}
        kept: list[Subscription] = []
        wanted = [watch for watch in spec.subscriptions if not (same_primary and old.get(watch.name) == watch)]
        for watch in spec.subscriptions:
            if watch not in wanted and watch.name in present:
                kept.append(present.pop(watch.name))
        for subscription in present.values():
            self._subscriber.unsubscribe(subscription)
        operator.subscriptions = tuple(kept)
        self.mappings.replaced(operator, spec, {subscription.name for subscription in kept})
        if wanted:
            self._condition(operator, "Watching", "Unknown", "Starting", "the first snapshot is under way")
        for watch in wanted:
            operator.subscriptions = (*operator.subscriptions, self._subscriber.subscribe(operator, watch.name))

    # -- what the watches say ----------------------------------------------------------------------------------------

    def on_event(
        self, operator: Operator, subscription: Subscription, keys: Sequence[Key], event: Event, sequence: int
    ) -> None:
        key = Key(event.key.namespace, event.key.name)
        deleted = event.type == Event.DELETED
        if subscription.name == "for":
            operator.own_writes.shown(event.position.resource_version)
            if operator.stale is not None:
                operator.stale.discard(key)
            if deleted:
                operator.known.discard(key)
            else:
                operator.known.add(key, event.uid)
        watch = operator.watch_of(subscription.name)
        if deleted or event.type == Event.ADDED:
            self._deletion_seen(operator, watch, key)
        # What the snapshot shows was not just changed: it may wait behind what was.
        snapshot = not subscription.progress.synced and not event.received_unix_ns
        cause = Cause.START if snapshot else Cause.WATCH
        operator.last_event_unix_ns = self._clock.unix_ns()
        if watch is not None and watch.coded:
            self.mappings.event(operator, watch.name, event, cause, sequence)
        else:
            traces = tuple(trace.traceparent for trace in event.traces if trace.traceparent)
            self.mark(operator, keys, cause, sequence, traces)

    @staticmethod
    def _deletion_seen(operator: Operator, watch: WatchSpec | None, key: Key) -> None:
        if watch is not None:
            resource = watch.resource
            operator.positions.deletion_seen(resource.group, resource.resource, key.namespace, key.name)

    def on_synced(self, operator: Operator, subscription: Subscription) -> None:
        if subscription.name == "for" and operator.stale is not None:
            for key in operator.stale:
                operator.known.discard(key)
            operator.stale = None
        if all(s.progress.synced and not s.failed for s in operator.subscriptions):
            self._condition(operator, "Watching", "True", "Live", f"{len(operator.subscriptions)} watches")
            self._judge(operator)

    def on_resync(self, operator: Operator, subscription: Subscription, sequence: int) -> None:
        """Everything that is known is run, what is gone too."""
        keys = operator.known.keys()
        if subscription.name == "for":
            operator.stale = set(keys)
        self.mark(operator, keys, Cause.RESYNC, sequence)

    def on_watch_error(self, operator: Operator, subscription: Subscription, status: bytes, final: bool) -> None:
        reason, message = describe_status(status)
        watch = f"{subscription.name}: {message}"
        self._condition(
            operator, "Watching", "False", reason, watch if final else f"{watch} (the cache goes on trying)"
        )
        self._judge(operator)

    def mark(
        self, operator: Operator, keys: Collection[Key], cause: Cause, sequence: int, traces: tuple[str, ...] = ()
    ) -> None:
        """Makes the keys dirty, and wakes the operator for them."""
        self._mark(operator, keys, cause, sequence, traces)
        if keys:
            self.work_arrived(operator)

    def _mark(
        self, operator: Operator, keys: Iterable[Key], cause: Cause, sequence: int, traces: tuple[str, ...] = ()
    ) -> None:
        now_s, now_ns = self._clock.monotonic_s(), self._clock.unix_ns()
        for key in keys:
            operator.queue.add(key, cause, now_s=now_s, now_unix_ns=now_ns, sequence=sequence, traces=traces)

    def _plan_resync(self, operator: Operator) -> None:
        self._timers.cancel(operator.resync_timer)
        operator.resync_timer = None
        assert operator.spec is not None
        if operator.spec.resync_s > 0:
            delay_s = operator.spec.resync_s * (1 + _RESYNC_JITTER * self._random())
            operator.resync_timer = self._timers.after(delay_s, self._resync, operator)

    def _resync(self, operator: Operator) -> None:
        if operator.gone:
            return
        self._mark(operator, operator.known.keys(), Cause.RESYNC, 0)
        self._plan_resync(operator)
        if len(operator.known):
            self.work_arrived(operator)

    # -- residency ---------------------------------------------------------------------------------------------------

    def work_arrived(self, operator: Operator) -> None:
        """Its queue has a key that is ready."""
        if operator.gone:
            return
        operator.advice = None  # a plan for a gap that is over
        self._timers.cancel(operator.preload_timer)
        self._apply(operator, WorkArrived())

    def wake(self, operator: Operator, key: Key | None) -> int:
        """By hand: one key, or every known one; returns how many."""
        keys = [key] if key is not None else operator.known.keys()
        self._mark(operator, keys, Cause.WAKE, 0)
        if keys:
            self.work_arrived(operator)
        return len(keys)

    def preload(self, operator: Operator) -> None:
        self._apply(operator, Preload())

    def unload(self, operator: Operator) -> bool:
        """Now; False while it runs."""
        if operator.residency.phase is Phase.RESIDENT:
            operator.reason = "unloaded by hand"
            self._apply(operator, UnloadDue())
            return True
        return operator.residency.phase in {Phase.COLD, Phase.FAILED, Phase.UNLOADING}

    def advise(self, operator: Operator, advice: Advice, reason: str) -> None:
        """What the scheduler says, already found to be about now."""
        operator.advice, operator.reason = advice, reason
        if operator.residency.phase is Phase.RESIDENT:
            self._plan_unload(operator)

    def advise_preload(self, operator: Operator, at_s: float, until_s: float, reason: str) -> None:
        """Be resident from then on, until `until_s` if nothing comes."""

        def due(target: Operator) -> None:
            if target.gone:
                return
            target.advice, target.reason = UnloadAt(until_s) if until_s else Keep(), reason
            if target.residency.phase is Phase.RESIDENT:
                self._plan_unload(target)
            else:
                self._apply(target, Preload())

        self._timers.cancel(operator.preload_timer)
        operator.preload_timer = self._timers.schedule(at_s, due, operator)

    def scheduler_away(self) -> None:
        """Advice of one that is gone no longer counts."""
        for operator in self._operators.values():
            if operator.advice is not None:
                operator.advice = None
                if operator.residency.phase is Phase.RESIDENT:
                    self._plan_unload(operator)

    def _apply(self, operator: Operator, event: ResidencyEvent) -> None:
        before = operator.residency.phase
        concurrency = 1 if operator.spec is None else operator.spec.concurrency
        operator.residency, effects = step(operator.residency, event, concurrency)
        phase = operator.residency.phase
        if phase is not before:
            self._phase_changed(operator, before)
        for effect in effects:
            self._carry_out(operator, effect)
        if phase is Phase.RESIDENT and before is not Phase.RESIDENT:
            self._plan_unload(operator)
            self._keep_budget()

    def _carry_out(self, operator: Operator, effect: Effect) -> None:
        match effect:
            case Effect.START_TURN:
                self._in_memory.pop(operator, None)
                self._in_memory[operator] = None
                self._workers.submit(partial(self.reconciler.turn, operator))
            case Effect.START_UNLOAD:
                operator.turn_round = False
                self._workers.submit(partial(self.reconciler.unload, operator))
            case Effect.TURN_ROUND:
                operator.turn_round = True
            case Effect.REST:
                operator.rest_timer = self._timers.after(operator.rest_s, self._rested, operator)
            case Effect.HELD:
                self._out_of_memory(operator)

    def _phase_changed(self, operator: Operator, before: Phase) -> None:
        if before is Phase.RESIDENT:
            self._timers.cancel(operator.unload_timer)
            operator.unload_timer = None
        if operator.residency.phase in {Phase.COLD, Phase.FAILED}:
            self._in_memory.pop(operator, None)
        if operator.gone:
            return
        if Phase.FAILED in {before, operator.residency.phase}:
            self._judge(operator)
        for observer in self.observers:
            observer.phase_changed(operator)

    def _plan_unload(self, operator: Operator) -> None:
        self._timers.cancel(operator.unload_timer)
        operator.unload_timer = None
        if operator.spec is None or operator.residency.phase is not Phase.RESIDENT:
            return
        now_s = self._clock.monotonic_s()
        price = self._price.under_pressure(self.used_bytes, self.memory_budget_bytes)
        at_s = unload_time_s(operator.spec.unload, operator.advice, operator.costs, price, now_s)
        if operator.advice is None:
            operator.reason = _reason(operator.spec.unload.policy, at_s, now_s)
        if at_s is None:
            return
        if at_s <= now_s:
            self._unload_due(operator)
        else:
            operator.unload_timer = self._timers.schedule(at_s, self._unload_due, operator)

    def _unload_due(self, operator: Operator) -> None:
        self._apply(operator, UnloadDue())

    def _keep_budget(self) -> None:
        """Above the budget idle guests leave, the least recently used first; `never` is kept."""
        excess = self.used_bytes - self.memory_budget_bytes
        if excess <= 0:
            return
        for operator in list(self._in_memory):
            if excess <= 0:
                return
            kept = operator.spec is not None and operator.spec.unload.policy is UnloadPolicy.NEVER
            if operator.residency.phase is Phase.RESIDENT and not kept:
                excess -= self.private_bytes(operator)
                operator.reason = "the memory budget is exceeded"
                self._apply(operator, UnloadDue())

    def _out_of_memory(self, operator: Operator) -> None:
        """HELD: nothing of it is in memory, unless a mapping still ends."""
        self._timers.cancel(operator.rest_timer)
        if self.mappings.busy(operator):
            return
        if operator.gone:
            self._leaving.discard(operator)
            if operator.snapshot is not None:
                operator.snapshot.path.unlink(missing_ok=True)
        elif operator.replacement is not None and not self._draining:
            self._replace(operator)

    def _rested(self, operator: Operator) -> None:
        self._apply(operator, BackoffEnded(work_left=operator.queue.ready))

    # -- what workers report -----------------------------------------------------------------------------------------

    def turn_loaded(self, operator: Operator) -> None:
        self._apply(operator, Loaded())

    def turn_ended(self, operator: Operator, report: TurnReport) -> None:
        self._count(operator, report)
        if report.cause is not None:
            operator.advice = None  # whatever was said, was said before these keys
        loaded = bool(operator.instances)
        if not operator.gone and (
            operator.failures or operator.degraded or operator.own_writes.endless or operator.wakes_itself
        ):
            self._judge(operator)
        if report.load_failure and not operator.gone and not loaded:
            self._load_failed(operator, report)
        elif report.crashes >= CRASHES_MAX and not operator.gone and not loaded:
            self._rest(operator, report.crashes - CRASHES_MAX, report.last_error)
        else:
            if operator.refusal() and not operator.gone:
                # Its keys went back: taking them again at once would spin until the fence is settled.
                self._look_after_fence(operator, 0.1)
                self._apply(operator, TurnEnded(work_left=False, loaded=loaded))
            else:
                self._apply(operator, TurnEnded(work_left=operator.queue.ready, loaded=loaded))
        if operator.gone:
            return
        self._subscriber.progressed(operator)
        for observer in self.observers:
            if report.cause is not None:
                observer.turn_began(operator, report)
            observer.changed(operator, urgent=report.errors > 0)
            observer.idle(operator)

    def mapping_ended(self, operator: Operator, report: MapReport) -> None:
        """A worker is done with its mappings; the keys that came out are in the queue."""
        operator.errors += report.errors
        if report.last_error:
            operator.last_error = report.last_error
        if report.load_s:
            operator.wakes += 1
            operator.costs = operator.costs.measured(load_s=report.load_s)
        if operator.residency.held and operator.residency.phase is Phase.COLD:
            self._out_of_memory(operator)
        if operator.gone:
            return
        if report.image_lost and operator.object is None:
            self._install_anew(operator)
        self._subscriber.progressed(operator)
        for observer in self.observers:
            observer.changed(operator, urgent=report.errors > 0)

    def _look_after_fence(self, operator: Operator, delay_s: float) -> None:
        """One timer an operator, however many events arrive meanwhile."""
        if operator.fence_timer is None or not operator.fence_timer.pending:
            operator.fence_timer = self._timers.after(delay_s, self._after_fence, operator)

    def _after_fence(self, operator: Operator) -> None:
        if operator.gone:
            return
        if operator.refusal():
            self._look_after_fence(operator, 0.5)
        elif operator.queue.ready:
            self._apply(operator, WorkArrived())

    def _count(self, operator: Operator, report: TurnReport) -> None:
        operator.reconciles += report.reconciles
        operator.errors += report.errors
        operator.crashes = report.crashes
        # A turn with one success is no failure of the operator, whatever else failed in it.
        if report.reconciles:
            operator.failures = operator.failures + report.errors if report.errors == report.reconciles else 0
        if report.last_error:
            operator.last_error = report.last_error
        if report.load_s:
            operator.wakes += 1
            if report.cause is not None:
                operator.entered(report.entry_latency_s)
        operator.costs = operator.costs.measured(load_s=report.load_s, resident_bytes=report.private_bytes)

    def _load_failed(self, operator: Operator, report: TurnReport) -> None:
        operator.crashes += 1
        operator.errors += 1
        operator.failures += 1
        operator.last_error = report.load_failure
        if report.image_lost and operator.object is None:
            self._install_anew(operator)
        self._judge(operator)
        self._rest(operator, operator.crashes - 1, report.load_failure)

    def _install_anew(self, operator: Operator) -> None:
        """Files of the store are gone: the assignment is read again, and with it the object."""
        operator.generation = 0
        self.verify_assignment(operator.id)

    def _rest(self, operator: Operator, failures: int, problem: str) -> None:
        first_s, longest_s = _REST_S
        operator.rest_s = min(first_s * 2.0 ** min(failures, 20), longest_s)
        log.warning(
            "operator rests: %s", problem, extra={"operator": operator.text, "retry_in_s": round(operator.rest_s, 2)}
        )
        self._apply(operator, TurnFailed())

    def unload_ended(self, operator: Operator, report: UnloadReport) -> None:
        if not report.loaded:
            operator.costs = operator.costs.measured(unload_s=report.seconds)
        self._apply(operator, UnloadEnded(work_left=operator.queue.ready, loaded=report.loaded))
        if not operator.gone:
            for observer in self.observers:
                observer.idle(operator)

    # -- fencing -----------------------------------------------------------------------------------------------------

    def was_fenced(self, operator: Operator, reason: str) -> None:
        """The cache refuses its epoch: nothing of it acts until the assignment has been read again."""
        if operator.gone or operator.fenced:
            return
        operator.fenced = f"{operator.text}: {reason or 'another assignment is confirmed'}"
        log.warning("operator is fenced: %s", reason, extra={"operator": operator.text})
        self.stop_guests(operator, "another assignment is confirmed")
        self.verify_assignment(operator.id)
        self._timers.after(_VERIFY_S, self._verify_again, operator)

    def confirmed(self, operator_id: OperatorId) -> None:
        """The assignment was read and is this host's, at its epoch."""
        operator = self._operators.get(operator_id)
        if operator is not None and operator.fenced:
            operator.fenced = ""

    def _verify_again(self, operator: Operator) -> None:
        if operator.fenced and not operator.gone:
            self.verify_assignment(operator.id)
            self._timers.after(_VERIFY_S, self._verify_again, operator)

    # -- conditions --------------------------------------------------------------------------------------------------

    def _condition(self, operator: Operator, name: str, status: str, reason: str, message: str) -> None:
        if operator.set_condition(name, status, reason, message, self._clock.unix_ns()) and not operator.gone:
            for observer in self.observers:
                observer.changed(operator, urgent=True)

    def _judge(self, operator: Operator) -> None:
        """Ready follows from the others."""
        if operator.spec is not None:
            self._judge_failures(operator)
            self._judge_own_writes(operator)
        installed, watching = operator.condition("Installed"), operator.condition("Watching")
        if operator.spec is None:
            reason = installed.reason if installed is not None else "Installing"
            self._condition(operator, "Ready", "False", reason, installed.message if installed is not None else "")
        elif operator.residency.phase is Phase.FAILED:
            self._condition(operator, "Ready", "False", "Resting", operator.last_error)
        elif watching is None or watching.status != "True":
            reason = watching.reason if watching is not None else "Starting"
            self._condition(operator, "Ready", "False", reason, watching.message if watching is not None else "")
        elif operator.degraded:
            self._condition(operator, "Ready", "False", "Degraded", "see the condition Degraded")
        else:
            self._condition(operator, "Ready", "True", "Watching", "it wakes when something changes")

    def _judge_failures(self, operator: Operator) -> None:
        """Degraded, as ClusterOperators have it. Its message stays while it lasts: each failure would be a write."""
        if operator.failures >= DEGRADED_AFTER:
            if not operator.degraded:
                message = f"{operator.failures} reconciles failed in a row, the last: {operator.last_error}"
                self._condition(operator, "Degraded", "True", "ReconcilesFail", message)
        elif not (operator.degraded and operator.failures):
            self._condition(operator, "Degraded", "False", "AsExpected", "")

    def _judge_own_writes(self, operator: Operator) -> None:
        """A warning that comes once there is something to warn of."""
        if operator.own_writes.endless:
            message = (
                f"{RUN_MAX} reconciles in a row were led to by the operator's own writes, without a pause of "
                f"{PAUSE_S:g} s: it writes each time; write only what differs, or set predicates: [generation]"
            )
            if not operator.wakes_itself:
                log.warning("operator wakes itself: %s", message, extra={"operator": operator.text})
                self._logs.write(operator.id, _WARNING, message)
            self._condition(operator, "WakesItself", "True", "OwnWrites", message)
        elif operator.wakes_itself:
            self._condition(operator, "WakesItself", "False", "AsExpected", "")


def _reason(policy: UnloadPolicy, at_s: float | None, now_s: float) -> str:
    if at_s is None:
        return f"policy {policy.value}: it stays"
    if policy is UnloadPolicy.IDLE:
        return f"policy idle: it leaves after {at_s - now_s:.3g} s"
    return f"break-even: it leaves after {at_s - now_s:.3g} s without an event"
