"""The stream to the scheduler: what happens here goes out, directives come in. Residency is advice.

Nothing waits for the scheduler. What it has not been told yet coalesces: the latest phase, timer and cost of each
operator, and the last 4,096 arrivals (the oldest are dropped; a forecast survives that). A directive is checked before
it counts: it must be about an operator of this host, about a time that makes sense, and based on a report that had the
operator's last event. After `away_s` without the scheduler the host decides alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
from torpor.scheduler.v1 import scheduler_pb2 as pb
from torpor.scheduler.v1 import scheduler_pb2_grpc
from torpor_services.backoff import Backoff
from torpor_services.clock import Clock

from torpor_host import operator_spec
from torpor_host.operator_record import Operator
from torpor_host.operator_spec import OperatorId, UnloadPolicy, UnloadState
from torpor_host.operators import Operators
from torpor_host.reconciler import TurnReport
from torpor_host.residency import Keep, Phase, UnloadAt
from torpor_host.timers import Timers
from torpor_host.work_queue import Cause

log = logging.getLogger(__name__)

ARRIVALS_MAX = 4096
_REPORT_EVERY_S = 0.02
_MEMORY_EVERY_S = 5.0
_CONNECTED_S_MIN = 2.0
_HORIZON_S = 30 * 86400.0  # a directive beyond this is a mistake

PHASES = {
    Phase.COLD: pb.COLD,
    Phase.LOADING: pb.LOADING,
    Phase.RESIDENT: pb.RESIDENT,
    Phase.RUNNING: pb.RUNNING,
    Phase.UNLOADING: pb.UNLOADING,
    Phase.FAILED: pb.FAILED,
}
_POLICIES = {
    UnloadPolicy.PREDICTIVE: pb.PREDICTIVE,
    UnloadPolicy.NEVER: pb.NEVER,
    UnloadPolicy.IDLE: pb.IDLE,
}
_CAUSES = {
    Cause.WATCH: pb.Arrival.WATCH,
    Cause.WAKE: pb.Arrival.WAKE,
    Cause.TIMER: pb.Arrival.TIMER,
    Cause.RETRY: pb.Arrival.RETRY,
    Cause.START: pb.Arrival.START,
    Cause.RESYNC: pb.Arrival.RESYNC,
}


class AssignmentListener(Protocol):
    """What `assignments.Assignments` does with directives about where operators run."""

    def assign(self, operator_id: OperatorId, epoch: int) -> None: ...

    def revoke(self, operator_id: OperatorId, epoch: int) -> None: ...

    def reconsider(self) -> None: ...


class SchedulerLink:
    """An `Observer`; `run` is its task. Without a channel it is never connected."""

    def __init__(
        self,
        channel: grpc.aio.Channel | None,
        *,
        host: str,
        clock: Clock,
        timers: Timers,
        operators: Operators,
        assignments: AssignmentListener,
        away_s: float,
        pressure: Path = Path("/proc/pressure"),
    ) -> None:
        self._channel = channel
        self._host = host
        self._clock = clock
        self._timers = timers
        self._operators = operators
        self._assignments = assignments
        self._away_s = away_s
        self._pressure = pressure
        self._incarnation = ""
        self._sequence = 0
        self._arrivals: deque[pb.Arrival] = deque(maxlen=ARRIVALS_MAX)
        self._timers_known: dict[tuple[OperatorId, str], pb.KnownTimer] = {}
        self._timers_sent: dict[tuple[OperatorId, str], int] = {}
        self._idle: dict[Operator, None] = {}
        self._changed: dict[Operator, int] = {}  # → when
        self._wake = asyncio.Event()
        self._connected = False
        self._connected_s = 0.0
        self._lost_s = clock.monotonic_s()
        self._call: Any = None
        self._streams = 0  # that have ended
        self._restarting = False
        self.refused = 0  # directives that were not followed

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def decides(self) -> bool:
        """Whether the scheduler places operators now; without it this host claims."""
        if self._channel is None:
            return False
        return self._connected or self._clock.monotonic_s() - self._lost_s < self._away_s

    def incarnation(self, name: str) -> None:
        """The Lease was acquired: reports begin anew under this name."""
        self._incarnation, self._sequence = name, 0
        if self._call is not None:
            self._restarting = True
            self._call.cancel()
        self._wake.set()

    # -- Observer ----------------------------------------------------------------------------------------------------

    # Only what happened is noted here, and messages are made of it when they are sent: meanwhile it happens again.
    # While nobody is connected only arrivals are noted, since the first report tells how everything stands.

    def phase_changed(self, operator: Operator) -> None:
        if self._connected:
            self._changed[operator] = self._clock.unix_ns()
            self._wake.set()

    def changed(self, operator: Operator, *, urgent: bool) -> None:
        """Nothing that decides residency."""

    def turn_began(self, operator: Operator, report: TurnReport) -> None:
        assert report.cause is not None
        operator.arrival_sequence = self._sequence + 1
        if self._channel is None:
            return
        self._arrivals.append(
            pb.Arrival(
                operator=_id(operator.id),
                unix_ns=report.since_unix_ns,
                cause=_CAUSES[report.cause],
                found_cold=report.found_cold,
                entry_latency_s=report.entry_latency_s,
            )
        )
        self._wake.set()

    def idle(self, operator: Operator) -> None:
        if self._connected:
            self._idle[operator] = None
            self._wake.set()

    def removed(self, operator: Operator) -> None:
        for name in ("next", "resync"):
            self._timers_known.pop((operator.id, name), None)
            self._timers_sent.pop((operator.id, name), None)
        self._idle.pop(operator, None)
        self.phase_changed(operator)

    # -- what is sent ------------------------------------------------------------------------------------------------

    def _change(self, operator: Operator, unix_ns: int) -> pb.ResidencyChange:
        change = pb.ResidencyChange(
            operator=_id(operator.id), phase=PHASES[operator.residency.phase], unix_ns=unix_ns, epoch=operator.epoch
        )
        if operator.gone:
            change.phase, change.gone = pb.COLD, True
            return change
        change.reason = operator.reason
        if operator.spec is not None:
            unload = operator.spec.unload
            change.policy = _POLICIES[unload.policy]
            change.latency_budget_s = unload.latency_budget_s
            change.idle_after_s = unload.idle_after_s
        return change

    def _cost(self, operator: Operator) -> pb.MeasuredCost:
        costs = operator.costs
        state_kept = operator.spec is not None and operator.spec.unload.state is UnloadState.SNAPSHOT
        return pb.MeasuredCost(
            operator=_id(operator.id),
            load_s=costs.load_s,
            unload_s=costs.unload_s,
            resident_bytes=costs.resident_bytes,
            state_kept=state_kept,
        )

    def _timers_of(self, operator: Operator) -> None:
        waiting = operator.queue.timers()
        earliest = min(waiting, key=lambda entry: entry[2], default=None)
        self._timer(operator.id, "next", None if earliest is None else (earliest[1], earliest[2]))
        resync = operator.resync_timer
        due = (Cause.RESYNC, resync.due_s) if resync is not None and resync.pending else None
        self._timer(operator.id, "resync", due)

    def _timer(self, operator_id: OperatorId, name: str, due: tuple[Cause, float] | None) -> None:
        key = (operator_id, name)
        unix_ns = 0 if due is None else self._unix_ns(due[1])
        # A timer that is where it was need not be told again; our two clocks drift by microseconds.
        if abs(self._timers_sent.get(key, 0) - unix_ns) < 1_000_000:
            return
        if unix_ns:
            self._timers_sent[key] = unix_ns
        else:
            del self._timers_sent[key]
        cause = pb.Arrival.CAUSE_UNSPECIFIED if due is None else _CAUSES[due[0]]
        self._timers_known[key] = pb.KnownTimer(operator=_id(operator_id), id=name, unix_ns=unix_ns, cause=cause)

    # -- the stream --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the stream, until cancelled."""
        if self._channel is None:
            return
        backoff = Backoff(self._clock, initial_s=0.2, max_s=5.0)
        self._timers.after(self._away_s + 0.01, self._check_away, self._lost_s)
        while True:
            while not self._incarnation:
                self._wake.clear()
                await self._wake.wait()
            try:
                await self._coordinate(backoff)
                problem = "the scheduler ended the stream"
            except grpc.aio.AioRpcError as exc:
                problem = f"{exc.code().name}: {exc.details()}"
            finally:
                self._disconnected()
            delay_s = backoff.next_delay_s()
            log.warning("the scheduler is away: %s", problem, extra={"retry_in_s": round(delay_s, 2)})
            await self._clock.sleep(delay_s)

    async def _coordinate(self, backoff: Backoff) -> None:
        assert self._channel is not None
        await self._channel.channel_ready()
        call = scheduler_pb2_grpc.SchedulerStub(self._channel).Coordinate(self._reports(self._incarnation))
        self._call = call
        try:
            self._connected = True
            self._connected_s = self._clock.monotonic_s()
            backoff.succeeded()
            self._assignments.reconsider()
            async for directive in call:
                self._follow(directive)
        except asyncio.CancelledError:
            if not self._restarting:
                raise
        finally:
            self._call, self._restarting = None, False
            call.cancel()
            # gRPC goes on asking the generator of a stream that the other end has ended: it must take nothing more.
            self._streams += 1
            self._wake.set()

    def _disconnected(self) -> None:
        now_s = self._clock.monotonic_s()
        # One that takes the stream and drops it again and again is away.
        if self._connected and now_s - self._connected_s >= _CONNECTED_S_MIN:
            self._lost_s = now_s
        self._connected = False
        self._timers.after(self._away_s + 0.01, self._check_away, self._lost_s)

    def _check_away(self, lost_s: float) -> None:
        if not self._connected and self._lost_s == lost_s:
            self._operators.scheduler_away()
            self._assignments.reconsider()

    async def _reports(self, incarnation: str) -> AsyncIterator[pb.HostReport]:
        """Of one stream; ends with it."""
        mine = self._streams
        hello = pb.HostReport(hello=self._hello(incarnation), memory=self._memory())
        yield self._seal(hello)
        memory_due_s = self._clock.monotonic_s() + _MEMORY_EVERY_S
        while incarnation == self._incarnation:
            await self._wake.wait()
            if mine == self._streams:
                await self._clock.sleep(_REPORT_EVERY_S)
            if mine != self._streams:
                return
            self._wake.clear()
            report = self._pending()
            if self._clock.monotonic_s() >= memory_due_s:
                report.memory.CopyFrom(self._memory())
                memory_due_s = self._clock.monotonic_s() + _MEMORY_EVERY_S
            if report.ByteSize():
                yield self._seal(report)

    def _pending(self) -> pb.HostReport:
        for operator in self._idle:
            self._timers_of(operator)
        report = pb.HostReport(
            arrivals=self._arrivals,
            timers=self._timers_known.values(),
            costs=[self._cost(operator) for operator in self._idle],
            changes=[self._change(operator, unix_ns) for operator, unix_ns in self._changed.items()],
        )
        self._arrivals.clear()
        self._timers_known.clear()
        self._idle.clear()
        self._changed.clear()
        return report

    def _seal(self, report: pb.HostReport) -> pb.HostReport:
        self._sequence += 1
        report.sequence = self._sequence
        report.sent_unix_ns = self._clock.unix_ns()
        return report

    def _hello(self, incarnation: str) -> pb.Hello:
        self._timers_sent.clear()
        self._changed.clear()
        residencies, modules = [], set[str]()
        for operator in self._operators.all():
            residency = pb.Residency(
                operator=_id(operator.id), epoch=operator.epoch, phase=PHASES[operator.residency.phase]
            )
            if operator.spec is not None:
                residency.policy = _POLICIES[operator.spec.unload.policy]
                residency.latency_budget_s = operator.spec.unload.latency_budget_s
                residency.idle_after_s = operator.spec.unload.idle_after_s
            if operator.installed is not None:
                modules.add(operator.installed.sha256)
            residencies.append(residency)
            self._idle[operator] = None  # costs and timers follow in the first report
        self._wake.set()
        return pb.Hello(
            host=self._host,
            incarnation=incarnation,
            residencies=residencies,
            memory_budget_bytes=self._operators.memory_budget_bytes,
            modules=sorted(modules),
        )

    def _memory(self) -> pb.Memory:
        return pb.Memory(
            used_bytes=self._operators.used_bytes,
            budget_bytes=self._operators.memory_budget_bytes,
            memory_pressure_some_10s=_pressure(self._pressure / "memory"),
            io_pressure_some_10s=_pressure(self._pressure / "io"),
        )

    # -- directives --------------------------------------------------------------------------------------------------

    def _follow(self, directive: pb.Directive) -> None:
        problem = self._obey(directive)
        if problem:
            self.refused += 1
            log.info(
                "a directive was not followed: %s",
                problem,
                extra={"operator": f"{directive.operator.namespace}/{directive.operator.name}"[:200]},
            )

    def _obey(self, directive: pb.Directive) -> str:
        """Follows it, or says why not."""
        operator_id = operator_spec.operator_id(directive.operator.namespace, directive.operator.name)
        kind = directive.WhichOneof("directive")
        match kind:
            case "assign":
                self._assignments.assign(operator_id, directive.assign.epoch)
                return ""
            case "revoke":
                self._assignments.revoke(operator_id, directive.revoke.epoch)
                return ""
        operator = self._operators.get(operator_id)
        if operator is None:
            return "this host does not run it"
        if directive.based_on_sequence > self._sequence:
            return f"it is based on report {directive.based_on_sequence}, which was not sent"
        if directive.based_on_sequence < operator.arrival_sequence:
            return "something has happened since"
        if operator.queue.running or operator.residency.turns:
            return "it runs"
        match kind:
            case "keep":
                self._operators.advise(operator, Keep(), directive.reason[:500])
            case "unload_at":
                at_s = self._time_s(directive.unload_at.unix_ns)
                if at_s is None:
                    return f"its time {directive.unload_at.unix_ns} makes no sense"
                self._operators.advise(operator, UnloadAt(at_s), directive.reason[:500])
            case "preload_at":
                at_s, until_s = self._time_s(directive.preload_at.unix_ns), 0.0
                if directive.preload_at.until_unix_ns:
                    until_s = self._time_s(directive.preload_at.until_unix_ns) or -1.0
                if at_s is None or until_s < 0 or (until_s and until_s < at_s):
                    return "its times make no sense"
                self._operators.advise_preload(operator, at_s, until_s, directive.reason[:500])
            case _:
                return "it is of a kind unknown here"
        return ""

    def _time_s(self, unix_ns: int) -> float | None:
        """On the monotonic clock; None if it cannot be meant. 0 is now."""
        now_s = self._clock.monotonic_s()
        if unix_ns == 0:
            return now_s
        delay_s = (unix_ns - self._clock.unix_ns()) / 1e9
        if unix_ns < 0 or delay_s > _HORIZON_S or delay_s < -_HORIZON_S:
            return None
        return now_s + delay_s

    def _unix_ns(self, due_s: float) -> int:
        return self._clock.unix_ns() + round((due_s - self._clock.monotonic_s()) * 1e9)


def _id(operator_id: OperatorId) -> pb.OperatorId:
    return pb.OperatorId(namespace=operator_id[0], name=operator_id[1])


def _pressure(path: Path) -> float:
    """`some avg10` in percent; 0 where the kernel does not say."""
    try:
        fields = path.read_text().split("\n", 1)[0].split()
        return float(next(field for field in fields if field.startswith("avg10=")).removeprefix("avg10="))
    except (OSError, StopIteration, ValueError):
        return 0.0
