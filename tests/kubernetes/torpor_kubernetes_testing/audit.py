"""The API server's audit log: who asked for what, with which User-Agent, and how it was answered.

The server writes a request's line before it ends the answer, so what a client has been told is in the log.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Everything but the server's own loopback requests, without bodies. A watch is logged when it starts
# (ResponseStarted) and when it ends; any other request once (ResponseComplete).
POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "None", "users": ["system:apiserver"]}, {"level": "Metadata"}],
}


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One line of the log; `raw` holds the rest of it."""

    stage: str
    received_at: str  # RFC 3339 with microseconds: sorts as text
    verb: str
    uri: str
    user: str
    impersonated: str  # the impersonated user, empty without impersonation
    user_agent: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int  # HTTP status; 0 where the request ended without one
    raw: dict[str, Any]

    @property
    def is_write(self) -> bool:
        return self.verb in {"create", "update", "patch", "delete", "deletecollection"}


def read_events(log: Path) -> Iterator[AuditEvent]:
    """Events in the order they were written. A last line that is still being written is left out."""
    if not log.exists():
        return
    with log.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield _event(json.loads(line))


def cut_unfinished_line(log: Path) -> None:
    """Remove what a killed server left of its last line, which a new one would continue; it answered no client."""
    if not log.exists():
        return
    with log.open("r+b") as file:
        written = file.read()
        file.truncate(written.rfind(b"\n") + 1)


def _event(raw: dict[str, Any]) -> AuditEvent:
    target = raw.get("objectRef", {})
    return AuditEvent(
        stage=raw["stage"],
        received_at=raw["requestReceivedTimestamp"],
        verb=raw["verb"],
        uri=raw["requestURI"],
        user=raw["user"].get("username", ""),
        impersonated=raw.get("impersonatedUser", {}).get("username", ""),
        user_agent=raw.get("userAgent", ""),
        group=target.get("apiGroup", ""),
        resource=target.get("resource", ""),
        subresource=target.get("subresource", ""),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=raw.get("responseStatus", {}).get("code", 0),
        raw=raw,
    )
