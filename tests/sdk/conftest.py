"""A host for the SDK's tests: the native module `_torpor`, in Python, that records what it is asked."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from torpor_sdk import _frames, _guest, _host, settings

Answer = tuple[int, Any] | bytes


@dataclass
class NativeHost:
    """Answers by path; what it is not told it does not find."""

    answers: dict[tuple[str, str], list[Answer]] = field(default_factory=dict)
    asked: list[list[bytes]] = field(default_factory=list)
    lines: list[tuple[int, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    fetched: list[list[bytes]] = field(default_factory=list)
    fetch_answer: bytes = b""

    def answer(self, method: str, path: str, status: int, body: Any) -> None:
        """The next answers to a request, in order; the last stays."""
        self.answers.setdefault((method, path), []).append((status, body))

    def fail(self, method: str, path: str, code: str, message: str = "") -> None:
        self.answers.setdefault((method, path), []).append(_frames.encode("", "", "", code, message))

    def kube_request(self, message: bytes) -> bytes:
        fields = _frames.decode(message, fields_min=6)
        self.asked.append(fields)
        queue = self.answers.get((fields[0].decode(), fields[1].decode()))
        if queue is None:
            return self._encoded(404, {"kind": "Status", "reason": "NotFound", "message": "nothing here"})
        answer = queue.pop(0) if len(queue) > 1 else queue[0]
        return answer if isinstance(answer, bytes) else self._encoded(*answer)

    def kube_tree(self, message: bytes) -> bytes:
        return self.kube_request(_frames.encode("TREE", *_frames.decode(message)))

    def http_fetch(self, message: bytes) -> bytes:
        self.fetched.append(_frames.decode(message, fields_min=5))
        return self.fetch_answer

    def config(self) -> bytes:
        return json.dumps(self.settings).encode()

    def log(self, level: int, text: str) -> None:
        self.lines.append((level, text))

    @staticmethod
    def _encoded(status: int, body: Any) -> bytes:
        return _frames.encode(status, "application/json", json.dumps(body).encode())

    def requests(self) -> list[str]:
        """`METHOD path` of all that was asked."""
        return [f"{fields[0].decode()} {fields[1].decode()}" for fields in self.asked]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeHost]:
    """The native module, in place; no operator is loaded."""
    native = NativeHost()
    module = ModuleType("_torpor")
    for name in ("kube_request", "kube_tree", "http_fetch", "config", "log"):
        setattr(module, name, getattr(native, name))
    monkeypatch.setitem(sys.modules, "_torpor", module)
    monkeypatch.setattr(_host, "_calls", None)
    monkeypatch.setattr(_guest, "_operator", None)
    path, modules = list(sys.meta_path), set(sys.modules)
    settings.forget()
    yield native
    settings.forget()
    sys.meta_path[:] = path
    for name in set(sys.modules) - modules:
        if name == "main" or name.startswith("main.") or getattr(sys.modules[name], "__from_zip__", False):
            del sys.modules[name]


@pytest.fixture
def load(host: NativeHost) -> Callable[[str], None]:
    """Loads an operator from source."""

    def load_source(source: str) -> None:
        _guest.load("source", "operator.py", source.encode())

    return load_source
