"""etcd through its JSON gateway on a Unix socket: is it up, and make it forget.

In the gateway's JSON, bytes are base64 and numbers of 64 bits are strings.
"""

from pathlib import Path
from typing import Any

import aiohttp


class EtcdRefused(Exception):
    """etcd answered with an error, whose text this carries."""


async def answers(socket: Path) -> bool:
    try:
        await _call(socket, "maintenance/status", {})
    except (OSError, aiohttp.ClientError, EtcdRefused):
        return False
    return True


async def compact(socket: Path) -> str:
    """Forget all revisions before the present one, which is returned."""
    revision: str = (await _call(socket, "kv/range", {"key": "Lw=="}))["header"]["revision"]
    try:
        await _call(socket, "kv/compaction", {"revision": revision, "physical": True})
    except EtcdRefused as refused:
        # Nothing was written since the last compaction, so there is nothing to forget.
        if "has been compacted" not in str(refused):
            raise
    return revision


async def _call(socket: Path, method: str, body: dict[str, Any]) -> dict[str, Any]:
    connector = aiohttp.UnixConnector(str(socket))
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.post(f"http://etcd/v3/{method}", json=body) as response:
            if response.status >= 400:
                raise EtcdRefused(f"{method}: {response.status} {await response.text()}")
            answer: dict[str, Any] = await response.json()
            return answer
