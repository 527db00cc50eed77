"""`torpor up` and `torpor run`: start the mesh, install what it needs, stay until asked to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

from torpor_cli.errors import CommandFailed
from torpor_cli.mesh import MeshOptions, RunningMesh, Say, mesh
from torpor_cli.processes import python


async def run_mesh(options: MeshOptions, folder: Path | None, say: Say = print) -> None:
    """Until cancelled, or until a service cannot be kept running (CommandFailed)."""
    if folder is not None:
        await _checked(folder)
    async with mesh(options, say) as running:
        await start_up(running, folder, say)
        say(f"the mesh is up; see `torpor ls`, `torpor top`; logs are in {running.run_dir.logs}; Ctrl-C stops it")
        if options.devcluster:
            say(f"kubectl --kubeconfig {running.kubeconfig} get wasmoperators -A")
        await running.wait_failed()


async def start_up(running: RunningMesh, folder: Path | None, say: Say) -> None:
    """Installs the definition, applies the folder, and waits until all services are ready."""
    await apply_in_process(running, ["install-crds"])
    if folder is not None:
        await apply_in_process(running, ["apply", str(folder)])
    for child in running.children:
        if child.name != "devcluster":
            await running.wait_ready(child.name)
            say(f"{child.name} is ready")


async def apply_in_process(running: RunningMesh, arguments: list[str]) -> None:
    """A command of ours in a short-lived process: what it imports (55 MB) does not stay."""
    command = python("torpor_cli", *arguments)
    if running.kubeconfig is not None:
        command += ["--kubeconfig", str(running.kubeconfig)]
    if running.context:
        command += ["--context", running.context]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise CommandFailed(errors.decode("utf-8", "replace").strip().removeprefix("torpor: ") or "it failed")


async def _checked(folder: Path) -> None:
    """Before anything is started: a wrong file is said at once."""
    from torpor_cli.manifests import read_folder

    await asyncio.to_thread(read_folder, folder)
