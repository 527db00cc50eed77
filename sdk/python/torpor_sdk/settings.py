"""The operator's configuration and environment: what the WasmOperator says, as it is now.

Read from the host once for each reconcile, never while the image is built.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from . import _host

_current: dict[str, Any] | None = None


def forget() -> None:
    """The next look asks the host again. Called at the start of every call into the guest."""
    global _current
    _current = None


def _settings() -> dict[str, Any]:
    global _current
    if _current is None:
        _host.refuse_while_building("config()")
        read = json.loads(_host.calls().config() or b"{}")
        _current = read if isinstance(read, dict) else {}
    return _current


def config() -> dict[str, Any]:
    """`spec.config` of the WasmOperator. Empty if it has none.

    >>> size = config().get("size", "1Gi")  # doctest: +SKIP
    """
    found = _settings().get("config")
    return found if isinstance(found, dict) else {}


def identity() -> str:
    """The name of this operator's WasmOperator where the host tells it, else empty."""
    found = _settings().get("operator")
    return str(found.get("name") or "") if isinstance(found, dict) else ""


class Environment(Mapping[str, str]):
    """`spec.env` of the WasmOperator, read like `os.environ` (which is empty in a guest)."""

    def __getitem__(self, name: str) -> str:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def _now(self) -> dict[str, str]:
        found = _settings().get("env")
        return found if isinstance(found, dict) else {}


env = Environment()
