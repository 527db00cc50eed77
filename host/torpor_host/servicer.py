"""torpor.host.v1.Host: what runs here, for people and tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from torpor.host.v1 import host_pb2 as pb
from torpor.host.v1 import host_pb2_grpc
from torpor.scheduler.v1 import scheduler_pb2
from torpor_services.clock import Clock

from torpor_host.guest_logs import GuestLogs, Line
from torpor_host.operator_record import Operator
from torpor_host.operator_spec import OperatorId
from torpor_host.operators import Operators
from torpor_host.reconciler import TurnReport
from torpor_host.residency import Phase
from torpor_host.scheduler_link import PHASES
from torpor_host.work_queue import Key

SERVICE = "torpor.host.v1.Host"
_MANIFEST_CHARACTERS_MAX = 1 << 20


class StateFeed:
    """An `Observer` that tells watchers of changes. Each keeps the operators that changed, and no history."""

    def __init__(self) -> None:
        self._watchers: dict[asyncio.Event, dict[OperatorId, None]] = {}

    def watch(self) -> tuple[asyncio.Event, dict[OperatorId, None]]:
        changed: dict[OperatorId, None] = {}
        event = asyncio.Event()
        self._watchers[event] = changed
        return event, changed

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.pop(event, None)

    def _tell(self, operator: Operator) -> None:
        for event, changed in self._watchers.items():
            changed[operator.id] = None
            event.set()

    def phase_changed(self, operator: Operator) -> None:
        self._tell(operator)

    def changed(self, operator: Operator, *, urgent: bool) -> None:
        self._tell(operator)

    def turn_began(self, operator: Operator, report: TurnReport) -> None:
        """`changed` follows."""

    def idle(self, operator: Operator) -> None:
        """`changed` or `phase_changed` has told it."""

    def removed(self, operator: Operator) -> None:
        self._tell(operator)


class HostServicer(host_pb2_grpc.HostServicer):
    """On the loop; never touches a guest."""

    def __init__(self, host: str, clock: Clock, operators: Operators, logs: GuestLogs, states: StateFeed) -> None:
        self._host = host
        self._clock = clock
        self._operators = operators
        self._logs = logs
        self._states = states

    async def ListOperators(
        self, request: pb.ListOperatorsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.ListOperatorsResponse:
        operators = sorted(self._operators.all(), key=lambda operator: operator.id)
        return pb.ListOperatorsResponse(
            operators=[self.state(operator) for operator in operators],
            host=self._host,
            memory_used_bytes=self._operators.used_bytes,
            memory_budget_bytes=self._operators.memory_budget_bytes,
        )

    async def DescribeOperator(
        self, request: pb.DescribeOperatorRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.DescribeOperatorResponse:
        operator = await self._find(request.operator, context)
        answer = pb.DescribeOperatorResponse(
            state=self.state(operator),
            conditions=[
                pb.Condition(type=c.type, status=c.status, reason=c.reason, message=c.message)
                for c in sorted(operator.conditions, key=lambda c: c.type)
            ],
        )
        if operator.installed is not None:
            answer.manifest = operator.installed.manifest.decode("utf-8", "replace")[:_MANIFEST_CHARACTERS_MAX]
            answer.module_sha256 = operator.installed.sha256
            answer.image_state = operator.installed.image_refusal or "image"
            answer.image_bytes = operator.installed.image_bytes
        return answer

    async def Load(self, request: pb.LoadRequest, context: grpc.aio.ServicerContext[object, object]) -> pb.LoadResponse:
        operator = await self._find(request.operator, context)
        if operator.spec is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{operator.text} is not installed")
        self._operators.preload(operator)
        return pb.LoadResponse()

    async def Unload(
        self, request: pb.UnloadRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.UnloadResponse:
        operator = await self._find(request.operator, context)
        if not self._operators.unload(operator):
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"{operator.text} runs; try again when it has ended"
            )
        return pb.UnloadResponse()

    async def Wake(self, request: pb.WakeRequest, context: grpc.aio.ServicerContext[object, object]) -> pb.WakeResponse:
        operator = await self._find(request.operator, context)
        key = Key(request.namespace, request.name) if request.name else None
        return pb.WakeResponse(keys=self._operators.wake(operator, key))

    async def WatchStates(
        self, request: pb.WatchStatesRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.StateChange]:
        event, changed = self._states.watch()
        try:
            for operator in self._operators.all():
                yield pb.StateChange(state=self.state(operator), initial=True)
            while True:
                await event.wait()
                event.clear()
                ids = list(changed)
                changed.clear()
                for operator_id in ids:
                    found = self._operators.get(operator_id)
                    if found is None:
                        yield pb.StateChange(state=pb.OperatorState(operator=_id(operator_id)), gone=True)
                    else:
                        yield pb.StateChange(state=self.state(found))
        finally:
            self._states.unwatch(event)

    async def Logs(
        self, request: pb.LogsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.LogLine]:
        wanted: OperatorId | None = None
        if request.HasField("operator"):
            wanted = (await self._find(request.operator, context)).id
        follower = self._logs.follow(wanted) if request.follow else None
        try:
            for line in self._logs.tail(wanted, request.tail):
                yield _line(line)
            while follower is not None:
                await follower.ready.wait()
                follower.ready.clear()
                if follower.lost:
                    text = f"{follower.lost} lines were lost: they came faster than they were read"
                    follower.lost = 0
                    yield pb.LogLine(unix_ns=self._clock.unix_ns(), level="warning", text=text)
                while follower.lines:
                    yield _line(follower.lines.popleft())
        finally:
            if follower is not None:
                self._logs.unfollow(follower)

    async def _find(
        self, operator: scheduler_pb2.OperatorId, context: grpc.aio.ServicerContext[object, object]
    ) -> Operator:
        found = self._operators.get(OperatorId((operator.namespace, operator.name)))
        if found is None:
            text = f"operator {operator.namespace}/{operator.name} is not run by host {self._host}"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
            raise AssertionError("abort raises")
        return found

    def state(self, operator: Operator) -> pb.OperatorState:
        """Of one operator, now."""
        next_s = self._operators.next_wake_s(operator)
        now_s, now_ns = self._clock.monotonic_s(), self._clock.unix_ns()
        loaded = operator.residency.phase not in {Phase.COLD, Phase.FAILED}
        return pb.OperatorState(
            operator=_id(operator.id),
            epoch=operator.epoch,
            phase=PHASES[operator.shown_phase],
            last_event_unix_ns=operator.last_event_unix_ns,
            next_wake_unix_ns=0 if next_s is None else now_ns + round((next_s - now_s) * 1e9),
            wakes=operator.wakes,
            reconciles=operator.reconciles,
            errors=operator.errors,
            last_error=operator.shown_error,
            private_bytes=self._operators.private_bytes(operator) if loaded else 0,
            queued=operator.queue.queued + (0 if operator.mapping is None else len(operator.mapping)),
            running=operator.queue.running,
            wake_p50_s=operator.latency(0.5),
            wake_p99_s=operator.latency(0.99),
            form=operator.installed.form if operator.installed is not None else "",
            residency_reason=operator.reason,
            ready=operator.is_true("Ready"),
            degraded=operator.degraded,
            own_writes=operator.own_writes.total,
        )


def _id(operator_id: OperatorId) -> scheduler_pb2.OperatorId:
    return scheduler_pb2.OperatorId(namespace=operator_id[0], name=operator_id[1])


def _line(line: Line) -> pb.LogLine:
    return pb.LogLine(
        operator=_id(line.operator), unix_ns=line.unix_ns, level=line.level, text=line.text, trace_id=line.trace_id
    )
