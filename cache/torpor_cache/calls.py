"""Requests as the contract's messages: who asks, what is answered, and why there is no answer.

The same for a call of its own (`Request`) and for one of many on a stream (`RequestStream`).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence

import grpc
from torpor.cache.v1 import cache_pb2
from torpor_services import telemetry
from torpor_services.errors import TorporError
from torpor_services.security import Identity

from torpor_cache.identity import AnotherEpoch, Identities, IdentityUnknown, NotAllowedHere, Subject
from torpor_cache.requests import WRITES, Answer, ApiRequest, Head, Requests, Unanswered
from torpor_cache.resources import InvalidResource, InvalidResourceVersion, Position, Resource
from torpor_cache.subscribing import InvalidCaller, read_caller, read_position, read_resource

MINIMA_MAX = 64


class CallFailed(TorporError):
    """There is no answer, or no rest of it. `sent`: the API server may have executed the request."""

    def __init__(
        self, code: grpc.StatusCode, message: str, *, retry_after_s: float | None = None, sent: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.sent = sent
        self.retry_after_ms = 0 if retry_after_s is None else max(1, math.ceil(retry_after_s * 1000))


class Calls:
    """`async for response in calls.answer(peer, message)`. Raises CallFailed."""

    def __init__(self, identities: Identities, requests: Requests) -> None:
        self._identities = identities
        self._requests = requests

    async def answer(
        self, peer: Identity | None, message: cache_pb2.HttpRequest
    ) -> AsyncIterator[cache_pb2.HttpResponse]:
        """The head comes with the first chunk of the body, or alone where there is none."""
        with telemetry.span(
            "cache.write" if message.method in WRITES else "cache.read",
            parent=message.trace.traceparent,
            attributes={"http.method": message.method, "url.path": message.path.partition("?")[0][:500]},
        ) as span:
            subject = await self._subject(peer, message)
            try:
                async with await self._requests.answer(subject, _read_request(message)) as answer:
                    span.set("http.status_code", answer.head.status)
                    span.set("torpor.from_cache", answer.head.from_cache)
                    async for response in self._responses(answer):
                        yield response
            except (InvalidResource, InvalidResourceVersion) as exc:
                raise CallFailed(grpc.StatusCode.INVALID_ARGUMENT, f"minimum: {exc}") from exc
            except Unanswered as exc:
                raise CallFailed(_code(exc), str(exc), retry_after_s=exc.retry_after_s, sent=exc.sent) from exc

    async def _subject(self, peer: Identity | None, message: cache_pb2.HttpRequest) -> Subject:
        try:
            caller = read_caller(message.caller) if message.HasField("caller") else None
            return await self._identities.resolve(peer, caller)
        except InvalidCaller as exc:
            raise CallFailed(grpc.StatusCode.INVALID_ARGUMENT, str(exc)) from exc
        except NotAllowedHere as exc:
            raise CallFailed(grpc.StatusCode.PERMISSION_DENIED, str(exc)) from exc
        except AnotherEpoch as exc:
            raise CallFailed(grpc.StatusCode.FAILED_PRECONDITION, str(exc)) from exc
        except IdentityUnknown as exc:
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, str(exc), retry_after_s=exc.retry_after_s) from exc

    async def _responses(self, answer: Answer) -> AsyncIterator[cache_pb2.HttpResponse]:
        head: cache_pb2.Head | None = _head_message(answer.head)
        if not isinstance(answer.body, AsyncIterator) and sum(map(len, answer.body)) <= self._requests.chunk_bytes:
            yield cache_pb2.HttpResponse(head=head, body=b"".join(answer.body))  # nearly all answers
            return
        async for chunk in _chunked(answer.body, self._requests.chunk_bytes):
            yield cache_pb2.HttpResponse(head=head, body=chunk)
            head = None
        if head is not None:
            yield cache_pb2.HttpResponse(head=head)


def _code(unanswered: Unanswered) -> grpc.StatusCode:
    if unanswered.too_large:
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return grpc.StatusCode.DEADLINE_EXCEEDED if unanswered.timed_out else grpc.StatusCode.UNAVAILABLE


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
