"""Events and batches as bytes of the contract's messages, put together by concatenation.

A protobuf message is the concatenation of its fields, so an event is encoded once, whoever receives it, and a batch is
made by writing lengths before fragments. `tests/cache/test_fanout_encoding.py` decodes the result with the generated
classes. Encoded events are kept, up to a bound in bytes, for the next subscriber of the same change.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache

import msgspec
from torpor.cache.v1 import cache_pb2

from torpor_cache.objects import StoredObject
from torpor_cache.resources import ObjectKey
from torpor_cache.subscriptions import Emission, EventType, Payload

_DELIVERIES = b"\x0a"  # WatchBatch.deliveries = 1
_TARGETS = b"\x0a"  # Delivery.targets = 1
_NUMBERS = b"\x0a"  # Target.subscriptions = 1, packed
_EVENT = b"\x12"  # Delivery.event = 2


class _WithMetadata(msgspec.Struct):
    metadata: msgspec.Raw


_metadata_of = msgspec.json.Decoder(_WithMetadata)
_PARTIAL_HEAD = b'{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":'


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


# Lengths and numbers up to here are looked up: 100 KiB.
_SHORT_MAX = 1 << 11
_SHORT = tuple(_varint(number) for number in range(_SHORT_MAX))


def varint(number: int) -> bytes:
    """A length or number as protobuf writes it."""
    return _SHORT[number] if number < _SHORT_MAX else _varint(number)


def payload_of(subject: StoredObject, payload: Payload) -> bytes:
    """The object as JSON, as much of it as the subscription asked for."""
    match payload:
        case Payload.KEY:
            return b""
        case Payload.METADATA:
            return _PARTIAL_HEAD + bytes(_metadata_of.decode(subject.json).metadata) + b"}"
        case Payload.FULL:
            return subject.json


@lru_cache(maxsize=1024)
def encode_keys(keys: tuple[ObjectKey, ...]) -> bytes:
    """The fields `keys` of a Target; kept, since a key goes to every stream that asked for it at the same time."""
    return cache_pb2.Target(
        keys=[cache_pb2.ObjectKey(namespace=key.namespace, name=key.name) for key in keys]
    ).SerializeToString()


def encode_target(subscriptions: list[int], keys: tuple[ObjectKey, ...]) -> bytes:
    """A field `targets` of a Delivery."""
    numbers = b"".join([varint(number) for number in subscriptions])
    fields = encode_keys(keys)
    length = varint(len(numbers))
    return b"".join((_TARGETS, varint(1 + len(length) + len(numbers) + len(fields)), _NUMBERS, length, numbers, fields))


def encode_delivery(targets: bytes, event: bytes) -> bytes:
    """A field `deliveries` of a WatchBatch; `event` comes from EventEncoder."""
    length = len(targets) + len(event)
    return b"".join((_DELIVERIES, varint(length), targets, event))


class EventEncoder:
    """Encodes events once, however many subscribers they go to: they ask for one within moments of each other."""

    def __init__(self, bytes_max: int = 1024 * 1024) -> None:
        self.encoded = 0  # how often the work was really done
        self._bytes_max = bytes_max
        self._bytes = 0
        # Overflow: the least recently used go; they are encoded again if somebody still needs them.
        self._kept: OrderedDict[object, _Kept] = OrderedDict()

    def encode(self, identity: object, emission: Emission, payload: Payload, history: str) -> bytes:
        """The field `event` of a Delivery. `identity` is that of `identity_of`."""
        kept = self._kept.get(identity)
        if kept is not None:
            self._kept.move_to_end(identity)
            return kept.field
        self.encoded += 1
        event = _event(emission, payload, history).SerializeToString()
        field = b"".join((_EVENT, varint(len(event)), event))
        self._keep(identity, _Kept(emission, field))
        return field

    def forget(self) -> None:
        """Lets go of what is kept: nobody has asked for it lately."""
        self._kept.clear()
        self._bytes = 0

    def _keep(self, identity: object, kept: _Kept) -> None:
        if kept.weight > self._bytes_max // 4:
            return
        self._kept[identity] = kept
        self._bytes += kept.weight
        while self._bytes > self._bytes_max:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.weight


class _Kept:
    """An encoded event. The emission is held too: ids of its parts are in the identity and must stay theirs."""

    __slots__ = ("emission", "field", "weight")

    def __init__(self, emission: Emission, field: bytes) -> None:
        self.emission = emission
        self.field = field
        subject = _subject(emission)
        held = sum(len(part.json) for part in (subject, emission.old) if part is not None)
        self.weight = len(field) + held + 500  # bytes; 500 for the Python objects around


def identity_of(emission: Emission, payload: Payload, history: str) -> object:
    """Equal for emissions that encode to the same event."""
    return (
        id(emission.source) if emission.source is not None else emission.status,
        emission.type,
        emission.resource_version,
        payload,
        emission.traces,
        id(emission.old),
        emission.final,
        history,
    )


def _event(emission: Emission, payload: Payload, history: str) -> cache_pb2.Event:
    event = cache_pb2.Event(type=int(emission.type))  # type: ignore[arg-type]
    if emission.type is EventType.ERROR:
        event.error.status = emission.status
        event.error.final = emission.final
        return event
    event.position.history = history
    event.position.resource_version = str(emission.resource_version)
    source = emission.source
    subject = _subject(emission)
    if isinstance(source, StoredObject):
        _describe(event, source.key, source.uid, subject, payload)
    elif source is not None:
        change = source.change
        _describe(event, change.key, change.uid, subject, payload)
        event.final_state_unknown = change.final_state_unknown
        event.received_unix_ns = change.received_unix_ns
        event.traces.extend(cache_pb2.TraceContext(traceparent=trace) for trace in emission.traces)
    if emission.old is not None:
        event.old_object = payload_of(emission.old, payload)
    return event


def _subject(emission: Emission) -> StoredObject | None:
    """The object that the event shows: of a deletion the last state before it."""
    source = emission.source
    if source is None or isinstance(source, StoredObject):
        return source
    old, new = source.change.old, source.change.new
    if emission.type is EventType.DELETED:
        return old if old is not None else new
    return new if new is not None else old


def _describe(event: cache_pb2.Event, key: ObjectKey, uid: str, subject: StoredObject | None, payload: Payload) -> None:
    event.key.namespace = key.namespace
    event.key.name = key.name
    event.uid = uid
    if subject is not None and payload is not Payload.KEY:
        event.object = payload_of(subject, payload)
