"""The mesh on the real kube-apiserver: one for each file of tests, with its logs in the report of a test that fails."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from torpor_guests_testing.toolchains import python_runtime as built_python_runtime
from torpor_kubernetes_testing import ControlPlane
from torpor_mesh_testing import Mesh, MeshOptions, install_kinds, install_torpor

_MESHES: list[Mesh] = []


@pytest.fixture(scope="session")
def python_runtime() -> Path:
    """CPython as a core module, built on first use."""
    return built_python_runtime()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def torpor_installed(control_plane: ControlPlane) -> ControlPlane:
    """The session's API server with Torpor's CRD and rights and example.com's kinds."""
    async with control_plane.admin_client() as kube:
        await install_torpor(kube)
        await install_kinds(kube)
    return control_plane


@pytest.fixture(scope="session")
def host_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state folder for the hosts of a session, one at a time: each module is compiled once."""
    return tmp_path_factory.mktemp("host-state")


@pytest.fixture(scope="module")
def mesh_options(python_runtime: Path, host_state: Path) -> MeshOptions:
    """What a file of tests may replace."""
    return MeshOptions(python_runtime=python_runtime, host_state=host_state)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(torpor_installed: ControlPlane, mesh_options: MeshOptions) -> AsyncIterator[Mesh]:
    """The three services, ready; those of the file."""
    mesh = Mesh(torpor_installed, mesh_options)
    await mesh.count_watches_before()
    async with showing(mesh) as running:
        await running.ready()
        yield running


@contextlib.asynccontextmanager
async def showing(mesh: Mesh) -> AsyncIterator[Mesh]:
    """Runs a mesh, with its logs in the report of a test that fails meanwhile."""
    _MESHES.append(mesh)
    try:
        async with mesh:
            try:
                yield mesh
            except BaseException as error:
                # By the time of the report the logs are gone.
                error.add_note(mesh.log_tails())
                raise
    finally:
        _MESHES.remove(mesh)


@pytest.fixture
def run_mesh() -> Callable[[Mesh], contextlib.AbstractAsyncContextManager[Mesh]]:
    """`showing`, for tests that start a mesh of their own."""
    return showing


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        for mesh in _MESHES:
            report.sections.append(("logs of the mesh", mesh.log_tails()))
    return report
