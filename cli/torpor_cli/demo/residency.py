"""What the demo counts while it runs: how many operators were in memory at once, and what the mesh's memory is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torpor.host.v1 import host_pb2 as pb
from torpor.scheduler.v1 import scheduler_pb2 as scheduler

if TYPE_CHECKING:
    from torpor.host.v1.host_pb2_grpc import HostAsyncStub

_IN_MEMORY = frozenset({scheduler.LOADING, scheduler.RESIDENT, scheduler.RUNNING, scheduler.UNLOADING})


class ResidencyCount:
    """Follows every state change of the host."""

    def __init__(self, host: HostAsyncStub) -> None:
        self._host = host
        self._in_memory: set[tuple[str, str]] = set()
        self.most = 0

    async def follow(self) -> None:
        """Until cancelled."""
        async for change in self._host.WatchStates(pb.WatchStatesRequest()):
            key = (change.state.operator.namespace, change.state.operator.name)
            if change.state.phase in _IN_MEMORY and not change.gone:
                self._in_memory.add(key)
            else:
                self._in_memory.discard(key)
            self.most = max(self.most, len(self._in_memory))


def pss_bytes(pids: Iterable[int]) -> int:
    """Proportional set size of processes, from the kernel."""
    return sum(_pss_bytes(pid) for pid in pids)


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
