"""Figures appear only with samples enough behind them."""

from torpor_bench.figures import Figures, percentile, slope


def test_a_median_needs_200_samples():
    assert percentile([1.0] * 199, 50) is None
    assert percentile([1.0] * 200, 50) == 1.0


def test_a_p99_needs_5000_samples():
    assert percentile([1.0] * 4999, 99) is None
    assert percentile([1.0] * 5000, 99) == 1.0


def test_percentiles_are_values_that_were_measured_whatever_their_order():
    samples = [float(n) for n in reversed(range(1, 5001))]
    assert (percentile(samples, 50), percentile(samples, 99)) == (2500.0, 4950.0)


def test_a_key_without_samples_enough_is_absent_and_never_zero():
    figures = Figures()
    figures.add_percentiles("wake", [0.001] * 300)
    assert figures.values == {"wake_p50_ms": 1.0}
    assert figures.samples == {"wake_p50_ms": 300}


def test_the_slope_of_memory_is_per_operator():
    assert slope((100, 2000.0), (1000, 9200.0)) == 8.0
