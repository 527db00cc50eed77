"""The mesh on this machine: the devcluster if wanted, then cache, scheduler and host as processes.

Torpor's own definitions are installed before anything watches them.

    async with mesh(options, say=print) as running:
        await running.wait_failed()

Everything is stopped in reverse order when the block ends, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torpor_services.channels import open_channel
from torpor_services.security import Identity, TlsFiles

from torpor_cli.errors import CommandFailed
from torpor_cli.processes import Child, python, run_command
from torpor_cli.rundir import MeshFile, RunDir

CLIENT = Identity("client", "cli")
_DEVCLUSTER_READY_S = 20.0

Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class MeshOptions:
    """What to start, and against what."""

    name: str = "default"
    kubeconfig: Path | None = None
    context: str = ""
    devcluster: bool = False
    scheduler: bool = True
    modules: Path | None = None
    python_runtime: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # for every service, over this process's own


@dataclass
class RunningMesh:
    """The processes and where they are reached."""

    run_dir: RunDir
    children: list[Child]
    kubeconfig: Path | None
    context: str

    async def wait_failed(self) -> None:
        """Until one of them can no longer be kept running; raises CommandFailed."""
        waits = [asyncio.create_task(child.wait_failed()) for child in self.children]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in waits:
                task.cancel()

    async def wait_ready(self, service: str) -> None:
        """Until the service's health says SERVING; raises CommandFailed if it cannot be kept running."""
        await self.unless_failed(_serving(self.run_dir.socket(service)))

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives; raises CommandFailed if a service cannot be kept running meanwhile."""
        wanted = asyncio.create_task(work)
        failed = asyncio.create_task(self.wait_failed())
        try:
            await asyncio.wait({wanted, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            return await wanted
        finally:
            wanted.cancel()
            failed.cancel()

    def child(self, name: str) -> Child:
        return next(child for child in self.children if child.name == name)


@asynccontextmanager
async def mesh(options: MeshOptions, say: Say) -> AsyncIterator[RunningMesh]:
    """Starts everything, without waiting for readiness; raises CommandFailed."""
    run_dir = RunDir.named(options.name)
    run_dir.create()
    lock = run_dir.lock()
    children: list[Child] = []
    try:
        kubeconfig = options.kubeconfig
        if options.devcluster:
            kubeconfig = run_dir.root / "kubeconfig"
            devcluster = Child(
                "devcluster",
                python("torpor_devcluster", "--kubeconfig", str(kubeconfig)),
                dict(os.environ),
                run_dir.logs / "devcluster.log",
                say,
                lost_with_it="its objects, which were in its memory, are gone: start anew",
            )
            children.append(devcluster)  # before it starts, so that whatever happens then stops it
            await _start_devcluster(devcluster, kubeconfig)
        for name, module, environment in _services(options, run_dir, kubeconfig):
            child = Child(name, python(module), environment, run_dir.logs / f"{name}.log", say)
            children.append(child)
            await child.start()
            if name == "cache":
                # Scheduler and host watch WasmOperators at once: without the definition that is an error.
                await run_command(["install-crds"], kubeconfig, options.context)
        run_dir.write(_mesh_file(run_dir, kubeconfig, options))
        yield RunningMesh(run_dir, children, kubeconfig, options.context)
    finally:
        run_dir.mesh_file.unlink(missing_ok=True)
        for child in reversed(children):
            await child.stop()
        lock.close()


def host_name() -> str:
    """This machine's name as a DNS label."""
    label = "".join(c if c.isalnum() else "-" for c in socket.gethostname().split(".", maxsplit=1)[0].lower())
    return label.strip("-") or "host-0"


def find_python_runtime(given: Path | None) -> Path | None:
    """The Python runtime: given, from TORPOR_PYTHON_RUNTIME, or the one this checkout builds (built if missing)."""
    import subprocess

    if given is not None or os.environ.get("TORPOR_PYTHON_RUNTIME"):
        path = given or Path(os.environ["TORPOR_PYTHON_RUNTIME"])
        if not path.is_file():
            raise CommandFailed(f"the Python runtime {path} does not exist")
        return path
    script = Path(__file__).resolve().parents[2] / "sdk" / "python" / "runtime" / "build.py"
    if not script.is_file():
        return None
    result = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise CommandFailed("the Python runtime could not be built; see above")
    return Path(result.stdout.strip().splitlines()[-1])


def _services(
    options: MeshOptions, run_dir: RunDir, kubeconfig: Path | None
) -> list[tuple[str, str, Mapping[str, str]]]:
    common = {**os.environ, **options.environment}
    cache = {"TORPOR_CACHE_LISTEN": run_dir.socket("cache"), "TORPOR_CACHE_STATE": str(run_dir.root / "cache-state")}
    if kubeconfig is not None:
        cache["TORPOR_CACHE_KUBECONFIG"] = str(kubeconfig)
    if options.context:
        cache["TORPOR_CACHE_CONTEXT"] = options.context
    scheduler = {
        "TORPOR_LISTEN": run_dir.socket("scheduler"),
        "TORPOR_SCHEDULER_CACHE": run_dir.socket("cache"),
    }
    host = {
        "TORPOR_HOST_NAME": host_name(),
        "TORPOR_HOST_LISTEN": run_dir.socket("host"),
        "TORPOR_HOST_CACHE": run_dir.socket("cache"),
        "TORPOR_HOST_STATE_DIR": str(_state_home() / f"host-{options.name}"),
    }
    if options.scheduler:
        host["TORPOR_HOST_SCHEDULER"] = run_dir.socket("scheduler")
    if options.modules is not None:
        host["TORPOR_HOST_MODULES_DIR"] = str(options.modules.resolve())
    if options.python_runtime is not None:
        host["TORPOR_HOST_PYTHON_RUNTIME"] = str(options.python_runtime)
    services: list[tuple[str, str, Mapping[str, str]]] = [("cache", "torpor_cache", {**common, **cache})]
    if options.scheduler:
        services.append(("scheduler", "torpor_scheduler", {**common, **scheduler}))
    services.append(("host", "torpor_host", {**common, **host}))
    return services


def _state_home() -> Path:
    """Where compiled modules and images stay from one run to the next."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "torpor"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _mesh_file(run_dir: RunDir, kubeconfig: Path | None, options: MeshOptions) -> MeshFile:
    return MeshFile(
        pid=os.getpid(),
        cache=run_dir.socket("cache"),
        host=run_dir.socket("host"),
        scheduler=run_dir.socket("scheduler") if options.scheduler else "",
        kubeconfig=str(kubeconfig or ""),
        host_name=host_name(),
    )


async def _start_devcluster(child: Child, kubeconfig: Path) -> None:
    await asyncio.to_thread(_remove, kubeconfig, child.log)
    await child.start()
    if not await asyncio.to_thread(_appears, kubeconfig, _DEVCLUSTER_READY_S):
        raise CommandFailed(f"the devcluster did not start: {child.last_line()}")


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _appears(path: Path, timeout_s: float) -> bool:
    """Waits for a file that another process writes last, once it serves; there is no portable event for it."""
    deadline_s = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return path.exists()


async def _serving(address: str) -> None:
    """Until health says SERVING there, whatever happens to the connection meanwhile."""
    async with open_channel(address, CLIENT, TlsFiles()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for answer in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
