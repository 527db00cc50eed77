"""The scheduler's view of the cluster, through the cache: WasmOperators, hosts' Leases, and writing assignments."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import msgspec
from torpor.cache.v1 import cache_pb2 as cache
from torpor.cache.v1.cache_pb2_grpc import ResourceCacheStub
from torpor_services.backoff import Backoff
from torpor_services.clock import Clock
from torpor_services.crd import API_VERSION, GROUP, KIND, PLURAL, VERSION
from torpor_services.errors import one_line

from torpor_scheduler.assignments import Assignment, LeaseObservation, OperatorObject
from torpor_scheduler.planner import OperatorKey

if TYPE_CHECKING:
    from torpor.cache.v1.cache_pb2_grpc import ResourceCacheAsyncStub

log = logging.getLogger(__name__)

_OPERATORS, _LEASES = 1, 2
_LEASE_PREFIX = "torpor-host-"
_CREDIT = 4096


class _Metadata(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resourceVersion: str = ""  # noqa: N815 - the API's own name
    deletionTimestamp: str | None = None  # noqa: N815


class _Status(msgspec.Struct):
    host: str = ""
    epoch: int = 0


class _Operator(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    status: _Status = msgspec.field(default_factory=_Status)


class _LeaseSpec(msgspec.Struct):
    holderIdentity: str | None = None  # noqa: N815
    leaseDurationSeconds: int | None = None  # noqa: N815
    renewTime: str | None = None  # noqa: N815


class _Lease(msgspec.Struct):
    spec: _LeaseSpec = msgspec.field(default_factory=_LeaseSpec)


_decode_operator = msgspec.json.Decoder(_Operator).decode
_decode_lease = msgspec.json.Decoder(_Lease).decode


class _SubscriptionRefused(Exception):
    """The cache cannot serve a subscription now: the definition or a right is missing. Tried again with back-off."""


class Cluster:
    """Keeps `operators` and `leases` in step with the cache and says so by `on_change`."""

    def __init__(self, channel: grpc.aio.Channel, namespace: str, clock: Clock, on_change: Callable[[], None]) -> None:
        self._channel = channel
        self._stub: ResourceCacheAsyncStub = ResourceCacheStub(channel)
        self._namespace = namespace
        self._clock = clock
        self._on_change = on_change
        self.operators: dict[OperatorKey, OperatorObject] = {}
        self.leases: dict[str, LeaseObservation] = {}
        self.synced = False
        self._seen: set[OperatorKey] | None = None  # while a snapshot is under way

    async def run(self) -> None:
        """Watches, and tries again with back-off whenever the stream ends; until cancelled."""
        backoff = Backoff(self._clock, initial_s=0.2, max_s=5.0)
        while True:
            await self._channel.channel_ready()
            self._seen = set()
            requests = _Requests(self._namespace)
            try:
                async for batch in self._stub.Watch(aiter(requests)):
                    backoff.succeeded()
                    requests.used(batch)
                    if self._apply(batch):
                        self._on_change()
            except (grpc.aio.AioRpcError, _SubscriptionRefused) as exc:
                log.warning("the watch of the cache ended", extra={"error": one_line(exc)})
            self.synced = False
            self._on_change()
            await self._clock.sleep(backoff.next_delay_s())

    async def write(self, assignment: Assignment) -> bool:
        """Writes `{host, epoch}` if the object is still as it was seen; says whether it was written."""
        operator = assignment.operator
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"resourceVersion": operator.resource_version, "uid": operator.uid},
            "status": {"host": assignment.host, "epoch": assignment.epoch},
        }
        request = cache.HttpRequest(
            method="PATCH",
            path=f"/apis/{GROUP}/{VERSION}/namespaces/{operator.key[0]}/{PLURAL}/{operator.key[1]}/status",
            content_type="application/merge-patch+json",
            accept="application/json",
            body=msgspec.json.encode(body),
        )
        try:
            status, answer = await self._send(request)
        except grpc.aio.AioRpcError as exc:
            log.warning("an assignment could not be written", extra={"operator": operator.key, "error": one_line(exc)})
            return False
        if status == 200:
            self._take_operator(answer)
            return True
        if status not in (404, 409):
            message = answer[:300].decode("utf-8", "replace")
            log.warning("an assignment was refused", extra={"operator": operator.key, "answer": message})
        return False

    async def _send(self, request: cache.HttpRequest) -> tuple[int, bytes]:
        status, body = 0, bytearray()
        async for response in self._stub.Request(request, timeout=10):
            if response.HasField("head"):
                status = response.head.status
            body += response.body
        return status, bytes(body)

    def _apply(self, batch: cache.WatchBatch) -> bool:
        changed = False
        for delivery in batch.deliveries:
            for target in delivery.targets:
                if _OPERATORS in target.subscriptions:
                    changed |= self._operator_event(delivery.event)
                if _LEASES in target.subscriptions:
                    changed |= self._lease_event(delivery.event)
        return changed

    def _operator_event(self, event: cache.Event) -> bool:
        key = (event.key.namespace, event.key.name)
        match event.type:
            case cache.Event.ADDED | cache.Event.MODIFIED:
                return self._take_operator(event.object)
            case cache.Event.DELETED:
                return self.operators.pop(key, None) is not None
            case cache.Event.RESYNC:
                self._seen = set()
            case cache.Event.SYNCED:
                if self._seen is not None:
                    self.operators = {k: v for k, v in self.operators.items() if k in self._seen}
                    self._seen = None
                self.synced = True
                return True
            case cache.Event.ERROR:
                self.synced = False
                _raise_if_final(event.error)
        return False

    def _take_operator(self, text: bytes) -> bool:
        try:
            decoded = _decode_operator(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            log.warning("a WasmOperator cannot be read", extra={"error": one_line(exc)})
            return False
        metadata = decoded.metadata
        key = (sys.intern(metadata.namespace), sys.intern(metadata.name))
        if self._seen is not None:
            self._seen.add(key)
        known = self.operators.get(key)
        new = OperatorObject(
            key,
            metadata.uid,
            metadata.resourceVersion,
            sys.intern(decoded.status.host),
            decoded.status.epoch,
            metadata.deletionTimestamp is not None,
        )
        if known is not None and known.uid == new.uid and _older(new.resource_version, known.resource_version):
            return False
        self.operators[key] = new
        # A host's own status writes move the version and nothing that placement looks at.
        return known is None or (known.host, known.epoch, known.deleting) != (new.host, new.epoch, new.deleting)

    def _lease_event(self, event: cache.Event) -> bool:
        if event.type == cache.Event.ERROR:
            _raise_if_final(event.error)
        if not event.key.name.startswith(_LEASE_PREFIX):
            return False
        host = event.key.name.removeprefix(_LEASE_PREFIX)
        if event.type not in (cache.Event.ADDED, cache.Event.MODIFIED):
            return False
        try:
            spec = _decode_lease(event.object).spec
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            log.warning("a Lease cannot be read", extra={"lease": event.key.name, "error": one_line(exc)})
            return False
        known = self.leases.get(host)
        renewed = spec.renewTime or ""
        released = not spec.holderIdentity
        if known is None or known.renew_time != renewed or released:
            duration_s = 0.0 if released else float(spec.leaseDurationSeconds or 15)
            self.leases[host] = LeaseObservation(renewed, duration_s, self._clock.monotonic_s())
        return False


def _raise_if_final(error: cache.Error) -> None:
    """Where the cache does not go on trying, a new stream does."""
    if error.final:
        raise _SubscriptionRefused(error.status[:300].decode("utf-8", "replace"))


def _older(version: str, than: str) -> bool:
    return version.isdecimal() and than.isdecimal() and int(version) < int(than)


class _Requests:
    """What is asked of the cache on one stream: two subscriptions, then credit as it is used up."""

    def __init__(self, namespace: str) -> None:
        self._used = {_OPERATORS: 0, _LEASES: 0}
        self._queue: asyncio.Queue[cache.WatchRequest] = asyncio.Queue()  # at most a credit for each subscription
        operators = cache.Resource(group=GROUP, version=VERSION, resource=PLURAL)
        leases = cache.Resource(group="coordination.k8s.io", version="v1", resource="leases")
        self._queue.put_nowait(_subscribe(_OPERATORS, operators, ""))
        self._queue.put_nowait(_subscribe(_LEASES, leases, namespace))

    def used(self, batch: cache.WatchBatch) -> None:
        """Gives back the credit that a batch has used, half a window at a time."""
        for delivery in batch.deliveries:
            for target in delivery.targets:
                for subscription in target.subscriptions:
                    self._used[subscription] += 1
        for subscription, events in self._used.items():
            if events >= _CREDIT // 2:
                self._queue.put_nowait(
                    cache.WatchRequest(credit=cache.Credit(subscription=subscription, events=events))
                )
                self._used[subscription] = 0

    async def __aiter__(self) -> AsyncIterator[cache.WatchRequest]:
        while True:
            yield await self._queue.get()


def _subscribe(subscription: int, resource: cache.Resource, namespace: str) -> cache.WatchRequest:
    return cache.WatchRequest(
        subscribe=cache.Subscribe(
            subscription=subscription,
            resource=resource,
            namespace=namespace,
            payload=cache.PAYLOAD_FULL,
            initial_credit=_CREDIT,
        )
    )
