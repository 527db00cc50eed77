"""throughput: reconciles a second of one host process, Python guests, each reading its object through the real cache.

*drain*: every key of every operator is dirty at once; a loaded guest drains its operator's queue before it leaves.
*wake each*: every operator has one key that asks to be looked at again after some milliseconds and leaves memory after
each reconcile, so that every reconcile is a wake. More is asked for than a host can do; what it does is the figure.

The clock is this process's; the counts are the host's own (a read answered from memory leaves no trace outside), and
every operator then writes what it has read, which is seen at the API server.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median

from torpor.host.v1 import host_pb2
from torpor.scheduler.v1.scheduler_pb2 import OperatorId
from torpor_guests_testing import toolchains
from torpor_kubernetes_testing import KubeClient
from torpor_mesh_testing import Mesh, MeshOptions
from torpor_mesh_testing.mesh import asleep

from torpor_bench import fleet
from torpor_bench.figures import Figures
from torpor_bench.guests import python_reader
from torpor_bench.memory import cpu_s
from torpor_bench.progress import say

HAS_QUICK = True
OPERATORS, OBJECTS_EACH = 30, 68
# 30 operators and 25 ms: up to 1,200 wakes a second are asked for. A host that does much less is still busy with one
# when its next is due, and finds it loaded, which is no wake: the delay with most wakes a second is taken.
_DELAYS_MS = (25, 50, 100, 200)
_WARM_UP_S, _MEASURED_S = 3.0, 30.0
_DRAINS, _DRAINS_QUICK = 9, 5


async def run(*, quick: bool) -> Figures:
    figures = Figures()
    say("starting kube-apiserver, cache and host")
    runtime = await asyncio.to_thread(toolchains.python_runtime)
    options = MeshOptions(python_runtime=runtime, services=("cache", "host"))
    async with fleet.cluster() as control_plane, Mesh(control_plane, options) as mesh:
        await mesh.ready()
        async with control_plane.admin_client() as kube:
            names = [f"reader-{n:02}" for n in range(OPERATORS)]
            keys = [(f"{name}-{k:02}", {"operator": name}) for name in names for k in range(OBJECTS_EACH)]
            await fleet.add_widgets(kube, keys, "read")
            await fleet.declare(kube, mesh, {name: python_reader(name) for name in names}, "operator={name}", "0s")
            await fleet.until_settled(mesh, OPERATORS, timeout_s=120.0)
            say("draining full queues")
            await _drain(mesh, figures, _DRAINS_QUICK if quick else _DRAINS)
            say("waking for each reconcile")
            await _wake_each(mesh, kube, names, figures, _MEASURED_S / 3 if quick else _MEASURED_S)
            say("every operator writes, to show that it works")
            await fleet.set_widgets(kube, [f"{name}-00" for name in names], "write it")
            await fleet.until_copied(kube, OPERATORS, "write it", timeout_s=60.0)
    figures.note(
        f"upstream: kube-apiserver; {OPERATORS} different operators, {OBJECTS_EACH} objects each, no scheduler"
    )
    return figures


async def _drain(mesh: Mesh, figures: Figures, rounds: int) -> None:
    rates = [await _drain_once(mesh) for _ in range(rounds + 1)][1:]  # the first warms up
    figures.add("reconciles_per_s_drain", median(rates), OPERATORS * OBJECTS_EACH * rounds)


async def _drain_once(mesh: Mesh) -> float:
    before = {key: int(state.reconciles) for key, state in (await mesh.until_asleep()).items()}

    def drained(states: fleet.States) -> bool:
        return all(s.reconciles >= before[key] + OBJECTS_EACH and not s.queued for key, s in states.items())

    async with mesh.host() as host:
        started_s = time.perf_counter()
        await asyncio.gather(*(host.Wake(host_pb2.WakeRequest(operator=_id(key))) for key in before))
        after = await mesh.until_states(drained, timeout_s=60.0)
        took_s = time.perf_counter() - started_s
    return sum(int(after[key].reconciles) - before[key] for key in before) / took_s


async def _wake_each(mesh: Mesh, kube: KubeClient, names: list[str], figures: Figures, measured_s: float) -> None:
    objects = [f"{name}-00" for name in names]
    rates: dict[int, float] = {}
    for delay_ms in _DELAYS_MS:
        await fleet.set_widgets(kube, objects, f"spin {delay_ms}")
        await asyncio.sleep(_WARM_UP_S)
        wakes, _, took_s = await _counted(mesh, _WARM_UP_S)
        rates[delay_ms] = wakes / took_s
    delay_ms = max(rates, key=lambda each: rates[each])
    await fleet.set_widgets(kube, objects, f"spin {delay_ms}")
    await asyncio.sleep(_WARM_UP_S)
    host_s, cache_s = _cpu(mesh)
    wakes, reconciles, took_s = await _counted(mesh, measured_s)
    host_end_s, cache_end_s = _cpu(mesh)
    # One that found its guest still there was no wake and does not count.
    figures.add("reconciles_per_s_wake_each", wakes / took_s, wakes)
    figures.add("wake_each_found_asleep_share", wakes / reconciles, reconciles)
    figures.add("wake_each_host_cpu_percent", 100 * (host_end_s - host_s) / took_s)
    figures.add("wake_each_cache_cpu_percent", 100 * (cache_end_s - cache_s) / took_s)
    figures.note(f"wake each: up to {OPERATORS * 1000 // delay_ms} a second were asked for")
    await fleet.set_widgets(kube, objects, "read")
    await mesh.until_states(lambda states: all(asleep(s) for s in states.values()), timeout_s=30.0)


async def _counted(mesh: Mesh, seconds: float) -> tuple[int, int, float]:
    """Wakes and reconciles in about so many seconds, and the seconds."""
    began_s, began = time.perf_counter(), await mesh.states()
    await asyncio.sleep(seconds)
    ended_s, ended = time.perf_counter(), await mesh.states()
    wakes = sum(int(ended[key].wakes - began[key].wakes) for key in ended)
    reconciles = sum(int(ended[key].reconciles - began[key].reconciles) for key in ended)
    return wakes, max(reconciles, 1), ended_s - began_s


def _cpu(mesh: Mesh) -> tuple[float, float]:
    return cpu_s(mesh.pid("host")), cpu_s(mesh.pid("cache"))


def _id(key: tuple[str, str]) -> OperatorId:
    return OperatorId(namespace=key[0], name=key[1])
