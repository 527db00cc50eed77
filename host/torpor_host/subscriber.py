"""The one Watch stream to the cache that carries every subscription of this host.

It is opened again whenever it breaks, and each subscription resumes from the position it had received, telling what it
knows, so that a snapshot after too long an absence also tells what is gone. A subscription whose snapshot was not
complete starts anew as a holder that takes over (from the acknowledged position).

Nothing here blocks: events become dirty keys at once (so credit is given back as they are read), what is sent coalesces
to the latest acknowledgement and the sum of credits per subscription. Acknowledgements go out together, every 200 ms or
once 100 operators have made progress. A subscription that the cache ended (ERROR, final) is tried again with back-off.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

import grpc
import grpc.aio
from torpor.cache.v1 import cache_pb2, cache_pb2_grpc
from torpor_services.backoff import Backoff
from torpor_services.clock import Clock
from torpor_services.errors import one_line

from torpor_host.positions import Progress
from torpor_host.timers import Timer, Timers, first_of
from torpor_host.work_queue import Key

log = logging.getLogger(__name__)

ACK_EVERY_S = 0.2
ACK_OWNERS_MAX = 100
_CREDIT = 1024
_KNOWN_MAX = 100_000  # beyond this a resume carries no list (16 MiB a message) and every key is run instead
_RETRY_FINAL_S = (2.0, 30.0)

Event = cache_pb2.Event
_SIGNS_OF_LIFE = frozenset({Event.ADDED, Event.MODIFIED, Event.DELETED, Event.BOOKMARK})
_OWN_FAILURE = cache_pb2.Error(
    status=b'{"reason": "InternalError", "message": "the host could not take an event in; see its log"}', final=True
)


class SubscriptionOwner(Protocol):
    """Whose keys a subscription makes dirty. All calls on the loop; none may block or raise."""

    def subscribe_request(self, subscription: Subscription) -> cache_pb2.Subscribe:
        """What to ask for; id, resume and credit are filled in."""

    def known_objects(self, subscription: Subscription) -> Iterable[tuple[Key, str]]:
        """(key, uid) of what this subscription knows."""

    def on_event(self, subscription: Subscription, keys: Sequence[Key], event: Event, sequence: int) -> None: ...

    def on_synced(self, subscription: Subscription) -> None: ...

    def on_resync(self, subscription: Subscription, sequence: int) -> None:
        """What is known may be wrong: run everything. A snapshot follows."""

    def on_error(self, subscription: Subscription, status: bytes, final: bool) -> None: ...

    def oldest_sequence(self) -> int:
        """The lowest sequence that is not reconciled; 0 if none."""

    def owned_subscriptions(self) -> Sequence[Subscription]: ...


class Subscription:
    """One of an owner's. `name` is what it is called across reconnects and hosts; empty: nothing is acknowledged."""

    __slots__ = ("_begun", "_errors", "_retry", "_spent", "failed", "id", "name", "owner", "progress")

    def __init__(self, subscription_id: int, name: str, owner: SubscriptionOwner) -> None:
        self.id = subscription_id
        self.name = name
        self.owner = owner
        self.progress = Progress()
        self.failed = False
        self._begun = False
        self._spent = 0
        self._errors = 0
        self._retry: Timer | None = None


