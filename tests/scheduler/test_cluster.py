"""The scheduler's view of the cluster, against a cache that speaks real gRPC."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from torpor.cache.v1 import cache_pb2 as pb
from torpor.cache.v1.cache_pb2_grpc import ResourceCacheServicer, add_ResourceCacheServicer_to_server
from torpor_scheduler.assignments import Assignment
from torpor_scheduler.cluster import Cluster
from torpor_services.channels import open_channel
from torpor_services.clock import ManualClock
from torpor_services.health import Readiness
from torpor_services.security import Identity, TlsFiles
from torpor_services.server import ServerConfig, serving

OPERATORS, LEASES = 1, 2
Event = pb.Event


def operator(name, version, host="", epoch=0):
    obj = {"metadata": {"name": name, "namespace": "ns", "uid": f"u-{name}", "resourceVersion": str(version)}}
    obj["status"] = {"host": host, "epoch": epoch, "phase": "Cold"}
    return json.dumps(obj).encode()


def event(type, subscription=OPERATORS, name="", body=b"", **fields):
    key = pb.ObjectKey(namespace="ns", name=name)
    made = Event(type=type, key=key, object=body, **fields)
    return pb.WatchBatch(deliveries=[pb.Delivery(targets=[pb.Target(subscriptions=[subscription])], event=made)])


class Cache(ResourceCacheServicer):
    """Sends what a test puts in `streams[n]` on the n-th Watch; answers requests with `answer`."""

    def __init__(self):
        self.streams = [asyncio.Queue() for _ in range(3)]
        self.subscribed, self.credits, self.requests, self.opened = [], [], [], 0
        self.answer = (200, b"")

    async def Watch(self, request_iterator, context):
        stream = self.streams[self.opened]
        self.opened += 1
        reader = asyncio.create_task(self._read(request_iterator))
        while (batch := await stream.get()) is not None:
            yield batch
        reader.cancel()

    async def _read(self, requests):
        async for request in requests:
            if request.HasField("subscribe"):
                self.subscribed.append(request.subscribe)
            else:
                self.credits.append(request.credit)

    async def Request(self, request, context):
        self.requests.append(request)
        status, body = self.answer
        yield pb.HttpResponse(head=pb.Head(status=status))
        yield pb.HttpResponse(body=body)


@asynccontextmanager
async def cluster(tmp_path, clock):
    cache, changed = Cache(), asyncio.Queue()
    async with serving(
        ServerConfig(listen=f"unix:{tmp_path}/c", drain_s=0),
        add=lambda server: add_ResourceCacheServicer_to_server(cache, server),
        names=[],
        readiness=Readiness(),
        handle_signals=False,
    ) as server:
        async with open_channel(server.address, Identity("scheduler", "s"), TlsFiles()) as channel:
            subject = Cluster(channel, "torpor-system", clock, on_change=lambda: changed.put_nowait(None))
            running = asyncio.create_task(subject.run())
            yield subject, cache, changed
            running.cancel()
            for stream in cache.streams:
                stream.put_nowait(None)


async def until_changed(changed):
    await asyncio.wait_for(changed.get(), 5)


async def test_a_snapshot_is_whole_only_when_the_cache_says_so(tmp_path):
    async with cluster(tmp_path, ManualClock()) as (subject, cache, changed):
        cache.streams[0].put_nowait(event(Event.ADDED, name="a", body=operator("a", 5, "h", 3)))
        await until_changed(changed)
        assert not subject.synced
        cache.streams[0].put_nowait(event(Event.SYNCED))
        await until_changed(changed)
        assert subject.synced and subject.operators["ns", "a"].epoch == 3
        assert [s.resource.resource for s in cache.subscribed] == ["wasmoperators", "leases"]
        assert cache.subscribed[1].namespace == "torpor-system"


async def test_what_vanished_while_the_stream_was_broken_is_forgotten(tmp_path):
    clock = ManualClock()
    async with cluster(tmp_path, clock) as (subject, cache, changed):
        for name in ("a", "b"):
            cache.streams[0].put_nowait(event(Event.ADDED, name=name, body=operator(name, 5)))
            await until_changed(changed)
        cache.streams[0].put_nowait(None)
        cache.streams[1].put_nowait(event(Event.ADDED, name="b", body=operator("b", 5)))
        cache.streams[1].put_nowait(event(Event.SYNCED))
        while not subject.synced:
            await clock.advance(1)
            await asyncio.sleep(0.01)
        assert list(subject.operators) == [("ns", "b")]


async def test_a_refused_subscription_is_tried_again(tmp_path):
    clock = ManualClock()
    async with cluster(tmp_path, clock) as (subject, cache, _):
        cache.streams[0].put_nowait(event(Event.ERROR, error=pb.Error(status=b'{"code":404}', final=True)))
        cache.streams[1].put_nowait(event(Event.SYNCED))
        while not subject.synced:
            await clock.advance(1)
            await asyncio.sleep(0.01)
        assert cache.opened == 2


async def test_an_older_version_never_replaces_a_newer_one(tmp_path):
    async with cluster(tmp_path, ManualClock()) as (subject, cache, changed):
        cache.streams[0].put_nowait(event(Event.ADDED, name="a", body=operator("a", 10, "h", 3)))
        cache.streams[0].put_nowait(event(Event.MODIFIED, name="a", body=operator("a", 9, "old", 2)))
        cache.streams[0].put_nowait(event(Event.MODIFIED, name="b", body=b"{broken"))
        cache.streams[0].put_nowait(event(Event.SYNCED))
        await until_changed(changed)
        await until_changed(changed)
        assert subject.operators["ns", "a"].host == "h" and len(subject.operators) == 1


async def test_credit_is_given_back_as_it_is_used(tmp_path):
    async with cluster(tmp_path, ManualClock()) as (_, cache, changed):
        for version in range(1, 2050):
            cache.streams[0].put_nowait(event(Event.MODIFIED, name="a", body=operator("a", version)))
        cache.streams[0].put_nowait(event(Event.SYNCED))
        await until_changed(changed)
        await until_changed(changed)
        for _ in range(500):  # it goes out on a stream of its own accord
            given = sum(credit.events for credit in cache.credits if credit.subscription == OPERATORS)
            if given >= 2048:
                break
            await asyncio.sleep(0.01)
        assert given == 2048


async def test_an_assignment_is_written_only_over_the_version_that_was_seen(tmp_path):
    async with cluster(tmp_path, ManualClock()) as (subject, cache, changed):
        cache.streams[0].put_nowait(event(Event.ADDED, name="a", body=operator("a", 5)))
        await until_changed(changed)
        seen = subject.operators["ns", "a"]
        cache.answer = (200, operator("a", 6, "h", 1))
        assert await subject.write(Assignment(seen, "h", 1))
        body = json.loads(cache.requests[0].body)
        assert body["metadata"] == {"resourceVersion": "5", "uid": "u-a"}
        assert body["status"] == {"host": "h", "epoch": 1}
        assert cache.requests[0].path.endswith("/namespaces/ns/wasmoperators/a/status")
        assert subject.operators["ns", "a"].resource_version == "6"
        cache.answer = (409, b"{}")
        assert not await subject.write(Assignment(seen, "h", 1))


@pytest.mark.parametrize(("renewals", "expired"), [([0.0], True), ([0.0, 20.0], False)])
async def test_a_lease_runs_from_when_its_renewal_was_seen(tmp_path, renewals, expired):
    clock = ManualClock()
    async with cluster(tmp_path, clock) as (subject, cache, changed):
        for at_s in renewals:
            await clock.advance(at_s)
            spec = {"holderIdentity": "h", "leaseDurationSeconds": 15, "renewTime": f"t{at_s}"}
            lease = event(Event.MODIFIED, LEASES, "torpor-host-h1", json.dumps({"spec": spec}).encode())
            cache.streams[0].put_nowait(lease)
            cache.streams[0].put_nowait(event(Event.SYNCED))
            await until_changed(changed)
        await clock.advance(26 - sum(renewals))
        assert subject.leases["h1"].expired(clock.monotonic_s()) is expired
