"""The host's functions, as Python: frames out, frames in, errors as exceptions.

In a guest they come from the native module `_torpor`; a test puts its own in place with `replaced`. Owns the one
fact about the moment: whether the image is being built, when only discovery is allowed.
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, cast

from . import _frames
from .errors import Denied, OperatorError, call_error


class HostCalls(Protocol):
    """The native module `_torpor`. Messages are those of the ABI."""

    def kube_request(self, message: bytes, /) -> bytes: ...

    def kube_tree(self, message: bytes, /) -> bytes: ...

    def http_fetch(self, message: bytes, /) -> bytes: ...

    def config(self) -> bytes: ...

    def log(self, level: int, text: str, /) -> None: ...


class Answer(NamedTuple):
    """What came back: an HTTP status with a body. Whatever the status, it is an answer."""

    status: int
    content_type: str
    body: bytes


_calls: HostCalls | None = None
_building = False


def calls() -> HostCalls:
    """The host. Raises `OperatorError` outside of a guest."""
    global _calls
    if _calls is None:
        try:
            _calls = cast(HostCalls, importlib.import_module("_torpor"))
        except ImportError:
            raise OperatorError(
                "there is no Torpor host here: this call works inside a guest. "
                "In a unit test run the operator with torpor_sdk.testing.reconcile(...)"
            ) from None
    return _calls


@contextlib.contextmanager
def replaced(by: HostCalls) -> Iterator[None]:
    """Other host functions for a while (tests)."""
    global _calls
    before, _calls = _calls, by
    try:
        yield
    finally:
        _calls = before


@contextlib.contextmanager
def building_image() -> Iterator[None]:
    """While the operator is loaded and described, before the image is taken."""
    global _building
    before, _building = _building, True
    try:
        yield
    finally:
        _building = before


def refuse_while_building(call: str) -> None:
    """What is read now would stay in the image, and be old or secret at every wake."""
    if _building:
        raise Denied(
            "denied",
            "not while the operator is imported (what it says would be frozen into the image); "
            "call it inside reconcile",
            call=call,
        )


def kube_request(
    method: str, path: str, *, accept: str, content_type: str, body: bytes, timeout_s: float | None
) -> Answer:
    """A request to the Kubernetes API as the operator. Raises `CallError` where there was no answer."""
    message = _frames.encode(method, path, accept, content_type, body, milliseconds(timeout_s))
    return _answer(calls().kube_request(message), call=f"{method} {path}")


def kube_tree(resource: str, namespace: str, name: str, *, timeout_s: float | None) -> Answer:
    """A primary and all that it owns. Raises `CallError` where there was no answer."""
    message = _frames.encode(resource, namespace, name, milliseconds(timeout_s))
    return _answer(calls().kube_tree(message), call=f"tree of {resource} {namespace}/{name}")


def http_fetch(
    method: str, url: str, headers: Mapping[str, str], body: bytes, *, timeout_s: float | None
) -> tuple[int, str, bytes]:
    """Status, header lines, body. Raises `CallError` where there was no answer."""
    lines = "".join(f"{name}: {value}\n" for name, value in headers.items())
    message = _frames.encode(method, url, lines, body, milliseconds(timeout_s))
    status, header_lines, content, error, why = _frames.decode(calls().http_fetch(message), fields_min=5)[:5]
    if error:
        raise call_error(_frames.text(error), _frames.text(why), call=f"{method} {url}")
    return _frames.number(status), _frames.text(header_lines), content


def milliseconds(seconds: float | None) -> int | None:
    """Rounded up, so that a short timeout does not become none. None: as long as the reconcile has."""
    return None if seconds is None else max(1, -int(-seconds * 1000 // 1))


def _answer(message: bytes, *, call: str) -> Answer:
    status, content_type, body, error, why = _frames.decode(message, fields_min=5)[:5]
    if error:
        raise call_error(_frames.text(error), _frames.text(why), call=call)
    return Answer(_frames.number(status), _frames.text(content_type), body)
