"""A client of a running cache for tests: one Watch stream, told apart by subscription, and requests.

Imported by tests only. It keeps what it was sent, so that a test waits for what it expects and then looks back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
import msgspec
from torpor.cache.v1 import cache_pb2, cache_pb2_grpc
from torpor_services.channels import open_channel
from torpor_services.security import Identity, TlsFiles

Type = cache_pb2.Event.Type


@dataclass(frozen=True, slots=True)
class Received:
    """One event for one subscription."""

    type: str
    key: tuple[str, str]
    uid: str
    version: int
    history: str
    keys: tuple[tuple[str, str], ...]
    event: cache_pb2.Event

    @property
    def status(self) -> dict[str, object]:
        """Of an ERROR."""
        read: dict[str, object] = msgspec.json.decode(self.event.error.status)
        return read


def told(delivery: cache_pb2.Delivery) -> Iterator[tuple[int, Received]]:
    """A delivery, taken apart: (subscription, what it received)."""
    event = delivery.event
    for target in delivery.targets:
        received = Received(
            type=Type.Name(event.type),
            key=(event.key.namespace, event.key.name),
            uid=event.uid,
            version=int(event.position.resource_version or 0),
            history=event.position.history,
            keys=tuple((key.namespace, key.name) for key in target.keys),
            event=event,
        )
        for number in target.subscriptions:
            yield number, received


@dataclass(slots=True)
class Answered:
    """A response of Request, its chunks joined."""

    head: cache_pb2.Head
    body: bytes
    chunks: int

    def json(self) -> dict[str, object]:
        read: dict[str, object] = msgspec.json.decode(self.body)
        return read


@dataclass
class CacheClient:
    """`async with CacheClient(address, Identity("host", "a")) as client`."""

    address: str
    identity: Identity
    batches: int = 0
    deliveries: int = 0
    events: dict[int, list[Received]] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        self.channel = open_channel(self.address, self.identity, TlsFiles())
        self.stub = cache_pb2_grpc.ResourceCacheStub(self.channel)
        self._call: grpc.aio.StreamStreamCall[cache_pb2.WatchRequest, cache_pb2.WatchBatch] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._arrived = asyncio.Condition()
        self.ended: grpc.aio.AioRpcError | None = None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.disconnect()
        await self.channel.close(None)

    # ---- Watch

    async def send(self, request: cache_pb2.WatchRequest) -> None:
        if self._call is None:
            self._call = self.stub.Watch(None)
            self._reader = asyncio.create_task(self._read(self._call))
        await self._call.write(request)

    async def subscribe(self, number: int, resource: str, **fields: object) -> None:
        """`resource` as v1/configmaps; `fields` are those of Subscribe."""
        *group, version, plural = resource.split("/")
        named = cache_pb2.Resource(group="".join(group), version=version, resource=plural)
        message = cache_pb2.Subscribe(subscription=number, resource=named, **fields)  # type: ignore[arg-type]
        self.events.setdefault(number, [])
        await self.send(cache_pb2.WatchRequest(subscribe=message))

    async def credit(self, number: int, events: int) -> None:
        await self.send(cache_pb2.WatchRequest(credit=cache_pb2.Credit(subscription=number, events=events)))

    async def ack(self, number: int, received: Received) -> None:
        position = cache_pb2.Position(history=received.history, resource_version=str(received.version))
        await self.send(cache_pb2.WatchRequest(ack=cache_pb2.Ack(subscription=number, position=position)))

    async def unsubscribe(self, number: int) -> None:
        await self.send(cache_pb2.WatchRequest(unsubscribe=cache_pb2.Unsubscribe(subscription=number)))

    async def disconnect(self) -> None:
        """Ends the stream; the next request opens another."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    async def until(
        self, number: int, condition: Callable[[list[Received]], object], timeout_s: float = 10.0
    ) -> list[Received]:
        """Waits until what subscription `number` has received fulfils the condition; all of it."""
        received = self.events.setdefault(number, [])
        try:
            async with asyncio.timeout(timeout_s), self._arrived:
                await self._arrived.wait_for(lambda: condition(received) or self.ended is not None)
        except TimeoutError:
            raise AssertionError(f"subscription {number} has received {received[-20:]}") from None
        if not condition(received):
            raise AssertionError(f"the stream ended: {self.ended}; received {received[-20:]}")
        return received

    async def until_synced(self, number: int, timeout_s: float = 10.0) -> list[Received]:
        return await self.until(number, lambda got: any(r.type == "SYNCED" for r in got), timeout_s)

    async def _read(self, call: grpc.aio.StreamStreamCall[cache_pb2.WatchRequest, cache_pb2.WatchBatch]) -> None:
        try:
            async for batch in call:
                self.batches += 1
                for delivery in batch.deliveries:
                    self.deliveries += 1
                    self._take(delivery)
                async with self._arrived:
                    self._arrived.notify_all()
        except grpc.aio.AioRpcError as exc:
            self.ended = exc
            async with self._arrived:
                self._arrived.notify_all()

    def _take(self, delivery: cache_pb2.Delivery) -> None:
        for number, received in told(delivery):
            self.events.setdefault(number, []).append(received)

    # ---- Request

    async def request(
        self,
        method: str,
        path: str,
        *,
        caller: cache_pb2.Caller | None = None,
        body: object = None,
        accept: str = "application/json",
        content_type: str = "",
        minimum: Iterable[cache_pb2.MinimumVersion] = (),
        live: bool = False,
        traceparent: str = "",
    ) -> Answered:
        """Raises AioRpcError where there is no answer. A body that is not bytes is sent as JSON."""
        message = cache_pb2.HttpRequest(
            caller=caller,
            method=method,
            path=path,
            accept=accept,
            content_type=content_type,
            body=body if isinstance(body, bytes) else (b"" if body is None else msgspec.json.encode(body)),
            minimum=minimum,
            live=live,
            trace=cache_pb2.TraceContext(traceparent=traceparent),
        )
        parts: list[bytes] = []
        head: cache_pb2.Head | None = None
        async for response in self.stub.Request(message):
            if head is None:
                head = response.head
            parts.append(response.body)
        assert head is not None, "the answer has a head"
        return Answered(head, b"".join(parts), len(parts))
