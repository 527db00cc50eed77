"""The cache's `RequestStream`, for threads that wait: one stream a process, many requests in flight.

A worker leaves its request in a queue and waits; the event loop sends what has gathered there as one message and gives
the answers out. The stream is opened by the first request, and by the first after it broke. What had been sent then
fails as UNAVAILABLE: whoever asked decides what may be asked again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from torpor.cache.v1 import cache_pb2, cache_pb2_grpc
from torpor_services.clock import Clock

from torpor_host.in_flight import InFlight
from torpor_host.timers import first_of
from torpor_host.waits import Slot, Wait

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 32 << 20  # of an answer; what a guest's memory could take anyway
_BATCH_REQUESTS, _BATCH_BYTES = 64, 1 << 20
_BROKEN_PAUSE_S = 1.0
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Unanswered(Exception):
    """There is no answer. `code` as the contract says for `Request`; CANCELLED: the guest was stopped."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class TooLarge(Exception):
    """The answer is longer than BODY_BYTES_MAX."""


class _Call:
    """A request that waits. Whoever takes it out of the table ends its wait."""

    __slots__ = ("complete", "failure", "head", "length", "not_after_s", "parts", "wait")

    def __init__(self, wait: Wait, not_after_s: float | None) -> None:
        self.wait = wait
        self.not_after_s = not_after_s  # on the host's monotonic clock
        self.complete = False
        self.head = cache_pb2.Head()
        self.parts: list[bytes] = []
        self.length = 0
        self.failure: Exception | None = None

    def take(self, message: cache_pb2.StreamedResponse) -> bool:
        """Whether nothing more is wanted."""
        if message.HasField("error"):
            self.failure = _unanswered(message.error)
            return True
        response = message.response
        if response.HasField("head"):
            self.head = response.head
        self.length += len(response.body)
        if self.length > BODY_BYTES_MAX:
            self.failure = TooLarge(f"the answer is larger than {BODY_BYTES_MAX >> 20} MiB")
            return True
        self.parts.append(response.body)
        self.complete = message.last
        return message.last


class Asked:
    """A request that is under way. `result` or `drop`, once."""

    __slots__ = ("_call", "_number", "_stream")

    def __init__(self, stream: RequestStream, number: int, call: _Call) -> None:
        self._stream = stream
        self._number = number
        self._call = call

    def result(self, timeout_s: float, in_flight: InFlight) -> tuple[cache_pb2.Head, bytes]:
        """The answer's head and body. Raises Unanswered, TooLarge.

        On the thread that asked. Blocks until then, to `timeout_s` at most and not beyond `in_flight.stop()`; its slot
        serves others meanwhile.
        """
        call = self._call
        with in_flight.waiting(self._stop):
            if not call.wait.until(timeout_s):
                late = Unanswered(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout_s:.3g} s")
                self._stream._give_up(self._number, late)
        if call.failure is not None:
            raise call.failure
        if not call.complete:  # it was given up by another thread in this very moment
            raise Unanswered(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout_s:.3g} s")
        return call.head, call.parts[0] if len(call.parts) == 1 else b"".join(call.parts)

    def drop(self) -> None:
        """Nobody wants to know any more."""
        self._stop()

    def _stop(self) -> None:
        self._stream._give_up(self._number, Unanswered(grpc.StatusCode.CANCELLED, ""))


