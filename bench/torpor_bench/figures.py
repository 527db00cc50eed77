"""Percentiles that are given only where there are samples enough for them, and the figures of one run.

A p50 has at least 200 samples, a p99 at least 5,000. A key that has too few, or whose part does not exist, is absent,
never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SAMPLES_MIN = {50: 200, 99: 5000}


def percentile(samples: Sequence[float], percent: int) -> float | None:
    """The nearest rank: a value that was measured. None with fewer samples than `SAMPLES_MIN`."""
    if len(samples) < SAMPLES_MIN[percent]:
        return None
    rank = math.ceil(percent / 100 * len(samples))
    return sorted(samples)[rank - 1]


@dataclass(slots=True)
class Figures:
    """What a benchmark found: figures by key, and how many samples are behind each."""

    values: dict[str, float] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, value: float, samples: int = 1) -> None:
        self.values[key] = value
        self.samples[key] = samples

    def add_percentiles(self, name: str, seconds: Iterable[float], percents: Sequence[int] = (50, 99)) -> None:
        """`NAME_p50_ms` and `NAME_p99_ms`, each if there are samples enough."""
        taken = list(seconds)
        for percent in percents:
            value = percentile(taken, percent)
            if value is not None:
                self.add(f"{name}_p{percent}_ms", value * 1000, len(taken))

    def note(self, text: str) -> None:
        """What a reader of the figures has to know."""
        self.notes.append(text)


def slope(low: tuple[float, float], high: tuple[float, float]) -> float:
    """Of the line through two points (x, y)."""
    return (high[1] - low[1]) / (high[0] - low[0])
