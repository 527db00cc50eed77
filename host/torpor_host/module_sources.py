"""Gets a module's bytes: from the host's module folder, a ConfigMap, or a URL.

Whatever the source, the content is bounded, hashed, and compared with `spec.module.sha256` where that is given.
A source is read when its WasmOperator is installed, never polled: a file that changes under an unchanged object is not
noticed, so whoever replaces one also changes the object (`torpor apply` writes the sha256 into it).
Knows nothing of engines; says only whether the bytes are a core module, a component, Python source or a zip.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from torpor_services.errors import TorporError

from torpor_host.operator_spec import ModuleRef

MODULE_BYTES_MAX = 256 << 20  # a Go operator with all of client-go is 60 MB
_FETCH_TIMEOUT_S = 60.0


class ModuleUnavailable(TorporError):
    """The module could not be read. `final`: trying again will not help until something is changed."""

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True, slots=True)
class ModuleContent:
    """The bytes of a module, its hash and the name it goes by in tracebacks."""

    content: bytes
    sha256: str
    filename: str


# (namespace, name) → the ConfigMap as the operator may read it: HTTP status and body.
ConfigMapReader = Callable[[str, str], tuple[int, bytes]]


def fetch(ref: ModuleRef, *, namespace: str, folder: Path | None, read_config_map: ConfigMapReader) -> ModuleContent:
    """The module's content; blocking. Raises ModuleUnavailable."""
    if ref.file:
        content, filename = _from_file(ref.file, folder), ref.file
    elif ref.config_map:
        content, filename = _from_config_map(ref.config_map, namespace, read_config_map), ref.config_map[1]
    else:
        content, filename = _from_url(ref.url), urlsplit(ref.url).path.rpartition("/")[2] or "module"
    digest = hashlib.sha256(content).hexdigest()
    if ref.sha256 and digest != ref.sha256:
        raise ModuleUnavailable(f"module {ref}: its sha256 is {digest}, not {ref.sha256}", final=True)
    return ModuleContent(content, digest, filename)


def _from_file(name: str, folder: Path | None) -> bytes:
    if folder is None:
        raise ModuleUnavailable(
            f"module file {name}: this host has no module folder (TORPOR_HOST_MODULES_DIR)", final=True
        )
    root = folder.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise ModuleUnavailable(f"module file {name}: lies outside the host's module folder", final=True)
    try:
        if path.stat().st_size > MODULE_BYTES_MAX:
            raise ModuleUnavailable(f"module file {name}: is larger than {MODULE_BYTES_MAX >> 20} MiB", final=True)
        return path.read_bytes()
    except FileNotFoundError as exc:
        raise ModuleUnavailable(f"module file {name}: is not in the host's module folder", final=False) from exc
    except OSError as exc:
        raise ModuleUnavailable(f"module file {name}: cannot be read: {exc.strerror}", final=False) from exc


def _from_config_map(ref: tuple[str, str], namespace: str, read: ConfigMapReader) -> bytes:
    name, key = ref
    status, body = read(namespace, name)
    if status != 200:
        raise ModuleUnavailable(f"ConfigMap {namespace}/{name}: {_reason(status, body)}", final=False)
    try:
        config_map: dict[str, Any] = msgspec.json.decode(body)
        text = config_map.get("data", {}).get(key)
        binary = config_map.get("binaryData", {}).get(key)
    except (msgspec.DecodeError, AttributeError, RecursionError) as exc:
        raise ModuleUnavailable(f"ConfigMap {namespace}/{name}: is not readable: {exc}", final=False) from exc
    if isinstance(text, str):
        return text.encode()
    if isinstance(binary, str):
        try:
            return base64.b64decode(binary, validate=True)
        except binascii.Error as exc:
            raise ModuleUnavailable(f"ConfigMap {namespace}/{name}: {key} is no base64", final=True) from exc
    raise ModuleUnavailable(f"ConfigMap {namespace}/{name}: has no key {key}", final=False)


def _reason(status: int, body: bytes) -> str:
    try:
        return f"{status} {msgspec.json.decode(body)['message']}"
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return str(status)


def _from_url(url: str) -> bytes:
    import urllib.error
    import urllib.request  # 1 MB, and few hosts need it

    if urlsplit(url).scheme not in {"http", "https"}:
        raise ModuleUnavailable(f"module {url}: only http and https are understood", final=True)
    try:
        with urllib.request.urlopen(url, timeout=_FETCH_TIMEOUT_S) as response:
            content: bytes = response.read(MODULE_BYTES_MAX + 1)
    except (urllib.error.URLError, OSError, ValueError) as exc:
        raise ModuleUnavailable(f"module {url}: {exc}", final=False) from exc
    if len(content) > MODULE_BYTES_MAX:
        raise ModuleUnavailable(f"module {url}: is larger than {MODULE_BYTES_MAX >> 20} MiB", final=True)
    return content
