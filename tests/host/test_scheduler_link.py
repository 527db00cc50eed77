"""The stream to the scheduler, against one that speaks the real protocol; and directives that make no sense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from torpor.scheduler.v1 import scheduler_pb2 as pb
from torpor.scheduler.v1 import scheduler_pb2_grpc
from torpor_host.known_objects import KnownSet, ObjectTable
from torpor_host.operator_record import Operator
from torpor_host.operator_spec import OperatorId
from torpor_host.reconciler import TurnReport
from torpor_host.residency import Keep, UnloadAt
from torpor_host.scheduler_link import ARRIVALS_MAX, SchedulerLink
from torpor_host.timers import Timers
from torpor_host.work_queue import Cause
from torpor_services.clock import SystemClock

WAIT_S = 10.0
OP = OperatorId(("ns", "op"))


class Queue:
    running = 0

    def timers(self) -> list[Any]:
        return []


class Operators:
    memory_budget_bytes, used_bytes = 1000, 10

    def __init__(self) -> None:
        self.operator = Operator(OP, "uid", 3, runtime=None, known=KnownSet(ObjectTable()))  # type: ignore[arg-type]
        self.operator.queue = Queue()  # type: ignore[assignment]
        self.advice: list[Any] = []
        self.advised, self.left = asyncio.Event(), asyncio.Event()

    def all(self) -> list[Operator]:
        return [self.operator]

    def get(self, operator_id: OperatorId) -> Operator | None:
        return self.operator if operator_id == OP else None

    def advise(self, operator: Operator, advice: Any, reason: str) -> None:
        self.advice.append(advice)
        self.advised.set()

    def advise_preload(self, operator: Operator, at_s: float, until_s: float, reason: str) -> None:
        self.advice.append(("preload", at_s, until_s))

    def scheduler_away(self) -> None:
        self.left.set()


class Assignments:
    def __init__(self) -> None:
        self.log: list[str] = []

    def assign(self, operator_id: OperatorId, epoch: int) -> None:
        self.log.append(f"assign {epoch}")

    def revoke(self, operator_id: OperatorId, epoch: int) -> None:
        self.log.append(f"revoke {epoch}")

    def reconsider(self) -> None:
        self.log.append("reconsider")


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    def __init__(self) -> None:
        self.reports: asyncio.Queue[pb.HostReport] = asyncio.Queue()
        self.directives: asyncio.Queue[pb.Directive | None] = asyncio.Queue()

    async def Coordinate(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.Directive]:
        async def read() -> None:
            async for report in request_iterator:
                await self.reports.put(report)

        reader = asyncio.create_task(read())
        try:
            while (directive := await self.directives.get()) is not None:
                yield directive
        finally:
            reader.cancel()

    async def next(self) -> pb.HostReport:
        return await asyncio.wait_for(self.reports.get(), WAIT_S)


class Bench:
    def __init__(self, channel: grpc.aio.Channel | None, away_s: float = 0.05) -> None:
        clock = SystemClock()
        self.timers = Timers(clock)
        self.operators, self.assignments = Operators(), Assignments()
        self.link = SchedulerLink(
            channel,
            host="host-0",
            clock=clock,
            timers=self.timers,
            operators=self.operators,  # type: ignore[arg-type]
            assignments=self.assignments,
            away_s=away_s,
        )
        self.clock = clock

    def began(self, cause: Cause = Cause.WATCH) -> None:
        report = TurnReport(cause=cause, since_unix_ns=5, found_cold=True, entry_latency_s=0.5)
        self.link.turn_began(self.operators.operator, report)

    def obey(self, based_on: int = 0, **directive: Any) -> str:
        message = pb.Directive(
            operator=pb.OperatorId(namespace="ns", name="op"), based_on_sequence=based_on, **directive
        )
        return self.link._obey(message)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Bench, FakeScheduler]]:
    scheduler, server = FakeScheduler(), grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        bench = Bench(channel)
        tasks = [asyncio.create_task(run()) for run in (bench.link.run, bench.timers.run)]
        bench.link.incarnation("one")
        yield bench, scheduler
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    scheduler.directives.put_nowait(None)
    await server.stop(0)


async def test_hello_tells_what_runs_and_reports_follow_in_sequence() -> None:
    async with connected() as (bench, scheduler):
        hello = await scheduler.next()
        assert (hello.hello.host, hello.hello.incarnation, hello.sequence) == ("host-0", "one", 1)
        assert [r.epoch for r in hello.hello.residencies] == [3]
        assert bench.link.decides
        bench.began()
        bench.link.phase_changed(bench.operators.operator)
        report = await scheduler.next()
        while not report.arrivals:
            report = await scheduler.next()
        assert report.sequence > 1 and report.arrivals[0].cause == pb.Arrival.WATCH
        assert report.arrivals[0].found_cold and report.sent_unix_ns > 0


async def test_a_new_incarnation_begins_a_new_stream() -> None:
    async with connected() as (bench, scheduler):
        await scheduler.next()
        bench.link.incarnation("two")
        report = await scheduler.next()
        while not report.HasField("hello"):
            report = await scheduler.next()
        assert (report.hello.incarnation, report.sequence) == ("two", 1)


async def test_directives_are_followed_and_assignments_handed_on() -> None:
    async with connected() as (bench, scheduler):
        await scheduler.next()
        operator = pb.OperatorId(namespace="ns", name="op")
        for directive in (
            pb.Directive(operator=operator, assign=pb.Assign(epoch=4)),
            pb.Directive(operator=operator, revoke=pb.Revoke(epoch=4)),
            pb.Directive(operator=operator, keep=pb.Keep(), based_on_sequence=1),
        ):
            scheduler.directives.put_nowait(directive)
        async with asyncio.timeout(WAIT_S):
            await bench.operators.advised.wait()
        assert bench.operators.advice == [Keep()]
        assert bench.assignments.log[-2:] == ["assign 4", "revoke 4"]


async def test_a_scheduler_that_never_comes_leaves_the_host_to_itself() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        bench = Bench(channel, away_s=0.2)
        tasks = [asyncio.create_task(run()) for run in (bench.link.run, bench.timers.run)]
        bench.link.incarnation("one")
        assert bench.link.decides, "it may still come"
        async with asyncio.timeout(WAIT_S):
            await bench.operators.left.wait()
        assert not bench.link.decides and "reconsider" in bench.assignments.log
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_without_a_scheduler_the_host_decides() -> None:
    bench = Bench(None)
    await bench.link.run()
    assert not bench.link.decides


@pytest.mark.parametrize("reading", [True, False], ids=["slowly", "nobody"])
async def test_what_the_scheduler_does_not_read_stays_bounded(reading: bool) -> None:
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
        bench = Bench(channel)
        bench.link._connected = reading
        for _ in range(3 * ARRIVALS_MAX):
            bench.began()
            bench.link.idle(bench.operators.operator)
            bench.link.phase_changed(bench.operators.operator)
        report = bench.link._pending()
        assert len(report.arrivals) == ARRIVALS_MAX
        assert (len(report.changes), len(report.costs)) == ((1, 1) if reading else (0, 0))


@pytest.mark.parametrize(
    ("directive", "problem"),
    [
        ({"unload_at": pb.UnloadAt(unix_ns=-5)}, "makes no sense"),
        ({"unload_at": pb.UnloadAt(unix_ns=2**62)}, "makes no sense"),
        ({"preload_at": pb.PreloadAt(unix_ns=2**62)}, "make no sense"),
        ({"preload_at": pb.PreloadAt(unix_ns=0, until_unix_ns=-1)}, "make no sense"),
        ({"based_on": 99, "keep": pb.Keep()}, "was not sent"),
        ({}, "unknown"),
    ],
)
async def test_a_directive_that_makes_no_sense_is_not_followed(directive: dict[str, Any], problem: str) -> None:
    bench = Bench(None)
    assert problem in bench.obey(**directive)
    assert bench.operators.advice == []


async def test_a_directive_older_than_an_event_is_void() -> None:
    bench = Bench(None)
    bench.link._sequence = 5
    bench.began()
    assert bench.obey(based_on=5, keep=pb.Keep()) == "something has happened since"
    bench.link._sequence = 6
    assert bench.obey(based_on=6, keep=pb.Keep()) == ""


async def test_a_directive_about_a_running_or_unknown_operator_is_void() -> None:
    bench = Bench(None)
    bench.operators.operator.queue.running = 1  # type: ignore[misc]
    assert bench.obey(keep=pb.Keep()) == "it runs"
    message = pb.Directive(operator=pb.OperatorId(namespace="ns", name="other"), keep=pb.Keep())
    assert "does not run" in bench.link._obey(message)


async def test_unload_at_zero_is_now() -> None:
    bench = Bench(None)
    before = bench.clock.monotonic_s()
    assert bench.obey(unload_at=pb.UnloadAt()) == ""
    advice = bench.operators.advice[0]
    assert isinstance(advice, UnloadAt) and 0 <= advice.at_s - before < 1


async def test_after_a_stream_that_the_scheduler_ended_costs_and_the_next_event_are_told() -> None:
    async with connected() as (bench, scheduler):
        await scheduler.next()
        for _ in range(2):
            scheduler.directives.put_nowait(None)
            report = await scheduler.next()
            while not report.HasField("hello"):
                report = await scheduler.next()
            costs = 0
            while not costs:
                costs = len((await scheduler.next()).costs)
            bench.began()
            while not report.arrivals:
                report = await scheduler.next()
