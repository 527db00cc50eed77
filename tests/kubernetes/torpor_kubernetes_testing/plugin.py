"""pytest fixtures: `pytest_plugins = ["torpor_kubernetes_testing.plugin"]` in the topmost conftest.py.

One control plane serves the whole session; each test gets a namespace of its own in it, emptied afterwards.
Missing binaries are built when collection has found a test that needs them: before any test's timeout runs, with
the progress on the terminal.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from torpor_kubernetes_testing.assets import AssetsMissing, built_assets
from torpor_kubernetes_testing.client import KubeClient
from torpor_kubernetes_testing.control_plane import ControlPlane
from torpor_kubernetes_testing.namespaces import temporary_namespace

_ASSETS = pytest.StashKey[Path | AssetsMissing]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    if any("kubernetes_assets" in getattr(item, "fixturenames", ()) for item in session.items):
        capture = session.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            session.config.stash[_ASSETS] = _assets()


def _assets() -> Path | AssetsMissing:
    # Only the tests that need a real API server fail for want of one, not the whole run.
    try:
        return built_assets()
    except AssetsMissing as error:
        return error


@pytest.fixture(scope="session")
def kubernetes_assets(request: pytest.FixtureRequest) -> Path:
    """The folder with etcd, kube-apiserver and kubectl, for tests that start a ControlPlane of their own."""
    # Asked for by name at run time, it was not seen at collection.
    assets = request.config.stash.get(_ASSETS, None) or _assets()
    if isinstance(assets, AssetsMissing):
        pytest.fail(str(assets), pytrace=False)
    return assets


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def control_plane(kubernetes_assets: Path) -> AsyncIterator[ControlPlane]:
    """The session's API server, without controllers. Leave it running, and as it was."""
    async with ControlPlane(kubernetes_assets) as running:
        yield running


@pytest_asyncio.fixture
async def kube(control_plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """An admin's client of the session's API server."""
    async with control_plane.admin_client() as client:
        yield client


@pytest_asyncio.fixture
async def namespace(kube: KubeClient) -> AsyncIterator[str]:
    """A new namespace of the session's API server; gone with all that is in it after the test."""
    async with temporary_namespace(kube) as name:
        yield name
