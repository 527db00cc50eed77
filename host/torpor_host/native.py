"""The few calls into wasmtime's C library and the kernel that must be fast or that the Python binding does not have.

wasmtime-py asks for types at every call and keeps a host function's exception in one slot for the whole process. The
`unchecked` entry points used here take raw 16-byte values instead: a call into a guest costs 2 µs instead of 11, and an
exception cannot reach another thread. In return signatures are not checked: `install` checks each export's once.
"""

from __future__ import annotations

import array
import ctypes
import errno
import importlib.metadata
import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import wasmtime
from wasmtime import FuncType, Linker, Store, Trap, TrapCode, ValType, WasmtimeError
from wasmtime import _ffi as ffi

PAGE = mmap.PAGESIZE
MASK32 = 0xFFFFFFFF

_WASM_PAGE = 65536

WASMTIME_VERSION = importlib.metadata.version("wasmtime")
if WASMTIME_VERSION != "50.0.1":  # the layouts used below belong to a version
    raise ImportError(f"torpor-host needs wasmtime 50.0.1, found {WASMTIME_VERSION}")

_dll: Any = ffi.dll

_func_call = _dll.wasmtime_func_call_unchecked
_func_call.restype = ctypes.c_void_p
_func_call.argtypes = [
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
]

_Callback = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t
)
_define_func = _dll.wasmtime_linker_define_func_unchecked
_define_func.restype = ctypes.c_void_p
_define_func.argtypes = [
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
    ctypes.c_char_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    _Callback,
    ctypes.c_void_p,
    ctypes.c_void_p,
]

_EpochCallback = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint8),
)
# A second handle on the symbol, so that the binding's own prototype stays untouched.
_set_epoch_callback = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, _EpochCallback, ctypes.c_void_p, ctypes.c_void_p)(
    ("wasmtime_store_epoch_deadline_callback", _dll)
)

# What takes less than a microsecond keeps the interpreter's lock: to let it go wakes a thread that waits for it, which
# then waits again, and with thirty guests in flight that cost more than the calls.
_address_of_memory = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)(
    ("wasmtime_memory_data", _dll)
)
_size_of_memory = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)(
    ("wasmtime_memory_data_size", _dll)
)
_global_get = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(("wasmtime_global_get", _dll))
_global_set = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ("wasmtime_global_set", _dll)
)

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]

_preadv = _libc.preadv
_preadv.restype = ctypes.c_ssize_t
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long]

_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)(("memmove", _libc))

_SMALL = 1 << 16  # bytes; a longer copy lets the interpreter's lock go

_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value

_TYPES = {"i": ValType.i32, "I": ValType.i64}


class NativeTrap(Exception):
    """A call into a guest ended in a trap or an error of the engine."""

    def __init__(self, message: str, code: TrapCode | None) -> None:
        super().__init__(message)
        self.code = code


def context_of(store: Store) -> int:
    """The address of the store's context, valid until the store is closed."""
    address = ctypes.cast(store._context(), ctypes.c_void_p).value
    assert address is not None
    return address


def call(context: int, function: Any, arguments: Sequence[int], results: int) -> int:
    """Calls a function with integer parameters and at most one integer result (0 if none, else unsigned)."""
    slots = max(len(arguments), results, 1)
    values = (ctypes.c_uint64 * (2 * slots))()
    for position, argument in enumerate(arguments):
        values[2 * position] = argument
    trap = ctypes.c_void_p()
    error = _func_call(context, ctypes.byref(function), values, slots, ctypes.byref(trap))
    if error:
        raise NativeTrap(str(_own_error(error)), None)
    if trap.value:
        raise _explained_trap(trap.value)
    return values[0] if results else 0


def _own_error(address: int) -> WasmtimeError:
    return WasmtimeError._from_ptr(ctypes.cast(address, ctypes.POINTER(ffi.wasmtime_error_t)))


def _explained_trap(address: int) -> NativeTrap:
    trap = Trap._from_ptr(ctypes.cast(address, ctypes.POINTER(ffi.wasm_trap_t)))
    try:
        code = trap.trap_code
    except ValueError:  # a code newer than the binding
        code = None
    what = code.name.lower().replace("_", " ") if code is not None else trap.message.splitlines()[0][:200]
    names = [frame.func_name or f"function {frame.func_index}" for frame in trap.frames[:4]]
    return NativeTrap(f"{what} in {' < '.join(names)}"[:500] if names else what, code)


def define(
    linker: Linker,
    module: str,
    name: str,
    parameters: str,
    result: str,
    function: Callable[[list[int]], int],
) -> Any:
    """Defines a host function for all stores. Parameters come unsigned; `parameters` and `result` are of "i" and "I".

    The returned object must live as long as the linker. `function` must not raise: ctypes would print the exception
    and the guest would read 0.
    """
    masks = [MASK32 if kind == "i" else 0xFFFFFFFFFFFFFFFF for kind in parameters]
    positions = [(2 * index, mask) for index, mask in enumerate(masks)]
    result_mask = MASK32 if result == "i" else 0xFFFFFFFFFFFFFFFF

    if result:

        def callback(_data: Any, _caller: Any, values: Any, _count: int) -> None:
            values[0] = function([values[slot] & mask for slot, mask in positions]) & result_mask

    else:

        def callback(_data: Any, _caller: Any, values: Any, _count: int) -> None:
            function([values[slot] & mask for slot, mask in positions])

    native = _Callback(callback)
    kind = FuncType([_TYPES[p]() for p in parameters], [_TYPES[r]() for r in result])
    error = _define_func(
        ctypes.cast(linker.ptr(), ctypes.c_void_p),
        module.encode(),
        len(module),
        name.encode(),
        len(name),
        ctypes.cast(kind.ptr(), ctypes.c_void_p),
        native,
        None,
        None,
    )
    if error:
        raise _own_error(error)
    return native


