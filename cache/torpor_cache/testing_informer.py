"""An informer without an API server, for tests of what hangs on informers.

It keeps the order that a real one keeps: store, history and position show a change before the listeners hear of it,
and versions grow.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torpor.cache.v1 import cache_pb2
from torpor_services.clock import Clock, ManualClock

from torpor_cache.fanout import Afresh, Feed, Member, Resume, StreamQueue
from torpor_cache.history import History, HistoryLimits
from torpor_cache.informers import InformerState, Listener, NotFresh, WatchScope
from torpor_cache.objects import Change, ChangeType, StoredObject, parse_object
from torpor_cache.resources import NO_VERSION, ObjectKey, Position, Resource, ResourceVersion
from torpor_cache.store import Store
from torpor_cache.subscriptions import Filter, Subscription
from torpor_cache.testing_client import Received, told

CONFIG_MAPS = Resource("", "v1", "configmaps")


def make_object(
    name: str,
    version: int,
    *,
    namespace: str = "ns",
    uid: str = "",
    labels: Mapping[str, str] | None = None,
    owner: str = "",
    **metadata: Any,
) -> StoredObject:
    """A ConfigMap. `owner` is the name of its controller, a Database; `metadata` is as Kubernetes writes it."""
    owners = [
        {"apiVersion": "example.com/v1", "kind": "Database", "name": owner, "uid": f"uid-{owner}", "controller": True}
    ]
    body = {
        "kind": "ConfigMap",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"uid-{name}",
            "resourceVersion": str(version),
            **({"labels": dict(labels)} if labels else {}),
            **({"ownerReferences": owners} if owner else {}),
            **metadata,
        },
        "data": {"version": str(version)},
    }
    return parse_object(msgspec.json.encode(body))


class LocalStream:
    """A client's stream without a client: `take` is what the writer would send."""

    def __init__(self, feed: Feed, **limits: int) -> None:
        self.feed = feed
        self.queue = StreamQueue(**limits)
        self.members: dict[int, Member] = {}
        self.batches: list[cache_pb2.WatchBatch] = []

    def subscribe(
        self, number: int, wanted: Filter | None = None, *, resume: Resume | None = None, **fields: Any
    ) -> Member:
        subscription = Subscription(number, wanted or Filter(), **fields)
        member = self.members[number] = Member(subscription, self.queue)
        self.feed.begin(member, resume or Afresh())
        return member

    def credit(self, number: int, events: int) -> None:
        member = self.members[number]
        member.subscription.credit += events
        member.ready()

    def take_batch(self) -> dict[int, list[Received]]:
        """The next batch, by subscription."""
        batch = cache_pb2.WatchBatch.FromString(self.queue.build())
        self.batches.append(batch)
        got: dict[int, list[Received]] = {}
        for delivery in batch.deliveries:
            for number, received in told(delivery):
                got.setdefault(number, []).append(received)
        return got

    def take(self) -> dict[int, list[Received]]:
        """All batches until there is nothing to send."""
        got: dict[int, list[Received]] = {}
        while part := self.take_batch():
            for number, received in part.items():
                got.setdefault(number, []).extend(received)
        return got


class FakeInformer:
    """`put` and `delete` are the API server's; what they return is the change that listeners were told."""

    def __init__(
        self,
        clock: Clock | None = None,
        scope: WatchScope | None = None,
        history_id: str = "h1",
        limits: HistoryLimits | None = None,
    ) -> None:
        self.scope = scope or WatchScope(CONFIG_MAPS)
        self.store = Store()
        self.history = History(clock or ManualClock(), limits)
        self.history.begin(ResourceVersion(1))
        self.position = Position(history_id, ResourceVersion(1))
        self.state = InformerState.SYNCED
        self.synced = True
        self.error = b""
        self.kind, self.list_kind = "ConfigMap", "ConfigMapList"
        self.events = self.relists = 0
        self.reason = "the first watch of this kind"
        self._listeners: list[Listener] = []
        self._versions = itertools.count(2)

    def attach(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def detach(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    def tell_memory(self) -> None:
        """There is none."""

    async def wait_caught_up(self) -> None:
        """It always is."""

    async def wait_synced(self, timeout_s: float) -> None:
        """It always is."""

    async def wait_at_least(self, version: ResourceVersion, timeout_s: float) -> None:
        if self.position.resource_version < version:
            raise NotFresh(self.scope, version, self.position.resource_version)

    def put(self, name: str, *, namespace: str = "ns", traceparent: str = "", **fields: Any) -> Change:
        version = next(self._versions)
        new = make_object(name, version, namespace=namespace, **fields)
        old = self.store.get(new.key)
        if old is not None and old.uid != new.uid:
            self.delete(name, namespace=namespace)
            return self.put(name, namespace=namespace, traceparent=traceparent, **fields)
        self.store.put(new)
        kind = ChangeType.ADDED if old is None else ChangeType.MODIFIED
        return self._tell(kind, new.key, new.uid, version, old, new, traceparent)

    def delete(self, name: str, *, namespace: str = "ns", traceparent: str = "") -> Change:
        key = ObjectKey(namespace, name)
        old = self.store.remove(key)
        assert old is not None, f"{key} is there"
        return self._tell(ChangeType.DELETED, key, old.uid, next(self._versions), old, None, traceparent)

    def pass_by(self, versions: int = 1) -> None:
        """Other objects of the cluster change."""
        for _ in range(versions):
            self._advance(next(self._versions))

    def begin_history(self, history_id: str, objects: Sequence[StoredObject] = ()) -> None:
        """Another history: everything is replaced."""
        self.store = Store()
        self.synced = False
        self.position = Position(history_id, NO_VERSION)
        for listener in self._listeners:
            listener.on_resync()
        for item in objects:
            self.store.put(item)
        version = ResourceVersion(max((item.resource_version for item in objects), default=1))
        self.history.begin(version)
        self._versions = itertools.count(version + 1)
        self.position = Position(history_id, version)
        self.synced = True
        for listener in self._listeners:
            listener.on_synced()

    def _tell(
        self,
        kind: ChangeType,
        key: ObjectKey,
        uid: str,
        version: int,
        old: StoredObject | None,
        new: StoredObject | None,
        traceparent: str,
    ) -> Change:
        change = Change(kind, key, uid, ResourceVersion(version), old, new, False, 1_000 + version, traceparent)
        self.history.append(change)
        self._advance(version)
        self.events += 1
        for listener in tuple(self._listeners):
            listener.on_change(change)
        for item in (old, new):
            if item is not None:
                item.drop_parsed()
        return change

    def _advance(self, version: int) -> None:
        self.history.advance(ResourceVersion(version))
        self.position = Position(self.position.history, ResourceVersion(version))
