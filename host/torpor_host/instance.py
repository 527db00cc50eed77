"""One awake guest: a store, its memory, and the calls into it.

An instance belongs to no thread but runs on one at a time: calls, `snapshot` and `close` take its lock, and a store
that is closed or called twice at once would end the process. `stop` and `alive` are for any thread at any time. After
a `GuestFailed` the instance is dead: closing it is all that is left.

It runs on the caller's thread, which needs a stack of some MiB (`EngineConfig.thread_stack_bytes`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from wasmtime import Store, Trap, TrapCode, WasmtimeError

from torpor_host import native, snapshots
from torpor_host.abi import VERSION
from torpor_host.artifacts import Artifact
from torpor_host.dirty_pages import page_count, written_ranges
from torpor_host.failures import (
    GuestExited,
    GuestFailed,
    GuestOutOfMemory,
    GuestProtocolError,
    GuestStopped,
    GuestTimedOut,
    GuestTrapped,
    InstallFailed,
    InstanceClosed,
)
from torpor_host.guest_clock import Clock
from torpor_host.guest_context import GuestContext, current
from torpor_host.hostcalls import HostCalls
from torpor_host.images import GuestState, Image, ImageLost, lay
from torpor_host.limits import MIB, Deadline, InstanceLimits
from torpor_host.native import MASK32, PAGE, GuestMemory, NativeTrap
from torpor_host.output import Output
from torpor_host.wasm_module import START_EXPORT

if TYPE_CHECKING:
    from torpor_host.engine import GuestEngine

_MAPS_OF_AN_INSTANCE = 4

T = TypeVar("T")


class Instance:
    """Made by `GuestEngine.load`; with `__init__` alone nothing of the guest has run yet."""

    def __init__(
        self,
        engine: GuestEngine,
        compiled: Artifact,
        limits: InstanceLimits,
        calls: HostCalls,
        *,
        clock: Clock,
        random: Callable[[int], bytes],
    ) -> None:
        self._engine = engine
        self._compiled = compiled
        self._limits = limits
        self._lock = threading.Lock()
        self._alive = True
        self._closed = False
        self._maps = 0
        self._image: Image | None = None
        self._private_bytes = 0
        self._functions: dict[str, object] = {}
        self._module = engine.modules.acquire(compiled)
        self._store = Store(engine.wasmtime)
        try:
            self._instantiate(calls, clock, random)
        except BaseException:
            self.close()
            raise

    def _instantiate(self, calls: HostCalls, clock: Clock, random: Callable[[int], bytes]) -> None:
        limits = self._limits
        self._store.set_limits(
            memory_size=limits.memory_bytes,
            table_elements=limits.table_elements,
            instances=1,
            tables=16,
            memories=1,
        )
        self._engine.watch.attach(self._store)
        try:
            self._instance = self._module.instantiate(self._store)
        except Trap as exc:
            raise GuestTrapped(f"instantiation: {exc.message.splitlines()[0]}") from exc
        except WasmtimeError as exc:
            reason = " ".join(str(exc).split())[:300]
            raise GuestOutOfMemory(f"instantiation within {limits.memory_bytes >> 20} MiB: {reason}") from exc
        self._context = native.context_of(self._store)
        self.memory = GuestMemory(self._context, self._module.memory(self._store, self._instance))
        self._guest = GuestContext(
            memory=self.memory,
            clock=clock,
            random=random,
            calls=calls,
            limits=limits,
            output=Output(limits.output_bytes_max),
        )
        self._hold_maps(_MAPS_OF_AN_INSTANCE)

    # What the runtime calls.

    def reconcile(self, message: bytes, *, deadline: Deadline) -> bytes:
        """`ReconcileRequest(...).encode()` in, bytes for `abi.decode_reconcile_result` out. Raises GuestFailed."""
        return self._ask("torpor_reconcile", message, deadline)

    def map(self, message: bytes, *, deadline: Deadline) -> bytes:
        """`MapRequest(...).encode()` in, bytes for `abi.decode_map_result` out. Raises GuestFailed."""
        if not self._module.has("torpor_map"):
            raise GuestProtocolError("the manifest has a mapping that is code, the module exports no torpor_map")
        return self._ask("torpor_map", message, deadline)

    def stop(self, reason: str) -> None:
        """From any thread: the running call ends with GuestStopped within a tick of guest code, sleeping ends at once,
        and a host call that waits is the runtime's to end; each further one answers `fenced`."""
        self._guest.stop(reason)

    @property
    def alive(self) -> bool:
        """False after a GuestFailed and after close."""
        return self._alive

    @property
    def imaged(self) -> bool:
        """Whether it was woken from an image."""
        return self._image is not None

    def private_bytes(self) -> int:
        """Memory that only this instance has: the pages it wrote (0.1 ms). While it runs, the last known value."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._closed:
                    ranges = written_ranges(self.memory.address(), self.memory.size())
                    self._private_bytes = self.memory.size() if ranges is None else page_count(ranges) * PAGE
            finally:
                self._lock.release()
        return self._private_bytes

    def snapshot(self, path: Path, *, epoch: int, wake: int) -> int:
        """Writes what this guest changed over its image to `path` and returns the file's bytes. Raises
        SnapshotImpossible, OSError. The instance stays usable; what happens in it afterwards is not in the file."""
        with self._lock:
            self._require_alive()
            if self._image is None:
                raise snapshots.SnapshotImpossible("a module without an image has no snapshots")
            label = snapshots.Label(image=self._image.identity, epoch=epoch, wake=wake)
            return snapshots.write(path, label, self.memory, self.state())

    def close(self) -> None:
        """Frees everything. Idempotent. Waits for a running call: `stop` it first."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._alive = False
            self._store.close()
            self._engine.modules.release(self._compiled)
            self._engine.maps.release(self._maps)
            self._maps = 0

    # What waking and installing are made of.

    def restore(self, image: Image) -> None:
        """Lays the image over the fresh instance. Raises GuestOutOfMemory, InstallFailed."""
        with self._lock:
            self._require_alive()
            if image.memory_bytes > self._limits.memory_bytes:
                raise GuestOutOfMemory(
                    f"after initialisation it has {_mib(image.memory_bytes)},"
                    f" the limit is {_mib(self._limits.memory_bytes)}"
                )
            if not self.memory.grow_to(self._store, image.memory_bytes):
                raise GuestOutOfMemory(f"cannot grow to the image's {_mib(image.memory_bytes)}")
            map_overlay = self._engine.config.map_overlays and self._engine.maps.room_for(image.map_count)
            try:
                lay(self._engine.store, image, self.memory, map_overlay=map_overlay)
            except ImageLost as exc:
                raise InstallFailed(f"{exc}: install again") from exc
            except OSError as exc:
                raise InstallFailed(
                    f"cannot map the image: {exc.strerror}; fewer instances, or raise vm.max_map_count"
                ) from exc
            self._hold_maps(image.map_count if map_overlay else 1)
            self._set_globals(image.globals)
            self._image = image

    def resume(self, snapshot: snapshots.Snapshot) -> None:
        """Lays a snapshot over the image it was taken over."""
        with self._lock:
            self._require_alive()
            if self._image is None or snapshot.label.image != self._image.identity:
                raise snapshots.SnapshotUnusable("the snapshot was taken over another image")
            if snapshot.memory_bytes > self._limits.memory_bytes or not self.memory.grow_to(
                self._store, snapshot.memory_bytes
            ):
                raise snapshots.SnapshotUnusable(f"it needs {_mib(snapshot.memory_bytes)} of memory")
            snapshots.lay(snapshot, self.memory)
            self._set_globals(snapshot.state.globals)

    def initialise(self, *, deadline: Deadline) -> None:
        """The start function, `_initialize`, and the check of the ABI's version."""
        for name in (START_EXPORT, "_initialize"):
            self._command(name, deadline)
        version = self._number("torpor_abi_version", deadline)
        if version != VERSION:
            raise self._dead(GuestProtocolError(f"speaks ABI version {version}, this host speaks {VERSION}"))

    def load_source(self, message: bytes, *, deadline: Deadline) -> bytes:
        """`torpor_load`, of language runtimes."""
        return self._ask("torpor_load", message, deadline, self._install_cpu_s())

    def describe(self, *, deadline: Deadline) -> bytes:
        """`torpor_describe`."""
        function = self._function("torpor_describe")
        return self._run(
            deadline, lambda: self._result(native.call(self._context, function, (), 1)), self._install_cpu_s()
        )

    def wake(self, *, deadline: Deadline) -> None:
        """`torpor_wake`, if there is one."""
        self._command("torpor_wake", deadline)

    def state(self) -> GuestState:
        """What of a guest that does not run goes beside its pages."""
        variables = self._module.globals(self._store, self._instance)
        raw = b"".join(native.read_global(self._context, variable) for variable in variables)
        return GuestState(raw, self._guest.clock.monotonic_ns())

    def face(self, calls: HostCalls, clock: Clock, random: Callable[[int], bytes]) -> None:
        """Gives the guest another outside world from its next call on (the install check's replay)."""
        with self._lock:
            self._guest.calls, self._guest.clock, self._guest.random = calls, clock, random

    def _install_cpu_s(self) -> float:
        return self._engine.config.initialise_timeout_s

    def _set_globals(self, raw: bytes) -> None:
        variables = self._module.globals(self._store, self._instance)
        if len(raw) != 9 * len(variables):
            raise InstallFailed("the image has other globals than the module: install again")
        for index, variable in enumerate(variables):
            native.write_global(self._context, variable, raw[9 * index : 9 * index + 9])

    def _hold_maps(self, count: int) -> None:
        self._maps += count
        self._engine.maps.hold(count)

    # Calls.

    def _command(self, name: str, deadline: Deadline) -> None:
        if self._module.has(name):
            function = self._function(name)
            self._run(deadline, lambda: native.call(self._context, function, (), 0), self._install_cpu_s())

    def _number(self, name: str, deadline: Deadline) -> int:
        function = self._function(name)
        return self._run(deadline, lambda: native.call(self._context, function, (), 1)) & MASK32

    def _ask(self, name: str, message: bytes, deadline: Deadline, cpu_s: float | None = None) -> bytes:
        allocate, function = self._function("torpor_alloc"), self._function(name)

        def call() -> bytes:
            if len(message) > self._limits.message_bytes_max:
                raise GuestProtocolError(
                    f"a message of {len(message)} bytes: the limit is {self._limits.message_bytes_max}"
                )
            pointer = native.call(self._context, allocate, (len(message),), 1) & MASK32
            if not pointer:
                raise GuestOutOfMemory(
                    f"torpor_alloc({len(message)}) answered 0 with {_mib(self.memory.size())} in use"
                )
            if not self.memory.write(pointer, message):
                raise GuestProtocolError(f"torpor_alloc({len(message)}) answered {pointer:#x}, outside of its memory")
            return self._result(native.call(self._context, function, (pointer, len(message)), 1))

        return self._run(deadline, call, cpu_s)

    def _result(self, packed: int) -> bytes:
        pointer, length = packed >> 32, packed & MASK32
        if length > self._limits.message_bytes_max:
            raise GuestProtocolError(f"a result of {length} bytes: the limit is {self._limits.message_bytes_max}")
        result = self.memory.read(pointer, length)
        if result is None:
            raise GuestProtocolError(f"a result of {length} bytes at {pointer:#x} lies outside of its memory")
        return result

    def _run(self, deadline: Deadline, call: Callable[[], T], cpu_s: float | None = None) -> T:
        """Runs guest code on this thread, with everything around it that must be there."""
        with self._lock:
            self._require_alive()
            guest = self._guest
            guest.begin(deadline, self._limits.cpu_budget_s if cpu_s is None else cpu_s)
            current.guest = guest
            self._engine.ticker.enter()
            try:
                result = call()
                if guest.exit_code is not None:
                    raise GuestExited(guest.exit_code)
                return result
            except NativeTrap as exc:
                self._alive = False
                raise self._failure(exc) from None
            except GuestFailed:
                self._alive = False
                raise
            finally:
                self._engine.ticker.leave()
                current.guest = None
                guest.end()

    def _function(self, name: str) -> object:
        function = self._functions.get(name)
        if function is None:
            self._require_alive()
            function = self._functions[name] = self._module.function(self._store, self._instance, name)
        return function

    def _require_alive(self) -> None:
        if not self._alive:
            raise InstanceClosed("a call on an instance that is closed or has failed")

    def _dead(self, failure: GuestFailed) -> GuestFailed:
        self._alive = False
        return failure

    def _failure(self, trap: NativeTrap) -> GuestFailed:
        guest, limits = self._guest, self._limits
        if guest.exit_code is not None:
            return GuestExited(guest.exit_code)
        match guest.ended_by:
            case "stop":
                return GuestStopped(guest.stop_reason or "stopped")
            case "cpu":
                return GuestTimedOut("used up its CPU budget without an end")
            case "deadline":
                return GuestTimedOut(f"did not return within {limits.grace_s} s after its deadline")
        reason = f"{trap}; a host function failed: {guest.fault}" if guest.fault else str(trap)
        full = self.memory.size() + max(limits.memory_bytes // 8, MIB) > limits.memory_bytes
        if full and trap.code == TrapCode.UNREACHABLE:
            return GuestOutOfMemory(
                f"ended itself ({reason}) with {_mib(self.memory.size())} of {_mib(limits.memory_bytes)} in use"
            )
        return GuestTrapped(reason)


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
