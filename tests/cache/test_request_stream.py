"""Many requests on one stream: each answered by itself, and a client that misbehaves harms only itself."""

import asyncio

import grpc
import pytest
from torpor.cache.v1 import cache_pb2
from torpor_cache import request_stream
from torpor_cache.calls import CallFailed
from torpor_cache.request_stream import RequestStream, StreamClosing
from torpor_cache.streams import ProtocolBroken
from torpor_services.clock import ManualClock

DONE = object()


class ScriptedCalls:
    """`/n/SIZE` answers SIZE bytes in two chunks, `/fail` fails, `/bug` raises, `/wait` waits for `release`."""

    def __init__(self):
        self.release = asyncio.Event()
        self.running = 0
        self.most = 0
        self.ended = []

    async def answer(self, peer, message):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            match message.path.split("/")[1:]:
                case ["fail"]:
                    raise CallFailed(grpc.StatusCode.UNAVAILABLE, "not synced", retry_after_s=0.25, sent=True)
                case ["bug"]:
                    raise RuntimeError("boom")
                case ["wait", *_]:
                    await self.release.wait()
                    yield cache_pb2.HttpResponse(head=cache_pb2.Head(status=200))
                case ["n", size]:
                    half = int(size) // 2
                    yield cache_pb2.HttpResponse(head=cache_pb2.Head(status=200), body=b"a" * half)
                    yield cache_pb2.HttpResponse(body=b"b" * (int(size) - half))
        finally:
            self.running -= 1
            self.ended.append(message.path)


class Client:
    """Both ends of one stream, without gRPC between them."""

    def __init__(self):
        self.calls = ScriptedCalls()
        self.requests = asyncio.Queue()
        self.batches = []
        self.written = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.clock = ManualClock()
        self.stream = RequestStream(self.calls, None, self.clock)
        self.serving = asyncio.create_task(self.stream.run(self._asked(), self._write))

    async def _asked(self):
        while (batch := await self.requests.get()) is not DONE:
            yield batch

    async def _write(self, batch):
        await self.reading.wait()
        self.batches.append(batch)
        self.written.set()

    def ask(self, *asked, cancelled=(), not_after_ms=0):
        requests = [
            cache_pb2.StreamedRequest(
                id=number, request=cache_pb2.HttpRequest(method="GET", path=path), not_after_ms=not_after_ms
            )
            for number, path in asked
        ]
        self.requests.put_nowait(cache_pb2.RequestBatch(requests=requests, cancelled=cancelled))

    def answers(self):
        return [response for batch in self.batches for response in batch.responses]

    def last(self):
        return {response.id: response for response in self.answers() if response.last}

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():
                self.written.clear()
                await asyncio.wait(
                    (asyncio.ensure_future(self.written.wait()), self.serving),
                    timeout=0.01,
                    return_when=asyncio.FIRST_COMPLETED,
                )

    async def end(self):
        self.requests.put_nowait(DONE)
        async with asyncio.timeout(10):
            await self.serving


@pytest.fixture
async def client():
    made = Client()
    yield made
    made.serving.cancel()
    await asyncio.gather(made.serving, return_exceptions=True)


async def test_each_request_is_answered_in_order_of_its_own_and_what_fails_stays_with_it(client):
    client.ask((1, "/wait"), (2, "/fail"), (3, "/bug"), (4, "/n/7"))
    await client.until(lambda: len(client.last()) == 3)
    client.calls.release.set()
    await client.end()  # what was asked is answered first
    by_id = {n: [r for r in client.answers() if r.id == n] for n in (1, 2, 3, 4)}
    assert [r.last for r in by_id[4]] == [False, True]
    assert by_id[4][0].response.head.status == 200
    assert b"".join(r.response.body for r in by_id[4]) == b"aaabbbb"
    error = by_id[2][0].error
    assert (error.code, error.message, error.retry_after_ms, error.sent) == (14, "not synced", 250, True)
    assert by_id[3][0].error.code == grpc.StatusCode.INTERNAL.value[0] and "boom" in by_id[3][0].error.message
    assert by_id[1][0].last and by_id[1][0].response.head.status == 200


async def test_answers_that_are_ready_together_are_one_message(client):
    client.reading.clear()
    client.ask((1, "/n/2"))
    await asyncio.sleep(0)
    client.ask(*((n, "/n/2") for n in range(2, 42)))
    await client.until(lambda: len(client.calls.ended) == 41)
    client.reading.set()
    await client.until(lambda: len(client.last()) == 41)
    assert len(client.batches) <= 3  # the first, which only tells the time, is one


