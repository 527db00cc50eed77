"""The whole path on the real kube-apiserver, stamped at the writer, and the API server's part in it.

The writer is a process of its own (`writer.py`): it changes an object of a sleeping operator and waits, on its own
watch, for the ConfigMap that the operator writes; then it writes one itself and waits for it on the same watch. Two
such direct round trips, of the changed object and of what the operator writes, are what the API server costs alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
from statistics import median
from typing import Any

from torpor_guests_testing import toolchains
from torpor_kubernetes_testing import ControlPlane
from torpor_mesh_testing import Mesh, MeshOptions

from torpor_bench import fleet
from torpor_bench.figures import SAMPLES_MIN, Figures
from torpor_bench.guests import python_mirror
from torpor_bench.machine import ROOT
from torpor_bench.progress import say

OPERATORS = 30
_SAMPLES_QUICK = 600
# Short enough that each sleeps again when its turn comes: 30 operators take 0.4 s a round.
_IDLE_AFTER = "50ms"


async def measure(figures: Figures, *, quick: bool) -> None:
    say("starting kube-apiserver and the mesh")
    runtime = await asyncio.to_thread(toolchains.python_runtime)
    async with fleet.cluster() as control_plane, Mesh(control_plane, MeshOptions(python_runtime=runtime)) as mesh:
        await mesh.ready()
        names = [f"path-{n:02}" for n in range(OPERATORS)]
        async with control_plane.admin_client() as kube:
            await fleet.add_widgets(kube, ((name, {"operator": name}) for name in names), "start")
            await fleet.declare(
                kube, mesh, {name: python_mirror(name) for name in names}, "operator={name}", _IDLE_AFTER
            )
            await fleet.until_settled(mesh, OPERATORS, timeout_s=120.0)
        before = await mesh.wake_counts()
        samples = _SAMPLES_QUICK if quick else SAMPLES_MIN[99]
        say(f"changing {samples} objects, one after another")
        result = await _write(control_plane, names, samples)
        await mesh.until_asleep()
        after = await mesh.wake_counts()
        states = await mesh.states()
    _report(figures, result, sum(after.values()) - sum(before.values()))
    figures.add("host_wake_p50_ms", 1000 * median(s.wake_p50_s for s in states.values()), 256 * OPERATORS)
    figures.note("host_wake_p50_ms is the host's own stamp under this load, the median operator: event to entry")


async def _write(control_plane: ControlPlane, names: list[str], samples: int) -> dict[str, Any]:
    settings = {
        "url": control_plane.url,
        "token": control_plane.admin_token,
        "ca_file": str(control_plane.ca_file),
        "namespace": fleet.NAMESPACE,
        "names": names,
        "samples": samples,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "torpor_bench.writer"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT / "bench",
    )
    output, _ = await process.communicate(json.dumps(settings).encode())
    if process.returncode:
        raise RuntimeError(f"the writer ended with {process.returncode}; see above")
    result: dict[str, Any] = json.loads(output)
    return result


def _report(figures: Figures, result: dict[str, Any], wakes: int) -> None:
    paths = result["path_s"]
    figures.add_percentiles("path", paths)
    figures.add_percentiles("direct_object", result["object_s"], (50,))
    figures.add_percentiles("direct_write", result["direct_s"], (50,))
    share = (median(result["object_s"]) + median(result["direct_s"])) / median(paths)
    figures.add("path_apiserver_share", share, len(paths))
    figures.add("path_found_asleep_share", min(wakes / len(paths), 1.0), len(paths))
