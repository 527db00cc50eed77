"""Who asks: from a connection and a Caller to the ServiceAccount that is acted as.

The cache believes only what it has read itself. An operator's account is the one that its WasmOperator names, in the
object's own namespace; the host is the one of the object's status and must be the connection's own identity; the epoch
must be the one confirmed there. A caller with a newer epoch than the watch has shown makes one live read, since an
assignment reaches its host before the watch reaches the cache. An account that does not exist would still have its
groups' rights, so it is looked up.

A peer without a Caller speaks as its role's configured account.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from torpor_services.clock import Clock
from torpor_services.errors import TorporError
from torpor_services.security import Identity

from torpor_cache.access import Account
from torpor_cache.apiserver import ApiServer, ApiUnavailable, Impersonation
from torpor_cache.config import AccessLimits, RoleAccounts
from torpor_cache.objects import Change, StoredObject
from torpor_cache.resources import ObjectKey, Position, Resource

log = logging.getLogger(__name__)

WASM_OPERATORS = Resource("torpor.dev", "v1alpha1", "wasmoperators")
LOOKUP_TIMEOUT_S = 10.0
MISSING_ACCOUNT_S = 1.0  # short: operators and their accounts are created together
LOOKUP_PAUSE_S = 1.0  # between live reads of one operator on behalf of callers that are refused


class NotAllowedHere(TorporError):
    """The peer may not act for whom it names, or is nobody we know."""


class AnotherEpoch(TorporError):
    """Another assignment of the operator is confirmed: the guest that asks must be stopped."""


class IdentityUnknown(TorporError):
    """Who asks cannot be told now; to be tried again after `retry_after_s`."""

    retry_after_s = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """What a host says on whose behalf it asks."""

    namespace: str
    name: str
    host: str
    epoch: int

    @property
    def operator(self) -> ObjectKey:
        return ObjectKey(self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a request is made as. `operator` is `namespace/name`, or `role/…` for a service that speaks for itself."""

    account: Account
    operator: str
    user_agent: str

    @property
    def impersonation(self) -> Impersonation:
        # The user alone: the API server adds the account's own groups, any group given would replace them.
        return Impersonation(self.account.user)


class _Spec(msgspec.Struct, rename="camel"):
    service_account_name: str = ""


class _Status(msgspec.Struct):
    host: str | None = ""
    epoch: int | None = 0


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = "0"


class _WasmOperator(msgspec.Struct):
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status | None = None
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


_wasm_operator = msgspec.json.Decoder(_WasmOperator)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a WasmOperator says of itself, at a version."""

    account: str
    host: str
    epoch: int
    resource_version: int

    @classmethod
    def parse(cls, json: bytes) -> Assignment | None:
        """None for an object that is none."""
        try:
            read = _wasm_operator.decode(json)
            version = int(read.metadata.resource_version)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        status = read.status or _Status()
        host = sys.intern(status.host or "")  # many operators name the same one
        return cls(read.spec.service_account_name, host, status.epoch or 0, version)


class Assignments:
    """Every WasmOperator's account, host and epoch: the listener of an informer, and newer live reads."""

    def __init__(self) -> None:
        self.synced = False
        self._known: dict[ObjectKey, Assignment] = {}
        self._observers: list[Callable[[ObjectKey], None]] = []

    def get(self, operator: ObjectKey) -> Assignment | None:
        return self._known.get(operator)

    def observe(self, observer: Callable[[ObjectKey], None]) -> None:
        """`observer` is called with each operator whose assignment has changed."""
        self._observers.append(observer)

    def learn(self, operator: ObjectKey, read: Assignment | None) -> None:
        """Takes in a live read; the watch's own word wins where it is newer."""
        known = self._known.get(operator)
        if read is not None and (known is None or known.resource_version < read.resource_version):
            self._set(operator, read)

    def load(self, objects: list[StoredObject]) -> None:
        """Replaces everything: the first list, or a new history."""
        before = set(self._known)
        self._known = {o.key: found for o in objects if (found := Assignment.parse(o.json)) is not None}
        self.synced = True
        for operator in before | set(self._known):
            self._tell(operator)

    def on_change(self, change: Change) -> None:
        known = self._known.get(change.key)
        if known is not None and known.resource_version > change.resource_version:
            return  # a live read was ahead of the watch
        if change.new is None:
            self._known.pop(change.key, None)
            self._tell(change.key)
            return
        read = Assignment.parse(change.new.json)
        if read is None:
            log.warning("a WasmOperator cannot be read", extra={"operator": str(change.key)})
            return
        self._set(change.key, read)

    def _set(self, operator: ObjectKey, read: Assignment) -> None:
        before = self._known.get(operator)
        self._known[operator] = read
        if before is None or (before.account, before.host, before.epoch) != (read.account, read.host, read.epoch):
            self._tell(operator)

    def _tell(self, operator: ObjectKey) -> None:
        for observer in self._observers:
            observer(operator)

    def on_synced(self) -> None:
        self.synced = True

    def on_bookmark(self, position: Position) -> None:
        """Nothing has changed."""

    def on_resync(self) -> None:
        self.synced = False
        self._known.clear()

    def on_error(self, status: bytes, final: bool) -> None:
        """Readiness tells of it; what is known goes on being right as far as it goes."""


