"""Cache, scheduler and host as processes of a test: started on Unix sockets, killed, restarted, their logs kept.

A Mesh belongs to no event loop, so that a fixture may keep one for a whole file of tests; stubs belong to the loop that
opens them. The processes die with the one that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torpor.cache.v1 import cache_pb2_grpc
from torpor.host.v1 import host_pb2, host_pb2_grpc
from torpor.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from torpor_kubernetes_testing import ControlPlane
from torpor_kubernetes_testing.processes import ServerProcess

SERVICES = ("cache", "scheduler", "host")
READY_S = 45.0
PROBE_S = 2.0


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """What differs between tests."""

    python_runtime: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # of all three
    host_environment: Mapping[str, str] = field(default_factory=dict)
    host_state: Path | None = None  # default: below the mesh's folder
    host_command: tuple[str, ...] = ()  # what the host's command is an argument of
    services: tuple[str, ...] = SERVICES


class Mesh:
    """`async with Mesh(control_plane, options)`: a folder of its own below the system's temporary one.

    `modules` is the host's module folder, `logs` what the three have written.
    """

    def __init__(self, control_plane: ControlPlane, options: MeshOptions | None = None) -> None:
        self._options = options or MeshOptions()
        # Not pytest's tmp_path: a Unix socket's path has 107 bytes at most.
        self.folder = Path(tempfile.mkdtemp(prefix="torpor-e2e-"))
        self.modules = self.folder / "modules"
        self.logs = self.folder / "logs"
        self.host_state = self._options.host_state or self.folder / "host"
        for folder in (self.modules, self.logs):
            folder.mkdir()
        self.control_plane = control_plane
        self.watches_before: dict[str, int] = {}
        kubeconfig = control_plane.admin_kubeconfig(self.folder / "kubeconfig")
        self._processes = {name: self._process(name, kubeconfig) for name in self._options.services}

    # Life

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def count_watches_before(self) -> None:
        """Before the start, where `upstream_watches` is asked later."""
        self.watches_before = (await self.control_plane.metrics()).watches()

    def start(self) -> None:
        for process in self._processes.values():
            process.start()

    async def stop(self) -> None:
        """SIGTERM to all, host first; the folder goes."""
        for name in reversed(SERVICES):
            if name in self._processes:
                await self._processes[name].terminate()
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    async def ready(self, *services: str, timeout_s: float = READY_S) -> None:
        """Until gRPC health says SERVING. Raises ProcessFailed with the end of the log."""
        for name in services or self._options.services:
            await self._processes[name].ready(partial(self.serving, name), timeout_s=timeout_s)

    async def serving(self, service: str) -> bool:
        """What gRPC health says now; False where nobody answers."""
        try:
            async with grpc.aio.insecure_channel(self.address(service)) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def until_serving(self, service: str, serving: bool, *, timeout_s: float = READY_S) -> None:
        """Follows gRPC health until it says so. Raises TimeoutError."""
        wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        async with asyncio.timeout(timeout_s), self._channel(service) as channel:
            async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                if answer.status == wanted:
                    return
        raise AssertionError(f"the health of {service} ended")

    async def until_logged(self, service: str, text: str, *, timeout_s: float = READY_S) -> None:
        """Until the service has logged `text` since it was last started."""

        async def logged() -> bool:
            return self._processes[service].has_logged(text)

        await self._processes[service].ready(logged, timeout_s=timeout_s)

    async def kill9(self, service: str) -> None:
        await self._processes[service].kill()

    async def terminate(self, service: str) -> None:
        await self._processes[service].terminate()

    async def restart(self, service: str) -> None:
        """Start it again, killed first if it runs; returns when it is ready."""
        await self._processes[service].kill()
        self._processes[service].start()
        await self.ready(service)

    def running(self, service: str) -> bool:
        return self._processes[service].running

    def start_one(self, service: str) -> None:
        self._processes[service].start()

    def pid(self, service: str) -> int:
        return self._processes[service].pid

    # Talking to it

    def address(self, service: str) -> str:
        return f"unix:{self.folder / service}.sock"

    @contextlib.asynccontextmanager
    async def host(self) -> AsyncIterator[host_pb2_grpc.HostAsyncStub]:
        async with self._channel("host") as channel:
            yield host_pb2_grpc.HostStub(channel)

    @contextlib.asynccontextmanager
    async def cache(self) -> AsyncIterator[cache_pb2_grpc.ResourceCacheAsyncStub]:
        async with self._channel("cache") as channel:
            yield cache_pb2_grpc.ResourceCacheStub(channel)

    @contextlib.asynccontextmanager
    async def scheduler(self) -> AsyncIterator[scheduler_pb2_grpc.SchedulerAsyncStub]:
        async with self._channel("scheduler") as channel:
            yield scheduler_pb2_grpc.SchedulerStub(channel)

    @contextlib.asynccontextmanager
    async def _channel(self, service: str) -> AsyncIterator[grpc.aio.Channel]:
        async with grpc.aio.insecure_channel(self.address(service)) as channel:
            yield channel

    async def states(self) -> dict[tuple[str, str], host_pb2.OperatorState]:
        """The host's operators by namespace and name."""
        async with self.host() as host:
            listed = await host.ListOperators(host_pb2.ListOperatorsRequest(), timeout=5.0)
        return {(state.operator.namespace, state.operator.name): state for state in listed.operators}

    async def until_states(
        self,
        condition: Callable[[dict[tuple[str, str], host_pb2.OperatorState]], bool],
        *,
        timeout_s: float = 30.0,
    ) -> dict[tuple[str, str], host_pb2.OperatorState]:
        """Wait, on the host's stream of states, until `condition` holds of all of them."""
        known: dict[tuple[str, str], host_pb2.OperatorState] = {}
        try:
            async with asyncio.timeout(timeout_s), self.host() as host:
                known = await self.states()
                if condition(known):
                    return known
                async for change in host.WatchStates(host_pb2.WatchStatesRequest()):
                    key = (change.state.operator.namespace, change.state.operator.name)
                    if change.gone:
                        known.pop(key, None)
                    else:
                        known[key] = change.state
                    if condition(known):
                        return known
        except TimeoutError as error:
            raise TimeoutError(f"after {timeout_s} s: {_summary(known)}") from error
        raise AssertionError("the host's stream of states ended")

    async def until_state(
        self,
        operator: tuple[str, str],
        condition: Callable[[host_pb2.OperatorState], bool],
        *,
        timeout_s: float = 30.0,
    ) -> host_pb2.OperatorState:
        """The same for one operator."""
        states = await self.until_states(
            lambda states: operator in states and condition(states[operator]), timeout_s=timeout_s
        )
        return states[operator]

    async def wake(self, operator: tuple[str, str], key: tuple[str, str]) -> None:
        """Marks a key (namespace, name) of an operator (namespace, name) dirty."""
        identity = scheduler_pb2.OperatorId(namespace=operator[0], name=operator[1])
        async with self.host() as host:
            await host.Wake(host_pb2.WakeRequest(operator=identity, namespace=key[0], name=key[1]), timeout=5.0)

    async def until_asleep(self, *, timeout_s: float = 30.0) -> dict[tuple[str, str], host_pb2.OperatorState]:
        """Until no guest is in memory and nothing waits."""
        return await self.until_states(
            lambda states: all(asleep(state) for state in states.values()), timeout_s=timeout_s
        )

    async def wake_counts(self) -> dict[tuple[str, str], int]:
        return {key: int(state.wakes) for key, state in (await self.states()).items()}

    async def upstream_watches(self) -> dict[str, int]:
        """Watches by resource ("widgets.example.com") as the API server counts them, less those before the mesh."""
        now = (await self.control_plane.metrics()).watches()
        grown = {name: count - self.watches_before.get(name, 0) for name, count in now.items()}
        return {name: count for name, count in grown.items() if count}

    async def log_lines(self, namespace: str, name: str) -> list[str]:
        """What the operator has logged, as far as the host has kept it."""
        request = host_pb2.LogsRequest(operator=scheduler_pb2.OperatorId(namespace=namespace, name=name))
        async with self.host() as host:
            return [line.text async for line in host.Logs(request, timeout=5.0)]

    async def follow_log(self, namespace: str, name: str, *, timeout_s: float = 30.0) -> AsyncIterator[str]:
        """The operator's log, those lines first that the host has kept. Raises TimeoutError."""
        operator = scheduler_pb2.OperatorId(namespace=namespace, name=name)
        async with asyncio.timeout(timeout_s), self.host() as host:
            async for line in host.Logs(host_pb2.LogsRequest(operator=operator, follow=True)):
                yield line.text

    def log_text(self, service: str) -> str:
        path = self.logs / f"{service}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def log_tails(self, characters: int = 4000) -> str:
        return "\n".join(f"--- {name}\n{self.log_text(name)[-characters:]}" for name in self._options.services)

    # How it is made

    def _process(self, name: str, kubeconfig: Path) -> ServerProcess:
        # Nothing of the developer's own settings, but the paths that a process needs.
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("TORPOR_", "OTEL_"))}
        environment = {**kept, **self._settings(name, kubeconfig), **self._options.environment}
        if name == "host":
            environment |= self._options.host_environment
        command = [sys.executable, "-m", f"torpor_{name}"]
        if name == "host":
            command = [*self._options.host_command, *command]
        return ServerProcess(command, log=self.logs / f"{name}.log", name=name, environment=environment)

    def _settings(self, name: str, kubeconfig: Path) -> dict[str, str]:
        match name:
            case "cache":
                return {
                    "TORPOR_CACHE_LISTEN": self.address("cache"),
                    "TORPOR_CACHE_KUBECONFIG": str(kubeconfig),
                    "TORPOR_CACHE_STATE": str(self.folder / "cache-state"),
                }
            case "scheduler":
                return {"TORPOR_LISTEN": self.address("scheduler"), "TORPOR_SCHEDULER_CACHE": self.address("cache")}
            case _:
                runtime = self._options.python_runtime
                return {
                    "TORPOR_HOST_LISTEN": self.address("host"),
                    "TORPOR_HOST_CACHE": self.address("cache"),
                    "TORPOR_HOST_SCHEDULER": self.address("scheduler") if "scheduler" in self._options.services else "",
                    "TORPOR_HOST_STATE_DIR": str(self.host_state),
                    "TORPOR_HOST_MODULES_DIR": str(self.modules),
                    "TORPOR_HOST_PYTHON_RUNTIME": str(runtime) if runtime else "",
                    # Short, so that a killed host is missed soon; the margin covers a stall of the test's machine.
                    "TORPOR_HOST_LEASE_DURATION_S": "8",
                    "TORPOR_HOST_LEASE_RENEW_S": "2",
                }


def asleep(state: host_pb2.OperatorState) -> bool:
    idle = not state.queued and not state.running
    return idle and state.phase in (scheduler_pb2.COLD, scheduler_pb2.FAILED)


def with_host_environment(options: MeshOptions, **environment: str) -> MeshOptions:
    return dataclasses.replace(options, host_environment={**options.host_environment, **environment})


def _summary(states: Mapping[tuple[str, str], host_pb2.OperatorState]) -> str:
    shown = [
        f"{name}: {scheduler_pb2.Phase.Name(s.phase)} queued {s.queued} running {s.running} {s.last_error[:200]}"
        for (_, name), s in sorted(states.items())
        if not asleep(s)
    ]
    return f"{len(states)} operators, of which not asleep: {shown[:10]}"
