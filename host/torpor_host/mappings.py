"""Mappings that are code: a guest's `torpor_map` turns a changed object into keys.

It runs on an instance of its own, so that it never waits behind a reconcile, and whether or not the operator is in
memory: the instance is woken for what waits (from the image, never from a snapshot), drains it one event at a time, in
order, and is closed. An event leaves its queue when its keys are in the work queue; what fails too often or does not
fit is made good by running every known primary (`map_queue.py`). Keys that are no primary's, which only code can name,
are then not among them: the operator's `resync` and its other watches are what finds those.

`Mapper` is the worker's side, `Mappings` the loop's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import Protocol

import msgspec
from torpor_services import telemetry
from torpor_services.clock import Clock
from torpor_services.errors import one_line, shortened

from torpor_host import abi
from torpor_host.failures import GuestFailed, GuestStopped, InstallFailed
from torpor_host.limits import Deadline
from torpor_host.map_queue import EventType, MapEvent, MapMemory, MapQueue
from torpor_host.operator_record import Loaded, Operator
from torpor_host.operator_spec import OperatorSpec
from torpor_host.snapshots import Expected
from torpor_host.subscriber import Event
from torpor_host.timers import Timers
from torpor_host.turn_time import TurnTime
from torpor_host.work_queue import Cause, Key
from torpor_host.workers import Workers

log = logging.getLogger(__name__)

_FENCE_AGAIN_S = 0.5
_NAME_LENGTH_MAX = 253
# Keys that one operator may have waiting, if that is more than twice its primaries: a mapping that makes keys up must
# not fill the host.
_KEYS_MAX = 100_000

_TYPES: dict[int, EventType] = {Event.ADDED: "ADDED", Event.MODIFIED: "MODIFIED", Event.DELETED: "DELETED"}


@dataclass(slots=True)
class MapReport:
    """What a turn did. Times in seconds, 0 for none."""

    load_s: float = 0.0
    mapped: int = 0
    errors: int = 0
    last_error: str = ""
    image_lost: bool = False


class MapListener(Protocol):
    """Told on the loop."""

    def mapped(self, operator: Operator, event: MapEvent, keys: Sequence[Key]) -> None: ...

    def turn_ended(self, operator: Operator, report: MapReport) -> None: ...


class Mapper:
    """On workers. `load` is the reconciler's."""

    def __init__(
        self,
        *,
        load: Callable[[Operator, Expected | None], Loaded],
        workers: Workers,
        clock: Clock,
        post: Callable[[Callable[[], None]], None],
        cpu_s: Callable[[], float] = thread_time,
    ) -> None:
        self._load = load
        self._workers = workers
        self._clock = clock
        self._cpu_s = cpu_s
        self._post = post

    def turn(self, operator: Operator, listener: MapListener) -> None:
        """Maps what waits. An instance is kept only for the turn that follows at once."""
        report = MapReport()
        loaded, operator.mapper = operator.mapper, None
        try:
            if loaded is None and operator.mapping is not None and operator.mapping.ready and not operator.refusal():
                loaded = self._wake(operator, operator.mapping, report)
            if loaded is not None and operator.mapping is not None:
                self._drain(operator, operator.mapping, loaded, listener, report)
        except Exception as exc:
            log.exception("a turn of mappings failed", extra={"operator": operator.text})
            report.errors, report.last_error = report.errors + 1, f"the host failed: {one_line(exc)}"
        finally:
            if loaded is not None:
                self._put_away(operator, loaded)
        self._post(lambda: listener.turn_ended(operator, report))

    def _wake(self, operator: Operator, queue: MapQueue, report: MapReport) -> Loaded | None:
        started_s = self._clock.monotonic_s()
        try:
            loaded = self._load(operator, None)
        except (InstallFailed, GuestFailed) as exc:
            queue.failed_to_load()
            report.errors, report.last_error = 1, f"for a mapping: {exc.reason}"
            report.image_lost = isinstance(exc, InstallFailed)
            return None
        report.load_s = max(self._clock.monotonic_s() - started_s, 1e-9)
        operator.running.add(loaded)
        return loaded

    def _drain(
        self, operator: Operator, queue: MapQueue, loaded: Loaded, listener: MapListener, report: MapReport
    ) -> None:
        turn = TurnTime(self._workers, self._clock.monotonic_s, self._cpu_s)
        while loaded.instance.alive and not operator.refusal():
            event = queue.take()
            if event is None:
                return
            self._map(operator, queue, loaded, event, listener, report)
            if turn.over:
                return

    @staticmethod
    def _put_away(operator: Operator, loaded: Loaded) -> None:
        queue = operator.mapping
        if loaded.instance.alive and queue is not None and queue.ready and not operator.refusal():
            operator.mapper = loaded
        else:
            operator.running.discard(loaded)
            loaded.instance.close()

    def _map(
        self,
        operator: Operator,
        queue: MapQueue,
        loaded: Loaded,
        event: MapEvent,
        listener: MapListener,
        report: MapReport,
    ) -> None:
        assert operator.spec is not None
        parent = event.traces[0] if event.traces else ""
        attributes: dict[str, str | int] = {
            "torpor.operator": operator.text,
            "torpor.watch": event.watch,
            "torpor.object": "/".join(event.key),
        }
        span = telemetry.start("map", parent=parent, links=event.traces[1:], attributes=attributes)
        trace = span.traceparent or parent
        loaded.calls.begin(f"{operator.epoch}-map-{event.sequence}", trace)
        message = abi.MapRequest(event.watch, event.type, event.object, event.old).encode()
        error = ""
        began_s, allowed_s = self._clock.monotonic_s(), operator.spec.limits.deadline_s
        try:
            raw = loaded.instance.map(message, deadline=Deadline.after(allowed_s))
            error, keys = _read(raw)
            if self._clock.monotonic_s() - began_s >= allowed_s and not error:
                # What its deadline has cut short, a sleep for one, looks to the guest as if it had ended.
                error = f"it took until its deadline, limits.deadline of {allowed_s:g} s"
            if operator.refusal():
                queue.give_back(event)  # its last calls may have been refused
            elif error:
                queue.failed(event)
            else:
                self._post(lambda: listener.mapped(operator, event, keys))
        except GuestStopped:
            queue.give_back(event)
            span.fail("stopped")
        except GuestFailed as exc:
            error = f"{type(exc).__name__}: {exc.reason}"
            queue.failed(event)
        except abi.MessageInvalid as exc:
            error = f"the guest's answer cannot be read: {exc}"
            queue.failed(event)
        except Exception as exc:
            log.exception("a mapping failed in the host", extra={"operator": operator.text})
            error = f"the host failed: {one_line(exc)}"
            queue.failed(event)
        finally:
            loaded.calls.begin("", "")
            report.mapped += 1
            if error:
                report.errors += 1
                report.last_error = (
                    f"mapping of {'/'.join(event.key)} (watches/{event.watch}): {shortened(error, 2000)}"
                )
                span.fail(error[:200])
            span.end()


