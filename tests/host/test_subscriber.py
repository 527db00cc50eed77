"""The one stream to the cache, against a cache that speaks the real protocol as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest_asyncio
from torpor.cache.v1 import cache_pb2, cache_pb2_grpc
from torpor_host.known_objects import KnownSet, ObjectTable
from torpor_host.subscriber import Event, Subscriber, Subscription, describe_status
from torpor_host.timers import Timers
from torpor_host.work_queue import Key
from torpor_services.clock import SystemClock

WAIT_S = 10.0


class FakeCache(cache_pb2_grpc.ResourceCacheServicer):
    """Records what it is asked; sends what is put into `answers`."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[cache_pb2.WatchRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[cache_pb2.WatchBatch | None] = asyncio.Queue()
        self.streams = 0

    async def Watch(self, request_iterator: Any, context: Any) -> AsyncIterator[cache_pb2.WatchBatch]:
        self.streams += 1

        async def read() -> None:
            async for request in request_iterator:
                await self.requests.put(request)

        reader = asyncio.create_task(read())
        try:
            while (batch := await self.answers.get()) is not None:
                yield batch
        finally:
            reader.cancel()

    async def next(self, kind: str) -> Any:
        while True:
            request = await asyncio.wait_for(self.requests.get(), WAIT_S)
            if request.WhichOneof("request") == kind:
                return getattr(request, kind)

    def send(self, subscription: int, kind: int, *, name: str = "", version: int = 0, **event: Any) -> None:
        """An event of one object, whose key is also the key to reconcile."""
        keys = [cache_pb2.ObjectKey(namespace="ns", name=name)] if name else []
        message = Event(
            type=kind,  # type: ignore[arg-type]
            key=keys[0] if keys else None,
            uid=f"uid-{name}",
            position=cache_pb2.Position(history="h", resource_version=str(version)),
            **event,
        )
        target = cache_pb2.Target(subscriptions=[subscription], keys=keys)
        delivery = cache_pb2.Delivery(targets=[target], event=message)
        self.answers.put_nowait(cache_pb2.WatchBatch(deliveries=[delivery]))


