"""One client's Watch stream: its subscriptions from request to end, its reader and its writer.

The reader never waits: each subscription is set up by a task of its own, which goes on trying while the API server or
an answer about rights is missing, and tells so by errors that are not final. A subscription fails alone; only a client
that breaks the protocol ends the stream (`ProtocolBroken`). Rights and the assignment of the operator are checked again
while the subscription lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from torpor.cache.v1 import cache_pb2
from torpor_services.backoff import Backoff
from torpor_services.clock import Clock
from torpor_services.errors import TorporError, one_line
from torpor_services.security import Identity

from torpor_cache.access import Access, Question, ReviewFailed
from torpor_cache.apiserver import ApiUnavailable
from torpor_cache.breadth import Breadths
from torpor_cache.config import AccessLimits, StreamLimits
from torpor_cache.fanout import Afresh, After, Feed, Member, Resume, StreamQueue, Takeover
from torpor_cache.feeds import Feeds
from torpor_cache.identity import AnotherEpoch, Identities, IdentityUnknown, NotAllowedHere, Subject
from torpor_cache.informers import InformerState, NotFresh, NotSynced
from torpor_cache.kinds import Kinds, UnknownResource
from torpor_cache.positions import Positions
from torpor_cache.resources import InvalidResourceVersion, ObjectKey
from torpor_cache.selectors import InvalidSelector
from torpor_cache.statuses import forbidden, status_json
from torpor_cache.subscribing import (
    RefusedSubscription,
    TakeoverAsked,
    Wanted,
    read_position,
    read_subscribe,
)
from torpor_cache.subscriptions import State, Subscription

log = logging.getLogger(__name__)

SYNC_WAIT_S = 30.0  # after which a subscriber is told that its kind is not listed yet; it goes on waiting
FRESH_WAIT_S = 3.0  # the same for a position that is ahead of the cache
REFUSED_PAUSE_S = 1.0  # how soon a kind that is served again is shown to those who waited
CREDIT_MAX = 2**31
_BEGUN = Afresh()  # in place of what a client resumed from, which may name all that it knows

Result = TypeVar("Result")
Write = Callable[[bytes], Awaitable[None]]  # waits while the client does not read; raises ClientGone


class ProtocolBroken(TorporError):
    """The client said something that has no meaning; the stream ends."""


@dataclass(frozen=True, slots=True)
class StreamParts:
    """What streams stand on."""

    feeds: Feeds
    breadths: Breadths
    identities: Identities
    access: Access
    kinds: Kinds
    positions: Positions
    clock: Clock
    limits: StreamLimits
    access_limits: AccessLimits


class ClientGone(TorporError):
    """Nobody receives any more."""


class ShuttingDown(TorporError):
    """The cache is about to end; clients resume by position elsewhere."""


class _Session:
    """One subscription of the stream, from request to end."""

    __slots__ = ("member", "operator", "questions", "subject", "task", "wanted")

    def __init__(self, member: Member, wanted: Wanted, operator: str) -> None:
        self.member = member
        self.wanted = wanted
        self.operator = operator
        self.subject: Subject | None = None
        self.questions: tuple[Question, ...] = ()  # about its rights, once the subject is known
        self.task: asyncio.Task[None] | None = None


class WatchStream:
    """`await stream.run(requests, write)` serves until it raises: ProtocolBroken, ClientGone or ShuttingDown."""

    def __init__(self, parts: StreamParts, peer: Identity | None, address: str = "") -> None:
        self.peer = peer
        self.address = address
        self.queue = StreamQueue(events_max=parts.limits.batch_events, bytes_max=parts.limits.batch_bytes)
        self._parts = parts
        self._sessions: dict[int, _Session] = {}
        self._ended_sent = 0
        self._ended_coalesced = 0
        self._writing_since_s: float | None = None
        self._recheck_now = asyncio.Event()
        self._closing = asyncio.Event()

    async def run(self, requests: AsyncIterator[cache_pb2.WatchRequest], write: Write) -> None:
        """A client that ends its requests goes on receiving until it cancels."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write(write))
                group.create_task(self._recheck_forever())
                group.create_task(self._end_on_close())
                await self._read(requests, group)
        except BaseExceptionGroup as failed:
            told = failed.subgroup((ProtocolBroken, ClientGone, ShuttingDown))
            if told is None:
                raise
            raise _first(told) from None
        finally:
            for session in tuple(self._sessions.values()):
                self._drop(session)

    def close(self) -> None:
        """Ends the stream soon, with ShuttingDown."""
        self._closing.set()

    async def _end_on_close(self) -> None:
        await self._closing.wait()
        raise ShuttingDown("the cache is shutting down; resume by position")

    # ---- reading

    async def _read(self, requests: AsyncIterator[cache_pb2.WatchRequest], group: asyncio.TaskGroup) -> None:
        async for request in requests:
            match request.WhichOneof("request"):
                case "subscribe":
                    self._subscribe(request.subscribe, group)
                case "ack":
                    self._ack(request.ack)
                case "credit":
                    self._credit(request.credit)
                case "unsubscribe":
                    if (session := self._sessions.get(request.unsubscribe.subscription)) is not None:
                        self._drop(session)
                case _:
                    raise ProtocolBroken("a WatchRequest without a request that this cache knows")

    def _subscribe(self, message: cache_pb2.Subscribe, group: asyncio.TaskGroup) -> None:
        number = message.subscription
        if number == 0:
            raise ProtocolBroken("subscription 0: the client chooses numbers from 1")
        if number in self._sessions:
            raise ProtocolBroken(f"subscription {number} lives already; unsubscribe it first")
        if len(self._sessions) >= self._parts.limits.subscriptions_max:
            raise ProtocolBroken(f"more than {self._parts.limits.subscriptions_max} subscriptions on one stream")
        subscription = Subscription(number, pending_max=self._parts.limits.pending_max)
        member = Member(subscription, self.queue, on_ended=self._ended)
        try:
            wanted = read_subscribe(message)
        except RefusedSubscription as exc:
            # Never a session: its number is free again at once, and nothing but this error is sent.
            member.fail(exc.status, final=True)
            return
        subscription.payload = wanted.payload
        subscription.credit = wanted.credit
        operator = str(wanted.caller.operator) if wanted.caller is not None else str(self.peer)
        session = self._sessions[number] = _Session(member, wanted, operator)
        session.task = group.create_task(self._set_up(session))

    def _ack(self, ack: cache_pb2.Ack) -> None:
        session = self._sessions.get(ack.subscription)
        if session is None or not session.wanted.name or session.member.subscription.state is State.WAITING:
            return  # it ended meanwhile, or keeps no positions
        try:
            position = read_position(ack.position)
        except InvalidResourceVersion as exc:
            raise ProtocolBroken(f"acknowledged position of subscription {ack.subscription}: {exc}") from exc
        if position is not None:
            resource = session.wanted.scope.resource
            self._parts.positions.acknowledge(session.operator, session.wanted.name, resource, position)

    def _credit(self, credit: cache_pb2.Credit) -> None:
        session = self._sessions.get(credit.subscription)
        if session is not None:
            subscription = session.member.subscription
            subscription.credit = min(subscription.credit + credit.events, CREDIT_MAX)
            session.member.ready()

    # ---- setting up

    async def _set_up(self, session: _Session) -> None:
        member = session.member
        try:
            session.subject, session.questions = await self._until(member, lambda: self._admit(session))
            scope = session.wanted.scope
            if session.wanted.name:
                self._parts.positions.expect(scope.resource)  # before the watch, so that it misses no deletion
            watched, reason = await self._until(member, lambda: self._parts.breadths.scope_for(scope))
            feed = self._parts.feeds.join(member, watched, reason)
            if session.wanted.name:
                feed.informer.tell_memory()
            if feed.informer.error:
                member.fail(feed.informer.error, final=False)
            member.subscription.filter = await self._until(
                member, lambda: session.wanted.filter_on(feed.informer.scope, self._parts.kinds)
            )
            await self._wait_synced(member, feed)
            await self._wait_position(session, feed)
            if isinstance(session.wanted.resume, TakeoverAsked):
                await feed.informer.wait_caught_up()
                await self._wait_synced(member, feed)  # another history may have begun meanwhile
            if member.subscription.state is State.WAITING:
                feed.begin(member, self._resume(session, feed))
                session.wanted = replace(session.wanted, resume=_BEGUN)
        except RefusedSubscription as exc:
            member.fail(exc.status, final=True)
        except (UnknownResource, InvalidSelector) as exc:
            code, reason = (404, "NotFound") if isinstance(exc, UnknownResource) else (400, "BadRequest")
            member.fail(status_json(code, reason, str(exc)), final=True)
        except Exception as exc:
            log.exception("a subscription failed", extra={"operator": session.operator})
            message = f"the subscription failed in the cache: {type(exc).__name__}: {one_line(exc, 200)}"
            member.fail(status_json(500, "InternalError", message), final=True)
        finally:
            session.task = None

    async def _admit(self, session: _Session) -> tuple[Subject, tuple[Question, ...]]:
        """Identity, and the questions that were answered yes; RefusedSubscription, or what `_until` tries again."""
        try:
            subject = await self._parts.identities.resolve(self.peer, session.wanted.caller)
        except AnotherEpoch as exc:
            raise RefusedSubscription(status_json(403, "AnotherEpoch", str(exc))) from exc
        except NotAllowedHere as exc:
            raise RefusedSubscription(status_json(403, "Forbidden", str(exc))) from exc
        questions = _questions(subject, session.wanted)
        for question in questions:
            await self._check(question, self._parts.access.may)
        return subject, questions

    @staticmethod
    async def _check(question: Question, ask: Callable[[Question], Awaitable[object]]) -> None:
        verdict = await ask(question)
        if not getattr(verdict, "allowed", False):
            reason = getattr(verdict, "reason", "")
            raise RefusedSubscription(
                forbidden(question.account.user, question.verb, question.resource, question.namespace, reason)
            )

    async def _until(self, member: Member, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """The attempt's result; failures that pass are told and tried again."""
        backoff = Backoff(self._parts.clock, initial_s=0.25, max_s=10.0)
        while True:
            try:
                return await attempt()
            except (IdentityUnknown, ReviewFailed, ApiUnavailable) as exc:
                member.fail(status_json(503, "ServiceUnavailable", str(exc), retry_after_s=1), final=False)
            await self._parts.clock.sleep(backoff.next_delay_s())

    async def _wait_synced(self, member: Member, feed: Feed) -> None:
        while not feed.informer.synced and member.subscription.state is State.WAITING:
            try:
                await feed.informer.wait_synced(SYNC_WAIT_S)
            except NotSynced as exc:
                told = feed.informer.error or status_json(503, "ServiceUnavailable", str(exc), retry_after_s=1)
                member.fail(told, final=False)
                # A refused kind answers at once; its informer tells of the next try.
                await self._parts.clock.sleep(exc.retry_after_s)

        while feed.informer.state is InformerState.FAILED and member.subscription.state is State.WAITING:
            # What was listed before is no answer while the kind is refused; the informer tells of each try.
            await self._parts.clock.sleep(REFUSED_PAUSE_S)

    async def _wait_position(self, session: _Session, feed: Feed) -> None:
        """Never shows a client less than it has seen: another replica may have been ahead."""
        resume = session.wanted.resume
        if not isinstance(resume, After):
            return
        member, informer = session.member, feed.informer
        while member.subscription.state is State.WAITING and resume.position.history == informer.position.history:
            if informer.position.resource_version >= resume.position.resource_version:
                return
            try:
                await informer.wait_at_least(resume.position.resource_version, FRESH_WAIT_S)
            except (NotFresh, NotSynced) as exc:
                member.fail(status_json(504, "Timeout", str(exc), retry_after_s=1), final=False)
                await self._parts.clock.sleep(exc.retry_after_s)

    def _resume(self, session: _Session, feed: Feed) -> Resume:
        wanted, positions = session.wanted, self._parts.positions
        resource = wanted.scope.resource
        if not isinstance(wanted.resume, TakeoverAsked):
            return wanted.resume
        acknowledged = positions.acknowledged(session.operator, wanted.name, resource) if wanted.name else None
        remembered = positions.deletions(resource, feed.informer.position.history, acknowledged)
        # They are of the whole kind; the feed's filter says nothing of what its watch selects anyway.
        return Takeover(acknowledged, [change for change in remembered if wanted.may_concern(change)])

    # ---- checking again

    def assignment_changed(self, operator: ObjectKey) -> None:
        """Ends what another host, or another epoch, now does."""
        for session in tuple(self._sessions.values()):
            caller = session.wanted.caller
            if caller is None or caller.operator != operator or session.subject is None:
                continue
            if not self._parts.identities.still_assigned(caller):
                message = f"{operator} is no longer assigned to host {caller.host!r} with epoch {caller.epoch}"
                session.member.fail(status_json(403, "AnotherEpoch", message), final=True)

    def recheck(self) -> None:
        """Rights may have changed."""
        self._recheck_now.set()

    async def _recheck_forever(self) -> None:
        while True:
            await self._wait_recheck()
            self._recheck_now.clear()
            verdicts: dict[object, bytes | None] = {}
            for session in tuple(self._sessions.values()):
                if session.subject is not None and session.member.subscription.state is not State.ENDED:
                    await self._recheck(session, verdicts)

    async def _wait_recheck(self) -> None:
        timer = asyncio.ensure_future(self._parts.clock.sleep(self._parts.access_limits.allowed_s))
        signal = asyncio.ensure_future(self._recheck_now.wait())
        try:
            await asyncio.wait({timer, signal}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            signal.cancel()

    async def _recheck(self, session: _Session, verdicts: dict[object, bytes | None]) -> None:
        """Each question once a round, whatever the number of subscriptions that depend on it."""
        try:
            await self._parts.identities.resolve(self.peer, session.wanted.caller)
            for question in session.questions:
                if question not in verdicts:
                    verdicts[question] = await self._verdict(question)
                if (refusal := verdicts[question]) is not None:
                    session.member.fail(refusal, final=True)
                    return
        except (AnotherEpoch, NotAllowedHere) as exc:
            session.member.fail(status_json(403, "Forbidden", str(exc)), final=True)
        except (IdentityUnknown, ReviewFailed):
            pass  # nothing is known against it; the next round asks again

    async def _verdict(self, question: Question) -> bytes | None:
        try:
            await self._check(question, self._parts.access.review)
        except RefusedSubscription as exc:
            return exc.status
        return None

    # ---- writing

    async def _write(self, write: Write) -> None:
        clock = self._parts.clock
        while True:
            await self.queue.wait()
            batch = self.queue.build()
            if not batch:
                continue
            self._writing_since_s = clock.monotonic_s()
            await write(batch)
            self._writing_since_s = None
            # Others get their turn between two batches of a long snapshot.
            await asyncio.sleep(0)

    # ---- ends and figures

    def _ended(self, member: Member) -> None:
        session = self._sessions.get(member.subscription.id)
        if session is not None and session.member is member:
            self._drop(session)

    def _drop(self, session: _Session) -> None:
        member = session.member
        if self._sessions.get(member.subscription.id) is session:
            del self._sessions[member.subscription.id]
        if session.task is not None and session.task is not asyncio.current_task():
            session.task.cancel()
        if member.feed is not None:
            member.feed.remove(member)
        member.subscription.end()
        self.queue.discard(member)
        self._ended_sent += member.subscription.sent
        self._ended_coalesced += member.subscription.coalesced

    def stats(self) -> cache_pb2.SubscriberStats:
        subscriptions = [session.member.subscription for session in self._sessions.values()]
        now_s = self._parts.clock.monotonic_s()
        # What gRPC has taken and the client has not is not seen here; a write that waits is.
        writing_s = now_s - self._writing_since_s if self._writing_since_s is not None else 0.0
        return cache_pb2.SubscriberStats(
            peer=f"{self.peer} {self.address}".strip(),
            subscriptions=len(subscriptions),
            queued=sum(len(s.pending) + len(s.remaining) for s in subscriptions),
            sent=self._ended_sent + sum(s.sent for s in subscriptions),
            coalesced=self._ended_coalesced + sum(s.coalesced for s in subscriptions),
            lag_s=max(writing_s, self.queue.lag_s(now_s)),
        )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _questions(subject: Subject, wanted: Wanted) -> tuple[Question, ...]:
    """A watch with its snapshot is a list too; both with the subscriber's own selectors."""
    scope = wanted.scope
    return tuple(
        Question.about_collection(
            subject.account, verb, scope.resource, scope.namespace, scope.label_selector, wanted.fields
        )
        for verb in ("list", "watch")
    )
