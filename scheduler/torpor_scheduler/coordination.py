"""The streams to hosts: reports come in, directives go out.

One `HostSession` a connected host. Directives wait in a map, newest per operator, so that a host that does not read
costs a bounded amount and never delays another. All times of a session are on its host's clock; `skew_ns` is what the
scheduler's clock is ahead of it. Repeated reports (a reconnect sends the last one again) are known by their sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from torpor.scheduler.v1 import scheduler_pb2 as pb
from torpor_services.clock import Clock

from torpor_scheduler.planner import Decision, OperatorKey, Order, Planner, key_of
from torpor_scheduler.price import Price

log = logging.getLogger(__name__)

PRICE_INTERVAL_S = 2.0
_IDLE_PHASES = frozenset({pb.RESIDENT, pb.COLD})
# A directive that moves by less changes nothing for the host.
_SAME_WITHIN_NS = 2_000_000


class HostSession:
    """One incarnation of a host, as long as its stream lasts."""

    def __init__(self, hello: pb.Hello, planner: Planner, clock: Clock) -> None:
        self.host = hello.host
        self.incarnation = hello.incarnation
        self.running: dict[OperatorKey, int] = {}  # operator → epoch
        self.last_sequence = 0
        self.decisions: dict[OperatorKey, Decision] = {}
        self._planner = planner
        self._clock = clock
        self._skew_ns = 0
        self._budget_bytes = hello.memory_budget_bytes
        self._used_bytes = 0
        self._pressure_percent = 0.0
        self._price_updated_s = clock.monotonic_s()
        self._outbox: dict[tuple[OperatorKey, str], pb.Directive] = {}
        self._sent: dict[OperatorKey, Order] = {}
        self._wakeup = asyncio.Event()
        self._closed = False
        for residency in hello.residencies:
            self._adopt(residency)

    def now_ns(self) -> int:
        """Now, on the host's clock."""
        return self._clock.unix_ns() - self._skew_ns

    def apply(self, report: pb.HostReport) -> None:
        """Takes a report over and plans anew what it concerns."""
        if report.sequence <= self.last_sequence and report.sequence:
            return
        self.last_sequence = report.sequence
        if report.sent_unix_ns > 0:
            self._skew_ns = self._clock.unix_ns() - report.sent_unix_ns
        now_ns, touched = self.now_ns(), set[OperatorKey]()
        for arrival in report.arrivals:
            self._planner.observe(arrival, now_ns)
        for timer in report.timers:
            self._planner.set_timer(timer, now_ns)
            touched.add(key_of(timer.operator))
        for cost in report.costs:
            self._planner.measure(cost)
        for change in report.changes:
            self._change(change)
            touched.add(key_of(change.operator))
        if report.HasField("memory"):
            self._memory(report.memory)
        self.plan(touched)

    def plan(self, operators: Iterable[OperatorKey]) -> None:
        """Decides for those that are idle and queues what is new."""
        for key in operators:
            record = self._planner.operators.get(key)
            if record is None or key not in self.running or record.phase not in _IDLE_PHASES:
                continue
            decision = self._planner.decide(key, self.now_ns())
            self.decisions[key] = decision
            if not _same(self._sent.get(key), decision.order):
                self._sent[key] = decision.order
                directive = decision.directive
                directive.based_on_sequence = self.last_sequence
                self._send((key, "residency"), directive)

    def assign(self, key: OperatorKey, epoch: int) -> None:
        """Tells the host that it now runs the operator."""
        self.running[key] = epoch
        operator = pb.OperatorId(namespace=key[0], name=key[1])
        self._send((key, "assignment"), pb.Directive(operator=operator, assign=pb.Assign(epoch=epoch)))

    def revoke(self, key: OperatorKey, epoch: int) -> None:
        self.running.pop(key, None)
        operator = pb.OperatorId(namespace=key[0], name=key[1])
        self._send((key, "assignment"), pb.Directive(operator=operator, revoke=pb.Revoke(epoch=epoch)))

    def tick(self) -> None:
        """Moves the price by the memory last reported; plans everything anew when it moved by a tenth."""
        now_s = self._clock.monotonic_s()
        elapsed_s, self._price_updated_s = now_s - self._price_updated_s, now_s
        before = self._planner.price.per_byte_s
        after = self._planner.price.update(self._used_bytes, self._budget_bytes, elapsed_s, self._pressure_percent)
        if not 0.9 < after / before < 1.1:
            self.plan(list(self.running))

    def close(self) -> None:
        self._closed = True
        self._wakeup.set()

    async def directives(self) -> AsyncIterator[pb.Directive]:
        """What goes out, until `close`."""
        while True:
            while self._outbox:
                outbox, self._outbox = self._outbox, {}
                for directive in outbox.values():
                    yield directive
            if self._closed:
                return
            self._wakeup.clear()
            await self._wakeup.wait()

    def _send(self, slot: tuple[OperatorKey, str], directive: pb.Directive) -> None:
        self._outbox[slot] = directive
        self._wakeup.set()

    def _adopt(self, residency: pb.Residency) -> None:
        key = key_of(residency.operator)
        self.running[key] = residency.epoch
        record = self._planner.record(key)
        record.phase = residency.phase
        record.policy = residency.policy or pb.PREDICTIVE
        record.latency_budget_s = residency.latency_budget_s or record.latency_budget_s
        record.idle_after_s = residency.idle_after_s or record.idle_after_s

    def _change(self, change: pb.ResidencyChange) -> None:
        key = key_of(change.operator)
        if change.gone:
            self.running.pop(key, None)
            self._sent.pop(key, None)
            self.decisions.pop(key, None)
            return
        record = self._planner.record(key)
        was_running = record.phase == pb.RUNNING
        record.phase = change.phase
        record.policy = change.policy or record.policy
        record.latency_budget_s = change.latency_budget_s or record.latency_budget_s
        record.idle_after_s = change.idle_after_s or record.idle_after_s
        if change.epoch:
            self.running[key] = change.epoch
        if was_running and change.phase == pb.RESIDENT:
            record.gap_start_ns = min(max(change.unix_ns, record.gap_start_ns), self.now_ns())
        if change.phase not in _IDLE_PHASES:
            self._sent.pop(key, None)  # what was asked of the last idle time is void

    def _memory(self, memory: pb.Memory) -> None:
        self._used_bytes = memory.used_bytes
        self._budget_bytes = memory.budget_bytes or self._budget_bytes
        self._pressure_percent = memory.memory_pressure_some_10s


