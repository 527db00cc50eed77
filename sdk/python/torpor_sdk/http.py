"""Outbound HTTP, to the hosts that the WasmOperator lists in `limits.outboundHosts`.

At-least-once: a reconcile that is repeated repeats its requests, with the operator and its epoch as headers.
"""

import json as _json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import _host
from .errors import TorporError


class HTTPError(TorporError):
    """`raise_for_status` of a response of 400 and above."""

    def __init__(self, response: "Response") -> None:
        super().__init__(f"{response.method} {response.url}: {response.status}: {response.text[:200]}")
        self.response = response


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, whatever its status. `headers` are in lower case; repeated ones are joined by a comma."""

    method: str
    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        return self.status < 400

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON. Raises `ValueError`."""
        return _json.loads(self.body)

    def raise_for_status(self) -> "Response":
        """Itself, or `HTTPError` for 400 and above."""
        if not self.ok:
            raise HTTPError(self)
        return self


def fetch(
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | str = b"",
    json: Any = None,
    timeout_s: float | None = None,
) -> Response:
    """One request; nothing is followed or retried.

    >>> fetch("https://example.com/health", timeout_s=5).raise_for_status().json()  # doctest: +SKIP

    Raises `Denied` for a host that is not on the list, `DeadlineExceeded`, `Unavailable`; `ValueError` for headers
    with line breaks.
    """
    _host.refuse_while_building("http.fetch")
    sent = {str(name): str(value) for name, value in (headers or {}).items()}
    content = body.encode() if isinstance(body, str) else body
    if json is not None:
        content = _json.dumps(json).encode()
        sent.setdefault("Content-Type", "application/json")
    for name, value in sent.items():
        if any(mark in name + value for mark in "\r\n\0") or ":" in name or not name:
            raise ValueError(f"header {name!r} cannot be sent: no line breaks, no colon in the name")
    status, lines, answer = _host.http_fetch(method.upper(), url, sent, content, timeout_s=timeout_s)
    return Response(method.upper(), url, status, _parsed(lines), answer)


def _parsed(lines: str) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines.split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            key = name.strip().lower()
            headers[key] = f"{headers[key]}, {value.strip()}" if key in headers else value.strip()
    return headers
