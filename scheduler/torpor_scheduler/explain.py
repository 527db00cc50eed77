"""Answers to "why": a decision with every figure behind it, and the distribution of the next gap."""

from __future__ import annotations

from torpor.scheduler.v1 import scheduler_pb2 as pb

from torpor_scheduler.planner import Decision, OperatorRecord, Planner, forecast

_POLICIES: dict[int, str] = {pb.NEVER: "never unload", pb.IDLE: "idle"}


def explain(decision: Decision, record: OperatorRecord, host: str, epoch: int) -> pb.ExplainResponse:
    """The decision as the contract has it."""
    response = pb.ExplainResponse(
        sentence=f"{decision.operator[0]}/{decision.operator[1]} {decision.sentence}",
        policy=_POLICIES.get(record.policy, "histogram plan"),
        decided_unix_ns=decision.decided_ns,
        directive=decision.directive,
        host=host,
        epoch=epoch,
    )
    response.figures.extend(_figures(decision, record))
    if decision.plan is not None and decision.costs is not None:
        start_ns = decision.decided_ns - round(decision.gap_s * 1e9)
        for start_s, end_s in decision.plan.resident:
            window = response.windows.add(from_unix_ns=start_ns + round(start_s * 1e9))
            if end_s != float("inf"):
                window.to_unix_ns = start_ns + round(end_s * 1e9)
        price = decision.price
        response.alternatives.add(name="in memory now", expected_cost=decision.plan.cost_on / price)
        unloaded = decision.plan.cost_off + decision.costs.unload
        response.alternatives.add(name="unloaded now", expected_cost=unloaded / price)
    return response


def _figures(decision: Decision, record: OperatorRecord) -> list[pb.Figure]:
    rows = [
        ("price", decision.price, "s of work per byte and s"),
        ("resident memory", record.resident_bytes, "bytes"),
        ("load time", record.load_s, "s"),
        ("unload time", record.unload_s, "s"),
        ("latency budget", record.latency_budget_s, "s"),
        ("gaps learned", record.gaps.observed, ""),
        ("events seen", record.events, ""),
        ("late events", record.late, ""),
        ("time since the last event", decision.gap_s, "s"),
    ]
    if decision.known_end_s is not None:
        rows.append(("next known timer in", decision.known_end_s - decision.gap_s, "s"))
    if decision.costs is not None:
        rows.append(("break-even", decision.costs.break_even_s, "s"))
    return [pb.Figure(name=name, value=value, unit=unit) for name, value, unit in rows]


def forecast_response(planner: Planner, record: OperatorRecord, now_ns: int) -> pb.ForecastResponse:
    """The chances of the next event from outside, per bin, and the known timers."""
    response = pb.ForecastResponse(from_unix_ns=now_ns)
    total, median_s = 0.0, None
    for from_s, to_s, probability in forecast(record, planner.prior, now_ns):
        response.bins.add(from_s=from_s, to_s=to_s, probability=probability)
        total += probability
        if median_s is None and total >= 0.5:
            median_s = (from_s + to_s) / 2
    for name, at_ns in sorted(record.timers.items(), key=lambda item: item[1]):
        if at_ns > now_ns:
            response.timers.add(id=name, unix_ns=at_ns, cause=pb.Arrival.TIMER)
    expected = [now_ns + round(median_s * 1e9)] if median_s is not None else []
    expected += [timer.unix_ns for timer in response.timers[:1]]
    response.next_expected_unix_ns = min(expected, default=0)
    return response
