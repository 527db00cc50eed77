"""What guests ask of their host: `HostCalls`, on the worker's own thread, past the event loop.

Before anything leaves, the fence: the host's Lease has its margin, the operator is still this host's, at this epoch.
Reads that the cache could not answer are tried again within their deadline, as it says; a write that was sent is never
sent again. What was refused before it was sent (the cache has not yet seen the assignment) may be tried again whatever
the method.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
import msgspec
from torpor.cache.v1 import cache_pb2, cache_pb2_grpc
from torpor_services import telemetry
from torpor_services.clock import Clock
from torpor_services.errors import one_line

from torpor_host import api_path
from torpor_host.api_path import ApiPath
from torpor_host.config import WRITE_DEADLINE_S
from torpor_host.guest_logs import GuestLogs
from torpor_host.hostcalls import CallError, CallResponse, FetchRequest, FetchResponse, KubeRequest, TreeRequest
from torpor_host.in_flight import InFlight
from torpor_host.limits import Deadline
from torpor_host.operator_spec import InvalidSpec, OperatorId, ResourceRef
from torpor_host.outbound import Outbound
from torpor_host.read_ahead import ReadAhead, Reader
from torpor_host.read_positions import ReadPositions
from torpor_host.request_stream import Asked, RequestStream, TooLarge, Unanswered
from torpor_host.waits import NO_SLOT, Slot

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})
_READS = frozenset({"GET", "HEAD"})
_RETRY_S = (0.05, 1.0)
# A cache that has not yet read the assignment this host has just written refuses it; its watch is never that late.
_ASSIGNMENT_S_MAX = 3.0
_STOPPED = "the guest is stopped; whether a write that was under way was made is not known"


class Fence(Protocol):
    """Whether this host may still act for an operator."""

    def refusal(self) -> str:
        """Why not; empty if it may. Any thread, no blocking."""

    def report_fenced(self, reason: str) -> None:
        """The cache says that another epoch is confirmed."""


@dataclass(frozen=True, slots=True)
class Actor:
    """On whose behalf an instance calls: fixed for its life, because another epoch gets another instance."""

    id: OperatorId
    host: str
    epoch: int
    outbound_hosts: tuple[str, ...]
    settings: bytes

    def caller(self) -> cache_pb2.Caller:
        return cache_pb2.Caller(namespace=self.id[0], name=self.id[1], host=self.host, epoch=self.epoch)


class CacheRequests:
    """The cache's requests and trees for worker threads. One a process; `run` is its task on the loop."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        clock: Clock,
        post: Callable[[Callable[[], None]], None],
        *,
        metadata: Sequence[tuple[str, str]] = (),
        sleep: Callable[[InFlight, float], None] = InFlight.sleep,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._stub = cache_pb2_grpc.ResourceCacheStub(channel)
        self._stream = RequestStream(channel, post, clock, metadata)
        self._clock = clock
        self._metadata = tuple(metadata)
        self._sleep = sleep

    async def run(self) -> None:
        """Carries the requests, until cancelled: what is in flight then fails."""
        await self._stream.run()

    def request(
        self,
        actor: Actor,
        positions: ReadPositions,
        fence: Fence,
        request: KubeRequest,
        deadline: Deadline,
        trace: str,
        in_flight: InFlight | None = None,
        slot: Slot = NO_SLOT,
        read_ahead: ReadAhead | None = None,
    ) -> CallResponse:
        """The API server's answer, or why there is none. Blocks to the deadline at most, and not beyond
        `in_flight.stop()`: whether a write that waited then was made is not known. `slot` is given back meanwhile."""
        in_flight = in_flight or InFlight()
        method = request.method.upper()
        problem = _problem(method, request.path)
        if problem is not None:
            return problem
        path = api_path.parse(request.path)
        reads = method in _READS
        message = self._message(actor, positions, request, method, path)
        ahead = read_ahead.take(message) if read_ahead is not None else None
        message.trace.traceparent = trace

        def call(timeout_s: float) -> CallResponse:
            nonlocal ahead
            if ahead is not None:
                asked, ahead = ahead, None
            elif reads:
                asked = self._stream.start(message, slot)
            else:
                timeout_s = min(timeout_s, WRITE_DEADLINE_S)
                asked = self._stream.start(message, slot, self._clock.monotonic_s() + timeout_s)
            head, body = asked.result(timeout_s, in_flight)
            if path is not None:
                self._learn(positions, path, message, head)
            return CallResponse(status=head.status, content_type=head.content_type, body=body)

        try:
            return self._try(call, fence, deadline, in_flight, slot, repeatable=reads)
        finally:
            if ahead is not None:
                ahead.drop()

    def reader(self, actor: Actor, positions: ReadPositions, fence: Fence, slot: Slot) -> Reader:
        """For what is read ahead of the guest."""
        return _Reader(self, actor, positions, fence, slot)

    def read_message(self, actor: Actor, positions: ReadPositions, path: str, accept: str) -> cache_pb2.HttpRequest:
        """A GET, as `request` would send it."""
        read = KubeRequest("GET", path, accept, "", b"")
        return self._message(actor, positions, read, "GET", api_path.parse(path))

    def start(self, message: cache_pb2.HttpRequest, slot: Slot) -> Asked:
        return self._stream.start(message, slot)

    def _message(
        self, actor: Actor, positions: ReadPositions, request: KubeRequest, method: str, path: ApiPath | None
    ) -> cache_pb2.HttpRequest:
        """All but the trace."""
        message = cache_pb2.HttpRequest(
            caller=actor.caller(),
            method=method,
            path=request.path,
            accept=request.accept,
            content_type=request.content_type,
            body=request.body,
        )
        if path is not None and method in _READS:
            message.live = positions.must_read_live(path, self._clock.monotonic_s())
            minimum = positions.minimum(path)
            if minimum is not None:
                message.minimum.append(minimum)
        return message

    def tree(
        self,
        actor: Actor,
        positions: ReadPositions,
        fence: Fence,
        request: TreeRequest,
        deadline: Deadline,
        in_flight: InFlight | None = None,
        slot: Slot = NO_SLOT,
    ) -> CallResponse:
        """A primary and what it owns, as JSON `{"primary": …, "nodes": […], "kinds": […]}`."""
        in_flight = in_flight or InFlight()
        try:
            resource = ResourceRef.parse(request.resource, "kube_tree")
        except InvalidSpec as exc:
            return CallResponse.failed(CallError.INVALID, one_line(exc))
        message = cache_pb2.TreeRequest(
            caller=actor.caller(),
            resource=cache_pb2.Resource(group=resource.group, version=resource.version, resource=resource.resource),
            key=cache_pb2.ObjectKey(namespace=request.namespace, name=request.name),
            minimum=positions.all_minimums(),
        )

        def call(timeout_s: float) -> CallResponse:
            answering = asyncio.run_coroutine_threadsafe(self._tree(message, timeout_s), self._loop)
            try:
                with in_flight.waiting(answering.cancel), slot.blocking():
                    answer = answering.result()
            except CancelledError:
                raise Unanswered(grpc.StatusCode.CANCELLED, "") from None
            except grpc.aio.AioRpcError as exc:
                raise Unanswered(exc.code(), exc.details() or "", _retry_after_s(exc)) from exc
            return CallResponse(status=200, content_type="application/json", body=_tree_json(answer))

        return self._try(call, fence, deadline, in_flight, slot, repeatable=True)

    async def _tree(self, message: cache_pb2.TreeRequest, timeout_s: float) -> cache_pb2.TreeResponse:
        return await self._stub.Tree(message, timeout=timeout_s, metadata=self._metadata)

    def _learn(
        self, positions: ReadPositions, path: ApiPath, message: cache_pb2.HttpRequest, head: cache_pb2.Head
    ) -> None:
        if message.method in _READS:
            if message.live and head.status < 500:
                positions.read_live(path)
            return
        if head.status == 409 and path.name:
            positions.conflicted(path)
        if head.HasField("written"):
            positions.written(head.written)
        if head.read_live:
            positions.deleted(path, self._clock.monotonic_s())

    def _try(
        self,
        call: Callable[[float], CallResponse],
        fence: Fence,
        deadline: Deadline,
        in_flight: InFlight,
        slot: Slot,
        *,
        repeatable: bool,
    ) -> CallResponse:
        first_s, longest_s = _RETRY_S
        delay_s = first_s
        assignment_by = deadline.within(_ASSIGNMENT_S_MAX)
        while True:
            refusal = fence.refusal()
            if refusal or in_flight.stopped():
                return CallResponse.failed(CallError.FENCED, refusal or _STOPPED)
            if deadline.passed:
                return CallResponse.failed(CallError.DEADLINE, "the deadline has passed")
            try:
                return call(max(deadline.remaining_s(), 0.001))
            except TooLarge as exc:
                return CallResponse.failed(CallError.TOO_LARGE, str(exc))
            except Unanswered as exc:
                code, details, hint_s = exc.code, exc.message, exc.retry_after_s
            if in_flight.stopped():
                return CallResponse.failed(CallError.FENCED, fence.refusal() or _STOPPED)
            again = code is grpc.StatusCode.UNAVAILABLE and repeatable
            if code is grpc.StatusCode.PERMISSION_DENIED:
                again = not assignment_by.passed
            wait_s = hint_s if hint_s is not None else delay_s
            if not again or wait_s >= deadline.remaining_s():
                return self._failed(code, details, deadline, fence)
            with slot.blocking():
                self._sleep(in_flight, wait_s)
            delay_s = min(delay_s * 2, longest_s)

    @staticmethod
    def _failed(code: grpc.StatusCode, details: str, deadline: Deadline, fence: Fence) -> CallResponse:
        match code:
            case grpc.StatusCode.DEADLINE_EXCEEDED if deadline.remaining_s() < 0.01:
                error = CallError.DEADLINE
            case grpc.StatusCode.FAILED_PRECONDITION:
                fence.report_fenced(details)
                error = CallError.FENCED
            case grpc.StatusCode.PERMISSION_DENIED:  # an account that does not exist, too
                error = CallError.DENIED
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                error = CallError.TOO_LARGE
            case grpc.StatusCode.UNIMPLEMENTED:
                error = CallError.UNIMPLEMENTED
            case grpc.StatusCode.INVALID_ARGUMENT:
                error = CallError.INVALID
            case _:
                error = CallError.UNAVAILABLE
        return CallResponse.failed(error, details or code.name)


