"""Compiled modules that are loaded now, shared by their instances. Loading verifies the file; idle ones are dropped.

A loaded module costs a descriptor, three maps and the code pages it has touched (file pages: the kernel may drop them),
so some stay loaded without an instance. Bound: `modules_idle_max` beyond those in use; the longest idle goes first.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from wasmtime import Engine, FuncType, Global, Instance, Linker, Memory, Module, Store, WasmtimeError
from wasmtime import _ffi as ffi

from torpor_host import native
from torpor_host.artifacts import Artifact, ArtifactStore
from torpor_host.failures import InstallFailed, InstallRefused
from torpor_host.wasm_module import GLOBAL_EXPORT, MEMORY_EXPORT, START_EXPORT

_REQUIRED = {
    "torpor_abi_version": ("", "i"),
    "torpor_alloc": ("i", "i"),
    "torpor_describe": ("", "I"),
    "torpor_reconcile": ("ii", "I"),
}
_OPTIONAL = {
    "_initialize": ("", ""),
    START_EXPORT: ("", ""),
    "torpor_wake": ("", ""),
    "torpor_map": ("ii", "I"),
    "torpor_load": ("ii", "I"),
}


class LoadedModule:
    """A module ready to instantiate, and where its exports are."""

    def __init__(self, engine: Engine, linker: Linker, compiled: Artifact) -> None:
        try:
            self.module = Module.deserialize_file(engine, str(compiled.path))
        except WasmtimeError as exc:
            raise InstallFailed(f"compiled module {compiled.path}: {exc}") from exc
        try:
            self._pre = linker.instantiate_pre(self.module)
        except WasmtimeError as exc:
            self.module.close()
            raise InstallRefused(" ".join(str(exc).split())[:500]) from exc
        exports = self.module.exports
        self.types = {export.name: export.type for export in exports}
        self._positions = {export.name: index for index, export in enumerate(exports)}
        self._globals = [
            self._positions[name]
            for name in sorted(
                (name for name in self._positions if name.startswith(GLOBAL_EXPORT)),
                key=lambda name: int(name.removeprefix(GLOBAL_EXPORT)),
            )
        ]

    def has(self, name: str) -> bool:
        return name in self._positions

    def instantiate(self, store: Store) -> Instance:
        return self._pre.instantiate(store)

    def function(self, store: Store, instance: Instance, name: str) -> object:
        """What `native.call` takes."""
        return self._export(store, instance, self._positions[name]).of.func

    def memory(self, store: Store, instance: Instance) -> Memory:
        return Memory._from_raw(self._export(store, instance, self._positions[MEMORY_EXPORT]).of.memory)

    def globals(self, store: Store, instance: Instance) -> list[Global]:
        """Mutable ones, by ascending index."""
        return [Global._from_raw(self._export(store, instance, at).of.global_) for at in self._globals]

    def refusal(self, *, language_runtime: bool) -> str | None:
        """Which export is missing or has the wrong type. To be asked once before any is called."""
        wanted = dict(_REQUIRED)
        if language_runtime:
            wanted["torpor_load"] = _OPTIONAL["torpor_load"]
        missing = [name for name in wanted if name not in self.types]
        if missing:
            return f"does not export {', '.join(missing)}: see the operator ABI"
        for name, (parameters, result) in (_OPTIONAL | wanted).items():
            if name in self.types and _signature(self.types[name]) != (parameters, result):
                return f"exports {name} with another type than {_text(parameters)} -> {_text(result)}"
        return None

    def close(self) -> None:
        self._pre.close()
        self.module.close()

    @staticmethod
    def _export(store: Store, instance: Instance, position: int) -> ffi.wasmtime_extern_t:
        item = ffi.wasmtime_extern_t()
        name, length = ctypes.POINTER(ctypes.c_char)(), ctypes.c_size_t()
        found = ffi.wasmtime_instance_export_nth(
            store._context(),
            ctypes.byref(instance._instance),
            position,
            ctypes.byref(name),
            ctypes.byref(length),
            ctypes.byref(item),
        )
        assert found, position
        return item


def _signature(kind: object) -> tuple[str, str] | None:
    if not isinstance(kind, FuncType):
        return None
    letters = {"i32": "i", "i64": "I"}
    return (
        "".join(letters.get(str(value), "?") for value in kind.params),
        "".join(letters.get(str(value), "?") for value in kind.results),
    )


def _text(kinds: str) -> str:
    return "(" + ", ".join({"i": "i32", "I": "i64"}[kind] for kind in kinds) + ")"


@dataclass(slots=True)
class _Entry:
    uses: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    loaded: LoadedModule | None = None


class ModuleCache:
    """Thread-safe. Loading one module delays nobody who wants another."""

    def __init__(self, engine: Engine, linker: Linker, store: ArtifactStore, idle_max: int) -> None:
        self._engine = engine
        self._linker = linker
        self._store = store
        self._idle_max = idle_max
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def acquire(self, compiled: Artifact) -> LoadedModule:
        """Pair with `release`. Raises InstallFailed if the file is gone or damaged, InstallRefused for its imports."""
        with self._lock:
            entry = self._entries.setdefault(compiled.sha256, _Entry())
            self._entries.move_to_end(compiled.sha256)
            entry.uses += 1
        try:
            with entry.lock:
                if entry.loaded is None:
                    if not self._store.verified(compiled):
                        raise InstallFailed(f"compiled module {compiled.path} is missing or damaged: install again")
                    entry.loaded = LoadedModule(self._engine, self._linker, compiled)
                return entry.loaded
        except BaseException:
            self.release(compiled)
            raise

    def release(self, compiled: Artifact) -> None:
        dropped: list[_Entry] = []
        with self._lock:
            self._entries[compiled.sha256].uses -= 1
            idle = [sha256 for sha256, entry in self._entries.items() if not entry.uses]
            for sha256 in idle[: max(0, len(idle) - self._idle_max)]:
                dropped.append(self._entries.pop(sha256))
        for entry in dropped:
            if entry.loaded is not None:
                entry.loaded.close()
        if dropped:
            native.trim_heap()

    def loaded_count(self) -> int:
        with self._lock:
            return len(self._entries)

    def close(self) -> None:
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            if entry.loaded is not None:
                entry.loaded.close()
