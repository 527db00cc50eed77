"""When a status is written, and what is in it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from torpor_host.api import Answer, ApiUnavailable
from torpor_host.known_objects import KnownSet, ObjectTable
from torpor_host.operator_record import Operator
from torpor_host.operator_spec import OperatorId
from torpor_host.residency import Phase, Residency
from torpor_host.status import StatusWriter
from torpor_host.timers import Timers
from torpor_services import crd
from torpor_services.clock import ManualClock


class Api:
    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.down = False

    async def request(self, method: str, path: str, *, body: Any, content_type: str, timeout_s: float) -> Answer:
        if self.down:
            raise ApiUnavailable("down")
        assert (method, path.rpartition("/")[2], content_type) == ("PATCH", "status", "application/merge-patch+json")
        self.bodies.append(body)
        version = str(100 + len(self.bodies))
        return Answer(self.status, msgspec.json.encode({"metadata": {"resourceVersion": version}}))


class Versions:
    def __init__(self) -> None:
        self.version = "100"

    def resource_version(self, operator_id: OperatorId) -> tuple[str, str] | None:
        return ("uid", self.version)

    def version_seen(self, operator_id: OperatorId, resource_version: str) -> None:
        self.version = resource_version


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.timers = Timers(self.clock)
        self.api, self.versions, self.allowed = Api(), Versions(), True
        self.writer = StatusWriter(
            self.api,  # type: ignore[arg-type]
            self.clock,
            self.timers,
            self.versions,
            allowed=lambda: self.allowed,
            next_wake_s=lambda operator: self.clock.monotonic_s() + 60,
            private_bytes=lambda operator: 5,
        )
        self.operator = Operator(OperatorId(("ns", "op")), "uid", 3, runtime=None, known=KnownSet(ObjectTable()))  # type: ignore[arg-type]
        self.operator.residency = Residency()

    async def changed(self) -> None:
        self.writer.changed(self.operator, urgent=False)
        await self.writer.write_due()

    async def pass_time(self, seconds: float) -> None:
        await self.clock.advance(seconds)
        self.timers.fire_due()
        await self.writer.write_due()


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_status_is_conditional_on_the_version_last_seen_and_never_claims(bench: Bench) -> None:
    await bench.changed()
    body = bench.api.bodies[0]
    assert body["metadata"] == {"uid": "uid", "resourceVersion": "100"}
    assert "host" not in body["status"] and "epoch" not in body["status"]
    assert bench.versions.version == "101"


async def test_what_is_written_fits_the_definition(bench: Bench) -> None:
    bench.operator.set_condition("Ready", "True", "Watching", "fine", bench.clock.unix_ns())
    bench.operator.last_event_unix_ns = bench.clock.unix_ns()
    await bench.changed()
    status = {key: value for key, value in bench.api.bodies[0]["status"].items() if value is not None}
    obj = {
        "apiVersion": crd.API_VERSION,
        "kind": crd.KIND,
        "metadata": {},
        "spec": {"module": {"file": "x"}, "serviceAccountName": "x"},
        "status": status,
    }
    assert crd.violations(obj) == []
    assert status["nextWake"] == "2023-11-14T22:14:20Z"


async def test_what_is_equal_is_not_written_again(bench: Bench) -> None:
    await bench.changed()
    await bench.pass_time(100)
    await bench.changed()
    assert len(bench.api.bodies) == 1


async def test_a_condition_is_written_soon_a_phase_seldom_counts_at_last(bench: Bench) -> None:
    await bench.changed()
    bench.operator.set_condition("Ready", "False", "Broken", "see", 1)
    await bench.changed()
    assert len(bench.api.bodies) == 1
    await bench.pass_time(1.1)
    assert len(bench.api.bodies) == 2
    bench.operator.residency = Residency(Phase.RESIDENT)
    await bench.changed()
    await bench.pass_time(5)
    assert len(bench.api.bodies) == 2
    await bench.pass_time(5.1)
    assert bench.api.bodies[2]["status"]["phase"] == "Resident"
    bench.operator.wakes = 7
    await bench.changed()
    await bench.pass_time(30)
    assert len(bench.api.bodies) == 3
    await bench.pass_time(31)
    assert bench.api.bodies[3]["status"]["wakes"] == 7


async def test_a_busy_operator_is_written_once_a_minute_at_most(bench: Bench) -> None:
    for i in range(600):
        bench.operator.wakes = i
        await bench.changed()
        await bench.pass_time(0.1)
    assert len(bench.api.bodies) <= 2


async def test_nothing_is_written_without_the_lease(bench: Bench) -> None:
    bench.allowed = False
    await bench.changed()
    assert bench.api.bodies == []
    bench.allowed = True
    await bench.pass_time(2)
    assert len(bench.api.bodies) == 1


async def test_a_conflict_and_an_outage_are_tried_again(bench: Bench) -> None:
    bench.api.status = 409
    await bench.changed()
    bench.api.status = 200
    bench.api.down = True
    await bench.pass_time(1.1)
    bench.api.down = False
    await bench.pass_time(2.1)
    assert len(bench.api.bodies) == 2


async def test_a_transition_time_moves_only_with_the_status(bench: Bench) -> None:
    bench.operator.set_condition("Ready", "False", "A", "", 1_000_000_000)
    assert bench.operator.set_condition("Ready", "False", "B", "", 2_000_000_000)
    assert not bench.operator.set_condition("Ready", "False", "B", "", 3_000_000_000)
    found = bench.operator.condition("Ready")
    assert found is not None and found.since_unix_ns == 1_000_000_000
    bench.operator.set_condition("Ready", "True", "B", "", 4_000_000_000)
    found = bench.operator.condition("Ready")
    assert found is not None and found.since_unix_ns == 4_000_000_000


async def test_a_busy_operator_has_one_timer(bench: Bench) -> None:
    await bench.changed()
    for i in range(100):
        bench.operator.wakes = i
        await bench.changed()
        await bench.pass_time(0.1)
    assert len(bench.timers) <= 1


async def test_at_the_end_the_phase_is_put_right(bench: Bench) -> None:
    bench.operator.residency = Residency(Phase.RESIDENT)
    await bench.changed()
    bench.operator.residency = Residency(Phase.COLD)
    await bench.writer.flush()
    assert [body["status"]["phase"] for body in bench.api.bodies] == ["Resident", "Cold"]


async def test_an_error_that_changes_with_each_failure_is_not_written_with_each(bench: Bench) -> None:
    bench.operator.last_error = "first"
    await bench.changed()
    for i in range(9):
        bench.operator.errors, bench.operator.last_error = i, f"at {i} o'clock"
        await bench.changed()
        await bench.pass_time(1)
    assert len(bench.api.bodies) == 1
    await bench.pass_time(1.1)
    assert [body["status"]["lastError"] for body in bench.api.bodies] == ["first", "at 8 o'clock"]


async def test_the_end_of_a_long_error_is_kept_where_a_traceback_says_what_happened(bench: Bench) -> None:
    bench.operator.last_error = "a/b: Traceback\n" + "  frame\n" * 1000 + "ValueError: too big"
    await bench.changed()
    written = bench.api.bodies[0]["status"]["lastError"]
    assert written.startswith("a/b: Traceback") and written.endswith("ValueError: too big") and len(written) <= 1000
