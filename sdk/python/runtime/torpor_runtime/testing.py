"""A small host for tests of the runtime: the ABI's functions and WASI in Python, on one wasmtime instance.

Independent of the real host on purpose, so that a mistake in one does not hide in the other. Needs wasmtime.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import wasmtime

RUNTIME = Path(__file__).resolve().parent.parent

# As a host sets it: wasmtime's default of 512 KiB is too little for deeply nested data.
WASM_STACK_BYTES = 2 * 1024 * 1024
MEMORY_BYTES_MAX = 256 << 20

ESUCCESS, EBADF, ENOTSUP, ESPIPE = 0, 8, 58, 70
STREAMS = (1, 2)
ABSOLUTE_TIME = 1


def message(*fields: bytes | str) -> bytes:
    encoded = [field.encode() if isinstance(field, str) else field for field in fields]
    return b"".join(struct.pack("<I", len(field)) + field for field in encoded)


def parse(data: bytes) -> list[bytes]:
    found = []
    while data:
        (size,) = struct.unpack_from("<I", data)
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


# The least that loads.
AN_OPERATOR = """
from torpor_sdk import Operator
op = Operator(for_="v1/configmaps")
"""


def operator(body: str) -> str:
    """An operator's file whose reconcile function is `body`, with `request` and `kube`."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"{AN_OPERATOR}\n@op.reconcile\ndef reconcile(request, kube):\n{lines}\n"


