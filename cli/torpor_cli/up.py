"""`torpor up` and `torpor run`: start the mesh, install what it needs, stay until asked to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

from torpor_services.crd import KIND

from torpor_cli.clients import services
from torpor_cli.errors import CommandFailed
from torpor_cli.first_states import tell_operators
from torpor_cli.mesh import MeshOptions, RunningMesh, Say, mesh
from torpor_cli.processes import run_command


async def run_mesh(options: MeshOptions, folder: Path | None, say: Say = print) -> None:
    """Until cancelled. CommandFailed: a service cannot be kept running, or no operator of the folder can be installed;
    where only some cannot, they are told and the others run."""
    operators = frozenset[str]() if folder is None else await _checked(folder)
    async with mesh(options, say) as running:
        await start_up(running, folder, say)
        missing = "" if folder is None else await _judged(running, folder, operators, say)
        logs = running.run_dir.logs
        say(f"the mesh is up{missing}; see `torpor ls`, `torpor top`; logs are in {logs}; Ctrl-C stops it")
        if options.devcluster:
            say(f"kubectl --kubeconfig {running.kubeconfig} get wasmoperators -A")
        await running.wait_failed()


async def start_up(running: RunningMesh, folder: Path | None, say: Say) -> None:
    """Applies the folder, and waits until all services are ready."""
    if folder is not None:
        await run_command(["apply", str(folder)], running.kubeconfig, running.context)
    for child in running.children:
        if child.name != "devcluster":
            await running.wait_ready(child.name)
            say(f"{child.name} is ready")


async def _judged(running: RunningMesh, folder: Path, operators: frozenset[str], say: Say) -> str:
    """What became of the folder's operators, told one by one; for the sentence at the end. Raises CommandFailed."""
    async with services(running.run_dir.root.name) as mesh_services:
        refused = await running.unless_failed(tell_operators(mesh_services.host, operators, say))
    if operators and len(refused) == len(operators):
        raise CommandFailed(f"no operator of {folder} could be installed, see above; mend them and start again")
    return f", without {', '.join(sorted(refused))}" if refused else ""


async def _checked(folder: Path) -> frozenset[str]:
    """Before anything is started: a wrong file is said at once. The folder's operators, NAMESPACE/NAME."""
    from torpor_cli.manifests import read_folder

    objects = await asyncio.to_thread(read_folder, folder)
    return frozenset(f"{o['metadata']['namespace']}/{o['metadata']['name']}" for o in objects if o["kind"] == KIND)
