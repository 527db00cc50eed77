"""Installing Torpor's own objects and applying a folder of operators. Short-lived: its imports are heavy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torpor_cli.kube import ApiError, KubeClient, connect, name_of
from torpor_cli.manifests import read_folder, torpor_objects
from torpor_cli.mesh import Say

# A CRD is served some moments after it was accepted; a namespace that is going is gone within as long.
_RETRIES, _RETRY_S = 40, 0.25


async def install(kubeconfig: Path | None, context: str, say: Say) -> list[str]:
    """The definition, accounts and rights; returns what was applied. Raises CommandFailed."""
    async with connect(kubeconfig, context) as kube:
        return await apply_all(kube, torpor_objects(), say)


async def apply_folder(folder: Path, kubeconfig: Path | None, context: str, say: Say) -> list[str]:
    """Every object below the folder, accounts and definitions first; returns what was applied."""
    objects = await asyncio.to_thread(read_folder, folder)
    async with connect(kubeconfig, context) as kube:
        return await apply_all(kube, objects, say)


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
