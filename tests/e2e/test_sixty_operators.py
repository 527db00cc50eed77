"""Sixty different operators over three kinds: what they cost the API server, that they sleep, that nothing is lost.

One mesh and one fleet for the file; the tests follow one another on it: quiet, then a load that wakes sleepers, then
the same load while each service is killed in turn.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from torpor_guests_testing import SIXTY
from torpor_kubernetes_testing import AuditEvent, ControlPlane, KubeClient
from torpor_kubernetes_testing.namespaces import temporary_namespace
from torpor_mesh_testing import EXAMPLE_KINDS, Mesh
from torpor_mesh_testing.fleet import Load, Member, deploy, members

OBJECTS = 500
# The scheduler would keep guests this small for a minute and more: they cost less than their next wake-up.
SOON = {"policy": "idle", "idleAfter": "500ms"}
AGENT = re.compile(r"torpor-operator/(?P<operator>\S+) host/(?P<host>\S+) epoch/(?P<epoch>\d+)")

pytestmark = pytest.mark.timeout(420)


@dataclass(frozen=True, slots=True)
class Fleet:
    namespace: str
    members: list[Member]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(mesh: Mesh) -> AsyncIterator[Fleet]:
    """All of them, ready, in a namespace that is gone after the file."""
    everybody = members(SIXTY)
    async with mesh.control_plane.admin_client() as kube, temporary_namespace(kube, "fleet") as namespace:
        await deploy(mesh, kube, namespace, everybody, unload=SOON)
        yield Fleet(namespace, everybody)


async def test_sixty_different_operators_cost_one_watch_a_kind_and_no_memory(mesh: Mesh, fleet: Fleet) -> None:
    assert len({member.guest.sha256 for member in fleet.members}) == 60
    states = await mesh.until_asleep()
    assert len(states) == 60
    assert sum(state.private_bytes for state in states.values()) == 0
    watches = await mesh.upstream_watches()
    assert {f"{kind}.example.com": 1 for kind in EXAMPLE_KINDS} == {
        name: count for name, count in watches.items() if name.endswith(".example.com")
    }


async def test_objects_changed_while_operators_sleep_are_all_reconciled(
    mesh: Mesh, fleet: Fleet, kube: KubeClient
) -> None:
    load = Load(kube, fleet.namespace, fleet.members, seed=1)
    before = await mesh.until_asleep()
    await load.create(OBJECTS)
    await load.until_reconciled()
    asleep = await mesh.until_asleep()
    await load.change(300)
    await load.delete(150)
    await load.create(50)
    await load.until_reconciled()
    after = await mesh.until_asleep()

    for key, state in after.items():
        assert (state.errors, state.last_error) == (0, ""), key
        assert before[key].wakes < asleep[key].wakes < state.wakes, f"{key} was woken by both rounds"
    await load.delete(len(load.objects))
    await load.until_reconciled()


async def test_nothing_is_lost_when_each_service_is_killed_during_the_load(
    mesh: Mesh, fleet: Fleet, kube: KubeClient, control_plane: ControlPlane
) -> None:
    load = Load(kube, fleet.namespace, fleet.members, seed=2)
    begun = len(control_plane.audit_events())
    await load.create(OBJECTS // 2)
    for service in ("host", "cache", "scheduler"):
        under_way = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(_drive(load, under_way))
            await under_way.wait()
            await mesh.kill9(service)
        await mesh.restart(service)
    await mesh.ready()
    await load.until_reconciled(timeout_s=120)
    await mesh.until_asleep()

    written = [event for event in control_plane.audit_events()[begun:] if event.is_write and event.code < 400]
    assert _epochs_seen(written), "no operator has written at two epochs: the host's death was not noticed"
    assert _writes_out_of_order(written) == []


def test_late_write_of_an_older_epoch_would_be_found() -> None:
    def write(operator: str, epoch: int, second: int) -> AuditEvent:
        agent = f"torpor-operator/{operator} host/host-0 epoch/{epoch}"
        fields = dict.fromkeys(AuditEvent.__dataclass_fields__, "")
        return AuditEvent(**{**fields, "received_at": f"2026-01-01T00:00:{second:02d}Z", "user_agent": agent})

    in_order = [write("ns/a", 1, 1), write("ns/b", 2, 2), write("ns/a", 2, 3), write("ns/b", 2, 4)]
    assert _writes_out_of_order(in_order) == []
    assert len(_writes_out_of_order([*in_order, write("ns/a", 1, 5)])) == 1
    assert _epochs_seen(in_order) == ["ns/a"]


async def _drive(load: Load, under_way: asyncio.Event) -> None:
    """Sets the event when what was changed is still being reconciled and the deletions begin."""
    await load.change(100)
    under_way.set()
    await load.delete(40)
    await load.create(80)


def _epochs_seen(events: list[AuditEvent]) -> list[str]:
    """Operators that wrote at more than one epoch."""
    epochs: dict[str, set[str]] = {}
    for event in events:
        if found := AGENT.search(event.user_agent):
            epochs.setdefault(found["operator"], set()).add(found["epoch"])
    return [operator for operator, seen in epochs.items() if len(seen) > 1]


def _writes_out_of_order(events: list[AuditEvent]) -> list[str]:
    """Writes of an older epoch that came after the first of a newer one, operator by operator."""
    newest: dict[str, int] = {}
    late: list[str] = []
    for event in sorted(events, key=lambda event: event.received_at):
        if (found := AGENT.search(event.user_agent)) is None:
            continue
        operator, epoch = found["operator"], int(found["epoch"])
        if epoch < newest.get(operator, 0):
            late.append(f"{event.received_at} {event.user_agent} {event.verb} {event.uri}")
        newest[operator] = max(newest.get(operator, 0), epoch)
    return late
