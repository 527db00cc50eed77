"""The scheduler service: servicer, price, and the loop that keeps every operator assigned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torpor.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServicer_to_server
from torpor_services.channels import open_channel
from torpor_services.clock import Clock, SystemClock
from torpor_services.health import Readiness
from torpor_services.security import Identity
from torpor_services.server import RunningServer, serving

from torpor_scheduler.assignments import HostView, choose
from torpor_scheduler.cluster import Cluster
from torpor_scheduler.config import SchedulerConfig
from torpor_scheduler.coordination import Coordinator
from torpor_scheduler.servicer import SchedulerServicer

# A dead host is seen by its Lease, of which the cache tells; its expiry is the passing of time, which nobody tells.
_EXPIRY_CHECK_S = 2.0


@asynccontextmanager
async def running(
    config: SchedulerConfig, clock: Clock | None = None, *, handle_signals: bool = True
) -> AsyncIterator[RunningServer]:
    """A scheduler that serves until the block ends."""
    clock = clock or SystemClock()
    wanted = asyncio.Event()
    readiness = Readiness()
    readiness.require("operators", "the cache has not answered yet")
    coordinator = Coordinator(clock, on_hosts_changed=wanted.set)
    identity = Identity("scheduler", config.name)
    channel = open_channel(config.cache, identity, config.server.tls)
    cluster = Cluster(channel, config.namespace, clock, on_change=wanted.set)
    async with (
        serving(
            config.server,
            add=lambda server: add_SchedulerServicer_to_server(SchedulerServicer(coordinator), server),
            names=["torpor.scheduler.v1.Scheduler"],
            readiness=readiness,
            handle_signals=handle_signals,
        ) as server,
        channel,
    ):
        tasks = [
            asyncio.create_task(cluster.run()),
            asyncio.create_task(coordinator.run()),
            asyncio.create_task(_place(cluster, coordinator, clock, wanted, readiness)),
            asyncio.create_task(_nudge(cluster, coordinator, clock, wanted)),
        ]
        try:
            yield server
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _place(
    cluster: Cluster, coordinator: Coordinator, clock: Clock, wanted: asyncio.Event, readiness: Readiness
) -> None:
    """Writes what `choose` finds missing, then tells the hosts; until cancelled."""
    while True:
        await wanted.wait()
        wanted.clear()
        if not cluster.synced:
            readiness.lost("operators", "the watch of WasmOperators is not live")
            continue
        readiness.met("operators")
        _forget_deleted(cluster, coordinator)
        hosts = {name: HostView(name, session.running) for name, session in coordinator.sessions.items()}
        for assignment in choose(cluster.operators.values(), hosts, cluster.leases, clock.monotonic_s()):
            session = coordinator.sessions.get(assignment.host)
            if session is not None and await cluster.write(assignment):
                session.assign(assignment.operator.key, assignment.epoch)


def _forget_deleted(cluster: Cluster, coordinator: Coordinator) -> None:
    for key in [key for key in coordinator.planner.operators if key not in cluster.operators]:
        coordinator.planner.forget(key)
    for session in coordinator.sessions.values():
        for key in [key for key in session.running if key not in cluster.operators]:
            session.revoke(key, session.running[key])


async def _nudge(cluster: Cluster, coordinator: Coordinator, clock: Clock, wanted: asyncio.Event) -> None:
    """Looks again while an operator belongs to a host that is away."""
    while True:
        await clock.sleep(_EXPIRY_CHECK_S)
        if coordinator.sessions and any(o.host not in coordinator.sessions for o in cluster.operators.values()):
            wanted.set()
