"""An engine of a test's own, and ways to install and wake a guest in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torpor_host.artifacts import ArtifactStore
from torpor_host.engine import GuestEngine
from torpor_host.instance import Instance
from torpor_host.limits import InstanceLimits
from torpor_host.testing import Guests, engine_in


@pytest.fixture
def artifact_store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def engine(artifact_store: ArtifactStore) -> Iterator[GuestEngine]:
    engine = engine_in(artifact_store)
    yield engine
    engine.close()


@pytest.fixture
def guests(engine: GuestEngine) -> Iterator[Guests]:
    guests = Guests(engine)
    yield guests
    guests.close()


@pytest.fixture
def woken(guests: Guests) -> Callable[..., Instance]:
    """Installs a module and wakes it: `woken(wat_guest(...))`."""

    def wake(wasm: bytes, limits: InstanceLimits | None = None) -> Instance:
        return guests.wake(guests.install(wasm), limits)

    return wake
