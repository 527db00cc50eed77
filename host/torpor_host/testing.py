"""Guests and a runtime side for tests: small modules in WAT, C guests compiled with zig, recorded host calls.

For tests only; nothing of the host imports it. C guests are compiled once and kept in a cache folder by their source.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from wasmtime import Module, WasmtimeError, wat2wasm

from torpor_host.abi import ReconcileFailed, ReconcileRequest, decode_reconcile_result, encode
from torpor_host.artifacts import Artifact, ArtifactStore
from torpor_host.compiler import KIND, Compiler
from torpor_host.engine import GuestEngine
from torpor_host.engine_config import EngineConfig, wasmtime_engine
from torpor_host.failures import InstallRefused
from torpor_host.hostcalls import (
    CallResponse,
    FetchRequest,
    FetchResponse,
    KubeRequest,
    TreeRequest,
)
from torpor_host.install import InstalledModule, ModuleSource, install
from torpor_host.instance import Instance
from torpor_host.limits import Deadline, InstanceLimits

DONE = encode([b"done"])
MANIFEST = b'{"for": {"resource": "v1/configmaps"}}'

_HEAP = 65536


def wat_text(content: bytes) -> str:
    """The bytes as a WAT string literal."""
    return '"' + "".join(f"\\{byte:02x}" for byte in content) + '"'


def wat_guest(
    reconcile: str = "$done",
    *,
    fields: str = "",
    imports: str = "",
    describe: str = "",
    describe_result: bytes = encode([b"", MANIFEST]),
    alloc: str = "",
    pages: int = 2,
    version: int = 1,
) -> bytes:
    """A guest whose `torpor_reconcile` is the given code (locals $ptr and $len; it may return $done). At 16 lies the
    message `done`, at 128 the describe result, from 65536 on a heap that only grows."""
    done = f"(i64.const {16 << 32 | len(DONE)})"
    reconcile = reconcile.replace("$done", done)
    describe = describe or f"(i64.const {128 << 32 | len(describe_result)})"
    alloc = alloc or (
        "(local $at i32) (local.set $at (global.get $top))"
        " (global.set $top (i32.add (global.get $top)"
        "   (i32.and (i32.add (local.get $len) (i32.const 15)) (i32.const -16))))"
        " (local.get $at)"
    )
    return bytes(
        wat2wasm(f"""(module
  (import "torpor" "log" (func $log (param i32 i32 i32)))
  (import "torpor" "take" (func $take (param i32 i32) (result i32)))
  {imports}
  (memory (export "memory") {pages})
  (global $top (mut i32) (i32.const {_HEAP}))
  (data (i32.const 16) {wat_text(DONE)})
  (data (i32.const 128) {wat_text(describe_result)})
  {fields}
  (func (export "torpor_abi_version") (result i32) (i32.const {version}))
  (func (export "torpor_alloc") (param $len i32) (result i32) {alloc})
  (func (export "torpor_describe") (result i64) {describe})
  (func (export "torpor_reconcile") (param $ptr i32) (param $len i32) (result i64) {reconcile})
)""")
    )


C_PRELUDE = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
#define EXPORT(name) __attribute__((export_name(#name)))
#define IMPORT(name) __attribute__((import_module("torpor"), import_name(#name)))
IMPORT(kube_request) int32_t kube_request(const void *, uint32_t);
IMPORT(kube_tree) int32_t kube_tree(const void *, uint32_t);
IMPORT(http_fetch) int32_t http_fetch(const void *, uint32_t);
IMPORT(config) int32_t host_config(void);
IMPORT(log) void host_log(int32_t, const void *, uint32_t);
IMPORT(take) int32_t take(void *, uint32_t);
EXPORT(torpor_abi_version) int32_t abi_version(void) { return 1; }
EXPORT(torpor_alloc) void *alloc(uint32_t len) { return malloc(len); }
static char out[1 << 16];
static uint32_t out_len;
static void field(const void *data, uint32_t len) {
    memcpy(out + out_len, &len, 4); memcpy(out + out_len + 4, data, len); out_len += 4 + len;
}
static uint64_t result(void) { uint64_t r = (uint64_t)(uintptr_t)out << 32 | out_len; return r; }
/* Outcome "error" with a message: the shortest way to tell the test something. */
static uint64_t tell(const char *message) {
    out_len = 0; field("error", 5); field("", 0); field(message, strlen(message)); return result();
}
EXPORT(torpor_describe) uint64_t describe(void) {
    out_len = 0; field("", 0); field("{}", 2); return result();
}
"""


