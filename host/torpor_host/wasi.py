"""All of `wasi_snapshot_preview1`, answered by the host itself: clocks, sleep, randomness, output, exit.

There are no files, no environment, no sockets, one argument. Calls on those answer an errno and nothing happens. The
three standard descriptors exist: 0 is at its end, 1 and 2 are lines of the operator's log. Sleeping ends at the
deadline, gives the CPU slot back, and can be interrupted; every other function returns at once.
"""

from __future__ import annotations

import struct
import time
from typing import Any

from wasmtime import Linker

from torpor_host import native
from torpor_host.guest_context import GuestContext
from torpor_host.host_functions import HostFunction, guarded

SUCCESS, BADF, FAULT, INVAL, IO, NOENT, NOSYS, NOTSUP, SPIPE = 0, 8, 21, 28, 29, 44, 52, 58, 70

_ARGUMENT = b"operator\0"
_CHARACTER_DEVICE = 2
_IOVECS_MAX = 1024
_SUBSCRIPTIONS_MAX = 1024
_RANDOM_BLOCK = 1 << 20
_FDSTAT = struct.Struct("<BxHxxxxQQ")
_FILESTAT = struct.Struct("<QQB7xQQQQQ")
_SUBSCRIPTION = struct.Struct("<QB7xI4xQQH6x")
_EVENT = struct.Struct("<QHB5xQH6x")
_IOVEC = struct.Struct("<II")


def define_wasi(linker: Linker) -> list[Any]:
    """Defines the module; the result must live as long as the linker."""
    return [
        native.define(linker, "wasi_snapshot_preview1", name, parameters, "i" if name != "proc_exit" else "", call)
        for name, (parameters, function) in _FUNCTIONS.items()
        for call in [guarded(name, function, IO)]
    ]


def _answer(errno: int) -> HostFunction:
    return lambda guest, arguments: errno


def _on_standard(errno: int) -> HostFunction:
    """This errno on 0, 1 and 2, EBADF on all other descriptors."""
    return lambda guest, arguments: errno if arguments[0] <= 2 else BADF


