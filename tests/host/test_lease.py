"""The host's Lease: acquired, renewed, lost, regained, in virtual time against a Lease in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torpor_host.api import Answer, ApiUnavailable
from torpor_host.config import WRITE_DEADLINE_S, LeaseConfig
from torpor_host.lease import HostLease, Observation, StateFolder, StateFolderInUse
from torpor_services.clock import ManualClock

CONFIG = LeaseConfig(duration_s=15, renew_s=5, margin_s=2)


class Leases:
    """The API server, as far as one Lease goes."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.down = False
        self.namespace = True
        self.writes = 0
        self._version = 0

    async def request(self, method: str, path: str, *, body: Any = None, timeout_s: float = 10.0, **_: Any) -> Answer:
        if self.down:
            raise ApiUnavailable(f"{method} {path}: UNAVAILABLE")
        if path == "/api/v1/namespaces":
            self.namespace = True
            return Answer(201, b"{}")
        if not self.namespace:
            return Answer(404, b"{}")
        if method == "GET":
            return Answer(404, b"{}") if self.lease is None else Answer(200, msgspec.json.encode(self.lease))
        if method == "POST" and self.lease is not None:
            return Answer(409, b"{}")
        sent = body["metadata"].get("resourceVersion")
        if method == "PUT" and (self.lease is None or sent != self.lease["metadata"]["resourceVersion"]):
            return Answer(409, b"{}")
        self.set(body)
        return Answer(200, msgspec.json.encode(self.lease))

    def set(self, body: dict[str, Any]) -> None:
        self._version += 1
        self.writes += 1
        metadata = {**body["metadata"], "resourceVersion": str(self._version)}
        self.lease = {**body, "metadata": metadata}

    def take(self, holder: str, renewed: str = "now") -> None:
        spec = {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15}
        self.set({"metadata": {"name": "torpor-host-a"}, "spec": spec})

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])


class Bench:
    def __init__(self, leases: Leases, state: str = "state-1") -> None:
        self.clock = ManualClock()
        self.leases = leases
        self.events: list[str] = []
        self.lease = HostLease(
            leases,  # type: ignore[arg-type]
            self.clock,
            CONFIG,
            host="a",
            state=state,
            on_acquired=lambda incarnation: self.events.append("acquired"),
            on_lost=lambda problem: self.events.append(f"lost: {problem}"),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.lease.run())
        await self.clock.advance(0.01)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_it_is_made_acquired_and_renewed() -> None:
    bench = Bench(Leases())
    assert bench.lease.refusal()
    async with bench.running():
        assert bench.events == ["acquired"] and bench.lease.refusal() == ""
        first = bench.leases.writes
        await bench.clock.advance(60)
        assert bench.leases.writes - first == 12 and bench.lease.held
        assert bench.leases.holder.startswith("a/state-1/")


async def test_a_missing_namespace_is_made() -> None:
    leases = Leases()
    leases.namespace = False
    bench = Bench(leases)
    async with bench.running():
        await bench.clock.advance(1)
        assert bench.events == ["acquired"]


async def test_the_margin_ends_it_though_nobody_took_it() -> None:
    bench = Bench(Leases())
    async with bench.running():
        await bench.clock.advance(4)
        bench.leases.down = True
        await bench.clock.advance(8.9)
        assert bench.lease.held, "13 s after the renewal was sent"
        await bench.clock.advance(0.2)
        assert not bench.lease.held and bench.lease.refusal()
        assert len(bench.events) == 2 and bench.events[1].startswith("lost")
        incarnation = bench.lease.incarnation
        bench.leases.down = False
        await bench.clock.advance(2)
        assert bench.events[2] == "acquired" and bench.lease.incarnation != incarnation


async def test_a_suspended_machine_does_not_believe_its_old_lease() -> None:
    bench = Bench(Leases())
    async with bench.running():
        bench.clock._now_s += 3600  # nothing ran meanwhile
        assert not bench.lease.held and bench.lease.refusal()


async def test_one_taken_by_another_is_lost_at_the_next_renewal() -> None:
    bench = Bench(Leases())
    async with bench.running():
        bench.leases.take("b/other/1")
        await bench.clock.advance(5.1)
        assert not bench.lease.held and "taken by b" in bench.events[1]


async def test_a_conflict_that_is_no_loss_is_renewed_again() -> None:
    bench = Bench(Leases())
    async with bench.running():
        assert bench.leases.lease is not None
        bench.leases.set(bench.leases.lease)  # someone labelled it: another version, the same holder
        await bench.clock.advance(8)
        assert bench.lease.held and bench.events == ["acquired"]


async def test_anothers_is_taken_only_after_it_stood_still_for_its_duration_and_the_longest_write() -> None:
    leases = Leases()
    leases.take("a/another-machine/1")
    bench = Bench(leases)
    async with bench.running():
        await bench.clock.advance(10)
        leases.take("a/another-machine/1", renewed="later")
        await bench.clock.advance(15 + WRITE_DEADLINE_S - 1)
        assert bench.events == []
        await bench.clock.advance(6)
        assert bench.events == ["acquired"]


async def test_one_of_an_earlier_life_of_this_state_folder_is_taken_at_once() -> None:
    leases = Leases()
    leases.take("a/state-1/dead")
    async with (bench := Bench(leases)).running():
        assert bench.events == ["acquired"]


async def test_a_released_one_is_taken_at_once_and_releasing_fences_first() -> None:
    leases = Leases()
    first = Bench(leases)
    async with first.running():
        await first.lease.release()
        assert leases.holder == "" and not first.lease.held
    async with (second := Bench(leases, state="state-2")).running():
        assert second.events == ["acquired"]


def test_a_lease_is_judged_by_our_own_clock_alone() -> None:
    seen = Observation()
    spec = {"holderIdentity": "b/x/1", "renewTime": "2099-01-01T00:00:00Z", "leaseDurationSeconds": 15}
    seen.see({"spec": spec}, 100.0)
    seen.see({"spec": spec}, 110.0)
    assert seen.expires_s() == 100 + 15 + WRITE_DEADLINE_S
    seen.see({"spec": {**spec, "leaseDurationSeconds": "hostile"}}, 111.0)
    assert seen.expires_s() == 100 + 15 + WRITE_DEADLINE_S
    seen.see({"spec": None}, 112.0)
    assert seen.released and seen.expires_s() == 112.0


def test_a_state_folder_belongs_to_one_host_and_keeps_its_id(tmp_path: Path) -> None:
    first = StateFolder.open(tmp_path / "state")
    with pytest.raises(StateFolderInUse, match="TORPOR_HOST_STATE_DIR"):
        StateFolder.open(tmp_path / "state")
    first.close()
    second = StateFolder.open(tmp_path / "state")
    assert second.id == first.id
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    second.close()
