"""The gRPC surface: the contract's messages in and out, errors as gRPC codes.

Watch is registered by hand, since its batches are bytes already. Request streams an answer's body in chunks. What is
not built answers UNIMPLEMENTED by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from torpor.cache.v1 import cache_pb2
from torpor_services import telemetry
from torpor_services.security import peer_identity

from torpor_cache.feeds import Feeds
from torpor_cache.identity import AnotherEpoch, Identities, IdentityUnknown, NotAllowedHere, Subject
from torpor_cache.informers import Informers
from torpor_cache.requests import WRITES, Answer, ApiRequest, Head, Requests, Unanswered
from torpor_cache.resources import InvalidResource, InvalidResourceVersion, ObjectKey, Position, Resource
from torpor_cache.stats import collect
from torpor_cache.streams import ClientGone, ProtocolBroken, ShuttingDown, StreamParts, WatchStream
from torpor_cache.subscribing import InvalidCaller, read_caller, read_position, read_resource

SERVICE = "torpor.cache.v1.ResourceCache"
RETRY_AFTER = "retry-after-ms"
SENT = "torpor-sent"  # "1": the request may have been executed, though there is no answer
MINIMA_MAX = 64

Context = grpc.aio.ServicerContext[Any, Any]


class CacheServicer:
    """The four methods of ResourceCache."""

    def __init__(
        self, parts: StreamParts, informers: Informers, feeds: Feeds, identities: Identities, requests: Requests
    ) -> None:
        self._parts = parts
        self._informers = informers
        self._feeds = feeds
        self._identities = identities
        self._requests = requests
        self._streams: dict[WatchStream, None] = {}

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

    def assignment_changed(self, operator: ObjectKey) -> None:
        for stream in tuple(self._streams):
            stream.assignment_changed(operator)

    def rights_changed(self) -> None:
        for stream in tuple(self._streams):
            stream.recheck()

    # ---- Request

    async def request(self, message: cache_pb2.HttpRequest, context: Context) -> AsyncIterator[cache_pb2.HttpResponse]:
        writes = message.method in WRITES
        with telemetry.span(
            "cache.write" if writes else "cache.read",
            parent=message.trace.traceparent,
            attributes={"http.method": message.method, "url.path": message.path.partition("?")[0][:500]},
        ) as span:
            subject = await self._subject(message, context)
            try:
                async with await self._requests.answer(subject, _read_request(message)) as answer:
                    span.set("http.status_code", answer.head.status)
                    span.set("torpor.from_cache", answer.head.from_cache)
                    async for response in self._responses(answer):
                        yield response
            except (InvalidResource, InvalidResourceVersion) as exc:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"minimum: {exc}")
            except Unanswered as exc:
                await _abort_unanswered(context, exc)

    async def _subject(self, message: cache_pb2.HttpRequest, context: Context) -> Subject:
        try:
            caller = read_caller(message.caller) if message.HasField("caller") else None
            return await self._identities.resolve(peer_identity(context), caller)
        except InvalidCaller as exc:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(exc))
        except NotAllowedHere as exc:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(exc))
        except AnotherEpoch as exc:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(exc))
        except IdentityUnknown as exc:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(exc), _retry_after(exc.retry_after_s))

    async def _responses(self, answer: Answer) -> AsyncIterator[cache_pb2.HttpResponse]:
        """The head goes with the first chunk, or alone where there is no body."""
        head: cache_pb2.Head | None = _head_message(answer.head)
        async for chunk in _chunked(answer.body, self._requests.chunk_bytes):
            yield cache_pb2.HttpResponse(head=head, body=chunk)
            head = None
        if head is not None:
            yield cache_pb2.HttpResponse(head=head)

    # ---- the rest

    async def tree(self, message: cache_pb2.TreeRequest, context: Context) -> cache_pb2.TreeResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{SERVICE}/Tree is not built yet")

    async def stats(self, message: cache_pb2.StatsRequest, context: Context) -> cache_pb2.StatsResponse:
        if peer_identity(context) is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the connection shows no identity")
        return collect(self._informers, self._feeds, self._streams)


async def _write(context: Context, batch: bytes) -> None:
    try:
        await context.write(batch)
    except grpc.aio.BaseError as exc:
        raise ClientGone("the client has left") from exc


def _read_request(message: cache_pb2.HttpRequest) -> ApiRequest:
    """Raises InvalidResource, InvalidResourceVersion."""
    minimum: list[tuple[Resource, Position]] = []
    for asked in message.minimum[:MINIMA_MAX]:
        position = read_position(asked.position)
        if position is not None:
            minimum.append((read_resource(asked.resource), position))
    return ApiRequest(
        method=message.method,
        path=message.path,
        accept=message.accept,
        content_type=message.content_type,
        body=message.body,
        minimum=minimum,
        live=message.live,
    )


def _head_message(head: Head) -> cache_pb2.Head:
    message = cache_pb2.Head(
        status=head.status,
        content_type=head.content_type,
        source=cache_pb2.Head.CACHE if head.from_cache else cache_pb2.Head.UPSTREAM,
        read_live=head.read_live,
        retry_after_s=head.retry_after_s,
        warning=head.warning,
    )
    if head.written is not None:
        resource, position = head.written
        message.written.resource.group = resource.group
        message.written.resource.version = resource.version
        message.written.resource.resource = resource.resource
        message.written.position.history = position.history
        message.written.position.resource_version = str(position.resource_version)
    return message


async def _chunked(body: AsyncIterator[bytes] | Sequence[bytes], size: int) -> AsyncIterator[bytes]:
    """The parts, joined or cut to `size` bytes; the last may be shorter."""
    waiting: list[bytes] = []
    length = 0
    async for part in _parts_of(body):
        waiting.append(part)
        length += len(part)
        if length < size:
            continue
        joined = b"".join(waiting)
        whole = length - length % size
        for start in range(0, whole, size):
            yield joined[start : start + size]
        waiting, length = [joined[whole:]], length - whole
    if length:
        yield b"".join(waiting)


async def _parts_of(body: AsyncIterator[bytes] | Sequence[bytes]) -> AsyncIterator[bytes]:
    if isinstance(body, AsyncIterator):
        async for part in body:
            yield part
        return
    for part in body:
        yield part


async def _abort_unanswered(context: Context, exc: Unanswered) -> NoReturn:
    metadata = _retry_after(exc.retry_after_s)
    if exc.sent:
        metadata = (*metadata, (SENT, "1"))
    code = grpc.StatusCode.UNAVAILABLE
    if exc.too_large:
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
    elif exc.timed_out:
        code = grpc.StatusCode.DEADLINE_EXCEEDED
    await context.abort(code, str(exc), metadata)


def _retry_after(seconds: float) -> tuple[tuple[str, str], ...]:
    return ((RETRY_AFTER, str(max(1, round(seconds * 1000)))),)
