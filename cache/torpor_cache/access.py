"""What an account may: SubjectAccessReviews, remembered for a bounded time.

A granted right is believed for `allowed_s` (60 s), a refused one for `denied_s` (10 s), both forgotten when Roles or
bindings are seen to change. One review of a question is in flight at a time, whoever asks; a granted answer that is
still asked for is renewed at three quarters of its time, off the path of the reader. Live watches are reviewed again by
their owner, as often as `allowed_s`. Groups are spelled out: the API server adds none to a review.

Without an answer nothing is allowed: `ReviewFailed`, to be tried again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec
from torpor_services.clock import Clock
from torpor_services.errors import TorporError

from torpor_cache.apiserver import ApiServer, ApiUnavailable
from torpor_cache.config import AccessLimits
from torpor_cache.resources import Resource
from torpor_cache.selectors import FieldSelector

REVIEW_TIMEOUT_S = 10.0
_PATH = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class ReviewFailed(TorporError):
    """The API server gave no answer about a right; ask again after `retry_after_s`."""

    retry_after_s = 1.0


@dataclass(frozen=True, slots=True)
class Account:
    """A ServiceAccount, as the API server's authorizers see it."""

    namespace: str
    name: str

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.name}"

    @property
    def groups(self) -> tuple[str, ...]:
        return ("system:serviceaccounts", f"system:serviceaccounts:{self.namespace}", "system:authenticated")

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Question:
    """May the account do this? Selectors are the asker's own, canonical."""

    account: Account
    verb: str
    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    label_selector: str = ""
    field_selector: str = ""

    @classmethod
    def about_collection(
        cls, account: Account, verb: str, resource: Resource, namespace: str, labels: str, fields: FieldSelector
    ) -> Question:
        """A list or watch. With `metadata.name=` it is about that one name, as the API server sees it."""
        name = fields.required("metadata.name") or ""
        return cls(account, verb, resource, namespace, name, "", labels, str(fields))

    def review(self) -> bytes:
        attributes: dict[str, Any] = {
            "verb": self.verb,
            "group": self.resource.group,
            "version": self.resource.version,
            "resource": self.resource.resource,
            "namespace": self.namespace,
            "name": self.name,
            "subresource": self.subresource,
        }
        if self.label_selector:
            attributes["labelSelector"] = {"rawSelector": self.label_selector}
        if self.field_selector:
            attributes["fieldSelector"] = {"rawSelector": self.field_selector}
        return msgspec.json.encode(
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": self.account.user,
                    "groups": self.account.groups,
                    "resourceAttributes": {key: value for key, value in attributes.items() if value != ""},
                },
            }
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, with the authorizer's reason for a refusal (often empty). All that allow are one."""

    allowed: bool
    reason: str = ""


ALLOWED = Verdict(True)


class _Status(msgspec.Struct):
    allowed: bool = False
    denied: bool = False
    reason: str = ""


class _Review(msgspec.Struct):
    status: _Status = msgspec.field(default_factory=_Status)


_review = msgspec.json.Decoder(_Review)


@dataclass(slots=True)
class _Answer:
    verdict: Verdict
    renew_s: float
    expires_s: float


class Access:
    """Answers questions about rights. `close` ends what is in flight."""

    def __init__(self, api: ApiServer, clock: Clock, limits: AccessLimits | None = None) -> None:
        self._api = api
        self._clock = clock
        self._limits = limits or AccessLimits()
        # Overflow: the oldest answers go, and are asked for again.
        self._answers: OrderedDict[Question, _Answer] = OrderedDict()
        self._in_flight: dict[Question, asyncio.Task[Verdict]] = {}
        self._generation = 0
        self._slots = asyncio.Semaphore(self._limits.reviews_max)
        self.reviews = 0

    async def may(self, question: Question) -> Verdict:
        """From memory where known, else from the API server. Raises ReviewFailed."""
        answer = self._answers.get(question)
        now_s = self._clock.monotonic_s()
        if answer is not None and now_s < answer.expires_s:
            if now_s >= answer.renew_s:
                answer.renew_s = answer.expires_s  # once is enough
                self._ask(question)
            return answer.verdict
        return await asyncio.shield(self._ask(question))

    async def review(self, question: Question) -> Verdict:
        """From the API server, whatever is known: for live watches. Raises ReviewFailed."""
        return await asyncio.shield(self._ask(question))

    def forget(self) -> None:
        """Roles or bindings have changed: nothing that was answered before, or is being asked now, is believed."""
        self._answers.clear()
        self._in_flight.clear()
        self._generation += 1

    async def close(self) -> None:
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ask(self, question: Question) -> asyncio.Task[Verdict]:
        task = self._in_flight.get(question)
        if task is None:
            task = asyncio.create_task(self._fetch(question, self._generation))
            self._in_flight[question] = task
            task.add_done_callback(lambda done: self._done(question, done))
        return task

    def _done(self, question: Question, task: asyncio.Task[Verdict]) -> None:
        if self._in_flight.get(question) is task:
            del self._in_flight[question]
        if not task.cancelled():
            task.exception()  # a renewal that failed is nobody's error: the answer expires and is asked for again

    async def _fetch(self, question: Question, generation: int) -> Verdict:
        async with self._slots:
            self.reviews += 1
            try:
                reply = await self._api.request(
                    "POST",
                    _PATH,
                    headers={"Content-Type": "application/json", "Accept": "application/json"},
                    body=question.review(),
                    timeout_s=REVIEW_TIMEOUT_S,
                )
            except ApiUnavailable as exc:
                raise ReviewFailed(f"the rights of {question.account} cannot be checked: {exc}") from exc
        if reply.status not in (200, 201):
            message = reply.kubernetes_status().get("message", "")
            raise ReviewFailed(
                f"the rights of {question.account} cannot be checked ({reply.status}: {message}); "
                "the cache's own account needs `create` on subjectaccessreviews"
            )
        try:
            status = _review.decode(reply.body).status
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise ReviewFailed(f"the rights of {question.account} cannot be checked: no SubjectAccessReview") from exc
        is_allowed = status.allowed and not status.denied
        verdict = ALLOWED if is_allowed else Verdict(False, status.reason)
        if generation == self._generation:
            self._remember(question, verdict)
        return verdict

    def _remember(self, question: Question, verdict: Verdict) -> None:
        now_s = self._clock.monotonic_s()
        believed_s = self._limits.allowed_s if verdict.allowed else self._limits.denied_s
        renew_s = now_s + believed_s * (0.75 if verdict.allowed else 1.0)
        self._answers[question] = _Answer(verdict, renew_s, now_s + believed_s)
        self._answers.move_to_end(question)
        self._drop_expired(now_s)
        while len(self._answers) > self._limits.entries_max:
            self._answers.popitem(last=False)

    def _drop_expired(self, now_s: float) -> None:
        """From the oldest on: an operator that sleeps asks nothing, and its answers need not stay."""
        while next(iter(self._answers.values())).expires_s <= now_s:
            self._answers.popitem(last=False)