class MappingOwner(Protocol):
    """What `Operators` does for it. Loop only."""

    def mark(
        self, operator: Operator, keys: Collection[Key], cause: Cause, sequence: int, traces: tuple[str, ...] = ()
    ) -> None:
        """Dirty from now on; wakes the operator."""

    def mapping_ended(self, operator: Operator, report: MapReport) -> None:
        """A turn is over, and whether another follows is settled."""


class Mappings:
    """On the loop: which operators map now. At most one worker an operator."""

    def __init__(
        self,
        *,
        workers: Workers,
        timers: Timers,
        clock: Clock,
        lock: threading.Lock,
        owner: MappingOwner,
    ) -> None:
        self.mapper: Mapper
        self.memory = MapMemory()
        self._workers = workers
        self._timers = timers
        self._clock = clock
        self._lock = lock
        self._owner = owner
        self._busy: dict[Operator, None] = {}

    def busy(self, operator: Operator) -> bool:
        """A worker has it, or is about to."""
        return operator in self._busy

    @property
    def instances(self) -> Sequence[Operator]:
        """Operators that have an instance for mapping."""
        return list(self._busy)

    # -- coming and going --------------------------------------------------------------------------------------------

    def replaced(self, operator: Operator, spec: OperatorSpec, kept: set[str]) -> None:
        """Another spec runs; `kept` are the subscriptions that go on. None of it maps now."""
        coded = {watch.name for watch in spec.watches if watch.coded}
        if not coded:
            self._forget(operator)
            return
        if operator.mapping is None:
            operator.mapping = MapQueue(self._lock, self.memory)
        operator.mapping.retain({_index(name) for name in coded & kept})
        operator.mapping.resume()
        self._start(operator)

    def hold(self, operator: Operator) -> None:
        """Nothing new is mapped, until `replaced`."""
        if operator.mapping is not None:
            operator.mapping.pause()

    def dropped(self, operator: Operator) -> None:
        """It is no longer this host's."""
        self.hold(operator)
        if operator.mapping is not None:
            operator.mapping.clear()
        self._timers.cancel(operator.map_timer)

    def _forget(self, operator: Operator) -> None:
        if operator.mapping is not None:
            operator.mapping.clear()
            operator.mapping = None
        self._timers.cancel(operator.map_timer)
        operator.map_timer = None

    # -- what happens ------------------------------------------------------------------------------------------------

    def event(self, operator: Operator, name: str, event: Event, cause: Cause, sequence: int) -> None:
        """A change that code is to map; `name` is the watch's."""
        queue = operator.mapping
        assert queue is not None
        key = Key(event.key.namespace, event.key.name)
        queue.add(
            MapEvent(
                watch=_index(name),
                key=key,
                type=_TYPES[event.type],
                object=event.object or _name_alone(key, event.uid),
                old=event.old_object,
                cause=cause,
                since_s=self._clock.monotonic_s(),
                since_unix_ns=self._clock.unix_ns(),
                sequence=sequence,
                traces=tuple(trace.traceparent for trace in event.traces if trace.traceparent),
            )
        )
        self._make_good(operator, queue)
        self._start(operator)

    def mapped(self, operator: Operator, event: MapEvent, keys: Sequence[Key]) -> None:
        queue = operator.mapping
        if queue is None or not queue.done(event):
            return
        if operator.queue.queued + len(keys) > max(_KEYS_MAX, 2 * len(operator.known)):
            log.warning("a mapping names too many keys: every primary is run", extra={"operator": operator.text})
            keys = operator.known.keys()
        self._owner.mark(operator, keys, event.cause, event.sequence, event.traces)

    def turn_ended(self, operator: Operator, report: MapReport) -> None:
        del self._busy[operator]
        queue = operator.mapping
        if report.last_error:
            log.warning("mapping failed: %s", report.last_error, extra={"operator": operator.text})
        if queue is not None:
            self._make_good(operator, queue)
            self._start(operator)
        self._owner.mapping_ended(operator, report)

    def _make_good(self, operator: Operator, queue: MapQueue) -> None:
        sequence = queue.take_given_up()
        if sequence is not None:
            log.warning("changes were not mapped: every primary is run instead", extra={"operator": operator.text})
            self._owner.mark(operator, operator.known.keys(), Cause.RESYNC, sequence)

    def _start(self, operator: Operator) -> None:
        queue = operator.mapping
        if queue is None or operator in self._busy:
            return
        if operator.mapper is not None:  # kept for this turn; also to be closed by it
            self._submit(operator)
        elif queue.rest_s:
            self._again_in(operator, queue.rest_s)
        elif queue.ready and operator.refusal():
            self._again_in(operator, _FENCE_AGAIN_S)
        elif queue.ready:
            self._submit(operator)

    def _submit(self, operator: Operator) -> None:
        self._busy[operator] = None
        self._workers.submit(lambda: self.mapper.turn(operator, self))

    def _again_in(self, operator: Operator, delay_s: float) -> None:
        if operator.gone or (operator.map_timer is not None and operator.map_timer.pending):
            return
        operator.map_timer = self._timers.after(delay_s, self._again, operator)

    def _again(self, operator: Operator) -> None:
        if operator.mapping is not None:
            operator.mapping.rested()
            self._start(operator)


def _read(raw: bytes) -> tuple[str, list[Key]]:
    """(error, keys); raises MessageInvalid."""
    error, pairs = abi.decode_map_result(raw)
    for namespace, name in pairs:
        if max(len(namespace), len(name)) > _NAME_LENGTH_MAX:
            raise abi.MessageInvalid(f"key {namespace[:40]}/{name[:40]}… is longer than any name")
    return error, [Key(namespace, name) for namespace, name in dict.fromkeys(pairs)]


def _index(name: str) -> int:
    """Of "watches/3"."""
    return int(name.partition("/")[2])


def _name_alone(key: Key, uid: str) -> bytes:
    """For a deletion of which nothing more is known."""
    metadata = {"name": key.name, "uid": uid, **({"namespace": key.namespace} if key.namespace else {})}
    return msgspec.json.encode({"metadata": metadata})
