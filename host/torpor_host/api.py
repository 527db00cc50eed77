"""The Kubernetes API under the host's own identity, through the cache: WasmOperators, Leases, a namespace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import msgspec
from torpor.cache.v1 import cache_pb2, cache_pb2_grpc
from torpor_services.errors import TorporError

MERGE_PATCH = "application/merge-patch+json"
_ANSWER_BYTES_MAX = 16 << 20


class ApiUnavailable(TorporError):
    """No answer of the API server exists; the caller tries again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API server said."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> dict[str, Any]:
        """The body as an object; empty if it is none."""
        try:
            decoded = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            return {}
        return decoded if isinstance(decoded, dict) else {}

    @property
    def message(self) -> str:
        return str(self.json().get("message") or f"status {self.status}")


class KubeApi:
    """One a process, on the loop."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = cache_pb2_grpc.ResourceCacheStub(channel)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        content_type: str = "application/json",
        timeout_s: float = 10.0,
    ) -> Answer:
        """Always answered by the API server itself, never from memory. Raises ApiUnavailable."""
        message = cache_pb2.HttpRequest(
            method=method,
            path=path,
            accept="application/json",
            content_type=content_type if body is not None else "",
            body=b"" if body is None else msgspec.json.encode(body),
            live=True,
        )
        status, parts, length = 0, list[bytes](), 0
        try:
            async for part in self._stub.Request(message, timeout=timeout_s):
                if part.HasField("head"):
                    status = part.head.status
                length += len(part.body)
                if length > _ANSWER_BYTES_MAX:
                    raise ApiUnavailable(f"{method} {path}: the answer is larger than {_ANSWER_BYTES_MAX >> 20} MiB")
                parts.append(part.body)
        except grpc.aio.AioRpcError as exc:
            raise ApiUnavailable(f"{method} {path}: {exc.code().name}: {exc.details()}") from exc
        if not status:
            raise ApiUnavailable(f"{method} {path}: the cache gave no answer")
        return Answer(status, b"".join(parts))
