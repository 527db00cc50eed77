"""A Subscribe message of the contract, read and checked: what it means, or the Status that refuses it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torpor.cache.v1 import cache_pb2
from torpor_services.errors import TorporError

from torpor_cache.fanout import Afresh, After, KnownObjects
from torpor_cache.fields import OF_METADATA
from torpor_cache.identity import Caller
from torpor_cache.informers import WatchScope
from torpor_cache.kinds import Kinds
from torpor_cache.mapping import AnnotationMapping, CodeMapping, LabelMapping, Mapping, OwnerMapping, SelfMapping
from torpor_cache.objects import Change
from torpor_cache.predicates import Predicate
from torpor_cache.resources import (
    NO_VERSION,
    InvalidResource,
    InvalidResourceVersion,
    ObjectKey,
    Position,
    Resource,
    parse_resource_version,
)
from torpor_cache.selectors import FieldSelector, InvalidSelector, LabelSelector
from torpor_cache.statuses import not_built, status_json
from torpor_cache.subscriptions import CREDIT_DEFAULT, SELF_MAPPINGS, Filter, Payload

_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
NAME_LENGTH_MAX = 253

_PREDICATES = {
    cache_pb2.PREDICATE_GENERATION: Predicate.GENERATION,
    cache_pb2.PREDICATE_LABELS: Predicate.LABELS,
    cache_pb2.PREDICATE_ANNOTATIONS: Predicate.ANNOTATIONS,
    cache_pb2.PREDICATE_DELETION: Predicate.DELETION,
}
_PAYLOADS = {
    cache_pb2.PAYLOAD_UNSPECIFIED: Payload.KEY,
    cache_pb2.PAYLOAD_KEY: Payload.KEY,
    cache_pb2.PAYLOAD_METADATA: Payload.METADATA,
    cache_pb2.PAYLOAD_FULL: Payload.FULL,
}


class RefusedSubscription(TorporError):
    """The subscription cannot be; `status` says why, as JSON."""

    def __init__(self, status: bytes) -> None:
        super().__init__(status.decode())
        self.status = status


class InvalidCaller(TorporError, ValueError):
    """A caller that names no operator."""


@dataclass(frozen=True, slots=True)
class TakeoverAsked:
    """The client begins as a new holder of its operator."""


@dataclass(frozen=True, slots=True)
class OwnerAsked:
    """An OwnerMapping whose kind is not looked up yet."""

    owner: Resource
    any_owner: bool
    cluster_scoped: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client subscribes to."""

    caller: Caller | None
    name: str
    scope: WatchScope
    labels: LabelSelector
    fields: FieldSelector
    predicates: tuple[Predicate, ...]
    mappings: tuple[Mapping | OwnerAsked, ...]
    payload: Payload
    resume: Afresh | After | TakeoverAsked
    credit: int

    async def filter_on(self, scope: WatchScope, kinds: Kinds) -> Filter:
        """The filter behind a watch of `scope`; raises UnknownResource, ApiUnavailable."""
        # What the watch selects already, perhaps by fields that only the API server can judge, is not selected again.
        return Filter(
            namespace="" if scope.namespace == self.scope.namespace else self.scope.namespace,
            labels=LabelSelector() if scope.label_selector == str(self.labels) else self.labels,
            fields=FieldSelector() if scope.field_selector == str(self.fields) else self.fields,
            predicates=self.predicates,
            mappings=await _resolved(self.mappings, kinds),
        )

    def may_concern(self, change: Change) -> bool:
        """Whether a deletion that any watch of the kind has told may be of this scope, as far as metadata shows it."""
        if self.scope.namespace not in ("", change.key.namespace):
            return False
        old = change.old
        if old is None:
            return True
        if self.labels and not self.labels.matches(old.labels):
            return False
        paths = self.fields.paths
        return not paths or not paths <= OF_METADATA or self.fields.matches(old.fields(paths))


def read_caller(message: cache_pb2.Caller) -> Caller:
    """Raises InvalidCaller."""
    for what, value in (("namespace", message.namespace), ("name", message.name)):
        if not _DNS_NAME.fullmatch(value):
            raise InvalidCaller(f"the caller's {what} {value[:80]!r} is none of Kubernetes")
    return Caller(message.namespace, message.name, message.host, message.epoch)


