"""Logarithmic bins of time between events: fine where gaps are short, a day at the far end."""

from __future__ import annotations

import bisect
import math

COUNT = 128
FIRST_S = 0.05
RATIO = 1.12

# EDGES_S[k] ≤ gap < EDGES_S[k + 1] is bin k; the last bin is open.
EDGES_S: tuple[float, ...] = (0.0, *(FIRST_S * RATIO**k for k in range(COUNT - 1)))


def bin_of(gap_s: float) -> int:
    """The bin of a gap; negative ones (a clock was set back) count as zero, NaN as the last."""
    if math.isnan(gap_s):
        return COUNT - 1
    return max(0, min(COUNT - 1, bisect.bisect_right(EDGES_S, gap_s) - 1))
