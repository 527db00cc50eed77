"""Who asked for what: the last requests, counters, and how many watches are live. Also as /metrics text."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from torpor_devcluster.requestinfo import RequestInfo


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request (a watch: when it ended). `code` is 0 when the client went away before the answer."""

    user: str
    impersonated: str
    """The user that was acted as, or empty."""
    verb: str
    group: str
    version: str
    resource: str
    subresource: str
    namespace: str
    name: str
    path: str
    user_agent: str
    code: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class WatchLabels:
    """The labels under which the real server counts a live watch."""

    group: str
    version: str
    resource: str
    scope: str
    subresource: str = ""


class RequestLog:
    """Keeps the newest `records_max` records; older ones are dropped, the counters stay."""

    def __init__(self, records_max: int) -> None:
        self.records: deque[RequestRecord] = deque(maxlen=records_max)
        self.live_watches: Counter[WatchLabels] = Counter()
        self._totals: Counter[tuple[str, str, str, str, str, str, int]] = Counter()

    def add(self, record: RequestRecord, scope: str) -> None:
        self.records.append(record)
        key = (
            record.verb.upper(),
            record.group,
            record.version,
            record.resource,
            record.subresource,
            scope,
            record.code,
        )
        self._totals[key] += 1

    def watch_began(self, info: RequestInfo) -> WatchLabels:
        labels = WatchLabels(info.group, info.version, info.plural, info.scope)
        self.live_watches[labels] += 1
        return labels

    def watch_ended(self, labels: WatchLabels) -> None:
        self.live_watches[labels] -= 1

    def watches_of(self, resource: str, group: str = "") -> int:
        """Live watches of one resource, in all scopes and versions."""
        return sum(
            count
            for labels, count in self.live_watches.items()
            if labels.resource == resource and labels.group == group
        )

    def metrics(self, objects: dict[str, int]) -> str:
        """Prometheus text with the series of the real server that tests lean on."""
        lines = [
            "# HELP apiserver_longrunning_requests [STABLE] Gauge of all active long-running apiserver requests broken "
            "out by verb, group, version, resource, scope and component. Not all requests are tracked this way.",
            "# TYPE apiserver_longrunning_requests gauge",
        ]
        for labels, count in self.live_watches.items():
            lines.append(
                f'apiserver_longrunning_requests{{component="apiserver",group="{labels.group}",'
                f'resource="{labels.resource}",scope="{labels.scope}",subresource="{labels.subresource}",'
                f'verb="WATCH",version="{labels.version}"}} {count}'
            )
        lines += [
            "# HELP apiserver_request_total [STABLE] Counter of apiserver requests broken out for each verb, dry run "
            "value, group, version, resource, scope, component, and HTTP response code.",
            "# TYPE apiserver_request_total counter",
        ]
        for (verb, group, version, resource, subresource, scope, code), count in self._totals.items():
            lines.append(
                f'apiserver_request_total{{code="{code}",component="apiserver",dry_run="",group="{group}",'
                f'resource="{resource}",scope="{scope}",subresource="{subresource}",verb="{verb}",'
                f'version="{version}"}} {count}'
            )
        lines.append("# TYPE apiserver_storage_objects gauge")
        lines += [f'apiserver_storage_objects{{resource="{name}"}} {count}' for name, count in objects.items()]
        return "\n".join(lines) + "\n"
