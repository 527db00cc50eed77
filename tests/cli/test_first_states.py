"""What `torpor run` says of the operators it has started."""

import asyncio

from torpor.host.v1 import host_pb2 as pb
from torpor.scheduler.v1 import scheduler_pb2 as scheduler
from torpor_cli.first_states import tell_operators


def change(name, *, gone=False, **fields):
    return pb.StateChange(
        state=pb.OperatorState(operator=scheduler.OperatorId(namespace="default", name=name), **fields), gone=gone
    )


def ready(name):
    return change(name, phase=scheduler.COLD, form="python", ready=True)


def refused(name, why):
    return change(name, phase=scheduler.FAILED, last_error=why)


class Host:
    """Tells the given changes and then nothing."""

    def __init__(self, *changes, conditions=()):
        self.changes, self.conditions = changes, conditions

    async def WatchStates(self, request):
        for item in self.changes:
            yield item
        await asyncio.Event().wait()

    async def DescribeOperator(self, request):
        return pb.DescribeOperatorResponse(conditions=self.conditions)


async def told(host, *names, **options):
    said = []
    wanted = frozenset(f"default/{name}" for name in names)
    return await asyncio.wait_for(tell_operators(host, wanted, said.append, **options), 10), said


async def test_each_operator_is_told_as_ready_or_refused_with_the_reason():
    host = Host(
        change("a", phase=scheduler.COLD),
        ready("other"),
        refused("b", "ModuleRefused:\n it is a component"),
        refused("b", "ModuleRefused:\n it is a component"),
        ready("a"),
    )
    assert await told(host, "a", "b") == (
        {"default/b"},
        ["default/b was refused: ModuleRefused: it is a component", "default/a is ready"],
    )


async def test_one_that_was_refused_for_a_moment_is_ready_in_the_end():
    host = Host(refused("a", "no service account"), ready("a"))
    assert await told(host, "a", grace_s=5) == (
        frozenset(),
        ["default/a was refused: no service account", "default/a is ready"],
    )


async def test_where_all_are_refused_it_waits_no_longer_than_the_grace():
    refusals, said = await told(Host(refused("a", "broken")), "a", wait_s=1000, grace_s=0.01)
    assert refusals == {"default/a"} and said == ["default/a was refused: broken"]


async def test_one_that_is_late_is_told_with_what_it_waits_for():
    conditions = [pb.Condition(type="Ready", status="False", reason="Forbidden", message="for: no rights")]
    refusals, said = await told(Host(conditions=conditions), "a", wait_s=0.01)
    assert not refusals
    assert said == ["default/a is not ready yet: for: no rights; see `torpor describe default/a`"]


async def test_one_that_runs_and_fails_is_told_so():
    host = Host(change("a", phase=scheduler.COLD, form="python", degraded=True, last_error="a/b: ValueError"))
    assert await told(host, "a") == (frozenset(), ["default/a runs, and fails: a/b: ValueError"])


async def test_a_folder_without_operators_waits_for_nothing():
    assert await told(Host()) == (frozenset(), [])
