"""Learning gaps: hazards with censoring, fading, a prior, and state that survives."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor_scheduler.arrivals import GapHistogram
from torpor_scheduler.bins import COUNT, EDGES_S, bin_of


def filled(gaps, censored=()):
    histogram = GapHistogram()
    for gap in gaps:
        histogram.add(gap)
    for gap in censored:
        histogram.add(gap, censored=True)
    return histogram


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_number_has_a_bin(gap):
    k = bin_of(gap)
    assert 0 <= k < COUNT
    if math.isfinite(gap) and gap >= 0:
        assert EDGES_S[k] <= gap and (k + 1 == COUNT or gap < EDGES_S[k + 1])


def test_the_bins_reach_a_day():
    assert EDGES_S[-1] > 0.9 * 86_400


def test_a_steady_operator_has_one_sharp_hazard():
    hazards = filled([5.0] * 100).hazards()
    assert hazards[bin_of(5.0)] == pytest.approx(1.0)
    assert sum(hazards) == pytest.approx(1.0)


def test_exponential_gaps_have_a_flat_rate():
    generator = random.Random(7)
    hazards = filled([generator.expovariate(1 / 30) for _ in range(20_000)]).hazards()
    # 0.995 a gap leaves 200 gaps' worth: 20 % is 3 standard deviations for bins that a third of gaps reach.
    k = bin_of(20.0)
    rate = -math.log(1 - hazards[k]) / (EDGES_S[k + 1] - EDGES_S[k])
    assert rate == pytest.approx(1 / 30, rel=0.75)


def test_a_censored_gap_lowers_the_hazard_before_it_and_not_after():
    with_events = filled([1.0, 10.0])
    with_censored = filled([1.0, 10.0], censored=[5.0])
    assert with_censored.hazards()[bin_of(1.0)] < with_events.hazards()[bin_of(1.0)]
    assert with_censored.hazards()[bin_of(10.0)] == pytest.approx(with_events.hazards()[bin_of(10.0)])


def test_the_past_fades():
    histogram = filled([5.0] * 500 + [60.0] * 500)
    assert histogram.hazards()[bin_of(5.0)] < 0.1


def test_the_prior_counts_as_one_gap():
    prior = filled([300.0] * 50)
    assert GapHistogram().hazards(prior)[bin_of(300.0)] == pytest.approx(1.0)
    hazards = filled([5.0] * 200).hazards(prior)
    assert hazards[bin_of(5.0)] > 0.98 and hazards[bin_of(300.0)] == pytest.approx(1.0)


def test_a_hundred_thousand_gaps_do_not_overflow():
    histogram = filled([5.0] * 100_000)
    assert histogram.observed == pytest.approx(200, rel=0.02)


def test_state_survives_and_stays_small():
    histogram = filled([1.0, 5.0, 70.0], censored=[3.0])
    state = histogram.dump()
    assert len(state) == 1024
    assert GapHistogram.load(state).hazards() == pytest.approx(histogram.hazards(), rel=1e-5)


@pytest.mark.parametrize("state", [b"", b"x" * 1023, b"\xff" * 1024])
def test_broken_state_is_refused(state):
    with pytest.raises(ValueError):
        GapHistogram.load(state)


def test_histograms_that_have_seen_nothing_share_no_counts():
    filled([1.0] * 10, censored=[2.0])
    assert sum(GapHistogram().events) == sum(GapHistogram().censored) == 0
    one = filled([1.0])
    assert sum(one.events) == 1 and sum(one.censored) == 0
