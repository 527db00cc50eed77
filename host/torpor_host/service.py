"""A host, put together: everything that `python -m torpor_host` runs, also inside another process for tests.

    async with running_host(config) as host:
        await host.server.wait_stopped()

Order of the end: intake stops, running reconciles get `drain_s`, what is left is stopped; acknowledgements go out; the
Lease is released; then the tasks, the threads and the engine end.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from torpor.host.v1 import host_pb2_grpc
from torpor_services.channels import open_bare_channel, open_channel, peer_metadata
from torpor_services.clock import Clock, SystemClock
from torpor_services.errors import InvalidSetting
from torpor_services.health import Readiness
from torpor_services.security import Identity
from torpor_services.server import RunningServer, ServerConfig, serving

from torpor_host.api import KubeApi
from torpor_host.artifacts import ArtifactStore
from torpor_host.assignments import Assignments
from torpor_host.config import HostConfig
from torpor_host.engine import GuestEngine
from torpor_host.engine_config import EngineConfig
from torpor_host.guest_logs import GuestLogs
from torpor_host.install import Discovery, InstalledModule, ModuleSource, install
from torpor_host.installation import Installer, instance_limits
from torpor_host.lease import HostLease, StateFolder
from torpor_host.limits import InstanceLimits
from torpor_host.mappings import Mapper
from torpor_host.native import trim_heap
from torpor_host.operator_record import Loaded, Operator
from torpor_host.operators import Operators
from torpor_host.outbound import Outbound
from torpor_host.read_ahead import ReadAhead
from torpor_host.reconciler import Reconciler
from torpor_host.requests import CacheRequests, GuestCalls
from torpor_host.scheduler_link import SchedulerLink
from torpor_host.servicer import SERVICE, HostServicer, StateFeed
from torpor_host.snapshots import Expected
from torpor_host.status import StatusWriter
from torpor_host.subscriber import Subscriber
from torpor_host.timers import Timers
from torpor_host.work_queue import Key, Pending
from torpor_host.workers import Mailbox, Workers

log = logging.getLogger(__name__)

# A reconcile of a Python guest takes a few milliseconds between host calls; what holds the processor for longer than
# this while others wait runs on beside them.
SLICE_S = 0.1

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?\Z")
_FLUSH_S = 2.0
_STOP_S = 5.0  # for guests that were told to stop: a tick, or the end of their host call
_TRIM_EVERY_S = 60.0


@dataclass(slots=True)
class Host:
    """A running host. Loop only."""

    config: HostConfig
    clock: Clock
    timers: Timers
    server: RunningServer
    readiness: Readiness
    operators: Operators
    assignments: Assignments
    lease: HostLease
    subscriber: Subscriber
    requests: CacheRequests
    link: SchedulerLink
    status: StatusWriter
    logs: GuestLogs
    workers: Workers
    engine: GuestEngine
    servicer: HostServicer
    spawned: _Spawner
    failed: bool = False  # a task of its own ended with an error

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.server.address


@asynccontextmanager
async def running_host(
    config: HostConfig, *, clock: Clock | None = None, handle_signals: bool = False
) -> AsyncIterator[Host]:
    """Listens and runs until the block ends. Raises InvalidSetting, AddressInUse, StateFolderInUse."""
    if not _NAME.match(config.name):
        raise InvalidSetting("TORPOR_HOST_NAME", f"{config.name!r} is not a DNS label of at most 42 characters")
    clock = clock or SystemClock()
    async with AsyncExitStack() as stack:
        state = StateFolder.open(config.guests.state_dir)
        stack.callback(state.close)
        host = await _assemble(config, clock, state, stack)
        await stack.enter_async_context(_serve(host, handle_signals=handle_signals))
        async with _tasks(host):
            yield host
            await _drain(host)


async def _assemble(config: HostConfig, clock: Clock, state: StateFolder, stack: AsyncExitStack) -> Host:
    identity = Identity("host", config.name)
    post = Mailbox(asyncio.get_running_loop()).post
    timers = Timers(clock)
    channel = open_channel(config.cache, identity, config.tls)
    stack.push_async_callback(channel.close, None)
    bare_channel = open_bare_channel(config.cache, config.tls)
    stack.push_async_callback(bare_channel.close, None)
    metadata = () if config.tls.enabled else peer_metadata(identity)
    requests = CacheRequests(bare_channel, clock, post, metadata=metadata)
    scheduler_channel: grpc.aio.Channel | None = None
    if config.scheduler:
        scheduler_channel = open_channel(config.scheduler, identity, config.tls)
        stack.push_async_callback(scheduler_channel.close, None)

    engine = await asyncio.to_thread(_engine, config, state)
    workers = Workers("guest", threads_max=config.guests.workers, slice_s=SLICE_S)
    install_workers = Workers("install", threads_max=config.guests.installs, slots=config.guests.installs)
    stack.push_async_callback(_close_engine, engine, workers, install_workers)

    logs = GuestLogs(clock, post)
    subscriber = Subscriber(channel, clock, timers)
    api = KubeApi(channel)
    readiness = Readiness()
    states = StateFeed()
    spawned = _Spawner()

    def acquired(incarnation: str) -> None:
        log.info("the Lease is held", extra={"host": config.name, "incarnation": incarnation})
        readiness.met("lease")
        host.link.incarnation(incarnation)
        host.assignments.lease_acquired()

    def lost(problem: str) -> None:
        readiness.lost("lease", problem)
        host.assignments.lease_lost(problem)

    lease = HostLease(api, clock, config.lease, host=config.name, state=state.id, on_acquired=acquired, on_lost=lost)
    operators = Operators(
        host=config.name,
        clock=clock,
        timers=timers,
        subscriber=subscriber,
        workers=workers,
        install_workers=install_workers,
        installer=_installer(engine, config),
        requests=requests,
        logs=logs,
        post=post,
        lease_refusal=lease.refusal,
        memory_budget_bytes=config.guests.memory_budget,
    )
    load = _Loader(engine, requests, Outbound(timers), logs, workers)
    operators.mappings.mapper = Mapper(load=load, workers=workers, clock=clock, post=post)
    operators.reconciler = Reconciler(
        load=load,
        workers=workers,
        clock=clock,
        post=post,
        listener=operators,
        snapshot_folder=_snapshot_folder(state),
        read_ahead=_read_ahead(requests, workers, clock),
    )
    assignments = Assignments(
        host=config.name,
        namespace=config.lease.namespace,
        clock=clock,
        timers=timers,
        subscriber=subscriber,
        api=api,
        registry=operators,
        lease_held=lambda: lease.held,
        scheduler_decides=lambda: host.link.decides,
        spawn=spawned,
    )
    operators.verify_assignment = assignments.verify
    link = SchedulerLink(
        scheduler_channel,
        host=config.name,
        clock=clock,
        timers=timers,
        operators=operators,
        assignments=assignments,
        away_s=config.scheduler_away_s,
    )
    status = StatusWriter(
        api,
        clock,
        timers,
        assignments,
        allowed=lambda: lease.held,
        next_wake_s=operators.next_wake_s,
        private_bytes=operators.private_bytes,
    )
    operators.observers = [link, status, states]
    _bind_readiness(readiness, subscriber, assignments)
    host = Host(
        config=config,
        clock=clock,
        timers=timers,
        server=RunningServer(""),
        readiness=readiness,
        operators=operators,
        assignments=assignments,
        lease=lease,
        subscriber=subscriber,
        requests=requests,
        link=link,
        status=status,
        logs=logs,
        workers=workers,
        engine=engine,
        servicer=HostServicer(config.name, clock, operators, logs, states),
        spawned=spawned,
    )
    return host


@asynccontextmanager
async def _serve(host: Host, *, handle_signals: bool) -> AsyncIterator[None]:
    config = ServerConfig(listen=host.config.listen, drain_s=1.0, tls=host.config.tls)
    async with serving(
        config,
        add=lambda server: host_pb2_grpc.add_HostServicer_to_server(host.servicer, server),
        names=[SERVICE],
        readiness=host.readiness,
        handle_signals=handle_signals,
    ) as server:
        host.server = server
        yield


@asynccontextmanager
async def _tasks(host: Host) -> AsyncIterator[None]:
    """The host's own tasks; each one goes on until it is cancelled here. One that fails ends the service."""
    host.assignments.start()
    runs: dict[str, Coroutine[Any, Any, None]] = {
        "timers": host.timers.run(),
        "watch": host.subscriber.run(),
        "acknowledgements": host.subscriber.run_acks(),
        "requests": host.requests.run(),
        "lease": host.lease.run(),
        "status": host.status.run(),
        "scheduler": host.link.run(),
        "trim": _trim(host),
    }
    tasks = [asyncio.create_task(run, name=name) for name, run in runs.items()]
    for task in tasks:
        task.add_done_callback(lambda ended: _ended(host, ended))
    try:
        yield
    finally:
        await host.spawned.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ended(host: Host, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a task of the host failed; it stops", extra={"task": task.get_name()}, exc_info=error)
        host.failed = True
        host.server.stop()


async def _drain(host: Host) -> None:
    """What runs may end; then others may take over at once."""
    log.info("draining", extra={"operators": len(host.operators)})
    host.operators.hold_all()
    if not await _still(host, host.config.drain_s):
        log.warning("guests are stopped: they did not end in time")
        for operator in host.operators.all():
            host.operators.stop_guests(operator, "the host shuts down")
        await _still(host, _STOP_S)
    await host.subscriber.flush(_FLUSH_S)
    with suppress(TimeoutError):
        async with asyncio.timeout(_FLUSH_S):
            await host.status.flush()
    await host.lease.release()


async def _still(host: Host, timeout_s: float) -> bool:
    """Waits until no worker has an operator."""
    deadline_s = host.clock.monotonic_s() + timeout_s
    while host.operators.moving:
        if host.clock.monotonic_s() >= deadline_s:
            return False
        await host.clock.sleep(0.01)
    return True


async def _trim(host: Host) -> None:
    """Gives the C heap's free memory back once guests have left; a millisecond, in a thread."""
    wakes_before = 0
    while True:
        await host.clock.sleep(_TRIM_EVERY_S)
        wakes = sum(operator.wakes for operator in host.operators.all())
        if wakes != wakes_before:
            wakes_before = wakes
            await asyncio.to_thread(trim_heap)


# -- parts


class _Spawner:
    """Short tasks with an owner: they end with the host."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, run: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(run)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request of the host failed", exc_info=error)

    async def cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _read_ahead(requests: CacheRequests, workers: Workers, clock: Clock) -> Callable[[Operator], ReadAhead]:
    def of(operator: Operator) -> ReadAhead:
        assert operator.spec is not None and operator.actor is not None
        reader = requests.reader(operator.actor, operator.positions, operator, workers)
        # With several turns at once each would ask for the same keys.
        peek = operator.queue.peek if operator.spec.concurrency == 1 else _nothing
        return ReadAhead(operator, operator.spec.primary.resource, reader, peek, clock.monotonic_s)

    return of


def _nothing(count: int) -> list[tuple[Key, Pending]]:
    return []


class _Loader:
    """Makes instances; on workers."""

    def __init__(
        self, engine: GuestEngine, requests: CacheRequests, outbound: Outbound, logs: GuestLogs, workers: Workers
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._outbound = outbound
        self._logs = logs
        self._workers = workers

    def __call__(self, operator: Operator, snapshot: Expected | None) -> Loaded:
        assert operator.spec is not None and operator.installed is not None and operator.actor is not None
        calls = GuestCalls(
            operator.actor,
            requests=self._requests,
            outbound=self._outbound,
            positions=operator.positions,
            fence=operator,
            logs=self._logs,
            slot=self._workers,
        )
        limits = instance_limits(operator.spec.limits)
        return Loaded(self._engine.load(operator.installed, limits, calls, snapshot=snapshot), calls)


def _engine(config: HostConfig, state: StateFolder) -> GuestEngine:
    settings = EngineConfig(python_runtime=config.guests.python_runtime)
    return GuestEngine(settings, ArtifactStore(state.path / "artifacts"))


def _installer(engine: GuestEngine, config: HostConfig) -> Installer:
    def install_module(source: ModuleSource, limits: InstanceLimits, discovery: Discovery) -> InstalledModule:
        return install(engine, source, limits=limits, discovery=discovery)

    return Installer(install_module, config.guests.modules_dir)


def _snapshot_folder(state: StateFolder) -> Path:
    """Those of an earlier life are of an earlier epoch: nobody may wake from them."""
    folder = state.path / "snapshots"
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
    return folder


async def _close_engine(engine: GuestEngine, *pools: Workers) -> None:
    """A thread that goes on (a compiler that takes its time) keeps the engine: it ends with the process."""
    ended = [await asyncio.to_thread(pool.close, _STOP_S) for pool in pools]
    if all(ended):
        engine.close()
    else:
        log.warning("a worker thread did not end; it ends with the process")


def _bind_readiness(readiness: Readiness, subscriber: Subscriber, assignments: Assignments) -> None:
    readiness.require("cache", "not connected")
    readiness.require("lease", "not acquired yet")
    readiness.require("operators", assignments.problem)

    def connection(connected: bool) -> None:
        if connected:
            readiness.met("cache")
        else:
            readiness.lost("cache", "the watch stream is broken")

    def synced(is_synced: bool) -> None:
        if is_synced:
            readiness.met("operators")
        else:
            readiness.lost("operators", assignments.problem)

    subscriber.on_connection = connection
    assignments.on_synced_changed = synced
