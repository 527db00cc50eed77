"""Compiled modules: made in a subprocess, kept in the store under everything they depend on.

The key is the wasm's hash, the engine's fingerprint (target, CPU features, tunables, as the engine itself writes them
into what it serialises), wasmtime's version and our settings. So another CPU, version or setting never meets a file
that is not meant for it, and a changed byte in one is found by its hash before it is run.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import struct
import subprocess
import sys
import threading

from wasmtime import Engine, Module

from torpor_host.artifacts import Artifact, ArtifactStore, ArtifactStoreFailed
from torpor_host.compile_worker import EXIT_REFUSED
from torpor_host.engine_config import CodeSettings, EngineConfig
from torpor_host.failures import InstallFailed, InstallRefused
from torpor_host.native import WASMTIME_VERSION

KIND = "compiled"
_EMPTY_MODULE = b"\0asm\x01\0\0\0"
_SECTION = b".wasmtime.engine\0"
# How Python, Rust and the dynamic linker say it.
_OUT_OF_MEMORY = ("MemoryError", "memory allocation", "Cannot allocate memory", "failed to map segment")


def fingerprint(engine: Engine, code: CodeSettings) -> str:
    """What compiled code of this engine depends on, as hexadecimal digits."""
    digest = hashlib.sha256()
    digest.update(_engine_section(bytes(Module(engine, _EMPTY_MODULE).serialize())))
    digest.update(WASMTIME_VERSION.encode())
    digest.update(code.to_json().encode())
    return digest.hexdigest()


def _engine_section(elf: bytes) -> bytes:
    """The section in which wasmtime writes what a module was compiled for. The whole file if there is none."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return elf
    (sections_at,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)

    def header(index: int) -> tuple[int, int, int]:
        name, _type, _flags, _address, offset, size = struct.unpack_from(
            "<IIQQQQ", elf, sections_at + index * entry_size
        )
        return name, offset, size

    _, names_at, names_size = header(names_index)
    names = elf[names_at : names_at + names_size]
    for index in range(count):
        name, offset, size = header(index)
        if names[name:].startswith(_SECTION):
            return elf[offset : offset + size]
    return elf


class Compiler:
    """Compiles for one engine. Thread-safe; as many at a time as configured, one a key over all processes."""

    def __init__(self, config: EngineConfig, store: ArtifactStore, engine_fingerprint: str) -> None:
        self._config = config
        self._store = store
        self._fingerprint = engine_fingerprint
        self._slots = threading.BoundedSemaphore(config.compiles_at_once)

    def key(self, wasm: bytes) -> str:
        return hashlib.sha256(hashlib.sha256(wasm).digest() + bytes.fromhex(self._fingerprint)).hexdigest()

    def compile(self, wasm: bytes) -> Artifact:
        """The compiled module, from the store or made now. Raises InstallRefused, InstallFailed."""
        key = self.key(wasm)
        found = self._store.load(KIND, key)
        if found is not None:
            return found
        try:
            with self._slots, self._store.lock(KIND, key):
                found = self._store.load(KIND, key)
                return found if found is not None else self._run(key, wasm)
        except ArtifactStoreFailed as exc:
            raise InstallFailed(str(exc)) from exc

    def _run(self, key: str, wasm: bytes) -> Artifact:
        with self._store.scratch() as folder:
            source, target = folder / "module.wasm", folder / "module.cwasm"
            try:
                source.write_bytes(wasm)
            except OSError as exc:
                raise InstallFailed(
                    f"cannot write {folder}: {exc.strerror}; free space, or set another folder"
                ) from exc
            command = [
                sys.executable,
                "-P",  # a file of the working directory must not stand for a standard library module
                "-m",
                "torpor_host.compile_worker",
                str(source),
                str(target),
                self._config.code.to_json(),
                str(self._config.compile_memory_bytes),
            ]
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=self._config.compile_timeout_s,
                    env=_environment(),
                    check=False,
                )
            except subprocess.TimeoutExpired as exc:
                raise InstallRefused(
                    f"compiling took longer than {self._config.compile_timeout_s:.0f} s: make the module smaller"
                ) from exc
            except OSError as exc:
                raise InstallFailed(f"cannot start the compiler: {exc}") from exc
            self._judge(done.returncode, done.stderr.decode(errors="replace").strip())
            return self._store.adopt(KIND, key, target)

    def _judge(self, code: int, errors: str) -> None:
        if code == 0:
            return
        last = errors.splitlines()[-1][:300] if errors else ""
        if code == EXIT_REFUSED:
            raise InstallRefused("not a valid module: " + " ".join(errors.split())[:500])
        if os.strerror(errno.ENOSPC) in errors:
            raise InstallFailed(
                f"no space left in {self._store.root} for compiled modules: free some, or set another folder"
            )
        if code == -signal.SIGKILL:
            raise InstallFailed("the compiler was killed, most likely because this machine is out of memory")
        if code == -signal.SIGABRT or any(sign in errors for sign in _OUT_OF_MEMORY):
            raise InstallRefused(
                f"compiling needs more than {self._config.compile_memory_bytes >> 20} MiB: make the module smaller"
            )
        raise InstallFailed(f"the compiler ended with {code}: {last}")


def _environment() -> dict[str, str]:
    """What the worker needs to find the same packages, and nothing else: no secret reaches it."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "LC_ALL": "C.UTF-8"}
