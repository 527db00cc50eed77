"""A dev cluster for each test, and clients of it."""

from collections.abc import AsyncIterator

import pytest_asyncio
from torpor_devcluster import Config, DevCluster
from torpor_kubernetes_testing import KubeClient


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[DevCluster]:
    """With frequent bookmarks, so that tests of them are short."""
    async with DevCluster(Config(bookmark_interval_s=0.1)) as running:
        yield running


@pytest_asyncio.fixture
async def dev(cluster: DevCluster) -> AsyncIterator[KubeClient]:
    """An admin's client of the dev cluster."""
    async with KubeClient(cluster.url, token=cluster.admin_token, ca_file=cluster.ca_file) as client:
        yield client
