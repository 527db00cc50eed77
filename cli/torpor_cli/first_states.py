"""What became of operators just declared, told one line each: ready, refused and why, or not ready yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable
from dataclasses import dataclass, field
from typing import Protocol

import grpc.aio
from torpor.host.v1 import host_pb2 as pb
from torpor.scheduler.v1 import scheduler_pb2 as scheduler
from torpor_services.errors import shortened

from torpor_cli.clients import operator_id
from torpor_cli.mesh import Say
from torpor_cli.views import operator_name

# The first Python operator of a machine compiles the runtime: seconds, a minute where the machine is busy.
WAIT_S = 60.0
# What is installed waits for its watches only: a kind that is not served, a right that is missing.
INSTALLED_WAIT_S = 10.0
# Where all are refused: what is applied together may come in another order, and the host tries again after 1 and 2 s.
GRACE_S = 3.5
_LINE_CHARACTERS_MAX = 300


class Host(Protocol):
    """Of the host's stub."""

    def WatchStates(self, request: pb.WatchStatesRequest, /) -> AsyncIterable[pb.StateChange]: ...  # noqa: N802

    def DescribeOperator(  # noqa: N802
        self, request: pb.DescribeOperatorRequest, /
    ) -> Awaitable[pb.DescribeOperatorResponse]: ...


@dataclass(slots=True)
class _Seen:
    """Names by what is known of them, and until when there is patience."""

    wanted: frozenset[str]
    grace_s: float
    limit: asyncio.Timeout
    refused: dict[str, str] = field(default_factory=dict)
    installed: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)

    def within(self, seconds: float) -> None:
        """From now on wait no longer than this; what was agreed before stays if it is shorter."""
        until_s = asyncio.get_running_loop().time() + seconds
        self.limit.reschedule(min(self.limit.when() or until_s, until_s))

    def take(self, state: pb.OperatorState, name: str, say: Say) -> bool:
        """Says what is new of this one; True once every one is ready or refused, and one is ready."""
        if state.form:
            self.installed.add(name)
            self.refused.pop(name, None)
        if state.ready or state.degraded:
            if name not in self.running:
                say(f"{name} is ready" if state.ready else f"{name} runs, and fails: {_line(state.last_error)}")
            self.running.add(name)
        elif state.phase == scheduler.FAILED and not state.form:
            if self.refused.get(name) != state.last_error:
                say(f"{name} was refused: {_line(state.last_error)}")
            self.refused[name] = state.last_error
        if len(self.refused) == len(self.wanted):
            self.within(self.grace_s)
        elif len(self.installed) + len(self.refused) == len(self.wanted):
            self.within(INSTALLED_WAIT_S)
        return bool(self.running) and len(self.running) + len(self.refused) == len(self.wanted)


async def tell_operators(
    host: Host, wanted: frozenset[str], say: Say, *, wait_s: float = WAIT_S, grace_s: float = GRACE_S
) -> frozenset[str]:
    """Follows the host until each wanted one (NAMESPACE/NAME) is ready or refused; returns the refused ones."""
    if not wanted:
        return frozenset()
    limit = asyncio.timeout(wait_s)
    seen = _Seen(wanted, grace_s, limit)
    try:
        async with limit:
            async for change in host.WatchStates(pb.WatchStatesRequest()):
                name = operator_name(change.state.operator)
                if name in wanted and not change.gone and seen.take(change.state, name, say):
                    break
    except TimeoutError:
        for name in sorted(wanted - seen.running - seen.refused.keys()):
            say(f"{name} is not ready yet: {await _reason(host, name)}; see `torpor describe {name}`")
    return frozenset(seen.refused)


async def _reason(host: Host, name: str) -> str:
    try:
        answer = await host.DescribeOperator(pb.DescribeOperatorRequest(operator=operator_id(name)))
    except grpc.aio.AioRpcError:
        return "no host of this mesh runs it"
    ready = [condition for condition in answer.conditions if condition.type == "Ready"]
    return _line(ready[0].message or ready[0].reason) if ready else "it is being installed"


def _line(text: str) -> str:
    return shortened(" ".join(text.split()), _LINE_CHARACTERS_MAX) or "no reason was given"
