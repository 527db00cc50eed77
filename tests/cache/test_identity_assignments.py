"""What the cache believes of assignments: the watch's word, and newer live reads."""

import msgspec
import pytest
from torpor_cache.apiserver import ApiUnavailable, Reply
from torpor_cache.config import RoleAccounts
from torpor_cache.identity import (
    AnotherEpoch,
    Assignment,
    Assignments,
    Caller,
    Identities,
    IdentityUnknown,
    NotAllowedHere,
)
from torpor_cache.objects import Change, ChangeType, parse_object
from torpor_cache.resources import ObjectKey
from torpor_services.clock import ManualClock
from torpor_services.security import Identity

KEY = ObjectKey("ns", "x")
HOST = Identity("host", "a")


def json(version, host="a", epoch=1, account="op"):
    metadata = {"namespace": "ns", "name": "x", "uid": "u", "resourceVersion": str(version)}
    status = {"host": host, "epoch": epoch}
    return msgspec.json.encode(
        {
            "kind": "WasmOperator",
            "apiVersion": "torpor.dev/v1alpha1",
            "metadata": metadata,
            "spec": {"serviceAccountName": account},
            "status": status,
        }
    )


def change(version, **fields):
    new = parse_object(json(version, **fields))
    return Change(ChangeType.MODIFIED, KEY, "u", version, None, new, False, 0, "")


class Api:
    """One WasmOperator, and every account but `missing`."""

    def __init__(self):
        self.body = json(1)
        self.reads = []

    async def request(self, method, path, *, headers, timeout_s):
        self.reads.append(path)
        if "serviceaccounts" in path:
            return Reply(404 if path.endswith("/missing") else 200, {}, b"{}")
        if self.body is None:
            raise ApiUnavailable("gone")
        return Reply(200, {}, self.body)

    @property
    def operator_reads(self):
        return [path for path in self.reads if "wasmoperators" in path]


@pytest.fixture
def api():
    return Api()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def assignments():
    assignments = Assignments()
    assignments.load([parse_object(json(10))])
    return assignments


@pytest.fixture
def identities(api, assignments, clock):
    return Identities(api, assignments, RoleAccounts(), clock)


def caller(epoch=1, host="a"):
    return Caller("ns", "x", host, epoch)


async def test_the_confirmed_epoch_needs_no_read(identities, api):
    subject = await identities.resolve(HOST, caller())
    assert subject.account.user == "system:serviceaccount:ns:op"
    assert subject.user_agent == "torpor-operator/ns/x host/a epoch/1"
    assert subject.impersonation.groups == ()
    assert api.operator_reads == []


async def test_a_newer_epoch_is_read_live_once_and_believed(identities, api):
    api.body = json(20, epoch=2)
    await identities.resolve(HOST, caller(2))
    await identities.resolve(HOST, caller(2))
    assert len(api.operator_reads) == 1
    with pytest.raises(AnotherEpoch):
        await identities.resolve(HOST, caller(1))


async def test_an_older_epoch_is_refused_without_a_read(identities, api, assignments):
    assignments.on_change(change(11, epoch=5))
    with pytest.raises(AnotherEpoch, match="epoch 5, not 4"):
        await identities.resolve(HOST, caller(4))
    assert api.operator_reads == []


async def test_a_made_up_epoch_costs_one_read_a_second(identities, api, clock):
    api.body = json(10)
    for _ in range(50):
        with pytest.raises(AnotherEpoch):
            await identities.resolve(HOST, caller(99))
    assert len(api.operator_reads) == 1
    await clock.advance(1.5)
    with pytest.raises(AnotherEpoch):
        await identities.resolve(HOST, caller(99))
    assert len(api.operator_reads) == 2


async def test_a_late_watch_event_does_not_take_back_what_was_read_live(identities, api, assignments):
    api.body = json(20, epoch=2)
    await identities.resolve(HOST, caller(2))
    assignments.on_change(change(15, epoch=1))
    await identities.resolve(HOST, caller(2))
    assignments.on_change(change(25, epoch=3, host="b"))
    with pytest.raises(NotAllowedHere):
        await identities.resolve(HOST, caller(2))


async def test_while_the_operators_are_not_read_nobody_is_refused_for_good(api, clock):
    identities = Identities(api, Assignments(), RoleAccounts(), clock)
    with pytest.raises(IdentityUnknown):
        await identities.resolve(HOST, caller())


async def test_an_api_server_that_is_gone_refuses_nobody_for_good(identities, api):
    api.body = None
    with pytest.raises(IdentityUnknown):
        await identities.resolve(HOST, caller(2))


async def test_observers_hear_of_changed_assignments_only(assignments):
    heard = []
    assignments.observe(heard.append)
    assignments.on_change(change(11))
    assert heard == []
    assignments.on_change(change(12, host="b"))
    assert heard == [KEY]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"metadata":{"resourceVersion":"x"}}', b'{"status":{"epoch":"1"}}'])
def test_an_object_that_makes_no_sense_is_no_assignment(body):
    assert Assignment.parse(body) is None


def test_an_operator_without_a_status_is_assigned_to_nobody():
    read = Assignment.parse(b'{"metadata":{"resourceVersion":"3"},"spec":{"serviceAccountName":"op"},"status":null}')
    assert (read.host, read.epoch) == ("", 0)
