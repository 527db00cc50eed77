"""Guards every function that a guest can call, and the ones of module `torpor`.

A host function never traps and never raises because of its input: it answers a number that `abi.md` names. An
exception in it is a bug of the host; it is logged, the guest reads an error, and the failure's reason mentions it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from wasmtime import Linker

from torpor_host import abi, native
from torpor_host.guest_context import GuestContext, current
from torpor_host.hostcalls import CallError, CallResponse, FetchResponse

_log = logging.getLogger("torpor.host.calls")

HostFunction = Callable[[GuestContext, list[int]], int]

_GUEST_MISTAKE = -1


def guarded(name: str, function: HostFunction, on_fault: int) -> Callable[[list[int]], int]:
    """The function on the guest that runs on this thread, with all exceptions turned into `on_fault`."""

    def call(arguments: list[int]) -> int:
        guest: GuestContext | None = getattr(current, "guest", None)
        try:
            if guest is None:
                raise RuntimeError("called outside of a guest's call")
            return function(guest, arguments)
        except BaseException as exc:
            _log.exception("host function %s", name)
            if guest is not None:
                guest.fault = f"{name}: {type(exc).__name__}: {exc}"[:300]
            return on_fault

    return call


def define_torpor(linker: Linker) -> list[Any]:
    """Defines module `torpor`; the result must live as long as the linker."""
    functions: list[tuple[str, str, str, HostFunction]] = [
        ("kube_request", "ii", "i", _kube_request),
        ("kube_tree", "ii", "i", _kube_tree),
        ("http_fetch", "ii", "i", _http_fetch),
        ("config", "", "i", _config),
        ("log", "iii", "", _log_line),
        ("take", "ii", "i", _take),
    ]
    return [
        native.define(linker, "torpor", name, parameters, result, guarded(name, function, _GUEST_MISTAKE))
        for name, parameters, result, function in functions
    ]


def _message(guest: GuestContext, arguments: list[int]) -> bytes | None:
    pointer, length = arguments
    if length > guest.limits.message_bytes_max:
        return None
    return guest.memory.read(pointer, length)


def _hold(guest: GuestContext, result: bytes, too_large: Callable[[], bytes]) -> int:
    """Keeps the result for `take`; one that is too long is replaced."""
    guest.pending = result if len(result) <= guest.limits.message_bytes_max else too_large()
    return len(guest.pending)


def _ended(guest: GuestContext) -> tuple[CallError, str] | None:
    """Why no further call is made for this guest."""
    if guest.stop_reason is not None:
        return CallError.FENCED, guest.stop_reason
    if guest.deadline.passed:
        return CallError.DEADLINE, "the reconcile's deadline has passed"
    return None


def _too_large(guest: GuestContext) -> str:
    return f"the answer is longer than {guest.limits.message_bytes_max} bytes"


def _kube_request(guest: GuestContext, arguments: list[int]) -> int:
    message = _message(guest, arguments)
    if message is None:
        return _GUEST_MISTAKE
    try:
        request, timeout_s = abi.decode_kube_request(message)
    except abi.MessageInvalid:
        return _GUEST_MISTAKE
    return _answer(guest, lambda: guest.calls.kube_request(request, guest.deadline.within(timeout_s)))


def _kube_tree(guest: GuestContext, arguments: list[int]) -> int:
    message = _message(guest, arguments)
    if message is None:
        return _GUEST_MISTAKE
    try:
        request, timeout_s = abi.decode_tree_request(message)
    except abi.MessageInvalid:
        return _GUEST_MISTAKE
    return _answer(guest, lambda: guest.calls.kube_tree(request, guest.deadline.within(timeout_s)))


def _answer(guest: GuestContext, call: Callable[[], CallResponse]) -> int:
    ended = _ended(guest)
    if ended is not None:
        response = CallResponse.failed(*ended)
    else:
        try:
            response = call()
        except Exception as exc:
            _log.exception("a host call failed")
            response = CallResponse.failed(CallError.UNAVAILABLE, f"the host failed: {type(exc).__name__}: {exc}"[:300])
    return _hold(
        guest,
        abi.encode_call_response(response),
        lambda: abi.encode_call_response(CallResponse.failed(CallError.TOO_LARGE, _too_large(guest))),
    )


def _http_fetch(guest: GuestContext, arguments: list[int]) -> int:
    message = _message(guest, arguments)
    if message is None:
        return _GUEST_MISTAKE
    try:
        request, timeout_s = abi.decode_fetch_request(message)
    except abi.MessageInvalid:
        return _GUEST_MISTAKE
    ended = _ended(guest)
    if ended is not None:
        response = FetchResponse.failed(*ended)
    else:
        try:
            response = guest.calls.http_fetch(request, guest.deadline.within(timeout_s))
        except Exception as exc:
            _log.exception("a host call failed")
            response = FetchResponse.failed(
                CallError.UNAVAILABLE, f"the host failed: {type(exc).__name__}: {exc}"[:300]
            )
    return _hold(
        guest,
        abi.encode_fetch_response(response),
        lambda: abi.encode_fetch_response(FetchResponse.failed(CallError.TOO_LARGE, _too_large(guest))),
    )


def _config(guest: GuestContext, _arguments: list[int]) -> int:
    return _hold(guest, guest.calls.config(), lambda: b'{"config": {}, "env": {}}')


def _log_line(guest: GuestContext, arguments: list[int]) -> int:
    level, pointer, length = arguments
    text = guest.memory.read(pointer, min(length, guest.limits.output_bytes_max + 1))
    if text is not None:
        guest.output.line(guest.calls.log, min(level, 3), text)
    return 0


def _take(guest: GuestContext, arguments: list[int]) -> int:
    """Copies as much as fits; the result is gone afterwards, and kept if the buffer was wrong."""
    pointer, length = arguments
    result = guest.pending
    if result is None or not guest.memory.write(pointer, result[:length]):
        return _GUEST_MISTAKE
    guest.pending = None
    return min(length, len(result))