def read_subscribe(message: cache_pb2.Subscribe) -> Wanted:
    """Raises RefusedSubscription."""
    try:
        resource = read_resource(message.resource)
        labels = LabelSelector.parse(message.label_selector)
        fields = FieldSelector.parse(message.field_selector)
        caller = read_caller(message.caller) if message.HasField("caller") else None
        resume = _resume(message.resume) if message.HasField("resume") else Afresh()
    except (InvalidResource, InvalidSelector, InvalidCaller, InvalidResourceVersion) as exc:
        raise _bad(str(exc)) from exc
    if message.namespace and not _DNS_NAME.fullmatch(message.namespace):
        raise _bad(f"{message.namespace[:80]!r} is no namespace")
    if len(message.name) > NAME_LENGTH_MAX:
        raise _bad(f"a subscription's name has at most {NAME_LENGTH_MAX} characters")
    if message.payload not in _PAYLOADS:
        raise _bad(f"payload {message.payload} is not known")
    for mapping in message.mappings:
        _check_mapping(mapping)
    return Wanted(
        caller=caller,
        name=message.name,
        scope=WatchScope(resource, message.namespace, str(labels), str(fields)),
        labels=labels,
        fields=fields,
        predicates=_predicates(message),
        mappings=tuple(map(_asked, message.mappings)) or SELF_MAPPINGS,
        payload=_PAYLOADS[message.payload],
        resume=resume,
        credit=message.initial_credit or CREDIT_DEFAULT,
    )


def read_resource(message: cache_pb2.Resource) -> Resource:
    """Raises InvalidResource."""
    return Resource.checked(message.group, message.version, message.resource)


def read_position(message: cache_pb2.Position) -> Position | None:
    """None for no position (empty or 0); raises InvalidResourceVersion."""
    if message.resource_version in ("", "0"):
        return None
    return Position(message.history, parse_resource_version(message.resource_version))


def _resume(message: cache_pb2.Resume) -> Afresh | After | TakeoverAsked:
    if message.from_acknowledged:
        return TakeoverAsked()
    if not message.HasField("position"):
        return Afresh()
    known: KnownObjects = [(ObjectKey(k.key.namespace, k.key.name), k.uid) for k in message.known]
    # A client without a position has one all the same if it says so: it is told RESYNC, and what is gone.
    return After(read_position(message.position) or Position(message.position.history, NO_VERSION), known)


def _predicates(message: cache_pb2.Subscribe) -> tuple[Predicate, ...]:
    if cache_pb2.PREDICATE_NOT_OWN_WRITE in message.predicates:
        raise RefusedSubscription(not_built("the predicate NOT_OWN_WRITE"))
    unknown = [predicate for predicate in message.predicates if predicate not in _PREDICATES]
    if unknown:
        raise _bad(f"predicate {unknown[0]} is not known")
    return tuple(dict.fromkeys(_PREDICATES[predicate] for predicate in message.predicates))


def _check_mapping(mapping: cache_pb2.Mapping) -> None:
    match mapping.WhichOneof("mapping"):
        case "tree":
            raise RefusedSubscription(not_built("the mapping `tree`"))
        case "self" | "code":
            if not getattr(mapping, mapping.WhichOneof("mapping") or ""):
                raise _bad("a mapping that is false maps to nothing: leave it out")
        case "owner":
            owner = mapping.owner.owner
            if not _DNS_NAME.fullmatch(owner.resource) or (owner.group and not _DNS_NAME.fullmatch(owner.group)):
                raise _bad(f"{owner.group[:80]}/{owner.resource[:80]} is no resource that could own")
            if owner.version and not _DNS_NAME.fullmatch(owner.version):
                raise _bad(f"{owner.version[:80]!r} is no version")
        case "label" | "annotation":
            if not (mapping.label or mapping.annotation):
                raise _bad("a mapping by label or annotation needs its key")
        case _:
            raise _bad("a mapping is empty, or of a kind that this cache does not know")


def _asked(mapping: cache_pb2.Mapping) -> Mapping | OwnerAsked:
    # A value of our own: a part of a message keeps the memory of the whole message.
    match mapping.WhichOneof("mapping"):
        case "owner":
            owner = mapping.owner.owner
            resource = Resource(owner.group, owner.version, owner.resource)
            return OwnerAsked(resource, mapping.owner.any_owner, mapping.owner.cluster_scoped)
        case "label":
            return LabelMapping(mapping.label)
        case "annotation":
            return AnnotationMapping(mapping.annotation)
        case "code":
            return CodeMapping()
        case _:
            return SelfMapping()


async def _resolved(mappings: tuple[Mapping | OwnerAsked, ...], kinds: Kinds) -> tuple[Mapping, ...]:
    found: list[Mapping] = []
    for mapping in mappings:
        if isinstance(mapping, OwnerAsked):
            kind = await kinds.kind_of(mapping.owner)
            found.append(OwnerMapping(mapping.owner.group, kind, mapping.any_owner, mapping.cluster_scoped))
        else:
            found.append(mapping)
    return SELF_MAPPINGS if tuple(found) == SELF_MAPPINGS else tuple(found)


def _bad(message: str) -> RefusedSubscription:
    return RefusedSubscription(status_json(400, "BadRequest", message))
