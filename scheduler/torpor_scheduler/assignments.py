"""Who runs what: chooses a host for every operator that has none, and writes it by compare-and-swap.

The WasmOperator's status holds `{host, epoch}`. Each assignment counts the epoch up, also when the same host comes
back as a new incarnation, so that writes of the old one are refused by the cache. An operator is taken from a host only
when that host's Lease has not been renewed for its duration plus the longest write deadline, measured here from when
the last renewal was *seen* (never by comparing clocks of two machines).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torpor_scheduler.planner import OperatorKey

WRITE_DEADLINE_S = 10.0  # the longest a host lets a write run; its successor waits as long


@dataclass(frozen=True, slots=True)
class OperatorObject:
    """What placement needs of a WasmOperator."""

    key: OperatorKey
    uid: str
    resource_version: str
    host: str
    epoch: int
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class LeaseObservation:
    """A host's Lease: its last renewal, and when it was first seen here (monotonic)."""

    renew_time: str
    duration_s: float
    seen_s: float

    def expired(self, now_s: float) -> bool:
        return now_s >= self.seen_s + self.duration_s + WRITE_DEADLINE_S


@dataclass(frozen=True, slots=True)
class HostView:
    """A connected host: what it says it runs."""

    name: str
    running: Mapping[OperatorKey, int]


@dataclass(frozen=True, slots=True)
class Assignment:
    operator: OperatorObject
    host: str
    epoch: int


def choose(
    operators: Iterable[OperatorObject],
    hosts: Mapping[str, HostView],
    leases: Mapping[str, LeaseObservation],
    now_s: float,
) -> list[Assignment]:
    """The assignments to write now. Pure; fewest operators first among the connected hosts."""
    objects = [operator for operator in operators if not operator.deleting]
    load = dict.fromkeys(hosts, 0)
    for operator in objects:
        if operator.host in load:
            load[operator.host] += 1
    chosen: list[Assignment] = []
    for operator in objects:
        host = hosts.get(operator.host)
        if host is not None:
            if host.running.get(operator.key) != operator.epoch:
                chosen.append(Assignment(operator, host.name, operator.epoch + 1))
        elif load and _free(operator, leases, now_s):
            target = min(load, key=lambda name: (load[name], name))
            load[target] += 1
            chosen.append(Assignment(operator, target, operator.epoch + 1))
    return chosen


def _free(operator: OperatorObject, leases: Mapping[str, LeaseObservation], now_s: float) -> bool:
    if not operator.host:
        return True
    lease = leases.get(operator.host)
    return lease is not None and lease.expired(now_s)
