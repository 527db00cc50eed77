"""Installing Torpor's own objects and applying a folder of operators. Short-lived: its imports are heavy."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torpor_services.crd import GROUP, KIND, PLURAL, VERSION

from torpor_cli.errors import CommandFailed
from torpor_cli.kube import ApiError, KubeClient, connect, name_of
from torpor_cli.manifests import read_folder, torpor_objects
from torpor_cli.mesh import Say

# A CRD is served some moments after it was accepted; a namespace that is going is gone within as long.
_RETRIES, _RETRY_S = 40, 0.25


async def install(kubeconfig: Path | None, context: str, say: Say) -> list[str]:
    """The definition, accounts and rights; returns what was applied. Raises CommandFailed."""
    async with connect(kubeconfig, context) as kube:
        applied = await apply_all(kube, torpor_objects(), say)
        await _served(kube)
        return applied


async def apply_folder(folder: Path, kubeconfig: Path | None, context: str, say: Say) -> list[str]:
    """Every object below the folder, accounts and definitions first; returns what was applied."""
    objects = await asyncio.to_thread(_pinned_objects, folder)
    async with connect(kubeconfig, context) as kube:
        return await apply_all(kube, objects, say)


async def _served(kube: KubeClient) -> None:
    """Until WasmOperators can be asked for, whatever the answer: services that watch them may start."""
    for _ in range(_RETRIES):
        status, _ = await kube.request("GET", f"/apis/{GROUP}/{VERSION}/{PLURAL}?limit=1")
        if status != 404:
            return
        await asyncio.sleep(_RETRY_S)
    raise CommandFailed("the WasmOperator definition was accepted, but the API server does not serve it")


def _pinned_objects(folder: Path) -> list[dict[str, Any]]:
    """The folder's objects, each module file that lies there named with its hash: a changed file is a changed spec."""
    objects = read_folder(folder)
    for obj in objects:
        module = obj["spec"]["module"] if obj["kind"] == KIND else {}
        path = folder / module.get("file", "")
        if module.get("file") and not module.get("sha256") and path.is_file():
            module["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return objects


async def apply_all(kube: KubeClient, objects: Iterable[dict[str, Any]], say: Say) -> list[str]:
    """Applies in the order given; an object whose kind is not served yet is tried again for ten seconds."""
    applied = []
    for obj in objects:
        await _apply(kube, obj)
        applied.append(f"{obj['kind']} {name_of(obj)}")
        say(f"applied {applied[-1]}")
    return applied


async def _apply(kube: KubeClient, obj: dict[str, Any]) -> None:
    for attempt in range(_RETRIES):
        try:
            await kube.apply(obj)
            return
        except ApiError as exc:
            if exc.status != 404 or attempt == _RETRIES - 1:
                raise
        await asyncio.sleep(_RETRY_S)