class Guest:
    """One instance. `output` is what it wrote, in order; `calls` what it asked of the host."""

    def __init__(
        self, engine: wasmtime.Engine, module: wasmtime.Module, *, memory_bytes_max: int = MEMORY_BYTES_MAX
    ) -> None:
        self.output: list[tuple[int, bytes]] = []
        self.calls: list[tuple[str, list[bytes]]] = []
        self.logged: list[tuple[int, str]] = []
        self.kube: Callable[[list[bytes]], bytes] = lambda request: message("200", "application/json", "{}")
        self.exit_status: int | None = None
        self.refuse_with: int | None = None  # What kube and HTTP calls return instead of a length.
        self._result = b""
        self.store = wasmtime.Store(engine)
        self.store.set_limits(memory_size=memory_bytes_max)
        linker = wasmtime.Linker(engine)
        for wanted in module.imports:
            assert isinstance(wanted.type, wasmtime.FuncType) and wanted.name is not None
            source = self._torpor if wanted.module == "torpor" else self._wasi
            linker.define_func(wanted.module, wanted.name, wanted.type, source(wanted.name))
        self.exports = linker.instantiate(self.store, module).exports(self.store)
        memory = self.exports["memory"]
        assert isinstance(memory, wasmtime.Memory)
        self.memory = memory

    def call(self, name: str, *arguments: int) -> int:
        function = self.exports[name]
        assert isinstance(function, wasmtime.Func)
        return function(self.store, *arguments)  # type: ignore[no-any-return]

    def start(self) -> Guest:
        self.call("_initialize")
        return self

    def send(self, name: str, data: bytes | None = None) -> list[bytes]:
        """Call an export with a message and give the fields of its result."""
        arguments: tuple[int, ...] = ()
        if data is not None:
            at = self.call("torpor_alloc", len(data))
            assert at != 0, "out of memory"
            self._write(at, data)
            arguments = (at, len(data))
        packed = self.call(name, *arguments) & 0xFFFF_FFFF_FFFF_FFFF
        return parse(self._read(packed >> 32, packed & 0xFFFF_FFFF))

    def load(self, source: str, filename: str = "operator.py") -> list[bytes]:
        return self.send("torpor_load", message("source", filename, source))

    def run(self, code: str) -> str:
        """Run statements as the top of an operator's file; what they printed. Their errors fail the test."""
        before = len(self.output)
        error = self.load(f"{AN_OPERATOR}\n{code}\n")[0].decode()
        assert error == "", error
        return self.printed(before)

    def printed(self, since: int = 0) -> str:
        return b"".join(text for _, text in self.output[since:]).decode()

    def reconcile(self) -> list[bytes]:
        return self.send("torpor_reconcile", message("shop", "orders", "watch", "0", ""))

    def image(self) -> bytes:
        """The whole memory; the one mutable global, the stack pointer, is the same between any two calls."""
        return self._read(0, self.memory.data_len(self.store))

    def restore(self, image: bytes) -> None:
        """Put an image back into the memory it was taken from. What was grown since stays, unused."""
        self._write(0, image)

    def close(self) -> None:
        self.store.close()

    def _read(self, at: int, length: int) -> bytes:
        return bytes(self.memory.read(self.store, at, at + length))

    def _write(self, at: int, data: bytes) -> None:
        self.memory.write(self.store, data, at)

    def _torpor(self, name: str) -> Callable[..., int | None]:
        def ask(at: int, length: int) -> int:
            if self.refuse_with is not None:
                return self.refuse_with
            fields = parse(self._read(at, length))
            self.calls.append((name, fields))
            self._result = self.kube(fields)
            return len(self._result)

        def config() -> int:
            self._result = json.dumps({"config": {"colour": "green"}, "env": {"NAME": "value"}}).encode()
            return len(self._result)

        def log(level: int, at: int, length: int) -> None:
            self.logged.append((level, self._read(at, length).decode()))

        def take(at: int, length: int) -> int:
            self._write(at, self._result[:length])
            return min(length, len(self._result))

        own: dict[str, Callable[..., int | None]] = {"config": config, "log": log, "take": take}
        return own.get(name, ask)

    def _wasi(self, name: str) -> Callable[..., int | None]:
        def clock_time_get(clock: int, precision: int, at: int) -> int:
            self._write(at, struct.pack("<Q", time.time_ns() if clock == 0 else time.monotonic_ns()))
            return ESUCCESS

        def clock_res_get(clock: int, at: int) -> int:
            self._write(at, struct.pack("<Q", 1))
            return ESUCCESS

        def random_get(at: int, length: int) -> int:
            self._write(at, os.urandom(length))
            return ESUCCESS

        def sizes_get(count_at: int, size_at: int) -> int:
            self._write(count_at, struct.pack("<I", 0))
            self._write(size_at, struct.pack("<I", 0))
            return ESUCCESS

        def nothing(*_: int) -> int:
            return ESUCCESS

        def fd_write(fd: int, vectors: int, count: int, written_at: int) -> int:
            if fd not in STREAMS:
                return EBADF
            written = 0
            for index in range(count):
                at, length = struct.unpack("<II", self._read(vectors + 8 * index, 8))
                self.output.append((fd, self._read(at, length)))
                written += length
            self._write(written_at, struct.pack("<I", written))
            return ESUCCESS

        def fd_fdstat_get(fd: int, at: int) -> int:
            if fd not in STREAMS:
                return EBADF
            # A character device that can be written to, as a terminal would be.
            self._write(at, struct.pack("<BxHxxxxQQ", 2, 0, 1 << 6, 0))
            return ESUCCESS

        def fd_filestat_get(fd: int, at: int) -> int:
            if fd not in STREAMS:
                return EBADF
            self._write(at, struct.pack("<QQB7xQQQQQ", 0, 0, 2, 1, 0, 0, 0, 0))
            return ESUCCESS

        def fd_seek(fd: int, *_: int) -> int:
            return ESPIPE if fd in STREAMS else EBADF

        def poll_oneoff(subscriptions: int, events: int, count: int, stored_at: int) -> int:
            _, _, clock, until, _, flags = struct.unpack("<QB7xI4xQQH", self._read(subscriptions, 42))
            if flags & ABSOLUTE_TIME:
                until -= time.time_ns() if clock == 0 else time.monotonic_ns()
            time.sleep(max(0, until) / 1e9)
            self._write(events, self._read(subscriptions, 8) + bytes(24))
            self._write(stored_at, struct.pack("<I", 1))
            return ESUCCESS

        def proc_exit(status: int) -> None:
            self.exit_status = status

        def refused(*_: int) -> int:
            return EBADF if name.startswith("fd_") else ENOTSUP

        known: dict[str, Callable[..., int | None]] = {
            "args_get": nothing,
            "args_sizes_get": sizes_get,
            "clock_res_get": clock_res_get,
            "clock_time_get": clock_time_get,
            "environ_get": nothing,
            "environ_sizes_get": sizes_get,
            "fd_fdstat_get": fd_fdstat_get,
            "fd_filestat_get": fd_filestat_get,
            "fd_seek": fd_seek,
            "fd_write": fd_write,
            "poll_oneoff": poll_oneoff,
            "proc_exit": proc_exit,
            "random_get": random_get,
            "sched_yield": nothing,
        }
        return known.get(name, refused)
