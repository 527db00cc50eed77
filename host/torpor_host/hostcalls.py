"""What a guest can ask of its host: the requests, the answers, and the protocol that the runtime implements.

The engine half reads a guest's bytes, makes these values of them, calls `HostCalls` and writes the answer back. All
methods are called on the thread that runs the guest and may block up to the deadline they are given; those that wait
long give the CPU slot back meanwhile. The engine checks the deadline before each call, turns an exception into
`unavailable`, and calls nothing here while an image is built.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torpor_host.limits import Deadline


class CallError(StrEnum):
    """Why a call got no answer, as `abi.md` lists them."""

    DEADLINE = "deadline"
    UNAVAILABLE = "unavailable"
    FENCED = "fenced"
    DENIED = "denied"
    TOO_LARGE = "too-large"
    UNIMPLEMENTED = "unimplemented"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class KubeRequest:
    """A request to the Kubernetes API. `path`, with query, should begin with `/api` or `/apis`; it is not checked."""

    method: str
    path: str
    accept: str
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class TreeRequest:
    """A primary and all it owns. `resource` is `group/version/resource`, or `version/resource` for the core group."""

    resource: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """An outbound HTTP request; the allow-list is the runtime's to check."""

    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class CallResponse:
    """The answer to `kube_request` and `kube_tree`. With `error` set the rest but `message` is empty."""

    status: int = 0
    content_type: str = ""
    body: bytes = b""
    error: CallError | None = None
    message: str = ""

    @classmethod
    def failed(cls, error: CallError, message: str) -> CallResponse:
        return cls(error=error, message=message)


@dataclass(frozen=True, slots=True)
class FetchResponse:
    """The answer to `http_fetch`."""

    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    error: CallError | None = None
    message: str = ""

    @classmethod
    def failed(cls, error: CallError, message: str) -> FetchResponse:
        return cls(error=error, message=message)


class HostCalls(Protocol):
    """The runtime's side of a guest's calls. One object an instance; it knows operator, epoch and trace."""

    def kube_request(self, request: KubeRequest, deadline: Deadline) -> CallResponse:
        """Blocks to the deadline at most, then answers `deadline`."""

    def kube_tree(self, request: TreeRequest, deadline: Deadline) -> CallResponse:
        """Blocks to the deadline at most, then answers `deadline`."""

    def http_fetch(self, request: FetchRequest, deadline: Deadline) -> FetchResponse:
        """Blocks to the deadline at most, then answers `deadline`."""

    def config(self) -> bytes:
        """JSON `{"config": {…}, "env": {…}}` as it is now. Must not block."""

    def log(self, level: int, text: str) -> None:
        """A line: 0 debug, 1 info, 2 warning, 3 error; stdout comes as 1, stderr as 2. Must not block."""

    def blocking(self) -> AbstractContextManager[object]:
        """Entered around the guest's sleeping: give the CPU slot back inside it."""