class EpochWatch:
    """What is asked of a running guest at each tick: go on (None), or why to end (a line)."""

    def __init__(self, verdict: Callable[[], str | None]) -> None:
        def callback(_context: Any, _data: Any, ticks: Any, kind: Any) -> int:
            reason = verdict()
            if reason is None:
                ticks[0] = 1
                kind[0] = 0  # WASMTIME_UPDATE_DEADLINE_CONTINUE
                return 0
            error = ffi.wasmtime_error_new(ctypes.create_string_buffer(reason.encode()[:400]))
            return ctypes.cast(error, ctypes.c_void_p).value or 0

        self._native = _EpochCallback(callback)

    def attach(self, store: Store) -> None:
        """Also arms the first tick; needed before anything is instantiated in the store."""
        _set_epoch_callback(ctypes.cast(store.ptr(), ctypes.c_void_p), self._native, None, None)
        store.set_epoch_deadline(1)


class GuestMemory:
    """A guest's linear memory, bounds checked. Every method asks for address and size anew: memory moves and grows."""

    __slots__ = ("_context", "_memory", "_reference")

    def __init__(self, context: int, memory: wasmtime.Memory) -> None:
        self._context = context
        self._memory = memory
        self._reference = ctypes.addressof(memory._memory)

    def size(self) -> int:
        return int(_size_of_memory(self._context, self._reference))

    def address(self) -> int:
        """Where the memory lies now."""
        return int(_address_of_memory(self._context, self._reference))

    def read(self, pointer: int, length: int) -> bytes | None:
        """A copy, None if it lies outside."""
        if pointer + length > self.size():
            return None
        return ctypes.string_at(self.address() + pointer, length) if length else b""

    def write(self, pointer: int, content: bytes) -> bool:
        """False, and nothing written, if it lies outside."""
        if pointer + len(content) > self.size():
            return False
        if content:
            move = _memmove if len(content) < _SMALL else ctypes.memmove
            move(self.address() + pointer, content, len(content))
        return True

    def view(self) -> memoryview:
        """All of it, in place. Must be released before the guest runs or closes: afterwards it is a crash."""
        return memoryview((ctypes.c_ubyte * self.size()).from_address(self.address())).cast("B")

    def grow_to(self, store: Store, size: int) -> bool:
        """Grows to `size` bytes; False if limits forbid it."""
        missing = size - self.size()
        if missing < 0 or missing % _WASM_PAGE:
            return False
        if missing:
            try:
                self._memory.grow(store, missing // _WASM_PAGE)
            except WasmtimeError:
                return False
        return self.size() == size


_RAW_VALUE = ctypes.sizeof(ffi.wasmtime_val_t)


def read_global(context: int, variable: wasmtime.Global) -> bytes:
    """The raw value with its kind: NaN payloads survive, which they do not as Python floats."""
    value = ctypes.create_string_buffer(_RAW_VALUE)
    _global_get(context, ctypes.addressof(variable._global), value)
    kind = value.raw[0]
    width = 8 if kind in (1, 3) else 4  # i64 and f64; the union's other bytes are not set
    start = ffi.wasmtime_val_t.of.offset
    return bytes([kind]) + value.raw[start : start + width].ljust(8, b"\0")


def write_global(context: int, variable: wasmtime.Global, raw: bytes) -> None:
    """Sets what `read_global` read. Raises WasmtimeError if the type differs."""
    value = ctypes.create_string_buffer(_RAW_VALUE)
    value[0] = raw[0:1]
    start = ffi.wasmtime_val_t.of.offset
    ctypes.memmove(ctypes.addressof(value) + start, raw[1:9], 8)
    error = _global_set(context, ctypes.addressof(variable._global), value)
    if error:
        raise _own_error(error)


def map_private(address: int, length: int, descriptor: int, offset: int) -> None:
    """Lays `length` bytes of a file, copy-on-write, over what is at `address`. All page-aligned. Raises OSError."""
    result = _mmap(
        address,
        length,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | _MAP_FIXED,
        descriptor,
        offset,
    )
    if result == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {length} bytes: {os.strerror(number)}")


def read_into(ranges: list[tuple[int, int]], descriptor: int, offset: int) -> int:
    """Reads a file from `offset` on into (address, bytes) one after the other, 1,024 at most, by one call; returns the
    bytes read. Nothing checks the addresses. Raises OSError."""
    vectors = array.array("Q", itertools.chain.from_iterable(ranges))  # struct iovec: a pointer and a size_t
    done: int = _preadv(descriptor, vectors.buffer_info()[0], len(ranges), offset)
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"preadv: {os.strerror(number)}")
    return done


def trim_heap() -> None:
    """Gives free memory of the C heap back; after many unloads or a compilation in this process."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def no_maps_left(error: OSError) -> bool:
    """Whether an mmap failed for want of maps (vm.max_map_count) or memory."""
    return error.errno == errno.ENOMEM