class _Reader:
    """`Reader` of one operator."""

    __slots__ = ("_actor", "_fence", "_positions", "_requests", "_slot")

    def __init__(
        self, requests: CacheRequests, actor: Actor, positions: ReadPositions, fence: Fence, slot: Slot
    ) -> None:
        self._requests = requests
        self._actor = actor
        self._positions = positions
        self._fence = fence
        self._slot = slot

    def read_message(self, path: str, accept: str) -> cache_pb2.HttpRequest | None:
        if self._fence.refusal():
            return None
        message = self._requests.read_message(self._actor, self._positions, path, accept)
        return None if message.live else message

    def start(self, message: cache_pb2.HttpRequest, trace: str) -> Asked:
        traced = cache_pb2.HttpRequest()
        traced.CopyFrom(message)
        traced.trace.traceparent = trace
        return self._requests.start(traced, self._slot)


class GuestCalls:
    """`HostCalls` of one instance. The reconciler says with `begin` which reconcile the next calls belong to."""

    __slots__ = (
        "_actor",
        "_fence",
        "_in_flight",
        "_logs",
        "_outbound",
        "_positions",
        "_reconcile",
        "_requests",
        "_slot",
        "read_ahead",
        "trace",
    )

    def __init__(
        self,
        actor: Actor,
        *,
        requests: CacheRequests,
        outbound: Outbound,
        positions: ReadPositions,
        fence: Fence,
        logs: GuestLogs,
        slot: Slot,
    ) -> None:
        self._actor = actor
        self._requests = requests
        self._outbound = outbound
        self._positions = positions
        self._fence = fence
        self._logs = logs
        self._slot = slot
        self._reconcile = ""
        self._in_flight = InFlight()
        self.trace = ""
        self.read_ahead: ReadAhead | None = None  # of the turn that the instance is in

    def stop(self) -> None:
        """From any thread: the call that waits answers `fenced` now, and so does each further one."""
        self._in_flight.stop()

    def begin(self, reconcile: str, trace: str) -> None:
        """The calls that follow belong to this reconcile and to this span."""
        self._reconcile, self.trace = reconcile, trace

    def kube_request(self, request: KubeRequest, deadline: Deadline) -> CallResponse:
        name = f"kube {request.method.upper()[:8]}"
        with telemetry.span(name, parent=self.trace, attributes={"url.path": request.path[:500]}) as span:
            answer = self._requests.request(
                self._actor,
                self._positions,
                self._fence,
                request,
                deadline,
                span.traceparent or self.trace,
                self._in_flight,
                self._slot,
                self.read_ahead,
            )
            _describe(span, answer.status, answer.error)
            return answer

    def kube_tree(self, request: TreeRequest, deadline: Deadline) -> CallResponse:
        self._other_call()
        with telemetry.span("kube tree", parent=self.trace, attributes={"k8s.resource": request.resource}) as span:
            answer = self._requests.tree(
                self._actor, self._positions, self._fence, request, deadline, self._in_flight, self._slot
            )
            _describe(span, answer.status, answer.error)
            return answer

    def http_fetch(self, request: FetchRequest, deadline: Deadline) -> FetchResponse:
        refusal = self._fence.refusal() or (_STOPPED if self._in_flight.stopped() else "")
        if refusal:
            return FetchResponse.failed(CallError.FENCED, refusal)
        self._other_call()
        with telemetry.span("http fetch", parent=self.trace, attributes={"http.method": request.method}) as span:
            headers = (
                ("Torpor-Operator", "/".join(self._actor.id)),
                ("Torpor-Epoch", str(self._actor.epoch)),
                ("Torpor-Reconcile", self._reconcile),
                *((("traceparent", span.traceparent),) if span.traceparent else ()),
            )
            with self._slot.blocking():
                answer = self._outbound.fetch(request, self._actor.outbound_hosts, headers, deadline, self._in_flight)
            _describe(span, answer.status, answer.error)
            return answer

    def _other_call(self) -> None:
        if self.read_ahead is not None:
            self.read_ahead.other_call()

    def config(self) -> bytes:
        return self._actor.settings

    def log(self, level: int, text: str) -> None:
        self._logs.write(self._actor.id, level, text, self.trace)

    def blocking(self) -> AbstractContextManager[object]:
        return self._slot.blocking()


