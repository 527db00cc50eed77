"""Many different operators and their objects, declared on a mesh that runs against the real kube-apiserver.

All are in one namespace, each under a ServiceAccount of its own; the objects of an operator carry its label.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from torpor.host.v1.host_pb2 import OperatorState
from torpor_kubernetes_testing import ControlPlane, KubeClient, built_assets
from torpor_mesh_testing import (
    SERVICES,
    WASM_OPERATORS,
    Mesh,
    install_kinds,
    install_torpor,
    mirror_rules,
    operator_object,
)
from torpor_mesh_testing.mesh import asleep

from torpor_bench.progress import say

NAMESPACE = "bench"
WIDGETS = "example.com/v1/widgets"
CONFIG_MAPS = "v1/configmaps"
_AT_ONCE = 16
_POLL_S = 1.0

Json = dict[str, Any]
States = Mapping[tuple[str, str], OperatorState]


@asynccontextmanager
async def cluster() -> AsyncIterator[ControlPlane]:
    """etcd and kube-apiserver with everything that a mesh needs, and no operators."""
    assets = await asyncio.to_thread(built_assets)
    await asyncio.to_thread(_compile_services)
    async with ControlPlane(assets) as control_plane:
        async with control_plane.admin_client() as kube:
            await install_torpor(kube)
            await install_kinds(kube, ["widgets"])
            await kube.create("v1/namespaces", {"metadata": {"name": NAMESPACE}})
            await _grant_all(kube)
        yield control_plane


def _compile_services() -> None:
    """Writes their bytecode, so that no service that is measured has compiled it itself."""
    modules = ", ".join(f"torpor_{name}.__main__" for name in SERVICES)
    telemetry = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    subprocess.run([sys.executable, "-c", f"import {modules}, {telemetry}"], check=True)


async def _grant_all(kube: KubeClient) -> None:
    """One binding for all accounts of the namespace: rights are not what is measured."""
    rules = list(mirror_rules())
    metadata = {"name": "operators", "namespace": NAMESPACE}
    await kube.create("rbac.authorization.k8s.io/v1/roles", {"metadata": metadata, "rules": rules})
    await kube.create(
        "rbac.authorization.k8s.io/v1/rolebindings",
        {
            "metadata": metadata,
            "subjects": [
                {
                    "kind": "Group",
                    "name": f"system:serviceaccounts:{NAMESPACE}",
                    "apiGroup": "rbac.authorization.k8s.io",
                }
            ],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "operators"},
        },
    )


async def declare(kube: KubeClient, mesh: Mesh, operators: Mapping[str, str], selector: str, idle_after: str) -> None:
    """Operators by name, with the text of their modules. `selector` has `{name}` where its name goes."""
    for name, source in operators.items():
        (mesh.modules / f"{name}.py").write_text(source)

    async def one(name: str) -> None:
        await kube.create("v1/serviceaccounts", {"metadata": {"name": name, "namespace": NAMESPACE}})
        unload = {"policy": "idle", "idleAfter": idle_after}
        chosen = selector.format(name=name)
        await kube.create(
            WASM_OPERATORS, operator_object(name, NAMESPACE, f"{name}.py", selector=chosen, unload=unload)
        )

    await all_of(one(name) for name in operators)


async def add_widgets(kube: KubeClient, widgets: Iterable[tuple[str, Mapping[str, str]]], value: str) -> None:
    """By name and labels."""
    await all_of(
        kube.create(
            WIDGETS,
            {
                "apiVersion": "example.com/v1",
                "kind": "Widget",
                "metadata": {"name": name, "namespace": NAMESPACE, "labels": dict(labels)},
                "spec": {"value": value},
            },
        )
        for name, labels in widgets
    )


async def set_widgets(kube: KubeClient, names: Iterable[str], value: str) -> None:
    await all_of(kube.merge_patch(WIDGETS, name, {"spec": {"value": value}}, namespace=NAMESPACE) for name in names)


async def all_of(runs: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """A few at a time."""
    waiting = iter(runs)

    async def worker() -> None:
        for run in waiting:
            await run

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(worker())


async def until_settled(mesh: Mesh, count: int, *, timeout_s: float) -> None:
    """Until all are installed, have reconciled, and sleep.

    Asks once a second: following each change of a thousand operators would be a load of its own.
    """
    failed: list[str] = []
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                states = await mesh.states()
                failed = [f"{name}: {s.last_error}" for (_, name), s in states.items() if s.last_error]
                if len(states) == count and all(s.form and s.reconciles and asleep(s) for s in states.values()):
                    break
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise RuntimeError(f"{count} operators have not settled within {timeout_s:g} s: {failed[:3]}") from error
    if failed:
        say(f"{len(failed)} operators have had errors, such as {failed[0][:200]}")


async def until_copied(kube: KubeClient, expected: int, value: str, *, timeout_s: float) -> None:
    """Until so many ConfigMaps hold `value`: what shows from outside that operators have worked."""
    last = -1
    try:
        async with asyncio.timeout(timeout_s):
            while last != expected:
                items = await kube.items(CONFIG_MAPS, namespace=NAMESPACE)
                last = sum(1 for item in items if item.get("data", {}).get("value") == value)
                await asyncio.sleep(0.2)
    except TimeoutError as error:
        raise RuntimeError(f"only {last} of {expected} ConfigMaps hold {value!r} after {timeout_s} s") from error
