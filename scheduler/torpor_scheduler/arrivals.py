"""What an operator's past says about the time to its next event.

A gap is the time from the end of the operator's last reconcile (or event) to its next event from outside. Gaps that a
known timer ended, or that are still open, are *censored*: they say only that nothing came for so long. Counting both
gives a hazard per bin, events over gaps at risk, as in survival analysis (Kaplan and Meier 1958, on grouped data).

Old gaps fade: each new gap weighs 1/0.995 of the one before, so 138 gaps halve a weight. O(1) a gap; half a KiB an
operator for each of the two kinds of gap that it has had. Knows nothing of costs.
"""

from __future__ import annotations

from array import array

from torpor_scheduler.bins import COUNT, bin_of

FADE = 0.995
_WEIGHT_MAX = 1e6  # float32 counts keep 24 bits: scale down well before small gaps vanish in large sums


# Of a kind of gap that was never seen; shared, and never written to.
_NO_COUNTS = array("f", bytes(4 * COUNT))


class GapHistogram:
    """Weighted counts of gaps that ended with an event, and of censored ones, per bin."""

    __slots__ = ("_weight", "censored", "events")

    def __init__(self) -> None:
        self.events = self.censored = _NO_COUNTS
        self._weight = 1.0

    def add(self, gap_s: float, *, censored: bool = False) -> None:
        """Counts one gap in O(1); every so often the weights are scaled down."""
        if censored:
            counts = self.censored = _own(self.censored)
        else:
            counts = self.events = _own(self.events)
        counts[bin_of(gap_s)] += self._weight
        self._weight /= FADE
        if self._weight > _WEIGHT_MAX:
            self._scale_down()

    @property
    def observed(self) -> float:
        """How many events the counts are worth, faded."""
        return sum(self.events) / self._weight

    def hazards(self, prior: GapHistogram | None = None) -> list[float]:
        """The chance per bin that a gap which got so far ends there with an event.

        `prior` counts as one gap more, spread as its own gaps are. Where nothing ever got so far the hazard is 0.
        """
        scale = 1 / self._weight
        events = [count * scale for count in self.events]
        ended = [event + count * scale for event, count in zip(events, self.censored, strict=True)]
        if prior is not None:
            _add_one_gap(prior, events, ended)
        hazards, at_risk = [0.0] * COUNT, 0.0
        for k in range(COUNT - 1, -1, -1):
            at_risk += ended[k]
            hazards[k] = events[k] / at_risk if at_risk > 0 else 0.0
        return hazards

    def dump(self) -> bytes:
        """The state as bytes, for `load`."""
        scaled = array("f", (count / self._weight for count in (*self.events, *self.censored)))
        return scaled.tobytes()

    @classmethod
    def load(cls, state: bytes) -> GapHistogram:
        """From `dump`; raises ValueError if it is not of this shape."""
        if len(state) != 8 * COUNT:
            raise ValueError(f"a histogram's state has {8 * COUNT} bytes, not {len(state)}")
        histogram, values = cls(), array("f", state)
        if not all(0 <= value < _WEIGHT_MAX for value in values):
            raise ValueError("a histogram's state holds impossible counts")
        histogram.events, histogram.censored = values[:COUNT], values[COUNT:]
        return histogram

    def _scale_down(self) -> None:
        self.events = _divided(self.events, self._weight)
        self.censored = _divided(self.censored, self._weight)
        self._weight = 1.0


def _own(counts: array[float]) -> array[float]:
    return array("f", counts) if counts is _NO_COUNTS else counts


def _divided(counts: array[float], by: float) -> array[float]:
    return counts if counts is _NO_COUNTS else array("f", (count / by for count in counts))


def _add_one_gap(prior: GapHistogram, events: list[float], ended: list[float]) -> None:
    total = sum(prior.events) + sum(prior.censored)
    if total <= 0:
        return
    for k in range(COUNT):
        events[k] += prior.events[k] / total
        ended[k] += (prior.events[k] + prior.censored[k]) / total
