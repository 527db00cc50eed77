"""One authorised request and one answer, between the HTTP side (`server.py`) and the handlers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from torpor_devcluster import bodies, errors
from torpor_devcluster.authn import User
from torpor_devcluster.negotiate import Accepted
from torpor_devcluster.requestinfo import RequestInfo
from torpor_devcluster.resources import ResourceType


@dataclass(slots=True)
class Call:
    info: RequestInfo
    resource: ResourceType
    query: Mapping[str, str]
    user: User
    accepted: Accepted
    request: web.BaseRequest
    warnings: list[str] = field(default_factory=list)
    """Sent as Warning headers."""

    @property
    def media_type(self) -> str:
        """Of the body, without parameters."""
        return self.request.headers.get("Content-Type", "").partition(";")[0].strip()

    @property
    def dry_run(self) -> bool:
        """Raises 422 for another value than All."""
        wanted = self.query.get("dryRun", "")
        if wanted not in ("", "All"):
            message = f'Unsupported value: "{wanted}": supported values: "All"'
            cause = errors.Cause("dryRun", message, "FieldValueNotSupported")
            raise errors.invalid("CreateOptions", "meta.k8s.io", "", [cause])
        return wanted == "All"

    @property
    def manager(self) -> str:
        """The field manager: as named, else the user agent up to the slash."""
        agent = self.request.headers.get("User-Agent", "")
        return self.query.get("fieldManager") or agent.partition("/")[0][:128] or "unknown"

    async def body(self, *, media_type: str | None = None) -> Any:
        """The decoded body, read as `media_type` where the header names a kind of patch. Raises 400, 413, 415."""
        data = await bodies.read_body(self.request)
        return bodies.decode(data, self.media_type if media_type is None else media_type)


@dataclass(frozen=True, slots=True)
class Reply:
    body: bytes
    code: int = 200
    content_type: str = "application/json"
