"""The dev cluster and the real kube-apiserver answer the same calls alike.

Each scenario (`conformance.py`) runs against both, in a namespace of the same name; the transcripts are compared.
"""

import difflib
import importlib.util
import json
import re
import secrets
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from torpor_devcluster import Config, DevCluster
from torpor_kubernetes_testing import ControlPlane, KubeClient

# Test folders are no packages (importmode=importlib), so the neighbour is loaded by its path.
_SPEC = importlib.util.spec_from_file_location("devcluster_conformance", Path(__file__).with_name("conformance.py"))
assert _SPEC is not None and _SPEC.loader is not None
conformance: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["devcluster_conformance"] = conformance
_SPEC.loader.exec_module(conformance)


async def _run(kube: KubeClient, namespace: str, scenario: str) -> list[tuple[str, int, Any]]:
    await kube.create("v1/namespaces", {"metadata": {"name": namespace}})
    script = conformance.Script(kube, namespace)
    await conformance.SCENARIOS[scenario](script)
    return script.transcript


def _differences(expected: list[tuple[str, int, Any]], found: list[tuple[str, int, Any]]) -> str:
    """The steps that differ, each as a short diff."""
    assert [step[0] for step in expected] == [step[0] for step in found], "both ran the same steps"
    parts = []
    for real, ours in zip(expected, found, strict=True):
        if real != ours:
            lines = difflib.unified_diff(_lines(real), _lines(ours), "real", "devcluster", lineterm="", n=1)
            parts.append(f"# {real[0]}\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _lines(step: tuple[str, int, Any]) -> list[str]:
    return json.dumps(step[1:], indent=1, sort_keys=True).splitlines()


async def _ask_for_what_is_forgotten(kube: KubeClient, forget: Callable[[], Awaitable[object]]) -> list[Any]:
    """Codes, reasons and messages of reads from before the history."""
    path = "/api/v1/namespaces/default/configmaps"
    for name in ("a", "b", "c"):
        await kube.create("v1/configmaps", {"metadata": {"name": name, "namespace": "default"}})
    page = await kube.list("v1/configmaps", namespace="default", limit=2)
    old = page["items"][0]["metadata"]["resourceVersion"]
    await kube.create("v1/configmaps", {"metadata": {"name": "d", "namespace": "default"}})
    await forget()
    answers = []
    for query in (
        {"watch": True, "resourceVersion": old, "timeoutSeconds": 5},
        {"resourceVersion": old, "resourceVersionMatch": "Exact"},
        {"limit": 2, "continue": page["metadata"]["continue"]},
    ):
        code, body = await kube.raw("GET", path, query=query)
        status = json.loads(body)
        event = status.get("object", status)
        message = re.sub(r"\d+", "N", event["message"])
        answers.append([code, status.get("type"), event["reason"], message])
    rest = {"limit": 5, "continue": event["metadata"]["continue"]}
    names = [item["metadata"]["name"] for item in await kube.items("v1/configmaps", namespace="default", **rest)]
    return [*answers, names[:2]]


async def test_both_servers_forget_alike(kubernetes_assets: Path) -> None:
    async with ControlPlane(kubernetes_assets) as real, real.admin_client() as kube:
        expected = await _ask_for_what_is_forgotten(kube, real.forget_history)
    async with (
        DevCluster(Config(controllers=False)) as cluster,
        KubeClient(cluster.url, token=cluster.admin_token, ca_file=cluster.ca_file) as kube,
    ):

        async def forget() -> None:
            cluster.faults.compact()

        assert await _ask_for_what_is_forgotten(kube, forget) == expected


@pytest.mark.parametrize("scenario", list(conformance.SCENARIOS))
async def test_both_servers_answer_alike(scenario: str, control_plane: ControlPlane) -> None:
    namespace = f"conformance-{secrets.token_hex(4)}"
    # Without controllers, as the bare API server is.
    async with (
        DevCluster(Config(controllers=False)) as cluster,
        KubeClient(cluster.url, token=cluster.admin_token, ca_file=cluster.ca_file) as ours,
        control_plane.admin_client() as real,
    ):
        expected = await _run(real, namespace, scenario)
        found = await _run(ours, namespace, scenario)
    differences = _differences(expected, found)
    assert not differences, f"the servers differ:\n{differences}"