def _describe(span: telemetry.Span, status: int, error: CallError | None) -> None:
    if error is not None:
        span.fail(error.value)
    else:
        span.set("http.status_code", status)


def _problem(method: str, path: str) -> CallResponse | None:
    if method not in _METHODS:
        return CallResponse.failed(
            CallError.INVALID, f"method {method[:16]!r} is none of {', '.join(sorted(_METHODS))}"
        )
    bare, _, query = path.partition("?")
    if not bare.startswith(("/api/", "/apis/")) and bare not in {"/api", "/apis", "/version"}:
        return CallResponse.failed(CallError.DENIED, f"path {bare[:80]!r} is not below /api or /apis")
    if any(part in {".", ".."} for part in bare.split("/")) or not path.isprintable() or "#" in path or " " in path:
        return CallResponse.failed(CallError.INVALID, f"path {bare[:80]!r} is not a clean path")
    if any(part.partition("=")[0] == "watch" and part not in {"watch=0", "watch=false"} for part in query.split("&")):
        return CallResponse.failed(CallError.UNIMPLEMENTED, "watches are declared in the manifest, not requested")
    return None


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key == "retry-after-ms":
            text = value if isinstance(value, str) else value.decode("ascii", "replace")
            if text.isdigit():
                return min(int(text) / 1000, 30.0)
    return None


def _tree_json(answer: cache_pb2.TreeResponse) -> bytes:
    nodes = [
        {
            "resource": _resource_text(node.resource),
            "uid": node.uid,
            "ownerUid": node.owner_uid,
            "object": msgspec.Raw(node.object),
        }
        for node in answer.nodes
    ]
    kinds = [
        {
            "resource": _resource_text(kind.resource),
            "state": cache_pb2.TreeKind.State.Name(kind.state),
            "resourceVersion": kind.position.resource_version,
        }
        for kind in answer.kinds
    ]
    primary = msgspec.Raw(answer.primary or b"null")
    return msgspec.json.encode({"primary": primary, "nodes": nodes, "kinds": kinds})


def _resource_text(resource: cache_pb2.Resource) -> str:
    return "/".join(part for part in (resource.group, resource.version, resource.resource) if part)