class Subscriber:
    """`run` is the stream's task, `run_acks` the acknowledgements'."""

    def __init__(self, channel: grpc.aio.Channel, clock: Clock, timers: Timers) -> None:
        self._stub = cache_pb2_grpc.ResourceCacheStub(channel)
        self._clock = clock
        self._timers = timers
        self._backoff = Backoff(clock, initial_s=0.2, max_s=5.0)
        self._ids = itertools.count(1)
        self._sequences = itertools.count(1)
        self._subscriptions: dict[int, Subscription] = {}
        self._outgoing: deque[cache_pb2.WatchRequest] = deque()
        self._acks: dict[int, cache_pb2.Position] = {}
        self._credits: dict[int, int] = {}
        self._progressed: dict[int, SubscriptionOwner] = {}
        self._wake_writer = asyncio.Event()
        self._streams = 0  # that have ended
        self._wake_acks = asyncio.Event()
        self._full = asyncio.Event()
        self._connected = False
        self.on_connection: Callable[[bool], None] = lambda connected: None

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def subscriptions(self) -> int:
        return len(self._subscriptions)

    # -- what owners do ----------------------------------------------------------------------------------------------

    def subscribe(self, owner: SubscriptionOwner, name: str) -> Subscription:
        """Begins a subscription; its events follow."""
        subscription = Subscription(next(self._ids), name, owner)
        self._subscriptions[subscription.id] = subscription
        if self._connected:
            self._send_subscribe(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Nothing of it is delivered any more, from this moment."""
        if self._subscriptions.pop(subscription.id, None) is None:
            return
        self._timers.cancel(subscription._retry)
        self._acks.pop(subscription.id, None)
        self._credits.pop(subscription.id, None)
        if self._connected:
            self._send(cache_pb2.WatchRequest(unsubscribe=cache_pb2.Unsubscribe(subscription=subscription.id)))

    def progressed(self, owner: SubscriptionOwner) -> None:
        """Something of the owner's was reconciled: its positions may have moved."""
        self._progressed[id(owner)] = owner
        self._wake_acks.set()
        if len(self._progressed) >= ACK_OWNERS_MAX:
            self._full.set()

    # -- tasks -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the stream, until cancelled."""
        while True:
            try:
                await self._stream()
                problem = "the cache ended the stream"
            except grpc.aio.AioRpcError as exc:
                problem = f"{exc.code().name}: {exc.details()}"
            finally:
                self._disconnected()
            delay_s = self._backoff.next_delay_s()
            log.warning("watch stream to the cache broke: %s", problem, extra={"retry_in_s": round(delay_s, 2)})
            await self._clock.sleep(delay_s)

    async def run_acks(self) -> None:
        """Sends acknowledgements together, until cancelled."""
        while True:
            await self._wake_acks.wait()
            self._full.clear()
            await first_of(self._clock.sleep(ACK_EVERY_S), self._full.wait())
            self._wake_acks.clear()
            self.collect_acks()

    async def flush(self, timeout_s: float) -> None:
        """Sends what can be acknowledged now and waits until it is written, at most `timeout_s`."""
        self.collect_acks()
        deadline_s = self._clock.monotonic_s() + timeout_s
        while self._connected and (self._acks or self._outgoing) and self._clock.monotonic_s() < deadline_s:
            await self._clock.sleep(0.01)
        await self._clock.sleep(0.02)  # from the generator to the wire

    def collect_acks(self) -> None:
        progressed, self._progressed = self._progressed, {}
        for owner in progressed.values():
            oldest = owner.oldest_sequence()
            for subscription in owner.owned_subscriptions():
                if not subscription.name:
                    continue
                position = subscription.progress.acknowledge(oldest)
                if position is not None and subscription.id in self._subscriptions:
                    self._acks[subscription.id] = position
        if self._acks:
            self._wake_writer.set()

    # -- the stream --------------------------------------------------------------------------------------------------

    async def _stream(self) -> None:
        call = self._stub.Watch(self._requests())
        self._connected = True
        for subscription in self._subscriptions.values():
            if subscription._retry is None:
                self._send_subscribe(subscription)
        heard = False
        try:
            async for batch in call:
                if not heard:
                    heard = True
                    self._backoff.succeeded()
                    self.on_connection(True)
                for delivery in batch.deliveries:
                    self._deliver(delivery)
        finally:
            call.cancel()
            # gRPC goes on asking the generator of a stream that the other end has ended: it must take nothing more.
            self._streams += 1
            self._wake_writer.set()

    def _disconnected(self) -> None:
        self._connected = False
        self._outgoing.clear()
        self._acks.clear()
        self._credits.clear()
        for subscription in self._subscriptions.values():
            subscription._spent = 0
            subscription.progress.repeat_acknowledgement()
            self._progressed[id(subscription.owner)] = subscription.owner
        self._wake_acks.set()
        self.on_connection(False)

    async def _requests(self) -> AsyncIterator[cache_pb2.WatchRequest]:
        """Of one stream; ends with it."""
        mine = self._streams
        while mine == self._streams:
            while self._outgoing:
                yield self._outgoing.popleft()
            while self._acks:
                number, position = self._acks.popitem()
                yield cache_pb2.WatchRequest(ack=cache_pb2.Ack(subscription=number, position=position))
            while self._credits:
                number, events = self._credits.popitem()
                yield cache_pb2.WatchRequest(credit=cache_pb2.Credit(subscription=number, events=events))
            self._wake_writer.clear()
            if not (self._outgoing or self._acks or self._credits):
                await self._wake_writer.wait()

    def _send(self, request: cache_pb2.WatchRequest) -> None:
        self._outgoing.append(request)
        self._wake_writer.set()

    def _send_subscribe(self, subscription: Subscription) -> None:
        request = subscription.owner.subscribe_request(subscription)
        request.subscription = subscription.id
        request.name = subscription.name
        request.initial_credit = _CREDIT
        position = subscription.progress.position
        if position is not None:
            request.resume.position.CopyFrom(position)
            for count, (key, uid) in enumerate(subscription.owner.known_objects(subscription)):
                if count == _KNOWN_MAX:
                    request.resume.ClearField("known")
                    subscription.owner.on_resync(subscription, next(self._sequences))
                    break
                request.resume.known.add(key=cache_pb2.ObjectKey(namespace=key.namespace, name=key.name), uid=uid)
        else:
            if subscription._begun:  # a part of a snapshot is known, and may be out of date
                subscription.owner.on_resync(subscription, next(self._sequences))
            subscription.progress.restart()
            request.resume.from_acknowledged = bool(subscription.name)
        subscription._begun = True
        self._send(cache_pb2.WatchRequest(subscribe=request))

    def _deliver(self, delivery: cache_pb2.Delivery) -> None:
        event = delivery.event
        sequence = next(self._sequences)
        for target in delivery.targets:
            keys = [Key(key.namespace, key.name) for key in target.keys]
            for number in target.subscriptions:
                subscription = self._subscriptions.get(number)
                if subscription is None:
                    continue
                try:
                    self._deliver_to(subscription, keys, event, sequence)
                except Exception:
                    # Its event is not lost: the subscription begins anew, from what was acknowledged.
                    log.exception("an event could not be taken in", extra={"subscription": subscription.name})
                    subscription.progress.restart()
                    self._failed(subscription, _OWN_FAILURE)

    def _deliver_to(self, subscription: Subscription, keys: Sequence[Key], event: Event, sequence: int) -> None:
        owner, progress = subscription.owner, subscription.progress
        if subscription.failed and progress.synced and event.type in _SIGNS_OF_LIFE:
            subscription.failed = False
            owner.on_synced(subscription)
        match event.type:
            case Event.ADDED | Event.MODIFIED | Event.DELETED:
                owner.on_event(subscription, keys, event, sequence)
                if progress.synced:
                    progress.advance(sequence, event.position)
                self._spend(subscription)
            case Event.BOOKMARK:
                if progress.synced:
                    progress.advance(sequence, event.position)
                    self.progressed(owner)
            case Event.SYNCED:
                progress.complete(sequence, event.position)
                subscription.failed, subscription._errors = False, 0
                owner.on_synced(subscription)
                self.progressed(owner)
            case Event.RESYNC:
                progress.restart()
                owner.on_resync(subscription, sequence)
            case Event.ERROR:
                self._failed(subscription, event.error)
            case _:
                log.warning("the cache sent an event of a type unknown here: %s", event.type)

    def _spend(self, subscription: Subscription) -> None:
        subscription._spent += 1
        if subscription._spent >= _CREDIT // 2:
            self._credits[subscription.id] = self._credits.get(subscription.id, 0) + subscription._spent
            subscription._spent = 0
            self._wake_writer.set()

    def _failed(self, subscription: Subscription, error: cache_pb2.Error) -> None:
        subscription.failed = True
        subscription.owner.on_error(subscription, error.status, error.final)
        if error.final and subscription._retry is None and subscription.id in self._subscriptions:
            first_s, longest_s = _RETRY_FINAL_S
            delay_s = min(first_s * 2.0 ** min(subscription._errors, 10), longest_s)
            subscription._errors += 1
            subscription._retry = self._timers.after(delay_s, self._retry_failed, subscription)

    def _retry_failed(self, subscription: Subscription) -> None:
        subscription._retry = None
        if self._subscriptions.get(subscription.id) is not subscription:
            return
        # A new number: what the cache still says about the old one is about the past.
        del self._subscriptions[subscription.id]
        subscription.id = next(self._ids)
        subscription._spent = 0
        self._subscriptions[subscription.id] = subscription
        if self._connected:
            self._send_subscribe(subscription)


def describe_status(status: bytes) -> tuple[str, str]:
    """(reason, message) of a Kubernetes Status, however broken."""
    import msgspec

    try:
        decoded = msgspec.json.decode(status)
        return str(decoded.get("reason") or decoded.get("code") or "Failed"), str(decoded.get("message") or "")
    except (msgspec.DecodeError, RecursionError, AttributeError) as exc:
        return "Failed", f"the cache sent no readable status: {one_line(exc)}"
