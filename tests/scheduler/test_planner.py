"""From reports to directives for one operator."""

import pytest
from torpor.scheduler.v1 import scheduler_pb2 as pb
from torpor_scheduler.planner import Planner, forecast
from torpor_scheduler.price import Price

KEY = ("default", "op")
OPERATOR = pb.OperatorId(namespace="default", name="op")
S = 10**9
START = 1_700_000_000 * S


def planner(price_per_byte_s=2e-10):
    return Planner(Price(per_byte_s=price_per_byte_s))


def arrive(planner, at_ns, cause=pb.Arrival.WATCH, now_ns=None, **extra):
    arrival = pb.Arrival(operator=OPERATOR, unix_ns=at_ns, cause=cause, **extra)
    planner.observe(arrival, now_ns or at_ns)


def every(planner, seconds, count):
    for k in range(count):
        arrive(planner, START + round(k * seconds * S))
    return START + round((count - 1) * seconds * S)


def decide(planner, now_ns, phase=pb.RESIDENT):
    planner.record(KEY).phase = phase
    return planner.decide(KEY, now_ns).directive


def test_frequent_events_keep_an_operator_in_memory_past_its_usual_gap():
    subject = planner()
    now = every(subject, 1.0, 100)
    directive = decide(subject, now)
    assert directive.WhichOneof("directive") == "unload_at" and directive.unload_at.unix_ns >= now + 1.0 * S


def test_rare_events_unload_at_once_and_load_ahead_of_the_next():
    subject = planner(price_per_byte_s=2e-8)
    now = every(subject, 300.0, 100)
    assert decide(subject, now).unload_at.unix_ns == now
    directive = decide(subject, now, pb.COLD)
    assert directive.WhichOneof("directive") == "unload_at"  # a 12 % bin of 300 s is dearer than being late


def test_a_known_timer_is_loaded_for_ahead_of_time():
    subject = planner(price_per_byte_s=1e-9)
    arrive(subject, START)
    due = START + 600 * S
    subject.set_timer(pb.KnownTimer(operator=OPERATOR, id="requeue", unix_ns=due), START)
    directive = decide(subject, START, pb.COLD)
    assert due - 20_000_000 < directive.preload_at.unix_ns < due
    assert "a timer is known in 600 s" in directive.reason


def test_a_timer_is_replaced_and_removed_by_its_id():
    subject = planner()
    for at_ns in (START + 5 * S, START + 9 * S):
        subject.set_timer(pb.KnownTimer(operator=OPERATOR, id="a", unix_ns=at_ns), START)
    assert subject.record(KEY).next_timer_ns(START) == START + 9 * S
    subject.set_timer(pb.KnownTimer(operator=OPERATOR, id="a"), START)
    assert subject.record(KEY).next_timer_ns(START) is None


def test_timers_and_own_writes_are_not_learned_as_events():
    subject = planner()
    for k in range(50):
        arrive(subject, START + k * 5 * S, pb.Arrival.TIMER)
        arrive(subject, START + k * 5 * S + 1, pb.Arrival.OWN_WRITE)
    assert subject.record(KEY).gaps.observed == 0


def test_policies_of_the_object_win():
    subject = planner()
    subject.record(KEY).policy = pb.NEVER
    assert decide(subject, START).HasField("keep")
    subject.record(KEY).policy = pb.IDLE
    subject.record(KEY).idle_after_s = 7
    arrive(subject, START)
    assert decide(subject, START).unload_at.unix_ns == START + 7 * S


@pytest.mark.parametrize("at_ns", [-5, 0, START + 10**18])
def test_impossible_times_neither_raise_nor_teach(at_ns):
    subject = planner()
    arrive(subject, START)
    arrive(subject, at_ns, now_ns=START + S)
    subject.set_timer(pb.KnownTimer(operator=OPERATOR, id="x", unix_ns=at_ns), START)
    assert decide(subject, START + S).WhichOneof("directive")
    assert subject.record(KEY).next_timer_ns(START) is None
    assert subject.record(KEY).gap_start_ns <= START + S


def test_measured_nonsense_is_ignored():
    subject = planner()
    before = subject.record(KEY).load_s
    for bad in (-1.0, float("nan"), float("inf"), 1e9):
        subject.measure(pb.MeasuredCost(operator=OPERATOR, load_s=bad, unload_s=bad))
    assert subject.record(KEY).load_s == before


def test_late_events_are_counted_against_the_operators_own_budget():
    subject = planner()
    subject.record(KEY).latency_budget_s = 0.01
    arrive(subject, START, found_cold=True, entry_latency_s=0.02)
    arrive(subject, START + S, found_cold=True, entry_latency_s=0.005)
    assert subject.record(KEY).late == 1


def test_the_forecast_of_a_steady_operator_is_its_period():
    subject = planner()
    now = every(subject, 10.0, 200)
    likely = max(forecast(subject.record(KEY), subject.prior, now), key=lambda row: row[2])
    assert likely[0] <= 10.0 <= likely[1] and likely[2] > 0.9


def test_memory_over_the_budget_makes_memory_dearer_until_it_fits():
    price = Price()
    start = price.per_byte_s
    for _ in range(5):
        price.update(150, 100, 2.0)
    high = price.per_byte_s
    assert high > 2 * start
    for _ in range(200):
        price.update(10, 100, 2.0)
    assert price.per_byte_s == price.minimum


def test_a_tiny_guest_may_stay_for_a_minute_and_a_half_and_costs_no_more_than_a_python_guest_for_three_seconds():
    subject = planner(Price().minimum)
    record = subject.record(KEY)
    record.load_s, record.unload_s, record.resident_bytes = 0.000118, 0.0005, 16 * 1024
    costs = subject.costs(record)
    assert (costs.unload + costs.load + costs.late) / costs.rent == pytest.approx(95, abs=1)
    assert 95 * record.resident_bytes < 3.2 * 512 * 1024


def test_pressure_of_the_kernel_raises_the_price_even_below_the_budget():
    price = Price()
    price.update(10, 100, 2.0)
    before = price.per_byte_s
    assert price.update(10, 100, 2.0, pressure_percent=5.0) == pytest.approx(2 * before)


def test_scheduler_and_a_host_that_decides_alone_have_the_same_price_of_free_memory():
    from torpor_host.residency import Price as PriceOfHost

    assert PriceOfHost().rent_s_per_byte_s == Price().minimum == Price().per_byte_s
