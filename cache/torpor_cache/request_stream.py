"""Many requests on one stream: each a task of its own, the answers written together.

A call of its own costs 0.5 ms of processor time on both ends together, one on a stream 0.15 ms, less where several wait
(measured, `docs/decisions/0020`). Overflow: beyond `IN_FLIGHT_MAX` unanswered requests a further one is refused, and
beyond twice as many nothing is read; beyond `UNSENT_BYTES_MAX` of unsent answers the requests wait for room, so that a
client that does not read holds up only itself.

A write must not be made after its host has given it up, because another host may act for the operator by then. So a
request carries its end on this cache's clock, which each batch of answers tells: the host may freeze, or the request
may wait in the socket of a cache that was stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
from torpor.cache.v1 import cache_pb2
from torpor_services.clock import Clock
from torpor_services.errors import TorporError, one_line
from torpor_services.security import Identity

from torpor_cache.calls import CallFailed, Calls
from torpor_cache.streams import ProtocolBroken

log = logging.getLogger(__name__)

IN_FLIGHT_MAX = 512
UNSENT_BYTES_MAX = 4 * 1024 * 1024
_BATCH_BYTES = 1024 * 1024

_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

Write = Callable[[cache_pb2.ResponseBatch], Awaitable[None]]


class StreamClosing(TorporError):
    """The cache is about to end; what was not answered is to be asked elsewhere."""


class RequestStream:
    """`await stream.run(batches, write)` serves until the client ends it, or raises ProtocolBroken, StreamClosing, or
    what `write` raises."""

    def __init__(self, calls: Calls, peer: Identity | None, clock: Clock) -> None:
        self._calls = calls
        self._peer = peer
        self._clock = clock
        self._reading: asyncio.Task[None] | None = None
        self._closing = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unsent: deque[cache_pb2.StreamedResponse] = deque()
        self._unsent_bytes = 0
        self._wake_writer = asyncio.Event()
        self._sent = asyncio.Event()
        self._answered = asyncio.Event()

    async def run(self, batches: AsyncIterator[cache_pb2.RequestBatch], write: Write) -> None:
        """What was asked before the client ended its side, or before `close`, is answered first."""
        self._reading = asyncio.create_task(self._read(batches))
        self._reading.add_done_callback(lambda _: self._wake_writer.set())
        try:
            await self._write_answers(self._reading, write)
            if self._closing:
                raise StreamClosing("the cache is shutting down; ask again elsewhere")
        finally:
            tasks = (self._reading, *self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Takes no further requests; ends, with StreamClosing, once those in flight are answered."""
        self._closing = True
        if self._reading is not None:
            self._reading.cancel()

    # ---- reading

    async def _read(self, batches: AsyncIterator[cache_pb2.RequestBatch]) -> None:
        async for batch in batches:
            for number in batch.cancelled:
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            for message in batch.requests:
                while len(self._tasks) >= 2 * IN_FLIGHT_MAX:
                    self._answered.clear()
                    await self._answered.wait()
                self._start(message)

    def _start(self, message: cache_pb2.StreamedRequest) -> None:
        number = message.id
        if number == 0:
            raise ProtocolBroken("request 0: the client chooses numbers from 1")
        if number in self._tasks:
            raise ProtocolBroken(f"request {number} is not answered yet: its number is taken")
        if len(self._tasks) >= IN_FLIGHT_MAX:
            step = self._fail(number, CallFailed(_UNAVAILABLE, f"{IN_FLIGHT_MAX} requests wait", retry_after_s=0.1))
        elif message.not_after_ms:
            step = self._answer_by(number, message.request, message.not_after_ms - self._now_ms())
        else:
            step = self._answer(number, message.request)
        task = self._tasks[number] = asyncio.create_task(step)
        task.add_done_callback(lambda _: self._ended(number))

    def _ended(self, number: int) -> None:
        del self._tasks[number]
        self._answered.set()
        self._wake_writer.set()

    # ---- answering

    async def _answer_by(self, number: int, request: cache_pb2.HttpRequest, left_ms: int) -> None:
        late = grpc.StatusCode.DEADLINE_EXCEEDED
        if left_ms <= 0:
            await self._fail(number, CallFailed(late, "it came after its end and was not made"))
            return
        try:
            async with asyncio.timeout(left_ms / 1000):
                await self._answer(number, request)
        except TimeoutError:
            await self._fail(number, CallFailed(late, "it had not ended when it had to", sent=True))

    async def _answer(self, number: int, request: cache_pb2.HttpRequest) -> None:
        waiting: cache_pb2.HttpResponse | None = None  # until it is known whether it is the last
        try:
            async for response in self._calls.answer(self._peer, request):
                if waiting is not None:
                    await self._send(cache_pb2.StreamedResponse(id=number, response=waiting))
                waiting = response
            await self._send(cache_pb2.StreamedResponse(id=number, response=waiting, last=True))
        except CallFailed as exc:
            await self._fail(number, exc)
        except Exception as exc:
            log.exception("a request failed in the cache")
            message = f"the request failed in the cache: {type(exc).__name__}: {one_line(exc, 200)}"
            await self._fail(number, CallFailed(grpc.StatusCode.INTERNAL, message, sent=True))

    async def _fail(self, number: int, failed: CallFailed) -> None:
        error = cache_pb2.RequestError(
            code=failed.code.value[0], message=str(failed), retry_after_ms=failed.retry_after_ms, sent=failed.sent
        )
        await self._send(cache_pb2.StreamedResponse(id=number, last=True, error=error))

    async def _send(self, response: cache_pb2.StreamedResponse) -> None:
        while self._unsent_bytes >= UNSENT_BYTES_MAX:
            self._sent.clear()
            await self._sent.wait()
        self._unsent.append(response)
        self._unsent_bytes += _size(response)
        self._wake_writer.set()

    # ---- writing

    async def _write_answers(self, reading: asyncio.Task[None], write: Write) -> None:
        """Until nothing more is read and all of it is answered. Raises what reading raised."""
        await write(self._next_batch())  # tells the time
        while True:
            while self._unsent:
                await write(self._next_batch())
            if reading.done():
                if not reading.cancelled():
                    reading.result()
                if not self._tasks and not self._unsent:
                    return
            await self._wake_writer.wait()
            self._wake_writer.clear()

    def _next_batch(self) -> cache_pb2.ResponseBatch:
        batch = cache_pb2.ResponseBatch(now_ms=self._now_ms())
        size = 0
        while self._unsent and size < _BATCH_BYTES:
            response = self._unsent.popleft()
            size += _size(response)
            batch.responses.append(response)
        self._unsent_bytes -= size
        self._sent.set()
        return batch

    def _now_ms(self) -> int:
        return int(self._clock.monotonic_s() * 1000)


def _size(response: cache_pb2.StreamedResponse) -> int:
    """About what it takes to keep it."""
    return 256 + len(response.response.body)
