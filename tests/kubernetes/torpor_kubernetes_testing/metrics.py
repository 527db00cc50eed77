"""A server's metrics in Prometheus' text format, summed by the labels that a test asks for."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """All samples of one scrape."""

    samples: tuple[Sample, ...]

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        """Comments and lines that are no sample are passed over, as a scraper does with what it does not know."""
        return cls(tuple(_samples(text)))

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of `name` that carry all `labels`; 0 where there are none yet."""
        return sum(s.value for s in self._matching(name, labels))

    def by(self, name: str, *labels: str, **having: str) -> dict[tuple[str, ...], float]:
        """Samples of `name` summed by the values of `labels`: `by("m", "verb")[("WATCH",)]`."""
        sums: dict[tuple[str, ...], float] = {}
        for sample in self._matching(name, having):
            key = tuple(sample.labels.get(label, "") for label in labels)
            sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def watches(self) -> dict[str, int]:
        """Open watches by resource ("databases.example.com", "configmaps"), as the API server counts them."""
        open_watches = self.by("apiserver_longrunning_requests", "resource", "group", verb="WATCH")
        return {".".join(part for part in key if part): int(count) for key, count in open_watches.items() if count}

    def _matching(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        return (s for s in self.samples if s.name == name and labels.items() <= s.labels.items())


def _samples(text: str) -> Iterator[Sample]:
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) is None:
            continue
        name, labels, value = found.groups()
        yield Sample(name, {key: _unescaped(raw) for key, raw in _LABEL.findall(labels or "")}, float(value))


def _unescaped(value: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), value)