class Coordinator:
    """Every connected host, and the planner of each. A host's experience of an operator stays with the operator."""

    def __init__(self, clock: Clock, on_hosts_changed: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._on_hosts_changed = on_hosts_changed
        self.planner = Planner(Price())
        self.sessions: dict[str, HostSession] = {}

    def connect(self, hello: pb.Hello) -> HostSession:
        """A new stream of a host replaces its old one."""
        old = self.sessions.pop(hello.host, None)
        if old is not None:
            old.close()
        session = HostSession(hello, self.planner, self._clock)
        self.sessions[hello.host] = session
        log.info("host connected", extra={"host": hello.host, "operators": len(session.running)})
        self._on_hosts_changed()
        return session

    def disconnect(self, session: HostSession) -> None:
        session.close()
        if self.sessions.get(session.host) is session:
            del self.sessions[session.host]
            log.info("host disconnected", extra={"host": session.host})
            self._on_hosts_changed()

    def now_ns(self) -> int:
        return self._clock.unix_ns()

    def session_of(self, key: OperatorKey) -> HostSession | None:
        return next((session for session in self.sessions.values() if key in session.running), None)

    async def run(self) -> None:
        """Keeps the price, until cancelled."""
        while True:
            await self._clock.sleep(PRICE_INTERVAL_S)
            for session in list(self.sessions.values()):
                session.tick()


def _same(old: Order | None, new: Order) -> bool:
    """Whether the host would do the same; reasons and small shifts in time do not count."""
    if old is None or old.kind != new.kind:
        return False
    shift_ns = max(abs(old.at_ns - new.at_ns), abs(old.until_ns - new.until_ns))
    return shift_ns <= _SAME_WITHIN_NS