class Identities:
    """Resolves peers and callers. `resolve` raises NotAllowedHere, AnotherEpoch or IdentityUnknown."""

    def __init__(
        self,
        api: ApiServer,
        assignments: Assignments,
        accounts: RoleAccounts,
        clock: Clock,
        limits: AccessLimits | None = None,
    ) -> None:
        self._api = api
        self._assignments = assignments
        self._accounts = accounts
        self._clock = clock
        self._existing = _ExistingAccounts(api, clock, limits or AccessLimits())
        self._reads: dict[ObjectKey, asyncio.Task[None]] = {}
        self._read_at_s: OrderedDict[tuple[ObjectKey, int], float] = OrderedDict()

    async def resolve(self, peer: Identity | None, caller: Caller | None) -> Subject:
        if peer is None:
            raise NotAllowedHere("the connection shows no identity: a certificate with torpor://ROLE/NAME is needed")
        subject = await self._operator(peer, caller) if caller is not None else self._service(peer)
        if not await self._existing.exists(subject.account):
            raise NotAllowedHere(
                f"the ServiceAccount {subject.account} of {subject.operator} does not exist; create it"
            )
        return subject

    def still_assigned(self, caller: Caller) -> bool:
        """Whether the caller is, as far as the watch has shown, still the one that the operator is assigned to."""
        known = self._assignments.get(caller.operator)
        return known is not None and (known.host, known.epoch) == (caller.host, caller.epoch)

    def _service(self, peer: Identity) -> Subject:
        account = self._accounts.of(peer.role)
        if account is None:
            raise NotAllowedHere(
                f"{peer} names no operator and its role has no account; set TORPOR_CACHE_ACCOUNT_{peer.role.upper()}"
            )
        return Subject(Account(*account), str(peer), f"torpor-{peer.role}/{peer.name}")

    async def _operator(self, peer: Identity, caller: Caller) -> Subject:
        if peer.role != "host" or peer.name != caller.host:
            raise NotAllowedHere(f"{peer} may not act for {caller.operator} as host {caller.host!r}")
        known = self._assignments.get(caller.operator)
        if known is None or known.epoch < caller.epoch:
            if not self._assignments.synced:
                raise IdentityUnknown("the WasmOperators are not read yet")
            await self._read_live(caller)
            known = self._assignments.get(caller.operator)
        if known is None:
            raise NotAllowedHere(f"there is no WasmOperator {caller.operator}")
        if known.host != caller.host:
            raise NotAllowedHere(f"{caller.operator} is assigned to host {known.host!r}, not to {caller.host!r}")
        if known.epoch != caller.epoch:
            raise AnotherEpoch(f"{caller.operator} is at epoch {known.epoch}, not {caller.epoch}: stop the guest")
        account = Account(caller.namespace, known.account)
        agent = f"torpor-operator/{caller.namespace}/{caller.name} host/{caller.host} epoch/{caller.epoch}"
        return Subject(account, str(caller.operator), agent)

    async def _read_live(self, caller: Caller) -> None:
        """One read for all who ask at the same time, and one a second for a caller who is wrong again and again."""
        operator = caller.operator
        task = self._reads.get(operator)
        if task is None:
            asked = (operator, caller.epoch)
            now_s = self._clock.monotonic_s()
            if now_s - self._read_at_s.get(asked, -LOOKUP_PAUSE_S) < LOOKUP_PAUSE_S:
                return
            self._read_at_s[asked] = now_s
            while len(self._read_at_s) > 10_000:
                self._read_at_s.popitem(last=False)
            task = self._reads[operator] = asyncio.create_task(self._fetch(operator))
            task.add_done_callback(lambda _: self._reads.pop(operator, None))
        await asyncio.shield(task)

    async def _fetch(self, operator: ObjectKey) -> None:
        path = WASM_OPERATORS.path(operator.namespace, operator.name)
        try:
            reply = await self._api.request(
                "GET", path, headers={"Accept": "application/json"}, timeout_s=LOOKUP_TIMEOUT_S
            )
        except ApiUnavailable as exc:
            raise IdentityUnknown(f"the WasmOperator {operator} cannot be read: {exc}") from exc
        if reply.status == 200:
            self._assignments.learn(operator, Assignment.parse(reply.body))
        elif reply.status != 404:
            raise IdentityUnknown(f"the WasmOperator {operator} cannot be read: {reply.status}")


class _ExistingAccounts:
    """Which ServiceAccounts exist, believed as long as rights are; that one is missing, for a second."""

    def __init__(self, api: ApiServer, clock: Clock, limits: AccessLimits) -> None:
        self._api = api
        self._clock = clock
        self._limits = limits
        # Overflow: the oldest answers go, and are asked for again.
        self._answers: OrderedDict[Account, tuple[bool, float]] = OrderedDict()
        self._in_flight: dict[Account, asyncio.Task[bool]] = {}

    async def exists(self, account: Account) -> bool:
        answer = self._answers.get(account)
        if answer is not None and self._clock.monotonic_s() < answer[1]:
            return answer[0]
        task = self._in_flight.get(account)
        if task is None:
            task = self._in_flight[account] = asyncio.create_task(self._fetch(account))
            task.add_done_callback(lambda _: self._in_flight.pop(account, None))
        return await asyncio.shield(task)

    async def _fetch(self, account: Account) -> bool:
        path = Resource("", "v1", "serviceaccounts").path(account.namespace, account.name)
        try:
            reply = await self._api.request(
                "GET", path, headers={"Accept": "application/json"}, timeout_s=LOOKUP_TIMEOUT_S
            )
        except ApiUnavailable as exc:
            raise IdentityUnknown(f"the ServiceAccount {account} cannot be looked up: {exc}") from exc
        if reply.status not in (200, 404):
            raise IdentityUnknown(
                f"the ServiceAccount {account} cannot be looked up ({reply.status}); "
                "the cache's own account needs `get` on serviceaccounts"
            )
        found = reply.status == 200
        believed_s = self._limits.allowed_s if found else MISSING_ACCOUNT_S
        self._answers[account] = (found, self._clock.monotonic_s() + believed_s)
        self._answers.move_to_end(account)
        while len(self._answers) > self._limits.entries_max:
            self._answers.popitem(last=False)
        return found
