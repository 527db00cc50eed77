"""gRPC reflection that costs nothing until somebody asks.

`grpc_reflection` imports protobuf's descriptors of descriptors: 4 MB private in every service, for a call that most
services never get. The method is registered here by its name; package and messages are imported at the first call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

SERVICE = "grpc.reflection.v1alpha.ServerReflection"
_METHOD = f"/{SERVICE}/ServerReflectionInfo"


class LazyReflection(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not subscriptable at run time
    """Tells of the services with these full `names`, and of itself."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = (*names, SERVICE)
        self._servicer: Any = None
        self._handler = grpc.stream_stream_rpc_method_handler(self._answer)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._handler if handler_call_details.method == _METHOD else None

    async def _answer(self, requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        if self._servicer is None:
            self._servicer = await asyncio.to_thread(_load, self._names)
        async for response in self._servicer.ServerReflectionInfo(_parsed(requests), context):
            yield response.SerializeToString()


def _load(names: Sequence[str]) -> Any:
    from grpc_reflection.v1alpha._async import ReflectionServicer

    return ReflectionServicer(names)


async def _parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    from grpc_reflection.v1alpha import reflection_pb2

    async for request in requests:
        yield reflection_pb2.ServerReflectionRequest.FromString(request)