class Owner:
    """Remembers what it is told; `oldest` is what it says it has not reconciled."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[str] = asyncio.Queue()
        self.known = KnownSet(ObjectTable())
        self.oldest = 0
        self.sequences: list[int] = []
        self.subscriptions: tuple[Subscription, ...] = ()

    def subscribe_request(self, subscription: Subscription) -> cache_pb2.Subscribe:
        return cache_pb2.Subscribe(resource=cache_pb2.Resource(version="v1", resource="secrets"))

    def known_objects(self, subscription: Subscription) -> Iterable[tuple[Key, str]]:
        return self.known

    def on_event(self, subscription: Subscription, keys: Sequence[Key], event: Event, sequence: int) -> None:
        self.known.add(Key(event.key.namespace, event.key.name), event.uid)
        self.sequences.append(sequence)
        self.told.put_nowait(",".join(key.name for key in keys))

    def on_synced(self, subscription: Subscription) -> None:
        self.told.put_nowait("synced")

    def on_resync(self, subscription: Subscription, sequence: int) -> None:
        self.told.put_nowait("resync")

    def on_error(self, subscription: Subscription, status: bytes, final: bool) -> None:
        self.told.put_nowait(f"error {describe_status(status)[0]} {final}")

    def oldest_sequence(self) -> int:
        return self.oldest

    def owned_subscriptions(self) -> Sequence[Subscription]:
        return self.subscriptions

    async def next(self) -> str:
        return await asyncio.wait_for(self.told.get(), WAIT_S)


class Bench:
    def __init__(self, cache: FakeCache, subscriber: Subscriber) -> None:
        self.cache, self.subscriber = cache, subscriber
        self.owner = Owner()

    def subscribe(self, name: str = "for") -> Subscription:
        subscription = self.subscriber.subscribe(self.owner, name)
        self.owner.subscriptions = (*self.owner.subscriptions, subscription)
        return subscription


@asynccontextmanager
async def _running(cache: FakeCache) -> AsyncIterator[Bench]:
    server = grpc.aio.server()
    cache_pb2_grpc.add_ResourceCacheServicer_to_server(cache, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    clock = SystemClock()
    timers = Timers(clock)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        subscriber = Subscriber(channel, clock, timers)
        tasks = [asyncio.create_task(run()) for run in (subscriber.run, subscriber.run_acks, timers.run)]
        yield Bench(cache, subscriber)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    cache.answers.put_nowait(None)
    await server.stop(0)


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    async with _running(FakeCache()) as bench:
        yield bench


async def test_a_new_subscription_takes_over_and_acknowledges_only_what_is_reconciled(bench: Bench) -> None:
    subscription = bench.subscribe()
    asked = await bench.cache.next("subscribe")
    assert asked.resume.from_acknowledged and asked.name == "for" and asked.initial_credit == 1024
    bench.cache.send(subscription.id, Event.ADDED, name="a")
    assert await bench.owner.next() == "a"
    bench.owner.oldest = bench.owner.sequences[0]
    bench.cache.send(subscription.id, Event.SYNCED, version=10)
    assert await bench.owner.next() == "synced"
    bench.subscriber.collect_acks()
    assert not bench.subscriber._acks, "the snapshot's key is not reconciled"
    bench.owner.oldest = 0
    bench.subscriber.progressed(bench.owner)
    ack = await bench.cache.next("ack")
    assert (ack.subscription, ack.position.resource_version, ack.position.history) == (subscription.id, "10", "h")


async def test_after_a_broken_stream_it_resumes_by_position_and_tells_what_it_knows(bench: Bench) -> None:
    subscription = bench.subscribe()
    await bench.cache.next("subscribe")
    bench.cache.send(subscription.id, Event.ADDED, name="a")
    bench.cache.send(subscription.id, Event.SYNCED, version=10)
    bench.cache.send(subscription.id, Event.MODIFIED, name="b", version=12)
    for expected in ("a", "synced", "b"):
        assert await bench.owner.next() == expected
    bench.cache.answers.put_nowait(None)
    asked = await bench.cache.next("subscribe")
    assert bench.cache.streams == 2
    assert asked.resume.position.resource_version == "12" and not asked.resume.from_acknowledged
    assert [(k.key.name, k.uid) for k in asked.resume.known] == [("a", "uid-a"), ("b", "uid-b")]


async def test_a_stream_that_broke_within_the_snapshot_begins_anew_and_doubts_what_it_knows(bench: Bench) -> None:
    subscription = bench.subscribe()
    await bench.cache.next("subscribe")
    bench.cache.send(subscription.id, Event.ADDED, name="a")
    assert await bench.owner.next() == "a"
    bench.cache.answers.put_nowait(None)
    asked = await bench.cache.next("subscribe")
    assert asked.resume.from_acknowledged and not asked.resume.HasField("position")
    assert await bench.owner.next() == "resync"


async def test_a_resync_voids_the_position(bench: Bench) -> None:
    subscription = bench.subscribe()
    bench.cache.send(subscription.id, Event.SYNCED, version=10)
    assert await bench.owner.next() == "synced"
    bench.cache.send(subscription.id, Event.RESYNC)
    assert await bench.owner.next() == "resync"
    assert subscription.progress.position is None


async def test_credit_is_given_back_as_events_are_read(bench: Bench) -> None:
    subscription = bench.subscribe()
    for i in range(600):
        bench.cache.send(subscription.id, Event.ADDED, name=f"o{i}")
    credit = await bench.cache.next("credit")
    assert (credit.subscription, credit.events) == (subscription.id, 512)


async def test_one_failed_subscription_leaves_the_other_alone_and_is_tried_again(bench: Bench) -> None:
    failing, other = bench.subscribe("for"), bench.subscribe("owns/0")
    first = {(await bench.cache.next("subscribe")).subscription for _ in range(2)}
    assert first == {failing.id, other.id}
    before = failing.id
    status = b'{"kind": "Status", "reason": "Forbidden", "message": "no"}'
    error = cache_pb2.Error(status=status, final=True)
    bench.cache.send(failing.id, Event.ERROR, error=error)
    assert await bench.owner.next() == "error Forbidden True"
    bench.cache.send(other.id, Event.ADDED, name="x")
    assert await bench.owner.next() == "x"
    again = await bench.cache.next("subscribe")
    assert again.name == "for" and again.subscription not in {before, other.id}


async def test_nothing_is_delivered_after_unsubscribing(bench: Bench) -> None:
    subscription = bench.subscribe()
    await bench.cache.next("subscribe")
    bench.subscriber.unsubscribe(subscription)
    other = bench.subscribe("owns/0")
    assert (await bench.cache.next("unsubscribe")).subscription == subscription.id
    bench.cache.send(subscription.id, Event.ADDED, name="late")
    bench.cache.send(other.id, Event.ADDED, name="mine")
    assert await bench.owner.next() == "mine"


async def test_an_event_of_an_unknown_type_is_passed_over(bench: Bench) -> None:
    subscription = bench.subscribe()
    bench.cache.send(subscription.id, 99)
    bench.cache.send(subscription.id, Event.ADDED, name="next")
    assert await bench.owner.next() == "next"


def test_a_status_that_cannot_be_read_is_still_an_error() -> None:
    assert describe_status(b"\xff")[0] == "Failed"
    assert describe_status(b"[]")[0] == "Failed"
    assert describe_status(b"[" * 100_000)[0] == "Failed", "nested too deeply"
    assert describe_status(b'{"reason": "Expired", "message": "too old"}') == ("Expired", "too old")


async def test_a_watch_that_goes_on_after_an_error_is_live_again(bench: Bench) -> None:
    subscription = bench.subscribe()
    bench.cache.send(subscription.id, Event.SYNCED, version=10)
    bench.cache.send(subscription.id, Event.ERROR, error=cache_pb2.Error(status=b"{}", final=False))
    bench.cache.send(subscription.id, Event.BOOKMARK, version=11)
    told = [await bench.owner.next() for _ in range(3)]
    assert told == ["synced", "error Failed False", "synced"] and not subscription.failed


async def test_an_owner_that_fails_costs_its_own_subscription_alone(bench: Bench) -> None:
    failing, other = bench.subscribe("for"), bench.subscribe("owns/0")
    taken_in = bench.owner.on_event

    def fail(subscription: Subscription, keys: Sequence[Key], event: Event, sequence: int) -> None:
        if subscription is failing:
            raise RuntimeError("a bug")
        taken_in(subscription, keys, event, sequence)

    bench.owner.on_event = fail  # type: ignore[method-assign]
    bench.cache.send(failing.id, Event.ADDED, name="a")
    bench.cache.send(other.id, Event.ADDED, name="b")
    assert [await bench.owner.next() for _ in range(2)] == ["error InternalError True", "b"]


async def test_every_subscription_is_asked_for_again_however_soon_the_next_stream_begins(bench: Bench) -> None:
    """gRPC goes on asking the ended stream's generator, which must not take what is the next stream's."""
    for number in range(4):
        bench.subscribe(f"owns/{number}")
    bench.subscriber._backoff.next_delay_s = lambda: 0.05  # type: ignore[method-assign]
    for _ in range(3):
        assert sorted([(await bench.cache.next("subscribe")).name for _ in range(4)]) == [f"owns/{n}" for n in range(4)]
        bench.cache.answers.put_nowait(None)
