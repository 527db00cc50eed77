"""idle: what a mesh costs whose operators all sleep: memory, memory for one more operator, processor.

Cache, scheduler and host, 1,000 objects, first 100 operators of ten objects each, then 900 more of one object each, so
that the slope is of operators and not of objects. All differ in source. Then all objects are changed and every
operator's effect is looked for at the API server.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from torpor_cli.demo.spans import receiving
from torpor_guests_testing import toolchains
from torpor_kubernetes_testing import KubeClient
from torpor_mesh_testing import SERVICES, Mesh, MeshOptions

from torpor_bench import fleet
from torpor_bench.figures import Figures, slope
from torpor_bench.guests import python_mirror
from torpor_bench.memory import MIB, Memory, cpu_s, memory_of
from torpor_bench.progress import say

HAS_QUICK = False
FEW, MANY, OBJECTS = 100, 1000, 1000
_EACH = OBJECTS // FEW
_CPU_S = 60.0
# A host gives free memory back once a minute after wakes; a cache keeps all changes for 90 s, and lets go of older ones
# once a minute. Nothing is measured before.
_SETTLE_S = 155.0
_IDLE_AFTER = "200ms"
_INSTALL_TIMEOUT_S = 900.0
# The product's own; tests renew more often to miss a killed host soon.
_LEASE_DEFAULTS = {"TORPOR_HOST_LEASE_DURATION_S": "15", "TORPOR_HOST_LEASE_RENEW_S": "5"}
_LOAD_MAX = 0.5  # above this others use the machine, and the share of the processor is not the mesh's alone


async def run(*, quick: bool) -> Figures:
    figures = Figures()
    runtime = await asyncio.to_thread(toolchains.python_runtime)
    # Compiled modules and images serve both meshes, so that the second starts sooner.
    state = Path(tempfile.mkdtemp(prefix="torpor-bench-"))
    try:
        await _plain(figures, _options(runtime, state))
        await _with_telemetry(figures, runtime, state)
    finally:
        await asyncio.to_thread(shutil.rmtree, state, ignore_errors=True)
    return figures


def _options(runtime: Path, state: Path, **environment: str) -> MeshOptions:
    return MeshOptions(
        python_runtime=runtime, host_state=state, environment=environment, host_environment=_LEASE_DEFAULTS
    )


async def _plain(figures: Figures, options: MeshOptions) -> None:
    say("starting kube-apiserver and the mesh")
    async with fleet.cluster() as control_plane, Mesh(control_plane, options) as mesh:
        await mesh.ready()
        _add_each(figures, "empty", _measure(mesh))
        async with control_plane.admin_client() as kube:
            await _declare_few(kube, mesh)
        few = await _idle(mesh, figures)
        total = sum(few.values(), start=Memory())
        figures.add("mesh_pss_mb", total.pss / MIB)
        figures.add("mesh_dirty_mb", total.dirty / MIB)
        _add_each(figures, "idle", few)
        async with control_plane.admin_client() as kube:
            await _declare_many(kube, mesh)
        await asyncio.sleep(_SETTLE_S)
        many = await _synced(mesh)
        kib = slope((FEW, _pss(few) / 1024), (MANY, _pss(many) / 1024))
        figures.add("per_operator_asleep_kib", kib)
        for name in SERVICES:
            figures.add(f"per_operator_{name}_kib", slope((FEW, few[name].pss / 1024), (MANY, many[name].pss / 1024)))
        async with control_plane.admin_client() as kube:
            await _wake_all(kube, MANY)


async def _with_telemetry(figures: Figures, runtime: Path, state: Path) -> None:
    say("the same mesh with OTLP on, to a receiver in this process")
    async with receiving() as (_, address), fleet.cluster() as control_plane:
        exporting = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}", "OTEL_EXPORTER_OTLP_INSECURE": "true"}
        async with Mesh(control_plane, _options(runtime, state, **exporting)) as mesh:
            await mesh.ready()
            async with control_plane.admin_client() as kube:
                await _declare_few(kube, mesh)
            await asyncio.sleep(_SETTLE_S)
            measured = await _synced(mesh)
            figures.add("mesh_pss_telemetry_mb", _pss(measured) / MIB)
            _add_each(figures, "telemetry", measured)
    figures.note("mesh_pss_telemetry_mb: spans by OTLP/gRPC; there is no Prometheus exporter yet")


async def _declare_few(kube: KubeClient, mesh: Mesh) -> None:
    say(f"{FEW} operators over {OBJECTS} objects")
    labels = [{"group": f"group-{n % FEW:04}", "object": f"object-{n:04}"} for n in range(OBJECTS)]
    await fleet.add_widgets(kube, ((label["object"], label) for label in labels), "start")
    sources = {f"group-{n:04}": python_mirror(f"few-{n:04}") for n in range(FEW)}
    await fleet.declare(kube, mesh, sources, "group={name}", _IDLE_AFTER)
    await fleet.until_settled(mesh, FEW, timeout_s=_INSTALL_TIMEOUT_S)
    await fleet.until_copied(kube, OBJECTS, "start", timeout_s=60.0)
    await fleet.until_settled(mesh, FEW, timeout_s=60.0)


async def _declare_many(kube: KubeClient, mesh: Mesh) -> None:
    say(f"{MANY - FEW} operators more")
    sources = {f"object-{n:04}": python_mirror(f"many-{n:04}") for n in range(FEW, MANY)}
    await fleet.declare(kube, mesh, sources, "object={name}", _IDLE_AFTER)
    await fleet.until_settled(mesh, MANY, timeout_s=_INSTALL_TIMEOUT_S)


async def _idle(mesh: Mesh, figures: Figures) -> Mapping[str, Memory]:
    """The processor's share over a minute in which nothing happens, then the memory."""
    say("all sleep; a minute of nothing")
    await asyncio.sleep(_SETTLE_S - _CPU_S)
    before, began_s = {name: cpu_s(mesh.pid(name)) for name in SERVICES}, time.perf_counter()
    await asyncio.sleep(_CPU_S)
    took_s = time.perf_counter() - began_s
    spent = {name: cpu_s(mesh.pid(name)) - before[name] for name in SERVICES}
    figures.add("cpu_percent", 100 * sum(spent.values()) / took_s)
    for name in SERVICES:
        figures.add(f"cpu_percent_{name}", 100 * spent[name] / took_s)
    if os.getloadavg()[0] > _LOAD_MAX:
        figures.note(f"cpu_percent was taken at a load of {os.getloadavg()[0]:.1f}, kube-apiserver's part included")
    return await _synced(mesh)


async def _synced(mesh: Mesh) -> Mapping[str, Memory]:
    await asyncio.to_thread(os.sync)
    return _measure(mesh)


def _measure(mesh: Mesh) -> dict[str, Memory]:
    return {name: memory_of(mesh.pid(name)) for name in SERVICES}


def _pss(measured: Mapping[str, Memory]) -> int:
    return sum(memory.pss for memory in measured.values())


def _add_each(figures: Figures, when: str, measured: Mapping[str, Memory]) -> None:
    for name, memory in measured.items():
        figures.add(f"{when}_{name}_pss_mb", memory.pss / MIB)


async def _wake_all(kube: KubeClient, operators: int) -> None:
    say(f"all {operators} are woken, to show that they work")
    await fleet.set_widgets(kube, [f"object-{n:04}" for n in range(OBJECTS)], "changed")
    # Each object has a copy of its group's operator, and the last 900 one of their own.
    await fleet.until_copied(kube, OBJECTS + operators - FEW, "changed", timeout_s=180.0)
