"""The writer of changes, a process of its own: settings as JSON on standard input, latencies on standard output.

For each operator in turn: change its object, wait for the ConfigMap that it writes (`path_s`), noting when the changed
object itself came by on the watch (`object_s`); then apply a ConfigMap of its own and wait for that (`direct_s`).
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from torpor_kubernetes_testing import KubeClient

_PATIENCE_S = 30.0
_WIDGETS, _CONFIG_MAPS = "example.com/v1/widgets", "v1/configmaps"


class Arrivals:
    """When each value came by on a watch. One wait a kind and name at a time."""

    def __init__(self) -> None:
        self._waits: dict[tuple[str, str], tuple[str, asyncio.Future[int]]] = {}

    def expect(self, resource: str, name: str, value: str) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waits[resource, name] = (value, future)
        return future

    async def follow(self, kube: KubeClient, resource: str, namespace: str) -> None:
        listed = await kube.list(resource, namespace=namespace)
        version = listed["metadata"]["resourceVersion"]
        async for event in kube.watch(resource, namespace=namespace, resourceVersion=version):
            now_ns = time.perf_counter_ns()
            wait = self._waits.get((resource, event.object["metadata"]["name"]))
            if wait is not None and _value(event.object) == wait[0] and not wait[1].done():
                wait[1].set_result(now_ns)
        raise RuntimeError(f"the watch of {resource} ended")


def _value(obj: dict[str, Any]) -> str | None:
    content: dict[str, str] = obj.get("spec") or obj.get("data") or {}
    return content.get("value")


async def _measure(kube: KubeClient, settings: dict[str, Any]) -> dict[str, list[float]]:
    arrivals, namespace = Arrivals(), settings["namespace"]
    follows = [asyncio.create_task(arrivals.follow(kube, r, namespace)) for r in (_WIDGETS, _CONFIG_MAPS)]
    path_s: list[float] = []
    object_s: list[float] = []
    direct_s: list[float] = []
    names: list[str] = settings["names"]
    await asyncio.sleep(1.0)  # the watches are open; there is no event that says so
    for number in range(settings["samples"]):
        name, value = names[number % len(names)], f"value-{number}"
        seen = arrivals.expect(_WIDGETS, name, value)
        effect = arrivals.expect(_CONFIG_MAPS, f"{name}-{name}", value)
        sent_ns = time.perf_counter_ns()
        await kube.merge_patch(_WIDGETS, name, {"spec": {"value": value}}, namespace=namespace)
        async with asyncio.timeout(_PATIENCE_S):
            path_s.append((await effect - sent_ns) / 1e9)
            object_s.append((await seen - sent_ns) / 1e9)
        direct = arrivals.expect(_CONFIG_MAPS, f"direct-{name}", value)
        sent_ns = time.perf_counter_ns()
        await kube.apply(_CONFIG_MAPS, _config_map(f"direct-{name}", namespace, value))
        async with asyncio.timeout(_PATIENCE_S):
            direct_s.append((await direct - sent_ns) / 1e9)
    for follow in follows:
        follow.cancel()
    return {"path_s": path_s, "object_s": object_s, "direct_s": direct_s}


def _config_map(name: str, namespace: str, value: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": {"value": value, "by": "writer", "build": "direct"},
    }


async def _run(settings: dict[str, Any]) -> dict[str, list[float]]:
    async with KubeClient(
        settings["url"], token=settings["token"], ca_file=Path(settings["ca_file"]), user_agent="torpor-bench-writer"
    ) as kube:
        return await _measure(kube, settings)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    gc.freeze()
    json.dump(asyncio.run(_run(given)), sys.stdout)
