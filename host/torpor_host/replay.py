"""The same outside world twice: clock, randomness and host calls that answer two guests alike.

The install check runs a guest that was never unloaded and one that was woken from its image through the same call and
compares what they did. That is only exact if nothing from outside differs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from torpor_host.hostcalls import (
    CallError,
    CallResponse,
    FetchRequest,
    FetchResponse,
    KubeRequest,
    TreeRequest,
)
from torpor_host.limits import Deadline

Discovery = Callable[[KubeRequest], CallResponse | None]
"""Answers a discovery read while an image is built; None refuses it."""

_REFUSED = "not possible while the image is built"
_EMPTY_CONFIG = b'{"config": {}, "env": {}}'


class ReplayClock:
    """Every look takes a microsecond, sleeping takes no time."""

    def __init__(self, monotonic_ns: int, realtime_ns: int) -> None:
        self._passed_ns = 0
        self._start_monotonic_ns = monotonic_ns
        self._start_realtime_ns = realtime_ns

    def monotonic_ns(self) -> int:
        self._passed_ns += 1000
        return self._start_monotonic_ns + self._passed_ns

    def realtime_ns(self) -> int:
        self._passed_ns += 1000
        return self._start_realtime_ns + self._passed_ns

    def sleep_ns(self, duration_ns: int, wait: Callable[[float], None]) -> None:
        self._passed_ns += duration_ns


class SeededRandom:
    """Bytes that look random and depend on the seed alone; nobody who lacks it can guess them."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._calls = 0

    def __call__(self, length: int) -> bytes:
        self._calls += 1
        return hashlib.shake_256(self._seed + self._calls.to_bytes(8, "big")).digest(length)


class ImageBuildCalls:
    """Host calls of a guest that is being installed: discovery if somebody answers it, and no configuration."""

    def __init__(self, discovery: Discovery | None = None) -> None:
        self._discovery = discovery
        self.made: list[object] = []
        """Every call with its arguments, in order, logs included."""
        self.unavailable = False
        """Whether discovery could not be reached: a failure may then be the cluster's, not the guest's."""

    def kube_request(self, request: KubeRequest, deadline: Deadline) -> CallResponse:
        self.made.append(request)
        answer = None
        if self._discovery is not None and is_discovery(request):
            answer = self._discovery(request)
        if answer is None:
            return CallResponse.failed(CallError.DENIED, _REFUSED)
        self.unavailable |= answer.error in (CallError.UNAVAILABLE, CallError.DEADLINE)
        return answer

    def kube_tree(self, request: TreeRequest, deadline: Deadline) -> CallResponse:
        self.made.append(request)
        return CallResponse.failed(CallError.DENIED, _REFUSED)

    def http_fetch(self, request: FetchRequest, deadline: Deadline) -> FetchResponse:
        self.made.append(request)
        return FetchResponse.failed(CallError.DENIED, _REFUSED)

    def config(self) -> bytes:
        self.made.append("config")
        return _EMPTY_CONFIG

    def log(self, level: int, text: str) -> None:
        self.made.append((level, text))

    def blocking(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def last_lines(self, count: int) -> str:
        """The end of what the guest wrote: often the only explanation of a trap."""
        lines = [call[1] for call in self.made if isinstance(call, tuple)]
        return " | ".join(lines[-count:])[-500:]


def is_discovery(request: KubeRequest) -> bool:
    """Reads of what the API server has, not of objects."""
    if request.method != "GET":
        return False
    parts = request.path.partition("?")[0].strip("/").split("/")
    match parts:
        case ["api"] | ["api", _] | ["apis"] | ["apis", _] | ["apis", _, _] | ["version"]:
            return True
        case ["openapi", *_]:
            return True
        case _:
            return False
