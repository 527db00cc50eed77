"""What an image must not repeat or keep: random names, the clock, configuration, secrets. Guests of every language.

The hundred wakes run on the engine alone; the rest on the mesh.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from torpor_guests_testing.witness import witness
from torpor_host.abi import Done, ReconcileRequest, decode_reconcile_result
from torpor_host.artifacts import ArtifactStore
from torpor_host.engine import GuestEngine
from torpor_host.engine_config import EngineConfig
from torpor_host.install import InstalledModule, ModuleSource, install
from torpor_host.limits import Deadline, InstanceLimits
from torpor_host.testing import FakeCalls
from torpor_kubernetes_testing import KubeClient, create_service_account
from torpor_mesh_testing import WASM_OPERATORS, Mesh, MeshOptions, mirror_rules, operator_object
from torpor_mesh_testing.fleet import until_ready
from torpor_mesh_testing.mesh import with_host_environment

LANGUAGES = ("zig", "rust", "go", "python")
WAKES = 100
SOON = {"policy": "idle", "idleAfter": "50ms"}
HOST_SECRET = secrets.token_hex(16)


@pytest.fixture(scope="module")
def engine(python_runtime: Path, host_state: Path) -> Iterator[GuestEngine]:
    """On what the session's hosts have compiled."""
    settings = replace(EngineConfig(), python_runtime=python_runtime)
    engine = GuestEngine(settings, ArtifactStore(host_state / "artifacts"))
    yield engine
    engine.close()


@pytest.mark.parametrize("language", LANGUAGES)
def test_hundred_wakes_give_hundred_names_and_a_clock_that_never_goes_back(engine: GuestEngine, language: str) -> None:
    module = installed(engine, language)
    said = [wake(engine, module, number) for number in range(WAKES)]

    for source in said[0]["names"]:
        seen = {one["names"][source] for one in said}
        assert len(seen) == WAKES, f"{language}'s {source} gave {len(seen)} different names in {WAKES} wakes"
    times = [one["monotonic_ns"] for one in said]
    assert times[0] >= 0
    assert all(earlier < later for earlier, later in pairwise(times)), "the clock went back"
    assert [one["settings"]["config"]["number"] for one in said] == list(range(WAKES))


@pytest.fixture(scope="module")
def mesh_options(python_runtime: Path, host_state: Path) -> MeshOptions:
    """A secret in the host's environment, under a name that a guest might ask for."""
    options = MeshOptions(python_runtime=python_runtime, host_state=host_state)
    return with_host_environment(options, API_TOKEN=HOST_SECRET)


async def test_configuration_changed_after_install_is_seen_and_no_secret_is_in_an_image(
    mesh: Mesh, kube: KubeClient, namespace: str
) -> None:
    own_secret = secrets.token_hex(16)
    await create_service_account(kube, namespace, "witness", mirror_rules())
    for language in LANGUAGES:
        operator = operator_object(
            language,
            namespace,
            witness(language).place(mesh.modules),
            account="witness",
            config={"greeting": "first"},
            env=[{"name": "API_TOKEN", "value": own_secret}],
            unload=SOON,
        )
        await kube.create(WASM_OPERATORS, operator)
    await until_ready(kube, namespace, LANGUAGES)

    await kube.create(
        "example.com/v1/widgets",
        {
            "apiVersion": "example.com/v1",
            "kind": "Widget",
            "metadata": {"name": "a", "namespace": namespace},
            "spec": {"value": "one"},
        },
    )
    for language in LANGUAGES:
        await until_said(mesh, namespace, language, "first")
    await mesh.until_asleep()
    images_before = len(image_files(mesh.host_state))
    for language in LANGUAGES:
        await kube.merge_patch(
            WASM_OPERATORS, language, {"spec": {"config": {"greeting": "second"}}}, namespace=namespace
        )
    for language in LANGUAGES:
        said = await until_said(mesh, namespace, language, "second")
        assert said["settings"]["env"] == {"API_TOKEN": own_secret}
    await mesh.until_asleep()

    files = image_files(mesh.host_state)
    assert len(files) == images_before > len(LANGUAGES), "the configuration is no part of an image"
    for path in files:
        content = path.read_bytes()
        for secret in (HOST_SECRET, own_secret):
            assert secret.encode() not in content, f"a secret is in {path.name}"


def installed(engine: GuestEngine, language: str) -> InstalledModule:
    guest = witness(language)
    form = "python" if language == "python" else "core"
    module = install(engine, ModuleSource(form, guest.path.read_bytes(), guest.filename), limits=InstanceLimits())
    assert module.image is not None, module.image_refusal
    return module


def wake(engine: GuestEngine, module: InstalledModule, number: int) -> dict[str, dict[str, object]]:
    """What a guest says that was woken for this and closed after it."""
    calls = FakeCalls(json.dumps({"config": {"number": number}, "env": {}}).encode())
    instance = engine.load(module, InstanceLimits(), calls)
    try:
        request = ReconcileRequest("default", "a", "watch", 0)
        answer = instance.reconcile(request.encode(), deadline=Deadline.after(10.0))
    finally:
        instance.close()
    assert decode_reconcile_result(answer) == Done(), answer
    (line,) = calls.lines()
    return json.loads(line)


async def until_said(mesh: Mesh, namespace: str, language: str, greeting: str) -> dict[str, dict[str, object]]:
    async for line in mesh.follow_log(namespace, language):
        said = json.loads(line)
        if said["settings"]["config"]["greeting"] == greeting:
            return said
    raise AssertionError("the log ended")


def image_files(state: Path) -> list[Path]:
    """All that the host keeps on disk, but the source of Python operators, which is what their author wrote."""
    return [path for path in state.rglob("*") if path.is_file()]