def _write(guest: GuestContext, *parts: tuple[int, bytes]) -> int:
    """All parts or, where one lies outside of memory, EFAULT."""
    return SUCCESS if all(guest.memory.write(pointer, content) for pointer, content in parts) else FAULT


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _u64(value: int) -> bytes:
    return (value & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")


def _args_get(guest: GuestContext, arguments: list[int]) -> int:
    vector, buffer = arguments
    return _write(guest, (vector, _u32(buffer)), (buffer, _ARGUMENT))


def _args_sizes_get(guest: GuestContext, arguments: list[int]) -> int:
    count, size = arguments
    return _write(guest, (count, _u32(1)), (size, _u32(len(_ARGUMENT))))


def _environ_sizes_get(guest: GuestContext, arguments: list[int]) -> int:
    count, size = arguments
    return _write(guest, (count, _u32(0)), (size, _u32(0)))


def _clock_ns(guest: GuestContext, clock: int) -> int | None:
    match clock:
        case 0:
            return guest.clock.realtime_ns()
        case 1:
            return guest.clock.monotonic_ns()
        case 2 | 3:  # the guest's process and its thread are one
            return time.thread_time_ns()
        case _:
            return None


def _clock_time_get(guest: GuestContext, arguments: list[int]) -> int:
    clock, _precision, pointer = arguments
    now_ns = _clock_ns(guest, clock)
    return INVAL if now_ns is None else _write(guest, (pointer, _u64(now_ns)))


def _clock_res_get(guest: GuestContext, arguments: list[int]) -> int:
    clock, pointer = arguments
    return INVAL if clock > 3 else _write(guest, (pointer, _u64(1)))


def _random_get(guest: GuestContext, arguments: list[int]) -> int:
    pointer, length = arguments
    if pointer + length > guest.memory.size():
        return FAULT
    while length:
        block = min(length, _RANDOM_BLOCK)
        if not guest.memory.write(pointer, guest.random(block)):
            return FAULT
        pointer += block
        length -= block
    return SUCCESS


def _gather(guest: GuestContext, pointer: int, count: int) -> bytes | int:
    """What the iovecs point to, no more than a call may write (a writer must go on with the rest), or an errno."""
    if count > _IOVECS_MAX:
        return INVAL
    vectors = guest.memory.read(pointer, count * _IOVEC.size)
    if vectors is None:
        return FAULT
    room = guest.limits.output_bytes_max
    parts: list[bytes] = []
    for start, length in _IOVEC.iter_unpack(vectors):
        part = guest.memory.read(start, min(length, room))
        if part is None:
            return FAULT
        parts.append(part)
        room -= len(part)
    return b"".join(parts)


def _fd_write(guest: GuestContext, arguments: list[int]) -> int:
    descriptor, vectors, count, written = arguments
    if descriptor not in (1, 2):
        return BADF
    content = _gather(guest, vectors, count)
    if isinstance(content, int):
        return content
    guest.output.stream(guest.calls.log, descriptor, content)
    return _write(guest, (written, _u32(len(content))))


def _fd_read(guest: GuestContext, arguments: list[int]) -> int:
    descriptor, _vectors, _count, read = arguments
    return BADF if descriptor != 0 else _write(guest, (read, _u32(0)))


def _fd_fdstat_get(guest: GuestContext, arguments: list[int]) -> int:
    descriptor, pointer = arguments
    if descriptor > 2:
        return BADF
    rights = 1 << 1 if descriptor == 0 else 1 << 6  # fd_read, fd_write
    return _write(guest, (pointer, _FDSTAT.pack(_CHARACTER_DEVICE, 0, rights, 0)))


def _fd_filestat_get(guest: GuestContext, arguments: list[int]) -> int:
    descriptor, pointer = arguments
    if descriptor > 2:
        return BADF
    return _write(guest, (pointer, _FILESTAT.pack(0, descriptor, _CHARACTER_DEVICE, 1, 0, 0, 0, 0)))


def _proc_exit(guest: GuestContext, arguments: list[int]) -> int:
    """The guest's next instruction is `unreachable`, or the next tick ends it."""
    if guest.exit_code is None:
        guest.exit_code = arguments[0]
    return SUCCESS


def _poll_oneoff(guest: GuestContext, arguments: list[int]) -> int:
    """Sleeps to the first event. At the deadline, and when stopped, the nearest timer counts as run out."""
    subscriptions, events, count, stored = arguments
    if not 0 < count <= _SUBSCRIPTIONS_MAX:
        return INVAL
    raw = guest.memory.read(subscriptions, count * _SUBSCRIPTION.size)
    if raw is None or events + count * _EVENT.size > guest.memory.size():
        return FAULT
    timers: list[tuple[int, int]] = []  # (wait in ns, user data)
    ready: list[bytes] = []
    for data, tag, clock_or_fd, timeout, _precision, flags in _SUBSCRIPTION.iter_unpack(raw):
        if tag == 0:
            now_ns = _clock_ns(guest, clock_or_fd)
            if now_ns is None:
                ready.append(_EVENT.pack(data, INVAL, tag, 0, 0))
            else:
                timers.append((max(0, timeout - now_ns) if flags & 1 else timeout, data))
        else:
            writable = tag == 2 and clock_or_fd in (1, 2)
            ready.append(_EVENT.pack(data, SUCCESS if writable else BADF, tag, 0, 0))
    if not ready:
        wait_ns = min(timers)[0]
        guest.sleep_ns(wait_ns)
        ready = [_EVENT.pack(data, SUCCESS, 0, 0, 0) for timer_ns, data in timers if timer_ns <= wait_ns]
    return _write(guest, (events, b"".join(ready)), (stored, _u32(len(ready))))


_FUNCTIONS: dict[str, tuple[str, HostFunction]] = {
    "args_get": ("ii", _args_get),
    "args_sizes_get": ("ii", _args_sizes_get),
    "environ_get": ("ii", _answer(SUCCESS)),
    "environ_sizes_get": ("ii", _environ_sizes_get),
    "clock_res_get": ("ii", _clock_res_get),
    "clock_time_get": ("iIi", _clock_time_get),
    "fd_advise": ("iIIi", _on_standard(SPIPE)),
    "fd_allocate": ("iII", _on_standard(NOTSUP)),
    "fd_close": ("i", _on_standard(SUCCESS)),
    "fd_datasync": ("i", _on_standard(SUCCESS)),
    "fd_fdstat_get": ("ii", _fd_fdstat_get),
    "fd_fdstat_set_flags": ("ii", _on_standard(SUCCESS)),
    "fd_fdstat_set_rights": ("iII", _on_standard(NOTSUP)),
    "fd_filestat_get": ("ii", _fd_filestat_get),
    "fd_filestat_set_size": ("iI", _on_standard(NOTSUP)),
    "fd_filestat_set_times": ("iIIi", _on_standard(NOTSUP)),
    "fd_pread": ("iiiIi", _on_standard(SPIPE)),
    "fd_prestat_get": ("ii", _answer(BADF)),
    "fd_prestat_dir_name": ("iii", _answer(BADF)),
    "fd_pwrite": ("iiiIi", _on_standard(SPIPE)),
    "fd_read": ("iiii", _fd_read),
    "fd_readdir": ("iiiIi", _answer(BADF)),
    "fd_renumber": ("ii", _on_standard(NOTSUP)),
    "fd_seek": ("iIii", _on_standard(SPIPE)),
    "fd_sync": ("i", _on_standard(SUCCESS)),
    "fd_tell": ("ii", _on_standard(SPIPE)),
    "fd_write": ("iiii", _fd_write),
    "path_create_directory": ("iii", _answer(BADF)),
    "path_filestat_get": ("iiiii", _answer(BADF)),
    "path_filestat_set_times": ("iiiiIIi", _answer(BADF)),
    "path_link": ("iiiiiii", _answer(BADF)),
    "path_open": ("iiiiiIIii", _answer(BADF)),
    "path_readlink": ("iiiiii", _answer(BADF)),
    "path_remove_directory": ("iii", _answer(BADF)),
    "path_rename": ("iiiiii", _answer(BADF)),
    "path_symlink": ("iiiii", _answer(BADF)),
    "path_unlink_file": ("iii", _answer(BADF)),
    "poll_oneoff": ("iiii", _poll_oneoff),
    "proc_exit": ("i", _proc_exit),
    "proc_raise": ("i", _answer(NOSYS)),
    "random_get": ("ii", _random_get),
    "sched_yield": ("", _answer(SUCCESS)),
    "sock_accept": ("iii", _answer(NOTSUP)),
    "sock_recv": ("iiiiii", _answer(NOTSUP)),
    "sock_send": ("iiiii", _answer(NOTSUP)),
    "sock_shutdown": ("ii", _answer(NOTSUP)),
}
