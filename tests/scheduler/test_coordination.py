"""Streams with hosts, through real gRPC."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from torpor.scheduler.v1 import scheduler_pb2 as pb
from torpor.scheduler.v1.scheduler_pb2_grpc import SchedulerStub, add_SchedulerServicer_to_server
from torpor_scheduler.coordination import Coordinator
from torpor_scheduler.servicer import SchedulerServicer
from torpor_services.channels import open_channel
from torpor_services.clock import ManualClock
from torpor_services.health import Readiness
from torpor_services.security import Identity, TlsFiles
from torpor_services.server import ServerConfig, serving

OPERATOR = pb.OperatorId(namespace="default", name="op")
KEY = ("default", "op")
S = 10**9


@asynccontextmanager
async def scheduler(tmp_path, clock):
    connected = asyncio.Event()
    coordinator = Coordinator(clock, on_hosts_changed=connected.set)
    coordinator.connected = connected
    async with serving(
        ServerConfig(listen=f"unix:{tmp_path}/s", drain_s=0),
        add=lambda server: add_SchedulerServicer_to_server(SchedulerServicer(coordinator), server),
        names=["torpor.scheduler.v1.Scheduler"],
        readiness=Readiness(),
        handle_signals=False,
    ) as server:
        async with open_channel(server.address, Identity("host", "h1"), TlsFiles()) as channel:
            yield coordinator, SchedulerStub(channel)


class Host:
    """A host's end of the stream."""

    def __init__(self, stub, clock, host="h1", **hello):
        self.clock, self.sequence = clock, 0
        self.call = stub.Coordinate()
        self.hello = pb.Hello(host=host, incarnation="i1", **hello)

    async def report(self, sequence=None, **fields):
        self.sequence += 1
        report = pb.HostReport(sequence=sequence or self.sequence, sent_unix_ns=self.clock.unix_ns(), **fields)
        if self.sequence == 1:
            report.hello.CopyFrom(self.hello)
        await self.call.write(report)

    async def directive(self):
        return await asyncio.wait_for(self.call.read(), 5)


def residency(phase=pb.RESIDENT, policy=pb.PREDICTIVE, epoch=1):
    return pb.Residency(operator=OPERATOR, epoch=epoch, phase=phase, policy=policy)


def change(clock, phase):
    return pb.ResidencyChange(operator=OPERATOR, phase=phase, unix_ns=clock.unix_ns(), epoch=1)


async def test_an_idle_operator_without_a_future_is_unloaded_and_explained(tmp_path):
    clock = ManualClock()
    async with scheduler(tmp_path, clock) as (_, stub):
        host = Host(stub, clock, residencies=[residency()])
        await host.report(changes=[change(clock, pb.RESIDENT)])
        directive = await host.directive()
        assert directive.operator == OPERATOR and directive.unload_at.unix_ns == clock.unix_ns()
        answer = await stub.Explain(pb.ExplainRequest(operator=OPERATOR))
        assert answer.sentence.startswith("default/op sleeps until an event: no timer is known")
        assert {"price", "load time", "break-even"} <= {figure.name for figure in answer.figures}
        assert (answer.host, answer.epoch) == ("h1", 1)


async def test_a_known_timer_brings_a_preload_just_ahead(tmp_path):
    clock = ManualClock()
    async with scheduler(tmp_path, clock) as (_, stub):
        host = Host(stub, clock, residencies=[residency(pb.COLD)])
        due = clock.unix_ns() + 3600 * S
        await host.report(timers=[pb.KnownTimer(operator=OPERATOR, id="requeue", unix_ns=due)])
        directive = await host.directive()
        assert 0 < due - directive.preload_at.unix_ns < 20_000_000


async def test_a_report_that_comes_twice_counts_once(tmp_path):
    clock = ManualClock()
    async with scheduler(tmp_path, clock) as (coordinator, stub):
        host = Host(stub, clock, residencies=[residency()])
        arrival = pb.Arrival(operator=OPERATOR, unix_ns=clock.unix_ns(), cause=pb.Arrival.WATCH)
        await host.report(arrivals=[arrival])
        await host.report(sequence=1, arrivals=[arrival])
        await host.report(changes=[change(clock, pb.RESIDENT)])
        await host.directive()
        assert coordinator.planner.record(KEY).events == 1


async def test_a_hosts_clock_may_be_wrong_by_hours(tmp_path):
    clock, host_clock = ManualClock(), ManualClock(unix_ns=1_600_000_000 * S)
    async with scheduler(tmp_path, clock) as (_, stub):
        host = Host(stub, host_clock, residencies=[residency()])
        await host.report(changes=[change(host_clock, pb.RESIDENT)])
        assert (await host.directive()).unload_at.unix_ns == host_clock.unix_ns()


async def test_a_new_stream_of_a_host_replaces_the_old_one(tmp_path):
    clock = ManualClock()
    async with scheduler(tmp_path, clock) as (coordinator, stub):
        first, second = Host(stub, clock), Host(stub, clock, residencies=[residency()])
        await first.report()
        await coordinator.connected.wait()
        await second.report(changes=[change(clock, pb.RESIDENT)])
        assert await first.directive() is grpc.aio.EOF
        assert (await second.directive()).HasField("unload_at")
        assert list(coordinator.sessions) == ["h1"]


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (pb.Hello(), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.Hello(host="h2", incarnation="x"), grpc.StatusCode.PERMISSION_DENIED),
    ],
)
async def test_a_host_must_say_who_it_is_and_be_it(tmp_path, hello, code):
    clock = ManualClock()
    async with scheduler(tmp_path, clock) as (_, stub):
        host = Host(stub, clock)
        host.hello = hello
        await host.report()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await host.directive()
        assert refused.value.code() == code


async def test_an_unknown_operator_is_not_found(tmp_path):
    async with scheduler(tmp_path, ManualClock()) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="no host has reported default/op"):
            await stub.Explain(pb.ExplainRequest(operator=OPERATOR))
        with pytest.raises(grpc.aio.AioRpcError, match="no host has reported"):
            await stub.Forecast(pb.ForecastRequest(operator=OPERATOR))


async def test_the_forecast_names_the_next_known_timer(tmp_path):
    clock = ManualClock()
    async with scheduler(tmp_path, clock) as (_, stub):
        host = Host(stub, clock, residencies=[residency(pb.COLD)])
        due = clock.unix_ns() + 60 * S
        await host.report(timers=[pb.KnownTimer(operator=OPERATOR, id="requeue", unix_ns=due)])
        await host.directive()
        answer = await stub.Forecast(pb.ForecastRequest(operator=OPERATOR))
        assert answer.next_expected_unix_ns == due and answer.timers[0].id == "requeue"