def c_guest(source: str) -> bytes:
    """Compiles C (after `C_PRELUDE`) to a reactor for wasm32-wasip1."""
    text = C_PRELUDE + source
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torpor" / "test-guests"
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"{hashlib.sha256(text.encode()).hexdigest()}.wasm"
    if not target.exists():
        code, built = target.with_suffix(f".{os.getpid()}.c"), target.with_suffix(f".{os.getpid()}.wasm")
        code.write_text(text)
        command = [sys.executable, "-m", "ziglang", "cc", "-target", "wasm32-wasi", "-mexec-model=reactor", "-O1", "-s"]
        subprocess.run([*command, "-o", str(built), str(code)], check=True, capture_output=True)
        built.replace(target)
        code.unlink()
    return target.read_bytes()


class InProcessCompiler(Compiler):
    """Compiles small test modules without a subprocess, which would take longer than the test."""

    def _run(self, key: str, wasm: bytes) -> Artifact:
        try:
            compiled = Module(wasmtime_engine(self._config.code), wasm).serialize()
        except WasmtimeError as exc:
            raise InstallRefused(f"not a valid module: {exc}") from exc
        return self._store.write_bytes(KIND, key, bytes(compiled))


class FakeCalls:
    """A runtime that answers from functions and remembers what was asked."""

    def __init__(self, config: bytes = b'{"config": {}, "env": {}}') -> None:
        self.requests: list[KubeRequest | TreeRequest | FetchRequest] = []
        self.deadlines: list[Deadline] = []
        self.logged: list[tuple[int, str]] = []
        self.configuration = config
        self.blocked = 0
        """How often a wait began."""
        self.waiting = threading.Event()
        """Set once a wait has begun."""
        self.on_kube: Callable[[KubeRequest, Deadline], CallResponse] = lambda request, deadline: CallResponse(
            200, "application/json", b"{}"
        )
        self.on_fetch: Callable[[FetchRequest, Deadline], FetchResponse] = lambda request, deadline: FetchResponse(204)

    def kube_request(self, request: KubeRequest, deadline: Deadline) -> CallResponse:
        self.requests.append(request)
        self.deadlines.append(deadline)
        return self.on_kube(request, deadline)

    def kube_tree(self, request: TreeRequest, deadline: Deadline) -> CallResponse:
        self.requests.append(request)
        self.deadlines.append(deadline)
        return CallResponse(200, "application/json", b"[]")

    def http_fetch(self, request: FetchRequest, deadline: Deadline) -> FetchResponse:
        self.requests.append(request)
        self.deadlines.append(deadline)
        return self.on_fetch(request, deadline)

    def config(self) -> bytes:
        return self.configuration

    def log(self, level: int, text: str) -> None:
        self.logged.append((level, text))

    def blocking(self) -> AbstractContextManager[object]:
        return self._blocking()

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        self.blocked += 1
        self.waiting.set()
        yield

    def lines(self) -> list[str]:
        return [text for _level, text in self.logged]


def engine_in(store: ArtifactStore, config: EngineConfig | None = None) -> GuestEngine:
    """An engine that compiles in this process."""
    engine = GuestEngine(config or EngineConfig(), store)
    engine.compiler = InProcessCompiler(engine.config, store, engine.fingerprint)
    return engine


class Guests:
    """Installs and wakes guests in one engine; closes what a test leaves open."""

    def __init__(self, engine: GuestEngine) -> None:
        self.engine = engine
        self.calls = FakeCalls()
        self._open: list[Instance] = []

    def install(self, wasm: bytes, limits: InstanceLimits | None = None) -> InstalledModule:
        return install(self.engine, ModuleSource("core", wasm, "guest.wasm"), limits=limits or InstanceLimits())

    def wake(self, module: InstalledModule, limits: InstanceLimits | None = None) -> Instance:
        instance = self.engine.load(module, limits or InstanceLimits(), self.calls)
        self._open.append(instance)
        return instance

    def run(self, instance: Instance, name: str = "", *, attempt: int = 0, timeout_s: float = 10.0) -> bytes:
        request = ReconcileRequest("default", name, "watch", attempt)
        return instance.reconcile(request.encode(), deadline=Deadline.after(timeout_s))

    def told(self, instance: Instance, name: str = "", *, attempt: int = 0, timeout_s: float = 10.0) -> str:
        """What a C guest says with `tell`."""
        result = decode_reconcile_result(self.run(instance, name, attempt=attempt, timeout_s=timeout_s))
        assert isinstance(result, ReconcileFailed), result
        return result.message

    def close(self) -> None:
        for instance in self._open:
            instance.close()
