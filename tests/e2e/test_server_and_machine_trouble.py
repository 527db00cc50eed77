"""The API server away or silent, the disk full, the port taken: said clearly, and mended without a restart."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from torpor_guests_testing import mirror
from torpor_kubernetes_testing import ControlPlane, KubeClient, create_service_account
from torpor_mesh_testing import (
    SERVICES,
    WASM_OPERATORS,
    Mesh,
    MeshOptions,
    condition_of,
    install_kinds,
    install_torpor,
    mirror_rules,
    operator_object,
)
from torpor_mesh_testing.fleet import until_ready

RunMesh = Callable[[Mesh], AbstractAsyncContextManager[Mesh]]
WIDGETS = "example.com/v1/widgets"
NAMESPACE = "trouble"
OPERATOR = (NAMESPACE, "copy")
SPEC = {"unload": {"policy": "idle", "idleAfter": "50ms"}, "limits": {"deadline": "3s"}}

# A private mount, gone with the host: $1 is the folder, $2 what stays free of its 64 MiB.
SMALL_DISK = """
mount -t tmpfs -o size=64m,mode=0700 tmpfs "$1" || exit 9
head -c $((67108864 - $2)) /dev/zero >"$1/filler"
shift 2
exec "$@"
"""
FREE_BYTES = 64 * 1024


@pytest_asyncio.fixture
async def own_control_plane(kubernetes_assets: Path) -> AsyncIterator[ControlPlane]:
    """An API server that may be killed, with Torpor's objects, the kind, an account and an operator."""
    async with ControlPlane(kubernetes_assets) as running:
        async with running.admin_client() as kube:
            await install_torpor(kube)
            await install_kinds(kube, ["widgets"])
            await kube.create("v1/namespaces", {"metadata": {"name": NAMESPACE}})
            await create_service_account(kube, NAMESPACE, "copy", mirror_rules())
        yield running


@pytest.mark.timeout(180)
async def test_api_server_down_at_start_lost_later_and_silent(
    own_control_plane: ControlPlane, host_state: Path, run_mesh: RunMesh
) -> None:
    await own_control_plane.kill_apiserver()
    async with run_mesh(Mesh(own_control_plane, MeshOptions(host_state=host_state))) as mesh:
        await mesh.until_logged("cache", "the API server cannot be reached")
        await mesh.until_logged("host", "the Lease of this host")
        assert not await mesh.serving("cache")
        assert all(mesh.running(service) for service in SERVICES)

        await own_control_plane.restart_apiserver()
        await mesh.ready()
        async with own_control_plane.admin_client() as kube:
            file = mirror("zig", "first").place(mesh.modules)
            await kube.create(WASM_OPERATORS, operator_object("copy", NAMESPACE, file, **SPEC))
            await until_ready(kube, NAMESPACE, ["copy"])
            await changed_and_copied(kube, "after-a-start-without-server")
        await mesh.until_asleep()

        await own_control_plane.kill_apiserver()
        await mesh.until_serving("cache", False)
        await own_control_plane.restart_apiserver()
        async with own_control_plane.admin_client() as kube:
            await changed_and_copied(kube, "after-the-loss")
            await mesh.ready()
            await mesh.until_asleep()
            await unanswered_call_ends_at_its_deadline(own_control_plane, mesh, kube)


async def unanswered_call_ends_at_its_deadline(control_plane: ControlPlane, mesh: Mesh, kube: KubeClient) -> None:
    """And what it was for is made good when the server speaks again."""
    before = (await mesh.states())[OPERATOR]
    control_plane.pause_apiserver()
    try:
        # Read from memory, then written to a server that says nothing.
        await mesh.wake(OPERATOR, (NAMESPACE, "after-the-loss"))
        silent = await mesh.until_state(OPERATOR, lambda state: state.errors > before.errors, timeout_s=20.0)
        assert silent.last_error.startswith(f"{NAMESPACE}/after-the-loss: ")
        assert await mesh.states(), "the host goes on answering"
    finally:
        control_plane.resume_apiserver()
    await mesh.until_state(OPERATOR, lambda state: state.errors == silent.errors and not state.queued, timeout_s=60.0)
    await changed_and_copied(kube, "after-the-silence")
    await mesh.ready()


async def test_full_disk_for_compiled_modules_is_said_and_mended_without_a_restart(
    torpor_installed: ControlPlane, kube: KubeClient, namespace: str, run_mesh: RunMesh, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = shutil.which("unshare")
    assert unshare is not None, "unshare is needed, of util-linux"
    command = (unshare, "--mount", *(("--map-root-user",) if os.geteuid() else ()), "sh", "-c", SMALL_DISK, "sh")
    options = MeshOptions(host_state=disk / "host", host_command=(*command, str(disk), str(FREE_BYTES)))
    async with run_mesh(Mesh(torpor_installed, options)) as mesh:
        await mesh.ready()
        await create_service_account(kube, namespace, "copy", mirror_rules())
        file = mirror("zig", "full-disk").place(mesh.modules)
        await kube.create(WASM_OPERATORS, operator_object("copy", namespace, file))
        await kube.until(WASM_OPERATORS, "copy", says_no_space, namespace=namespace, timeout_s=30.0)
        assert await mesh.serving("host")

        make_room(mesh.pid("host"), disk)
        await until_ready(kube, namespace, ["copy"], timeout_s=90.0)


def make_room(host: int, disk: Path) -> None:
    """The mount is seen by the host alone."""
    Path(f"/proc/{host}/root{disk}/filler").unlink()


def says_no_space(obj: dict[str, Any] | None) -> bool:
    status, _, message = condition_of(obj, "Installed")
    return status == "False" and "no space left" in message


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("service", SERVICES)
def test_port_in_use_ends_the_start_with_one_line_that_names_it(
    service: str, taken_port: int, tmp_path: Path, torpor_installed: ControlPlane
) -> None:
    address = f"127.0.0.1:{taken_port}"
    kubeconfig = torpor_installed.admin_kubeconfig(tmp_path / "kubeconfig")
    settings = {
        "cache": {"TORPOR_CACHE_LISTEN": address, "TORPOR_CACHE_KUBECONFIG": str(kubeconfig)},
        "scheduler": {"TORPOR_LISTEN": address, "TORPOR_SCHEDULER_CACHE": "unix:/nowhere"},
        "host": {
            "TORPOR_HOST_LISTEN": address,
            "TORPOR_HOST_CACHE": "unix:/nowhere",
            "TORPOR_HOST_STATE_DIR": str(tmp_path / "host"),
        },
    }[service]
    ended = subprocess.run(
        [sys.executable, "-m", f"torpor_{service}"],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode != 0
    # Before ours comes the log (JSON), and a line of gRPC's own.
    said = ended.stderr.splitlines()[-1]
    assert said.startswith(f"torpor-{service}: ") and address in said, ended.stderr
    assert "Traceback" not in ended.stderr


async def changed_and_copied(kube: KubeClient, name: str) -> None:
    await kube.create(
        WIDGETS,
        {
            "apiVersion": "example.com/v1",
            "kind": "Widget",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"value": name},
        },
    )
    await kube.until(
        "v1/configmaps",
        f"{name}-copy",
        lambda found: found is not None and found["data"]["value"] == name,
        namespace=NAMESPACE,
        timeout_s=60.0,
    )
