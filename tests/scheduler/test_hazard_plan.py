"""The dynamic programme over one gap, against brute force and hand-made cases."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torpor_scheduler.arrivals import GapHistogram
from torpor_scheduler.bins import COUNT, EDGES_S, bin_of
from torpor_scheduler.hazard import Bin, Costs, bins, plan

COSTS = Costs(rent=1.0, unload=1.0, load=1.0, late=8.0, load_s=0.1)


def expected_cost(parts, costs, residency):
    """The cost of holding to a residency per bin, by forward enumeration over where the gap ends."""
    total, survives, resident = 0.0, 1.0, True
    for k, part in enumerate(parts):
        wanted = residency[k]
        if resident and not wanted:
            total += survives * costs.unload
        if not resident and wanted:
            total += survives * (costs.load + costs.late * chance_within(parts, k, costs.load_s))
        resident = wanted
        ends = survives * part.hazard
        if resident:
            total += ends * costs.rent * part.width_s / 2 + (survives - ends) * costs.rent * part.width_s
        else:
            total += ends * (costs.load + costs.late)
        survives -= ends
    end = costs.unload + costs.load + costs.late if resident else costs.load + costs.late
    return total + survives * end


def chance_within(parts, k, seconds):
    until, survives = parts[k].from_s + seconds, 1.0
    for part in parts[k:]:
        if part.from_s >= until:
            break
        share = min(1.0, (until - part.from_s) / part.width_s) if part.width_s else 1.0
        survives *= 1 - part.hazard * share
    return 1 - survives


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.05, 5.0), st.floats(0.0, 1.0)), min_size=1, max_size=7),
    st.floats(0.05, 5.0),
    st.floats(0.0, 2.0),
    st.floats(0.0, 10.0),
    st.floats(0.01, 1.0),
)
def test_no_other_way_through_the_bins_is_cheaper(shape, rent, load, late, load_s):
    costs = Costs(rent=rent, unload=0.7, load=load, late=late, load_s=load_s)
    starts = [0.0, *itertools.accumulate(width for width, _ in shape)]
    parts = [Bin(start, width, hazard) for start, (width, hazard) in zip(starts, shape, strict=False)]
    best = min(
        expected_cost(parts, costs, residency) for residency in itertools.product([True, False], repeat=len(parts))
    )
    # Brute force cannot unload and load again at the very same edge, which never pays.
    assert plan(parts, costs).cost_on == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_the_plan_read_off_costs_what_the_programme_says():
    parts = [Bin(0, 1, 0.6), Bin(1, 9, 0.01), Bin(10, 1, 0.9), Bin(11, 20, 0.5)]
    costs = Costs(rent=0.5, unload=0.5, load=0.5, late=8.0, load_s=0.05)
    result = plan(parts, costs)
    residency = [result.resident_at(part.from_s) for part in parts]
    assert residency == [True, False, True, False]  # two windows in one gap
    assert expected_cost(parts, costs, residency) == pytest.approx(result.cost_on)


def test_a_known_timer_far_away_is_slept_through_and_loaded_for_just_ahead():
    result = plan(bins([0.0] * COUNT, 600.0, 0.1), COSTS)
    (window,) = result.resident
    # One load time and a half and 5 ms ahead: late would cost 8, a quarter of a second of rent 0.16.
    assert window[0] == pytest.approx(600 - 0.155)
    assert result.cost_on == pytest.approx(1.0 + 1.0 + 0.155, abs=1e-6)


def test_a_known_timer_so_near_that_sleeping_does_not_pay_is_waited_for():
    assert plan(bins([0.0] * COUNT, 1.5, 0.1), COSTS).resident == ((0.0, math.inf),)


def test_an_operator_without_a_past_unloads_at_once_and_is_not_loaded_on_a_guess():
    assert plan(bins([0.0] * COUNT, None, 0.1), COSTS).resident == ()


def test_when_an_event_is_all_but_sure_soon_it_stays():
    hazards = [0.0] * COUNT
    hazards[bin_of(2.0)] = 1.0
    assert plan(bins(hazards, None, 0.1), COSTS).resident_at(0.0)


def test_from_the_middle_of_a_gap_only_what_is_ahead_counts():
    hazards = [0.0] * COUNT
    hazards[bin_of(2.0)] = 0.99
    parts = bins(hazards, None, 0.1)
    assert plan(parts, COSTS, elapsed_s=1.0).resident_at(1.0)
    assert not plan(parts, COSTS, elapsed_s=5.0).resident_at(5.0)


@given(st.floats(0.06, 80_000), st.floats(0.001, 2.0))
@settings(max_examples=50, deadline=None)
def test_cutting_bins_at_a_timer_keeps_the_chance_to_get_so_far(known_end_s, load_s):
    histogram = GapHistogram()
    for gap_s in (0.3, 2.0, 2.1, 30.0, 400.0, 5000.0):
        histogram.add(gap_s)
    hazards = histogram.hazards()
    parts = bins(hazards, known_end_s, load_s)
    survives = math.prod(1 - part.hazard for part in parts[:-1])
    k = bin_of(known_end_s)
    whole = math.prod(1 - h for h in hazards[:k])
    width = (EDGES_S[k + 1] if k + 1 < COUNT else known_end_s) - EDGES_S[k]
    share = min(1.0, (known_end_s - EDGES_S[k]) / width) if width > 0 else 1.0
    assert survives == pytest.approx(whole * (1 - hazards[k]) ** share, rel=1e-6)
    assert parts[-1] == Bin(known_end_s, 0.0, 1.0)