async def test_what_is_cancelled_ends_and_its_number_is_free_again(client):
    client.ask((1, "/wait"), (2, "/wait"))
    await client.until(lambda: client.calls.running == 2)
    client.ask(cancelled=[1, 99])
    await client.until(lambda: client.calls.running == 1)
    client.ask((1, "/n/2"))
    await client.until(lambda: 1 in client.last())
    client.calls.release.set()
    await client.end()
    assert sorted(client.last()) == [1, 2]


@pytest.mark.parametrize("number", [0, 1])
async def test_a_number_that_is_none_or_is_taken_breaks_the_stream_and_ends_what_was_asked(client, number):
    client.ask((1, "/wait"))
    client.ask((number, "/n/2"))
    with pytest.raises(ProtocolBroken):
        await client.serving
    assert client.calls.running == 0


async def test_beyond_the_limit_requests_are_refused_and_cancellations_still_read(client, monkeypatch):
    monkeypatch.setattr(request_stream, "IN_FLIGHT_MAX", 3)
    client.ask(*((n, "/wait") for n in range(1, 6)))
    await client.until(lambda: client.calls.running == 3 and len(client.last()) == 2)
    assert {n: (r.error.code, r.error.sent) for n, r in client.last().items()} == {4: (14, False), 5: (14, False)}
    client.ask(cancelled=[1])
    await client.until(lambda: client.calls.running == 2)
    client.ask((6, "/n/2"))
    await client.until(lambda: 6 in client.last())
    assert client.last()[6].response.body


async def test_a_flood_of_requests_is_not_read_until_its_refusals_are(client, monkeypatch):
    monkeypatch.setattr(request_stream, "IN_FLIGHT_MAX", 3)
    monkeypatch.setattr(request_stream, "UNSENT_BYTES_MAX", 1000)
    client.reading.clear()
    client.ask(*((n, "/wait") for n in range(1, 1001)))
    for _ in range(3000):
        await asyncio.sleep(0)
    assert len(client.stream._tasks) <= 6 and client.calls.most == 3
    client.reading.set()
    client.calls.release.set()
    await client.end()
    assert len(client.last()) == 1000


async def test_a_request_that_comes_after_its_end_is_not_made(client):
    await client.until(lambda: client.batches)
    assert client.batches[0].now_ms == 0 and not client.batches[0].responses
    await client.clock.advance(5.0)
    client.ask((1, "/n/2"), not_after_ms=4_999)
    client.ask((2, "/n/2"), not_after_ms=60_000)
    await client.end()
    late = client.last()[1].error
    assert (late.code, late.sent) == (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], False)
    assert client.calls.ended == ["/n/2"] and client.last()[2].response.body == b"b"
    assert client.batches[-1].now_ms == 5_000


async def test_a_request_ends_at_its_end_though_nobody_cancels_it(client):
    client.ask((1, "/wait"), not_after_ms=20)
    await client.until(lambda: 1 in client.last())
    late = client.last()[1].error
    assert (late.code, late.sent) == (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], True)
    assert client.calls.running == 0


async def test_a_client_that_does_not_read_holds_up_its_own_answers_and_no_memory(client, monkeypatch):
    monkeypatch.setattr(request_stream, "UNSENT_BYTES_MAX", 1000)
    client.reading.clear()
    client.ask(*((n, "/n/800") for n in range(1, 101)))
    await client.until(lambda: client.calls.most > 90)
    for _ in range(50):
        await asyncio.sleep(0)
    assert client.stream._unsent_bytes < 3000
    client.reading.set()
    await client.end()
    assert len(client.last()) == 100


async def test_when_the_cache_ends_what_is_in_flight_is_answered_and_nothing_more_taken(client):
    client.ask((1, "/wait"))
    await client.until(lambda: client.calls.running == 1)
    client.stream.close()
    client.ask((2, "/n/2"))
    await asyncio.sleep(0.01)
    assert not client.serving.done()
    client.calls.release.set()
    with pytest.raises(StreamClosing):
        await client.serving
    assert sorted(client.last()) == [1]


async def test_a_client_that_has_left_ends_what_it_asked(client):
    client.ask((1, "/wait"))
    await client.until(lambda: client.calls.running == 1)
    client.serving.cancel()
    await asyncio.gather(client.serving, return_exceptions=True)
    assert client.calls.running == 0
