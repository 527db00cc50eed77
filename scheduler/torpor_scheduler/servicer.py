"""torpor.scheduler.v1.Scheduler on the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from torpor.scheduler.v1 import scheduler_pb2 as pb
from torpor.scheduler.v1.scheduler_pb2_grpc import SchedulerServicer as GeneratedServicer
from torpor_services.security import peer_identity

from torpor_scheduler.coordination import Coordinator, HostSession
from torpor_scheduler.explain import explain, forecast_response
from torpor_scheduler.planner import OperatorRecord

Context = grpc.aio.ServicerContext[object, object]


class SchedulerServicer(GeneratedServicer):
    """Translates between the contract and the coordinator; holds nothing itself."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def Coordinate(
        self, request_iterator: AsyncIterator[pb.HostReport], context: Context
    ) -> AsyncIterator[pb.Directive]:
        reports = aiter(request_iterator)
        first = await anext(reports, None)
        if first is None:
            return
        await _check_hello(first, context)
        session = self._coordinator.connect(first.hello)
        session.apply(first)
        reader = asyncio.create_task(_read(reports, session))
        try:
            async for directive in session.directives():
                yield directive
        finally:
            reader.cancel()
            self._coordinator.disconnect(session)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        key, record = await self._record(request.operator, context)
        session = self._coordinator.session_of(key)
        now_ns = session.now_ns() if session else self._coordinator.now_ns()
        decision = session.decisions.get(key) if session else None
        if decision is None:
            decision = self._coordinator.planner.decide(key, now_ns)
        host, epoch = (session.host, session.running[key]) if session else ("", 0)
        return explain(decision, record, host, epoch)

    async def Forecast(self, request: pb.ForecastRequest, context: Context) -> pb.ForecastResponse:
        _, record = await self._record(request.operator, context)
        return forecast_response(self._coordinator.planner, record, self._coordinator.now_ns())

    async def _record(self, operator: pb.OperatorId, context: Context) -> tuple[tuple[str, str], OperatorRecord]:
        key = (operator.namespace, operator.name)
        record = self._coordinator.planner.operators.get(key)
        if record is None:
            known = len(self._coordinator.planner.operators)
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no host has reported {key[0]}/{key[1]}; {known} operators are known"
            )
        assert record is not None
        return key, record


async def _read(reports: AsyncIterator[pb.HostReport], session: HostSession) -> None:
    """Applies reports until the host closes its side or the call ends."""
    try:
        async for report in reports:
            session.apply(report)
    finally:
        session.close()


async def _check_hello(report: pb.HostReport, context: Context) -> None:
    if not report.HasField("hello") or not report.hello.host or not report.hello.incarnation:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, "the first report must carry hello with host and incarnation"
        )
    identity = peer_identity(context)
    if identity is None or identity.role != "host" or identity.name != report.hello.host:
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            f"{identity or 'an unknown peer'} may not speak for host {report.hello.host}",
        )
