"""Who runs what: the decision as a pure function, and claims against an API that answers as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from torpor.cache.v1 import cache_pb2
from torpor_host.api import Answer
from torpor_host.assignments import (
    CLAIM_STAGGER_S,
    SCHEDULER_GRACE_S,
    Assignments,
    Claim,
    Entry,
    Leave,
    Run,
    Situation,
    Wait,
    decide,
)
from torpor_host.config import WRITE_DEADLINE_S
from torpor_host.operator_spec import OperatorId
from torpor_host.subscriber import Event
from torpor_host.timers import Timers
from torpor_services.clock import ManualClock

OP = OperatorId(("ns", "op"))


def situation(**changes: Any) -> Situation:
    values: dict[str, Any] = {
        "me": "a",
        "lease_held": True,
        "scheduler_decides": False,
        "mine": None,
        "assigned": None,
        "holder_expired": False,
        "rank": 0,
        **changes,
    }
    return Situation(**values)


def entry(host: str, epoch: int) -> Entry:
    return Entry("uid", "10", 1, host, epoch)


@pytest.mark.parametrize(
    ("what", "now", "expected"),
    [
        (entry("", 0), situation(), Claim(0.0)),
        (entry("", 0), situation(rank=2), Claim(2 * CLAIM_STAGGER_S)),
        (entry("", 0), situation(scheduler_decides=True), Wait()),
        (entry("", 0), situation(lease_held=False), Wait()),
        (entry("b", 4), situation(), Wait()),
        (entry("b", 4), situation(holder_expired=True), Claim(0.0)),
        (entry("b", 4), situation(holder_expired=True, scheduler_decides=True), Wait()),
        (entry("b", 4), situation(mine=3), Leave()),
        (entry("a", 4), situation(mine=4), Run()),
        (entry("a", 4), situation(assigned=4), Run()),
        (entry("a", 4), situation(), Claim(0.0)),
        (entry("a", 4), situation(assigned=3), Claim(0.0)),
        (entry("a", 4), situation(scheduler_decides=True), Claim(SCHEDULER_GRACE_S)),
        (entry("a", 4), situation(lease_held=False, mine=4), Wait()),
    ],
)
def test_what_a_host_does_about_an_operator(what: Entry, now: Situation, expected: object) -> None:
    assert decide(what, now) == expected


class Registry:
    def __init__(self) -> None:
        self.log: list[str] = []

    def adopt(self, obj: Mapping[str, Any], epoch: int) -> None:
        self.log.append(f"adopt {obj['metadata']['name']} {epoch}")

    def update(self, obj: Mapping[str, Any]) -> None:
        self.log.append(f"update {obj['metadata']['name']}")

    def drop(self, operator_id: OperatorId, reason: str) -> None:
        self.log.append(f"drop {operator_id[1]}: {reason}")

    def drop_all(self, reason: str) -> None:
        self.log.append("drop all")

    def confirmed(self, operator_id: OperatorId) -> None: ...

    def forget_logs(self, operator_id: OperatorId) -> None: ...


class Api:
    """WasmOperators with compare-and-swap on their status."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.patches = 0

    def put(self, name: str, host: str = "", epoch: int = 0, uid: str = "uid") -> dict[str, Any]:
        self.version += 1
        metadata = {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": str(self.version)}
        status = {"host": host, "epoch": epoch} if host else {}
        self.objects[name] = {"metadata": metadata, "spec": {}, "status": status}
        return self.objects[name]

    async def request(self, method: str, path: str, *, body: Any = None, **_: Any) -> Answer:
        name = path.removesuffix("/status").rpartition("/")[2]
        if name not in self.objects:
            return Answer(404, b"{}")
        if method == "PATCH":
            self.patches += 1
            if body["metadata"]["resourceVersion"] != self.objects[name]["metadata"]["resourceVersion"]:
                return Answer(409, b"{}")
            self.put(name, body["status"]["host"], body["status"]["epoch"], body["metadata"]["uid"])
        return Answer(200, msgspec.json.encode(self.objects[name]))


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.timers = Timers(self.clock)
        self.api, self.registry = Api(), Registry()
        self.lease, self.scheduler = True, False
        self.tasks: list[asyncio.Task[None]] = []
        self.assignments = Assignments(
            host="a",
            namespace="torpor-system",
            clock=self.clock,
            timers=self.timers,
            subscriber=_NoSubscriber(),  # type: ignore[arg-type]
            api=self.api,  # type: ignore[arg-type]
            registry=self.registry,
            lease_held=lambda: self.lease,
            scheduler_decides=lambda: self.scheduler,
            spawn=lambda run: self.tasks.append(asyncio.ensure_future(run)),
        )
        self.assignments.start()
        self.operators, self.leases = self.assignments._operators_watch, self.assignments._leases_watch
        self.assignments.on_synced(self.leases)  # type: ignore[arg-type]

    def show(self, name: str, host: str = "", epoch: int = 0, uid: str = "uid") -> None:
        self.tell(self.api.put(name, host, epoch, uid))

    def tell(self, obj: dict[str, Any]) -> None:
        key = cache_pb2.ObjectKey(namespace="ns", name=obj["metadata"]["name"])
        event = Event(type=Event.MODIFIED, key=key, uid=obj["metadata"]["uid"], object=msgspec.json.encode(obj))
        self.assignments.on_event(self.operators, [], event, 1)  # type: ignore[arg-type]

    def gone(self, name: str) -> None:
        event = Event(type=Event.DELETED, key=cache_pb2.ObjectKey(namespace="ns", name=name), uid="uid")
        self.assignments.on_event(self.operators, [], event, 1)  # type: ignore[arg-type]

    def show_lease(self, host: str, renewed: str) -> None:
        spec = {"holderIdentity": f"{host}/s/1", "renewTime": renewed, "leaseDurationSeconds": 15}
        key = cache_pb2.ObjectKey(namespace="torpor-system", name=f"torpor-host-{host}")
        event = Event(type=Event.MODIFIED, key=key, object=msgspec.json.encode({"spec": spec}))
        self.assignments.on_event(self.leases, [], event, 1)  # type: ignore[arg-type]

    async def settle(self, seconds: float = 0.0) -> None:
        await self.clock.advance(seconds)
        self.timers.fire_due()
        for _ in range(50):
            await asyncio.sleep(0)


class _NoSubscriber:
    def subscribe(self, owner: object, name: str) -> object:
        return object()


async def test_an_unassigned_operator_is_claimed_and_adopted_at_the_next_epoch() -> None:
    bench = Bench()
    bench.show("op")
    await bench.settle()
    assert bench.registry.log == ["adopt op 1"]
    assert bench.api.objects["op"]["status"] == {"host": "a", "epoch": 1}


async def test_a_lost_race_is_no_claim() -> None:
    bench = Bench()
    bench.show("op")
    bench.api.put("op", "b", 1)  # between what we saw and what we write
    await bench.settle()
    assert bench.registry.log == [] and bench.api.objects["op"]["status"]["host"] == "b"


async def test_our_own_claim_seen_on_the_watch_before_its_answer_is_not_claimed_twice() -> None:
    bench = Bench()
    bench.show("op")
    bench.tell(bench.api.put("op", "a", 1))
    await bench.settle(10)
    assert bench.registry.log == ["adopt op 2"], "one epoch, after the conflict"


async def test_what_stood_beside_our_name_before_is_claimed_anew() -> None:
    bench = Bench()
    bench.show("op", "a", 6)
    await bench.settle()
    assert bench.registry.log == ["adopt op 7"]


async def test_with_the_scheduler_it_is_left_to_it_and_adopted_when_assigned() -> None:
    bench = Bench()
    bench.scheduler = True
    bench.show("op", "a", 6)
    await bench.settle(1)
    assert bench.registry.log == []
    bench.show("op", "a", 7)
    bench.assignments.assign(OP, 7)
    await bench.settle()
    assert bench.registry.log == ["adopt op 7"] and bench.api.patches == 0


async def test_a_scheduler_that_forgets_what_bears_our_name_is_not_waited_for_for_ever() -> None:
    bench = Bench()
    bench.scheduler = True
    bench.show("op", "a", 6)
    await bench.settle(SCHEDULER_GRACE_S + 0.1)
    assert bench.registry.log == ["adopt op 7"]


async def test_an_operator_of_a_living_host_is_left_alone_and_of_a_dead_one_taken() -> None:
    bench = Bench()
    bench.show_lease("b", "1")
    bench.show("op", "b", 3)
    for i in range(5):
        await bench.settle(10)
        bench.show_lease("b", f"renewed {i}")
    assert bench.registry.log == []
    await bench.settle(15 + WRITE_DEADLINE_S - 1)
    assert bench.registry.log == []
    await bench.settle(2)
    await bench.settle(CLAIM_STAGGER_S)
    assert bench.registry.log == ["adopt op 4"]


async def test_an_operator_of_a_host_without_a_lease_is_taken_after_the_same_wait() -> None:
    bench = Bench()
    bench.show("op", "ghost", 3)
    await bench.settle(15 + WRITE_DEADLINE_S - 1)
    assert bench.registry.log == []
    await bench.settle(2)
    await bench.settle(CLAIM_STAGGER_S)
    assert bench.registry.log == ["adopt op 4"]


async def test_an_assignment_to_another_host_makes_us_leave() -> None:
    bench = Bench()
    bench.show("op")
    await bench.settle()
    bench.show("op", "b", 2)
    assert bench.registry.log[-1].startswith("drop op: it was assigned to b")


async def test_our_own_status_write_leads_to_nothing_but_an_update() -> None:
    bench = Bench()
    bench.show("op")
    await bench.settle()
    bench.show("op", "a", 1)
    await bench.settle(10)
    assert bench.registry.log == ["adopt op 1", "update op"]


async def test_a_deleted_operator_is_dropped_and_an_older_version_changes_nothing() -> None:
    bench = Bench()
    old = bench.api.put("op")
    bench.show("op")
    await bench.settle()
    bench.tell(old)
    assert bench.registry.log == ["adopt op 1"]
    bench.gone("op")
    assert bench.registry.log[-1] == "drop op: it was deleted" and len(bench.assignments) == 0


async def test_an_operator_made_anew_under_its_name_is_another() -> None:
    bench = Bench()
    bench.show("op")
    await bench.settle()
    bench.show("op", uid="second")
    await bench.settle()
    assert bench.registry.log == ["adopt op 1", "drop op: it was deleted and made anew", "adopt op 1"]


async def test_a_lost_lease_drops_everything_and_a_regained_one_claims_a_new_epoch() -> None:
    bench = Bench()
    bench.show("op")
    await bench.settle()
    bench.lease = False
    bench.assignments.lease_lost("gone")
    bench.show("op", "a", 1)
    await bench.settle()
    assert bench.registry.log == ["adopt op 1", "drop all"]
    bench.lease = True
    bench.assignments.lease_acquired()
    await bench.settle()
    assert bench.registry.log[-1] == "adopt op 2"


async def test_what_is_no_wasm_operator_is_ignored() -> None:
    bench = Bench()
    for text in (
        b"",
        b"[]",
        b"{}",
        b'{"metadata": 5}',
        b'{"metadata": {"uid": "u", "resourceVersion": "1"}, "status": 3}',
    ):
        key = cache_pb2.ObjectKey(namespace="ns", name="op")
        bench.assignments.on_event(bench.operators, [], Event(type=Event.ADDED, key=key, object=text), 1)  # type: ignore[arg-type]
    await bench.settle()
    assert bench.registry.log == []