class RequestStream:
    """`start` on any thread but the loop's, `run` as a task of the loop."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        post: Callable[[Callable[[], None]], None],
        clock: Clock,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._clock = clock
        self._behind_s = 0.0  # what our clock shows less what the cache's shows; more by the shortest way of a batch
        self._stub = cache_pb2_grpc.ResourceCacheStub(channel)
        self._post = post
        self._metadata = tuple(metadata)
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._outgoing: deque[cache_pb2.StreamedRequest | int] = deque()  # an int: this one is given up
        self._posted = False
        self._wake = asyncio.Event()
        self._closed = False

    # -- workers

    def start(self, request: cache_pb2.HttpRequest, slot: Slot, not_after_s: float | None = None) -> Asked:
        """Asks; whoever waits for the answer gives this slot back meanwhile. Beyond `not_after_s`, on the monotonic
        clock, the cache does not begin it, and ends it if it is under way, whatever becomes of this host."""
        number, call = next(self._numbers), _Call(slot.wait(), not_after_s)
        self._calls[number] = call
        asked = Asked(self, number, call)
        self._put(cache_pb2.StreamedRequest(id=number, request=request))
        if self._closed:
            asked.drop()
        return asked

    def _give_up(self, number: int, failure: Exception) -> None:
        """Nothing if it has been answered meanwhile."""
        call = self._calls.pop(number, None)
        if call is not None:
            call.failure = failure
            self._put(number)
            call.wait.end()

    def _put(self, what: cache_pb2.StreamedRequest | int) -> None:
        self._outgoing.append(what)
        if not self._posted:  # the loop clears it before it looks, so that what comes after is posted again
            self._posted = True
            self._post(self._wake.set)

    # -- the loop

    async def run(self) -> None:
        """Until cancelled. What is in flight then fails, as does what is asked later."""
        try:
            while True:
                await self._wake.wait()
                await self._serve()
        finally:
            self._closed = True
            self._fail_all(grpc.StatusCode.CANCELLED, "the host is shutting down", unsent=True)

    async def _serve(self) -> None:
        """One stream, until it breaks."""
        stream: Any = self._stub.RequestStream(None, metadata=self._metadata)
        told_time = asyncio.Event()
        reading = asyncio.create_task(self._read(stream, told_time))
        reading.add_done_callback(lambda _: self._wake.set())
        code, details = grpc.StatusCode.UNAVAILABLE, "the cache ended the stream"
        try:
            await first_of(told_time.wait(), _done(reading))
            while not reading.done():
                self._wake.clear()
                self._posted = False
                while (batch := self._next_batch()) is not None:
                    await stream.write(batch)
                await self._wake.wait()
            await reading
        except grpc.aio.AioRpcError as exc:
            code, details = _broken_by(exc)
        except (grpc.aio.BaseError, asyncio.InvalidStateError) as exc:  # a write on a stream that has just ended
            log.debug("a stream of requests ended", exc_info=exc)
        except Exception as exc:
            log.exception("the answers of the cache cannot be read")
            details = f"the answers of the cache cannot be read: {type(exc).__name__}"
            await self._clock.sleep(_BROKEN_PAUSE_S)
        finally:
            stream.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._wake.clear()
            self._fail_all(code, details, unsent=not told_time.is_set())

    def _next_batch(self) -> cache_pb2.RequestBatch | None:
        if not self._outgoing:
            return None
        batch = cache_pb2.RequestBatch()
        size = count = 0
        while self._outgoing and size < _BATCH_BYTES and count < _BATCH_REQUESTS:
            what = self._outgoing.popleft()
            count += 1
            if isinstance(what, int):
                batch.cancelled.append(what)
            elif (call := self._calls.get(what.id)) is not None:
                if call.not_after_s is not None:
                    what.not_after_ms = max(1, int((call.not_after_s - self._behind_s) * 1000))
                batch.requests.append(what)
                size += len(what.request.body)
        return batch

    async def _read(self, stream: Any, told_time: asyncio.Event) -> None:
        async for batch in stream:
            behind_s = self._clock.monotonic_s() - batch.now_ms / 1000
            self._behind_s = min(behind_s, self._behind_s) if told_time.is_set() else behind_s
            told_time.set()
            for response in batch.responses:
                self._deliver(response)

    def _deliver(self, response: cache_pb2.StreamedResponse) -> None:
        call = self._calls.get(response.id)
        if call is None or not call.take(response) or self._calls.pop(response.id, None) is None:
            return
        if not response.last:
            self._put(response.id)
        call.wait.end()

    def _fail_all(self, code: grpc.StatusCode, details: str, *, unsent: bool) -> None:
        """What was sent, or what was not too; the latter goes on the next stream otherwise."""
        # Copied first: workers add and remove meanwhile.
        outgoing, numbers = list(self._outgoing), list(self._calls)
        kept = {what.id for what in outgoing if not isinstance(what, int)} if not unsent else set[int]()
        for number in [number for number in numbers if number not in kept]:
            call = self._calls.pop(number, None)
            if call is not None:
                call.failure = Unanswered(code, details)
                call.wait.end()
        self._posted = False
        if self._outgoing:
            self._wake.set()


async def _done(task: asyncio.Task[None]) -> None:
    await asyncio.wait((task,))


def _unanswered(error: cache_pb2.RequestError) -> Unanswered:
    retry_after_s = error.retry_after_ms / 1000 if error.retry_after_ms else None
    return Unanswered(_CODES.get(error.code, grpc.StatusCode.UNKNOWN), error.message, retry_after_s)


def _broken_by(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str]:
    """However the stream ended, its requests may be asked again elsewhere, unless the cache does not know streams."""
    kept = error.code() is grpc.StatusCode.UNIMPLEMENTED
    return grpc.StatusCode.UNIMPLEMENTED if kept else grpc.StatusCode.UNAVAILABLE, error.details() or "it broke"
