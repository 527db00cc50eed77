"""The cheapest plan for one gap, given when its end is likely.

A dynamic programme over the bins of the gap (scheduling.md, "One gap"). With rent r a second, W to unload, R to load,
P for an event that finds the operator out of memory, L the load time and hazard h in a bin of width w:

    stay      = h·r·w/2 + (1 − h)·(r·w + V_on[k+1])
    V_off[k]  = min( h·(R + P) + (1 − h)·V_off[k+1],   R + E[late] + stay )
    V_on[k]   = min( stay,  W + V_off[k] )
    at the end: V_on = W + R + P,  V_off = R + P

The end values are those of a gap of which nothing more is known. A *known* end, such as a timer, is a bin of zero
width with h = 1: then nothing follows. The plan is read off forwards: where to unload, where to load ahead of the
event, perhaps several times in one gap.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torpor_scheduler.bins import EDGES_S

# A preload is asked for half a load time early, since load times vary, and by this much, since an event loop's timers
# fire up to some milliseconds late.
TIMER_SLACK_S = 0.005


@dataclass(frozen=True, slots=True)
class Costs:
    """What residency costs one operator, in one unit (here: seconds of work)."""

    rent: float  # a second in memory: price · bytes
    unload: float  # W
    load: float  # R
    late: float  # P
    load_s: float  # L, seconds

    @property
    def break_even_s(self) -> float:
        """B_off / r: in memory for longer than this without an event costs more than a cold wake."""
        return (self.unload + self.load + self.late) / self.rent


class Bin(NamedTuple):
    """A stretch of the gap and the chance that the event falls in it, if it has not come before."""

    from_s: float
    width_s: float
    hazard: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to be in memory, in seconds from the start of the gap, and what that is expected to cost."""

    resident: tuple[tuple[float, float], ...]  # [from, to) each; `to` is inf where it stays
    cost_on: float  # from the start of the plan, in memory
    cost_off: float  # from the start of the plan, not in memory

    def resident_at(self, gap_s: float) -> bool:
        return any(start <= gap_s < end for start, end in self.resident)

    def next_change_s(self, gap_s: float) -> float:
        """When residency next changes after this time; inf if it does not."""
        edges = (edge for window in self.resident for edge in window if edge > gap_s)
        return min(edges, default=float("inf"))


def bins(hazards: Sequence[float], known_end_s: float | None, load_s: float) -> list[Bin]:
    """The bins of a gap, cut at a known end, with a cut one load time ahead of it so that a preload can fall there."""
    if known_end_s is None:
        return [Bin(start, end - start, hazards[k]) for k, (start, end) in enumerate(itertools.pairwise(EDGES_S))]
    lead_s = max(0.0, known_end_s - 1.5 * load_s - TIMER_SLACK_S)
    edges = sorted({edge for edge in EDGES_S if edge < known_end_s} | {lead_s, known_end_s})
    parts = [_part_of(hazards, start, end) for start, end in itertools.pairwise(edges)]
    return [*parts, Bin(known_end_s, 0.0, 1.0)]


def plan(parts: Sequence[Bin], costs: Costs, *, elapsed_s: float = 0.0, resident: bool = True) -> Plan:
    """The cheapest plan from `elapsed_s` on, in or out of memory then."""
    stays, on, off = _values(parts, costs)
    start = next((k for k, part in enumerate(parts) if part.from_s + part.width_s > elapsed_s), len(parts) - 1)
    windows: list[tuple[float, float]] = []
    since_s = elapsed_s if resident else None
    for k in range(start, len(parts)):
        at_s = max(elapsed_s, parts[k].from_s)
        if since_s is not None and costs.unload + off[k] < stays[k]:
            if at_s > since_s:
                windows.append((since_s, at_s))
            since_s = None
        elif since_s is None and on[k] == stays[k] and off[k] < _cold(parts, off, costs, k):
            since_s = at_s
    if since_s is not None:
        windows.append((since_s, float("inf")))
    return Plan(tuple(windows), on[start], off[start])


def _values(parts: Sequence[Bin], costs: Costs) -> tuple[list[float], list[float], list[float]]:
    size = len(parts)
    stays, on, off = [0.0] * size, [0.0] * (size + 1), [0.0] * (size + 1)
    on[size] = costs.unload + costs.load + costs.late
    off[size] = costs.load + costs.late
    for k in range(size - 1, -1, -1):
        part = parts[k]
        rent = costs.rent * part.width_s
        stays[k] = part.hazard * rent / 2 + (1 - part.hazard) * (rent + on[k + 1])
        loaded = costs.load + costs.late * _chance_within(parts, k, costs.load_s) + stays[k]
        off[k] = min(_cold(parts, off, costs, k), loaded)
        on[k] = min(stays[k], costs.unload + off[k])
    return stays, on, off


def _cold(parts: Sequence[Bin], off: Sequence[float], costs: Costs, k: int) -> float:
    hazard = parts[k].hazard
    return hazard * (costs.load + costs.late) + (1 - hazard) * off[k + 1]


def _chance_within(parts: Sequence[Bin], k: int, seconds: float) -> float:
    """The chance that the event comes within so many seconds of the start of bin k: it would find a load under way."""
    until_s, survives = parts[k].from_s + seconds, 1.0
    for part in parts[k:]:
        if part.from_s >= until_s:
            break
        share = min(1.0, (until_s - part.from_s) / part.width_s) if part.width_s > 0 else 1.0
        survives *= 1 - part.hazard * share
    return 1 - survives


def _part_of(hazards: Sequence[float], start: float, end: float) -> Bin:
    """A part of a bin: the hazard spreads so that the parts together give the whole one's."""
    k = next(k for k in range(len(EDGES_S) - 1, -1, -1) if EDGES_S[k] <= start)
    width = EDGES_S[k + 1] - EDGES_S[k] if k + 1 < len(EDGES_S) else end - start
    share = min(1.0, (end - start) / width) if width > 0 else 1.0
    return Bin(start, end - start, 1 - (1 - hazards[k]) ** share)
