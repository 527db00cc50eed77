"""A client that stops reading costs a bounded memory and nobody else any time; over a real gRPC connection.

Input: 50,000 updates of 200 objects of 2 KB, 100 MB in all.
"""

import asyncio
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from torpor.cache.v1 import cache_pb2, cache_pb2_grpc
from torpor_cache.access import Account, Verdict
from torpor_cache.config import AccessLimits, StreamLimits
from torpor_cache.fanout import Feed
from torpor_cache.history import HistoryLimits
from torpor_cache.identity import Subject
from torpor_cache.servicer import CacheServicer
from torpor_cache.streams import StreamParts
from torpor_cache.testing_client import CacheClient
from torpor_cache.testing_informer import FakeInformer
from torpor_services.channels import open_channel
from torpor_services.clock import SystemClock
from torpor_services.security import Identity, TlsFiles

UPDATES = 50_000
KEYS = 200
PAD = {"x": "y" * 1_800}


class Everyone:
    """Identities and Access of a world without secrets."""

    async def resolve(self, peer, caller):
        return Subject(Account("ns", "op"), str(peer), "test")

    async def may(self, question):
        return Verdict(True)

    review = may


class OneFeed:
    def __init__(self, feed):
        self.feed = feed

    async def scope_for(self, scope):
        return scope, ""

    def join(self, member, scope, reason):
        self.feed.expect(member)
        return self.feed

    def __iter__(self):
        return iter([self.feed])


@pytest.fixture
async def served(tmp_path):
    """(informer, address, feed, servicer)"""
    clock = SystemClock()
    informer = FakeInformer(clock, limits=HistoryLimits(bytes_max=4 * 1024 * 1024))
    feed = Feed(informer, clock)
    informer.attach(feed)
    everyone = Everyone()
    positions = SimpleNamespace(expect=lambda _: None)
    one = OneFeed(feed)
    parts = StreamParts(one, one, everyone, everyone, None, positions, clock, StreamLimits(), AccessLimits())
    servicer = CacheServicer(parts, SimpleNamespace(history_id="h1"), one, everyone, None)
    server = grpc.aio.server()
    servicer.add_to(server)
    address = f"unix:{tmp_path}/s.sock"
    server.add_insecure_port(address)
    await server.start()
    yield informer, address, feed, servicer
    await server.stop(0)


def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


async def open_and_never_read(address):
    """A stream that subscribes and reads nothing but what gRPC takes on its own."""
    channel = open_channel(address, Identity("host", "stalled"), TlsFiles())
    call = cache_pb2_grpc.ResourceCacheStub(channel).Watch(None)
    kind = cache_pb2.Resource(version="v1", resource="configmaps")
    subscribe = cache_pb2.Subscribe(
        subscription=1, resource=kind, payload=cache_pb2.PAYLOAD_FULL, initial_credit=10_000_000
    )
    await call.write(cache_pb2.WatchRequest(subscribe=subscribe))
    return channel, call


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.01)


async def storm(informer, updates, newest, between=lambda: None):
    for number in range(updates):
        change = informer.put(f"n{number % KEYS}", annotations=PAD)
        newest[change.key.name] = change.resource_version
        if number % 20 == 0:
            between()
            await asyncio.sleep(0)


def take(received, versions):
    """Notes the newest version of each object, and lets go of the events."""
    for each in received:
        version = int(each.event.object.split(b'"resourceVersion":"')[1].split(b'"')[0])
        assert version >= versions.get(each.key[1], 0)
        versions[each.key[1]] = version
    received.clear()


async def test_50000_updates_to_a_stalled_stream_leave_memory_flat_and_its_neighbour_unharmed(served):
    informer, address, feed, servicer = served
    newest = {}
    await storm(informer, KEYS, newest)
    channel, call = await open_and_never_read(address)
    async with CacheClient(address, Identity("host", "b")) as neighbour:
        await neighbour.subscribe(1, "v1/configmaps", payload=cache_pb2.PAYLOAD_FULL, initial_credit=10_000_000)
        await neighbour.until_synced(1)
        await until(lambda: len(feed) == 2)
        # The first fifth fills what gRPC and the kernel take before a write waits, and history's first window.
        await storm(informer, UPDATES // 5, newest)
        (stalled,) = [s for s in servicer._streams if s.peer.name == "stalled"]
        assert stalled.stats().lag_s > 0
        received, versions = neighbour.events[1], {}
        received.clear()
        before_mb = resident_mb()
        await storm(informer, UPDATES * 4 // 5, newest, lambda: take(received, versions))
        waiting = stalled.stats()
        assert waiting.queued <= KEYS
        assert waiting.coalesced > UPDATES // 4
        await until(lambda: take(received, versions) or versions == newest)
        grown_mb = resident_mb() - before_mb
        assert grown_mb < 24, f"memory grew by {grown_mb:.0f} MB while 80 MB of updates passed"
    call.cancel()
    await channel.close(None)


async def test_a_stalled_stream_does_not_delay_its_neighbour(served):
    informer, address, feed, _ = served
    channel, call = await open_and_never_read(address)
    async with CacheClient(address, Identity("host", "b")) as neighbour:
        await neighbour.subscribe(1, "v1/configmaps", initial_credit=10_000_000)
        await neighbour.until_synced(1)
        await until(lambda: len(feed) == 2)
        await storm(informer, 10_000, {})
        await until(lambda: neighbour.events[1][-1].key[1] == f"n{9_999 % KEYS}")
        delays_ms = []
        for number in range(200):
            began_s = time.monotonic()
            before = len(neighbour.events[1])
            informer.put(f"n{number % KEYS}", annotations=PAD)
            await neighbour.until(1, lambda got, before=before: len(got) > before)
            delays_ms.append((time.monotonic() - began_s) * 1e3)
        assert sorted(delays_ms)[len(delays_ms) * 99 // 100] < 100
    call.cancel()
    await channel.close(None)
