"""Decides for one operator at a time: in memory now, and when that changes.

Holds what is known of each operator (its gaps, timers, measured costs, what the host said) and turns it into a
`Decision`. Pure: times come in as nanoseconds since the epoch, nothing is sent from here. Declared wake times are
planned for, never learned: the hazard is that of events from outside alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from torpor.scheduler.v1 import scheduler_pb2 as pb

from torpor_scheduler import hazard
from torpor_scheduler.arrivals import GapHistogram
from torpor_scheduler.bins import EDGES_S
from torpor_scheduler.hazard import Costs, Plan
from torpor_scheduler.price import Price

OperatorKey = tuple[str, str]

# Events that come from outside. Timers are known; own writes are echoes; retries and resyncs are the host's own doing.
EXTERNAL = frozenset({pb.Arrival.WATCH, pb.Arrival.WAKE})
# A late event is worth this many loads: the ratio W : R : P = 1 : 1 : 8 of the published measurements.
LATE_PER_LOAD = 8.0
# Before the host has measured: a Python guest, by `make bench NAME=wake`.
LOAD_S, UNLOAD_S, RESIDENT_BYTES = 0.001, 0.0005, 512 * 1024
TIMERS_MAX = 4096  # a host that reports more known timers an operator keeps its nearest ones itself
_FAR_FUTURE_NS = 400 * 86_400 * 10**9


@dataclass(slots=True)
class OperatorRecord:
    """What the scheduler knows of one operator."""

    gaps: GapHistogram = field(default_factory=GapHistogram)
    timers: dict[str, int] = field(default_factory=dict)  # id → unix_ns
    load_s: float = LOAD_S
    unload_s: float = UNLOAD_S
    resident_bytes: int = RESIDENT_BYTES
    state_kept: bool = False
    phase: pb.Phase.ValueType = pb.COLD
    policy: pb.UnloadPolicy.ValueType = pb.PREDICTIVE
    idle_after_s: float = 5.0
    latency_budget_s: float = 0.01
    gap_start_ns: int = 0  # of the gap that is open; 0: none was seen yet
    last_event_ns: int = 0
    events: int = 0
    late: int = 0

    @property
    def resident(self) -> bool:
        return self.phase in (pb.LOADING, pb.RESIDENT, pb.RUNNING)

    def next_timer_ns(self, now_ns: int) -> int | None:
        return min((at for at in self.timers.values() if at > now_ns), default=None)


@dataclass(frozen=True, slots=True)
class Order:
    """What a host is to do with an operator. In place of the message, which is three times the size."""

    kind: Literal["keep", "unload_at", "preload_at"]
    at_ns: int = 0
    until_ns: int = 0  # of a preload; 0: for good


KEEP = Order("keep")


@dataclass(frozen=True, slots=True)
class Decision:
    """What the host is told, and why."""

    operator: OperatorKey
    decided_ns: int
    order: Order
    plan: Plan | None
    costs: Costs | None
    price: float
    gap_s: float
    known_end_s: float | None
    sentence: str

    @property
    def directive(self) -> pb.Directive:
        """The order as the contract has it."""
        operator = pb.OperatorId(namespace=self.operator[0], name=self.operator[1])
        directive = pb.Directive(operator=operator, reason=self.sentence)
        match self.order:
            case Order("keep"):
                directive.keep.SetInParent()
            case Order("unload_at", at_ns):
                directive.unload_at.unix_ns = at_ns
            case Order("preload_at", at_ns, until_ns):
                directive.preload_at.unix_ns, directive.preload_at.until_unix_ns = at_ns, until_ns
        return directive


class Planner:
    """All operators, the pooled prior, and the price of memory on their host."""

    def __init__(self, price: Price) -> None:
        self.price = price
        self.prior = GapHistogram()
        self.operators: dict[OperatorKey, OperatorRecord] = {}

    def record(self, key: OperatorKey) -> OperatorRecord:
        return self.operators.setdefault(key, OperatorRecord())

    def forget(self, key: OperatorKey) -> None:
        self.operators.pop(key, None)

    def observe(self, arrival: pb.Arrival, now_ns: int) -> None:
        """An event: closes the open gap. Times in the future or before the last event count as now and as no gap."""
        record = self.record(key_of(arrival.operator))
        at_ns = min(arrival.unix_ns, now_ns) if arrival.unix_ns > 0 else now_ns
        record.events += 1
        if arrival.found_cold and arrival.entry_latency_s > record.latency_budget_s:
            record.late += 1
        if arrival.cause == pb.Arrival.OWN_WRITE:
            return
        if record.gap_start_ns and at_ns >= record.gap_start_ns:
            gap_s = (at_ns - record.gap_start_ns) / 1e9
            external = arrival.cause in EXTERNAL
            record.gaps.add(gap_s, censored=not external)
            self.prior.add(gap_s, censored=not external)
        record.gap_start_ns = record.last_event_ns = max(at_ns, record.last_event_ns)

    def set_timer(self, timer: pb.KnownTimer, now_ns: int) -> None:
        """Adds, moves or removes a known wake time; impossible ones are dropped."""
        record = self.record(key_of(timer.operator))
        if timer.unix_ns <= 0 or timer.unix_ns > now_ns + _FAR_FUTURE_NS:
            record.timers.pop(timer.id, None)
        elif len(record.timers) < TIMERS_MAX or timer.id in record.timers:
            record.timers[timer.id] = timer.unix_ns

    def measure(self, cost: pb.MeasuredCost) -> None:
        """Takes over measured costs; nonsense (negative, infinite, NaN) is ignored."""
        record = self.record(key_of(cost.operator))
        if 0 < cost.load_s < 600:
            record.load_s += 0.2 * (cost.load_s - record.load_s)
        if 0 < cost.unload_s < 600:
            record.unload_s += 0.2 * (cost.unload_s - record.unload_s)
        if 0 < cost.resident_bytes < 1 << 40:
            record.resident_bytes = cost.resident_bytes
        record.state_kept = cost.state_kept

    def costs(self, record: OperatorRecord) -> Costs:
        """In seconds of work: the price makes memory comparable with them."""
        return Costs(
            rent=self.price.per_byte_s * record.resident_bytes,
            unload=record.unload_s,
            load=record.load_s,
            late=LATE_PER_LOAD * record.load_s,
            load_s=record.load_s,
        )

    def decide(self, key: OperatorKey, now_ns: int) -> Decision:
        """What should happen to the operator from now on if nothing comes."""
        record = self.record(key)
        if record.policy == pb.NEVER:
            return self._fixed(key, KEEP, now_ns, "its policy is never to unload")
        if record.policy == pb.IDLE:
            at_ns = max(now_ns, (record.last_event_ns or now_ns) + round(record.idle_after_s * 1e9))
            sentence = sys.intern(f"its policy is to unload after {record.idle_after_s:g} s of idleness")
            return self._fixed(key, Order("unload_at", at_ns), now_ns, sentence)
        return self._planned(key, record, now_ns)

    def _fixed(self, key: OperatorKey, order: Order, now_ns: int, sentence: str) -> Decision:
        return Decision(key, now_ns, order, None, None, self.price.per_byte_s, 0.0, None, sentence)

    def _planned(self, key: OperatorKey, record: OperatorRecord, now_ns: int) -> Decision:
        start_ns = record.gap_start_ns or now_ns
        gap_s = max(0.0, (now_ns - start_ns) / 1e9)
        timer_ns = record.next_timer_ns(now_ns)
        known_end_s = None if timer_ns is None else max(gap_s, (timer_ns - start_ns) / 1e9)
        costs = self.costs(record)
        parts = hazard.bins(record.gaps.hazards(self.prior), known_end_s, record.load_s)
        plan = hazard.plan(parts, costs, elapsed_s=gap_s, resident=record.resident)
        order = _order(plan, gap_s, start_ns, now_ns, record.resident)
        sentence = _sentence(plan, gap_s, known_end_s, costs, record)
        return Decision(key, now_ns, order, plan, costs, self.price.per_byte_s, gap_s, known_end_s, sentence)


def key_of(operator: pb.OperatorId) -> OperatorKey:
    """Of texts that are there once: several dictionaries have an operator's key for as long as it lives."""
    return sys.intern(operator.namespace), sys.intern(operator.name)


