"""Answers about rights: remembered for a bounded time, one review at a time, renewed off the reader's path."""

import asyncio

import msgspec
import pytest
from torpor_cache.access import Access, Account, Question, ReviewFailed
from torpor_cache.apiserver import ApiUnavailable, Reply
from torpor_cache.config import AccessLimits
from torpor_cache.resources import Resource
from torpor_cache.selectors import FieldSelector
from torpor_services.clock import ManualClock

SECRETS = Resource("", "v1", "secrets")
OP = Account("ns", "op")
QUESTION = Question(OP, "get", SECRETS, "ns", "s")


class Authorizer:
    """Answers reviews when `gate` is open."""

    def __init__(self):
        self.allowed = True
        self.asked = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.status = 201

    async def request(self, method, path, *, headers, body, timeout_s):
        self.asked.append(msgspec.json.decode(body)["spec"])
        allowed = self.allowed
        await self.gate.wait()
        if self.status == 0:
            raise ApiUnavailable("gone")
        return Reply(self.status, {}, msgspec.json.encode({"status": {"allowed": allowed}, "message": "why"}))


@pytest.fixture
def authorizer():
    return Authorizer()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def access(authorizer, clock):
    access = Access(authorizer, clock, AccessLimits(allowed_s=60, denied_s=10, entries_max=100))
    yield access
    await access.close()


async def test_groups_verb_name_and_selectors_are_spelled_out(access, authorizer):
    fields = FieldSelector.parse("metadata.name=s,type=Opaque")
    await access.may(Question.about_collection(OP, "watch", SECRETS, "ns", "app=x", fields))
    assert authorizer.asked == [
        {
            "user": "system:serviceaccount:ns:op",
            "groups": ["system:serviceaccounts", "system:serviceaccounts:ns", "system:authenticated"],
            "resourceAttributes": {
                "verb": "watch",
                "version": "v1",
                "resource": "secrets",
                "namespace": "ns",
                "name": "s",
                "labelSelector": {"rawSelector": "app=x"},
                "fieldSelector": {"rawSelector": "metadata.name=s,type=Opaque"},
            },
        }
    ]


async def test_a_granted_right_is_believed_for_its_time_and_no_longer(access, authorizer, clock):
    assert (await access.may(QUESTION)).allowed
    authorizer.allowed = False
    await clock.advance(44)
    assert (await access.may(QUESTION)).allowed
    await clock.advance(17)
    assert not (await access.may(QUESTION)).allowed


async def test_a_refused_right_is_asked_for_again_soon(access, authorizer, clock):
    authorizer.allowed = False
    assert not (await access.may(QUESTION)).allowed
    authorizer.allowed = True
    await clock.advance(9)
    assert not (await access.may(QUESTION)).allowed
    await clock.advance(2)
    assert (await access.may(QUESTION)).allowed


async def test_a_right_in_use_is_renewed_before_its_time_without_a_wait(access, authorizer, clock):
    await access.may(QUESTION)
    await clock.advance(50)
    authorizer.gate.clear()
    assert (await asyncio.wait_for(access.may(QUESTION), 1)).allowed
    await clock.advance(1)
    authorizer.gate.set()
    await clock.advance(20)  # past the first answer's time
    authorizer.gate.clear()
    assert (await asyncio.wait_for(access.may(QUESTION), 1)).allowed
    assert len(authorizer.asked) == 2


async def test_many_who_ask_at_once_make_one_review(access, authorizer):
    verdicts = await asyncio.gather(*(access.may(QUESTION) for _ in range(50)))
    assert all(verdict.allowed for verdict in verdicts)
    assert len(authorizer.asked) == 1


async def test_one_who_gives_up_does_not_spoil_it_for_the_others(access, authorizer):
    authorizer.gate.clear()
    first, second = (asyncio.create_task(access.may(QUESTION)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    authorizer.gate.set()
    assert (await second).allowed


async def test_changed_roles_void_answers_also_those_under_way(access, authorizer):
    authorizer.gate.clear()
    asked = asyncio.create_task(access.may(QUESTION))
    await asyncio.sleep(0.01)
    authorizer.allowed = False
    access.forget()
    authorizer.gate.set()
    await asked
    assert not (await access.may(QUESTION)).allowed


async def test_a_live_watch_asks_whatever_is_remembered(access, authorizer):
    await access.may(QUESTION)
    authorizer.allowed = False
    assert not (await access.review(QUESTION)).allowed
    assert not (await access.may(QUESTION)).allowed


@pytest.mark.parametrize("status", [0, 403, 500])
async def test_without_an_answer_nothing_is_allowed(access, authorizer, status):
    authorizer.status = status
    with pytest.raises(ReviewFailed, match="ns/op"):
        await access.may(QUESTION)
    authorizer.status = 201
    assert (await access.may(QUESTION)).allowed


async def test_answers_are_bounded(access, authorizer):
    for number in range(300):
        await access.may(Question(OP, "get", SECRETS, "ns", f"s{number}"))
    assert len(access._answers) == 100


async def test_answers_that_have_expired_are_not_kept(access, clock):
    for name in ("a", "b"):
        await access.may(Question(OP, "get", SECRETS, "ns", name))
    await clock.advance(61)
    await access.may(QUESTION)
    assert list(access._answers) == [QUESTION]
