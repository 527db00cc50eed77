"""What a worker does with an operator: load, drain the queue, give the instance back; and unload.

Runs on worker threads while they hold the processor's slot. Everything that happened comes back to the loop in one
report a turn. A failure of the guest (trap, timeout, exit, out of memory) costs its instance and delays its key; a
reconcile that was cut short because this host may no longer act counts as not run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from typing import Protocol

from torpor_services import telemetry
from torpor_services.clock import Clock
from torpor_services.errors import one_line, shortened

from torpor_host import abi
from torpor_host.failures import GuestFailed, GuestStopped, InstallFailed
from torpor_host.limits import Deadline
from torpor_host.operator_record import Loaded, Operator
from torpor_host.operator_spec import UnloadState
from torpor_host.read_ahead import ReadAhead
from torpor_host.snapshots import Expected, SnapshotImpossible, SnapshotUnusable
from torpor_host.turn_time import TurnTime
from torpor_host.work_queue import Cause, Work
from torpor_host.workers import Workers

log = logging.getLogger(__name__)

_REQUEUE_S_MAX = 366 * 86400.0
# A key that asks for itself at once, again and again, may not have the processor for good.
_REQUEUE_S_MIN = 0.1
_ERROR = 3  # the level of a guest's log line
_MEASURE_EVERY = 64  # reconciles between two looks at an instance's memory, 0.1 ms each


@dataclass(slots=True)
class TurnReport:
    """What a turn did. Times in seconds, 0 for none."""

    load_s: float = 0.0
    load_failure: str = ""
    image_lost: bool = False  # the module has to be installed again
    found_cold: bool = False
    cause: Cause | None = None  # of the first key
    since_unix_ns: int = 0
    entry_latency_s: float = 0.0
    reconciles: int = 0
    errors: int = 0
    last_error: str = ""
    crashes: int = 0  # in a row at its end, with those before it
    private_bytes: int = 0


@dataclass(slots=True)
class UnloadReport:
    loaded: bool
    seconds: float = 0.0
    snapshot_bytes: int = 0


class TurnListener(Protocol):
    """Told on the loop."""

    def turn_loaded(self, operator: Operator) -> None: ...

    def turn_ended(self, operator: Operator, report: TurnReport) -> None: ...

    def unload_ended(self, operator: Operator, report: UnloadReport) -> None: ...


class Reconciler:
    """`load` makes an instance; it raises GuestFailed, InstallFailed or SnapshotUnusable."""

    def __init__(
        self,
        *,
        load: Callable[[Operator, Expected | None], Loaded],
        workers: Workers,
        clock: Clock,
        post: Callable[[Callable[[], None]], None],
        listener: TurnListener,
        snapshot_folder: Path,
        read_ahead: Callable[[Operator], ReadAhead],
        cpu_s: Callable[[], float] = thread_time,
    ) -> None:
        self._load = load
        self._workers = workers
        self._clock = clock
        self._cpu_s = cpu_s
        self._post = post
        self._listener = listener
        self._snapshot_folder = snapshot_folder
        self._read_ahead = read_ahead

    # -- a turn ------------------------------------------------------------------------------------------------------

    def turn(self, operator: Operator) -> None:
        """On a worker."""
        report = TurnReport(crashes=operator.crashes)
        ahead: ReadAhead | None = None
        try:
            ahead = self._read_ahead(operator)
            ahead.fill()  # answered while the guest is woken
            loaded = self._acquire(operator, report)
            if loaded is not None:
                self._drain(operator, loaded, ahead, report)
        except Exception as exc:
            log.exception("a turn failed", extra={"operator": operator.text})
            report.load_failure = f"the host failed: {one_line(exc)}"
        finally:
            if ahead is not None:
                ahead.close()
        self._post(lambda: self._listener.turn_ended(operator, report))

    def _acquire(self, operator: Operator, report: TurnReport) -> Loaded | None:
        try:
            loaded = operator.instances.pop()
        except IndexError:
            pass
        else:
            operator.running.add(loaded)
            return loaded
        if operator.refusal():
            return None
        report.found_cold = True
        started_s = self._clock.monotonic_s()
        try:
            loaded = self._load_one(operator)
        except InstallFailed as exc:
            report.load_failure, report.image_lost = exc.reason, True
            return None
        except GuestFailed as exc:
            report.load_failure = exc.reason
            return None
        report.load_s = max(self._clock.monotonic_s() - started_s, 1e-9)
        operator.running.add(loaded)
        self._post(lambda: self._listener.turn_loaded(operator))
        return loaded

    def _load_one(self, operator: Operator) -> Loaded:
        snapshot, operator.snapshot = operator.snapshot, None
        if snapshot is not None:
            try:
                return self._load(operator, snapshot)
            except SnapshotUnusable as exc:
                log.warning("a snapshot was not used: %s", exc, extra={"operator": operator.text})
        return self._load(operator, None)

    def _drain(self, operator: Operator, loaded: Loaded, ahead: ReadAhead, report: TurnReport) -> None:
        turn = TurnTime(self._workers, self._clock.monotonic_s, self._cpu_s)
        loaded.calls.read_ahead = ahead
        try:
            while loaded.instance.alive and not operator.refusal():
                work = operator.queue.take()
                if work is None:
                    break
                ahead.begin(work)
                self._reconcile(operator, loaded, work, report)
                ahead.end()
                if turn.over:
                    break
            if loaded.instance.alive and (report.found_cold or operator.reconciles % _MEASURE_EVERY == 0):
                report.private_bytes = loaded.instance.private_bytes()
        finally:
            loaded.calls.read_ahead = None
            if loaded.instance.alive and not operator.gone:
                operator.instances.append(loaded)
            else:
                loaded.instance.close()
            operator.running.discard(loaded)

    def _reconcile(self, operator: Operator, loaded: Loaded, work: Work, report: TurnReport) -> None:
        assert operator.spec is not None
        parent = work.pending.traces[0] if work.pending.traces else ""
        number = operator.reconciles + report.reconciles
        self._note_entry(work, report, parent)
        newest = max(operator.own_writes.shown_version, _version_written(operator))
        operator.own_writes.began(work.key, work.pending.cause, self._clock.monotonic_s())
        span = telemetry.start(
            "reconcile",
            parent=parent,
            links=work.pending.traces[1:],
            attributes={
                "torpor.operator": operator.text,
                "torpor.key": "/".join(work.key),
                "torpor.cause": work.pending.cause.value,
                "torpor.attempt": work.attempt,
                "torpor.cold": report.found_cold and not report.reconciles,
            },
        )
        trace = span.traceparent or parent
        loaded.calls.begin(f"{operator.epoch}-{number}", trace)
        message = abi.ReconcileRequest(
            work.key.namespace, work.key.name, work.pending.cause.value, work.attempt, trace
        ).encode()
        error = ""
        began_s, allowed_s = self._clock.monotonic_s(), operator.spec.limits.deadline_s
        try:
            raw = loaded.instance.reconcile(message, deadline=Deadline.after(allowed_s))
            result = abi.decode_reconcile_result(raw)
            if self._clock.monotonic_s() - began_s >= allowed_s and not isinstance(result, abi.ReconcileFailed):
                # A sleep that its deadline has cut short looks to the guest as if it had run out.
                result = abi.ReconcileFailed(f"it took until its deadline, limits.deadline of {allowed_s:g} s")
            error = self._conclude(operator, work, result, report)
        except GuestStopped:
            operator.queue.give_back(work)
            span.fail("stopped")
        except GuestFailed as exc:
            error = self._failed(operator, work, f"{type(exc).__name__}: {exc.reason}")
            report.crashes += 1
        except abi.MessageInvalid as exc:
            error = self._failed(operator, work, f"the guest's answer cannot be read: {exc}")
            report.crashes += 1
            loaded.instance.stop("its answer cannot be read")
        except Exception as exc:
            log.exception("a reconcile failed in the host", extra={"operator": operator.text})
            error = self._failed(operator, work, f"the host failed: {one_line(exc)}")
        finally:
            if error:
                loaded.calls.log(_ERROR, f"{'/'.join(work.key)}: {error}")
            loaded.calls.begin("", "")
            wrote = _version_written(operator) > newest
            operator.own_writes.ended(work.key, self._clock.monotonic_s(), wrote=wrote)
            report.reconciles += 1
            if error:
                report.errors += 1
                report.last_error = f"{'/'.join(work.key)}: {error}"
                span.fail(error[:200])
            span.end()

    def _conclude(self, operator: Operator, work: Work, result: abi.ReconcileResult, report: TurnReport) -> str:
        """The error, empty if there was none."""
        report.crashes = 0
        if operator.refusal():
            # Its last calls may have been refused: whether it did what it says is not known.
            operator.queue.give_back(work)
            return ""
        match result:
            case abi.Done():
                operator.queue.succeeded(work)
                return ""
            case abi.RequeueAfter(milliseconds):
                after_s = min(max(milliseconds / 1000, _REQUEUE_S_MIN), _REQUEUE_S_MAX)
                operator.queue.requeue(work, after_s)
                return ""
            case abi.ReconcileFailed(message):
                return self._failed(operator, work, message)

    @staticmethod
    def _failed(operator: Operator, work: Work, error: str) -> str:
        if operator.refusal():
            operator.queue.give_back(work)
        else:
            operator.queue.failed(work)
        return shortened(error, 2000)

    def _note_entry(self, work: Work, report: TurnReport, parent: str) -> None:
        now_s, now_ns = self._clock.monotonic_s(), self._clock.unix_ns()
        first = report.cause is None
        if first:
            report.cause, report.since_unix_ns = work.pending.cause, work.pending.since_unix_ns
            report.entry_latency_s = max(now_s - work.pending.since_s, 0.0)
        if telemetry.enabled():
            loaded_ns = now_ns - round(report.load_s * 1e9) if first and report.found_cold else now_ns
            attributes = {"torpor.key": "/".join(work.key)}
            telemetry.record("queue wait", work.pending.since_unix_ns, loaded_ns, parent=parent, attributes=attributes)
            if loaded_ns != now_ns:
                telemetry.record("wake", loaded_ns, now_ns, parent=parent, attributes=attributes)

    # -- unloading ---------------------------------------------------------------------------------------------------

    def unload(self, operator: Operator) -> None:
        """On a worker: snapshot if wanted, then close, unless work has turned it round."""
        report = UnloadReport(loaded=False)
        started_s = self._clock.monotonic_s()
        try:
            report.snapshot_bytes = self._snapshot(operator)
            if operator.turn_round and operator.instances and not operator.gone:
                _discard(operator)
                report.loaded = True
            else:
                close_all(operator)
        except Exception:
            log.exception("unloading failed", extra={"operator": operator.text})
            close_all(operator)
        report.seconds = max(self._clock.monotonic_s() - started_s, 1e-9)
        self._post(lambda: self._listener.unload_ended(operator, report))

    def _snapshot(self, operator: Operator) -> int:
        spec = operator.spec
        if spec is None or spec.unload.state is not UnloadState.SNAPSHOT or operator.gone or operator.residency.held:
            return 0
        if len(operator.instances) != 1 or not operator.instances[0].instance.alive:
            return 0
        path = self._snapshot_folder / f"{operator.uid or '_'.join(operator.id)}.snapshot"
        try:
            with self._workers.blocking():  # it is written and fsynced
                size = operator.instances[0].instance.snapshot(path, epoch=operator.epoch, wake=operator.wakes)
        except (SnapshotImpossible, OSError) as exc:
            log.warning("no snapshot was taken: %s", one_line(exc), extra={"operator": operator.text})
            return 0
        operator.snapshot = Expected(path, operator.epoch, operator.wakes)
        return size


def _version_written(operator: Operator) -> int:
    """Of the operator's newest write to the kind of its primaries."""
    assert operator.spec is not None
    resource = operator.spec.primary.resource
    return operator.positions.version_written(resource.group, resource.resource)


def close_all(operator: Operator) -> None:
    """Closes every instance that no worker has."""
    while operator.instances:
        try:
            loaded = operator.instances.pop()
        except IndexError:
            return
        loaded.instance.close()


def _discard(operator: Operator) -> None:
    snapshot, operator.snapshot = operator.snapshot, None
    if snapshot is not None:
        snapshot.path.unlink(missing_ok=True)
