"""The engine of a host process: one wasmtime engine, one linker with all host functions, and what instances share.

`load` wakes an operator: instantiate, lay its image, `torpor_wake`; 0.2 to 0.7 ms whatever the heap's size. A module
without an image is started the long way. Thread-safe; calls block and belong into worker threads.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wasmtime import Linker

from torpor_host import snapshots
from torpor_host.artifacts import ArtifactStore
from torpor_host.compiler import Compiler, fingerprint
from torpor_host.engine_config import EngineConfig, wasmtime_engine
from torpor_host.guest_clock import GuestClock
from torpor_host.guest_context import current, system_random
from torpor_host.host_functions import define_torpor
from torpor_host.hostcalls import HostCalls
from torpor_host.instance import Instance
from torpor_host.limits import Deadline, InstanceLimits
from torpor_host.modules import ModuleCache
from torpor_host.native import EpochWatch
from torpor_host.ticker import Ticker
from torpor_host.wasi import define_wasi

if TYPE_CHECKING:
    from torpor_host.install import InstalledModule, PythonBase


class GuestEngine:
    """One a process; every host function is shared, so two are possible but waste memory."""

    def __init__(self, config: EngineConfig, store: ArtifactStore, clock: GuestClock | None = None) -> None:
        self.config = config
        self.store = store
        self.clock = clock or GuestClock()
        threading.stack_size(config.thread_stack_bytes)
        self.wasmtime = wasmtime_engine(config.code)
        self.fingerprint = fingerprint(self.wasmtime, config.code)
        store.prune(config.artifacts_bytes_max)
        self.compiler = Compiler(config, store, self.fingerprint)
        self.linker = Linker(self.wasmtime)
        self._functions = define_wasi(self.linker) + define_torpor(self.linker)
        self.watch = EpochWatch(_verdict)
        self.ticker = Ticker(self.wasmtime, config.tick_s)
        self.modules = ModuleCache(self.wasmtime, self.linker, store, config.modules_idle_max)
        self.maps = MapBudget(config.maps_max)
        self.base_lock = threading.Lock()
        """Held while the Python base is looked up or built (`install.python_base`)."""
        self.base: tuple[tuple[int, int, int], PythonBase] | None = None
        """The base and the runtime file's inode, size and time it is of."""

    def load(
        self,
        installed: InstalledModule,
        limits: InstanceLimits,
        calls: HostCalls,
        *,
        deadline: Deadline | None = None,
        snapshot: snapshots.Expected | None = None,
    ) -> Instance:
        """A new instance, ready for its first call. `deadline` bounds `torpor_wake`, or the whole start of a module
        without an image. Raises GuestFailed, InstallFailed (install again), SnapshotUnusable (load without it)."""
        state = None
        if snapshot is not None:
            state = snapshots.consume(snapshot, memory_bytes_max=limits.memory_bytes)
        instance = Instance(self, installed.compiled, limits, calls, clock=self.clock, random=system_random)
        try:
            if installed.image is not None:
                self.clock.not_before(installed.image.monotonic_ns)
                instance.restore(installed.image)
                if state is not None:
                    self.clock.not_before(state.state.monotonic_ns)
                    instance.resume(state)
                instance.wake(deadline=deadline or Deadline.after(self.config.wake_timeout_s))
            elif state is not None:
                raise snapshots.SnapshotUnusable("this module has no image, so no snapshot fits it")
            else:
                long_way = deadline or Deadline.after(self.config.initialise_timeout_s)
                installed.start(instance, long_way)
        except BaseException:
            instance.close()
            raise
        return instance

    def close(self) -> None:
        """Ends the ticker and drops loaded modules. All instances must be closed."""
        self.ticker.close()
        self.modules.close()


def _verdict() -> str | None:
    guest = getattr(current, "guest", None)
    return guest.verdict() if guest is not None else None


@dataclass(slots=True)
class MapBudget:
    """How many memory maps guests hold. A count of ours: reading /proc/self/maps would cost more than a wake."""

    maximum: int
    held: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def room_for(self, count: int) -> bool:
        return self.held + count <= self.maximum

    def hold(self, count: int) -> None:
        with self._lock:
            self.held += count

    def release(self, count: int) -> None:
        with self._lock:
            self.held -= count
