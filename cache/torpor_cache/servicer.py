"""The gRPC surface: the contract's messages in and out, errors as gRPC codes.

Watch is registered by hand, since its batches are bytes already. Request streams an answer's body in chunks. What is
not built answers UNIMPLEMENTED by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import grpc.aio
from torpor.cache.v1 import cache_pb2
from torpor_services.security import peer_identity

from torpor_cache.calls import CallFailed, Calls
from torpor_cache.feeds import Feeds
from torpor_cache.identity import Identities
from torpor_cache.informers import Informers
from torpor_cache.request_stream import RequestStream, StreamClosing
from torpor_cache.requests import Requests
from torpor_cache.resources import ObjectKey
from torpor_cache.stats import collect
from torpor_cache.streams import ClientGone, ProtocolBroken, ShuttingDown, StreamParts, WatchStream

SERVICE = "torpor.cache.v1.ResourceCache"
RETRY_AFTER = "retry-after-ms"
SENT = "torpor-sent"  # "1": the request may have been executed, though there is no answer

Context = grpc.aio.ServicerContext[Any, Any]


class CacheServicer:
    """The methods of ResourceCache."""

    def __init__(
        self, parts: StreamParts, informers: Informers, feeds: Feeds, identities: Identities, requests: Requests
    ) -> None:
        self._parts = parts
        self._informers = informers
        self._feeds = feeds
        self._calls = Calls(identities, requests)
        self._clock = parts.clock
        self._streams: dict[WatchStream, None] = {}
        self._request_streams: set[RequestStream] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            "Watch": grpc.stream_stream_rpc_method_handler(
                self.watch,
                request_deserializer=cache_pb2.WatchRequest.FromString,
                response_serializer=None,  # batches are encoded already
            ),
            "Request": grpc.unary_stream_rpc_method_handler(
                self.request,
                request_deserializer=cache_pb2.HttpRequest.FromString,
                response_serializer=cache_pb2.HttpResponse.SerializeToString,
            ),
            "RequestStream": grpc.stream_stream_rpc_method_handler(
                self.request_stream,
                request_deserializer=cache_pb2.RequestBatch.FromString,
                response_serializer=cache_pb2.ResponseBatch.SerializeToString,
            ),
            "Tree": grpc.unary_unary_rpc_method_handler(
                self.tree,
                request_deserializer=cache_pb2.TreeRequest.FromString,
                response_serializer=cache_pb2.TreeResponse.SerializeToString,
            ),
            "Stats": grpc.unary_unary_rpc_method_handler(
                self.stats,
                request_deserializer=cache_pb2.StatsRequest.FromString,
                response_serializer=cache_pb2.StatsResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    # ---- Watch

    async def watch(self, requests: AsyncIterator[cache_pb2.WatchRequest], context: Context) -> None:
        peer = peer_identity(context)
        if peer is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the connection shows no identity")
        stream = WatchStream(self._parts, peer, context.peer() or "")
        self._streams[stream] = None
        try:
            await stream.run(requests, lambda batch: _write(context, batch))
        except ProtocolBroken as exc:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(exc))
        except ShuttingDown as exc:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(exc))
        except ClientGone:
            pass
        finally:
            del self._streams[stream]

    def close_streams(self) -> None:
        """Sends every client elsewhere."""
        for stream in tuple(self._streams):
            stream.close()
        for requests in tuple(self._request_streams):
            requests.close()

    def assignment_changed(self, operator: ObjectKey) -> None:
        for stream in tuple(self._streams):
            stream.assignment_changed(operator)

    def rights_changed(self) -> None:
        for stream in tuple(self._streams):
            stream.recheck()

    # ---- Request

    async def request(self, message: cache_pb2.HttpRequest, context: Context) -> AsyncIterator[cache_pb2.HttpResponse]:
        try:
            async for response in self._calls.answer(peer_identity(context), message):
                yield response
        except CallFailed as exc:
            await _abort(context, exc)

    async def request_stream(self, batches: AsyncIterator[cache_pb2.RequestBatch], context: Context) -> None:
        stream = RequestStream(self._calls, peer_identity(context), self._clock)
        self._request_streams.add(stream)
        try:
            await stream.run(batches, lambda batch: _write(context, batch))
        except ProtocolBroken as exc:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(exc))
        except StreamClosing as exc:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(exc))
        except ClientGone:
            pass
        finally:
            self._request_streams.discard(stream)

    # ---- the rest

    async def tree(self, message: cache_pb2.TreeRequest, context: Context) -> cache_pb2.TreeResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{SERVICE}/Tree is not built yet")

    async def stats(self, message: cache_pb2.StatsRequest, context: Context) -> cache_pb2.StatsResponse:
        if peer_identity(context) is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the connection shows no identity")
        return collect(self._informers, self._feeds, self._streams)


async def _write(context: Context, batch: object) -> None:
    try:
        await context.write(batch)
    except grpc.aio.BaseError as exc:
        raise ClientGone("the client has left") from exc


async def _abort(context: Context, failed: CallFailed) -> NoReturn:
    metadata: list[tuple[str, str]] = []
    if failed.retry_after_ms:
        metadata.append((RETRY_AFTER, str(failed.retry_after_ms)))
    if failed.sent:
        metadata.append((SENT, "1"))
    await context.abort(failed.code, str(failed), tuple(metadata))