def forecast(record: OperatorRecord, prior: GapHistogram, now_ns: int) -> Iterable[tuple[float, float, float]]:
    """(from, to, chance) in seconds from now, of the next event from outside; what is missing to 1 lies beyond."""
    gap_s = max(0.0, (now_ns - record.gap_start_ns) / 1e9) if record.gap_start_ns else 0.0
    survives = 1.0
    for k, chance in enumerate(record.gaps.hazards(prior)):
        start = EDGES_S[k]
        end = EDGES_S[k + 1] if k + 1 < len(EDGES_S) else start
        if end <= gap_s:
            continue
        if chance > 0:
            yield max(0.0, start - gap_s), end - gap_s, survives * chance
            survives *= 1 - chance


def _order(plan: Plan, gap_s: float, start_ns: int, now_ns: int, resident: bool) -> Order:
    change_s = plan.next_change_s(gap_s)
    change_ns = 0 if change_s == float("inf") else max(now_ns, start_ns + round(change_s * 1e9))
    if plan.resident_at(gap_s):
        if not change_ns:
            return KEEP
        return Order("unload_at", change_ns)
    if resident or not change_ns:
        # In memory but not worth it, or nothing to come: the load that a later window asks for is sent once it is out.
        return Order("unload_at", now_ns)
    until_s = plan.next_change_s(change_s)
    until_ns = 0 if until_s == float("inf") else start_ns + round(until_s * 1e9)
    return Order("preload_at", change_ns, until_ns)


def _sentence(plan: Plan, gap_s: float, known_end_s: float | None, costs: Costs, record: OperatorRecord) -> str:
    known = f"a timer is known in {known_end_s - gap_s:.3g} s" if known_end_s is not None else "no timer is known"
    seen = f"{record.gaps.observed:.0f} gaps were learned"
    pays = f"memory pays for at most {costs.break_even_s:.3g} s of waiting"
    change_s = plan.next_change_s(gap_s) - gap_s
    if plan.resident_at(gap_s):
        stays = "for good" if change_s == float("inf") else f"for {change_s:.3g} s more"
        return f"stays in memory {stays}: {known}, {seen}, {pays}"
    back = "until an event" if change_s == float("inf") else f"and is loaded ahead in {change_s:.3g} s"
    return f"sleeps {back}: {known}, {seen}, {pays}"
