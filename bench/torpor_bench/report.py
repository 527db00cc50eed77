"""One run as JSON and as a table. The JSON's shape is fixed: name, quick, machine, versions, figures, samples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torpor_bench.figures import Figures

# What is aimed at, by key: (comparison, bound). Keys without an aim are reported.
AIMS: Mapping[str, tuple[str, float]] = {
    "python_p50_ms": ("≤", 1.0),
    "core_p50_ms": ("≤", 1.0),
    "core_64mib_p50_ms": ("≤", 1.0),
    "go_p50_ms": ("≤", 1.0),
    "python_p99_ms": ("≤", 3.0),
    "core_p99_ms": ("≤", 3.0),
    "reconciles_per_s_wake_each": ("≥", 600),
    "reconciles_per_s_drain": ("≥", 2500),
    "mesh_pss_mb": ("≤", 110),
    "mesh_pss_telemetry_mb": ("≤", 140),
    "per_operator_asleep_kib": ("≤", 8),
    "cpu_percent": ("≤", 1),
}


@dataclass(frozen=True, slots=True)
class Report:
    name: str
    quick: bool
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    figures: Figures

    def to_json(self) -> str:
        content: dict[str, Any] = {
            "name": self.name,
            "quick": self.quick,
            "machine": self.machine,
            "versions": self.versions,
            "figures": self.figures.values,
            "samples": self.figures.samples,
        }
        if self.figures.notes:
            content["notes"] = self.figures.notes
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    def table(self) -> Iterator[str]:
        width = max(map(len, self.figures.values), default=0)
        for key, value in self.figures.values.items():
            yield f"  {key:{width}} {value:12,.3f}   {_aim(key, value):20} n={self.figures.samples[key]}".rstrip()
        yield from (f"  note: {note}" for note in self.figures.notes)


def _aim(key: str, value: float) -> str:
    if key not in AIMS:
        return ""
    comparison, bound = AIMS[key]
    met = value <= bound if comparison == "≤" else value >= bound
    return f"{comparison} {bound:g} {'met' if met else 'MISSED'}"
