"""Operators on a bench, for tests: guests are functions, and every step is taken by the test.

For tests only; nothing of the host imports it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torpor.cache.v1 import cache_pb2
from torpor_services import crd

from torpor_host import abi, operator_spec
from torpor_host.failures import GuestFailed
from torpor_host.guest_logs import GuestLogs
from torpor_host.installation import Problem
from torpor_host.limits import Deadline
from torpor_host.mappings import Mapper
from torpor_host.operator_record import Installation, Loaded, Operator
from torpor_host.operator_spec import OperatorId
from torpor_host.operators import Operators
from torpor_host.outbound import Outbound
from torpor_host.read_ahead import ReadAhead
from torpor_host.reconciler import Reconciler
from torpor_host.requests import GuestCalls
from torpor_host.snapshots import Expected
from torpor_host.subscriber import Event, Subscription
from torpor_host.timers import Timers
from torpor_host.waits import NO_SLOT
from torpor_host.work_queue import Key

OP = OperatorId(("default", "op"))


class StepClock:
    now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return round((1_700_000_000 + self.now_s) * 1e9)

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing sleeps here")


class StepWorkers:
    """Jobs run when the test says so."""

    contended = False
    blocking = staticmethod(nullcontext)

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)


class Guest:
    """An instance whose reconcile is a function of (namespace/name, cause, attempt)."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.alive = True
        self.closed = False

    def reconcile(self, message: bytes, *, deadline: Deadline) -> bytes:
        namespace, name, cause, attempt, _ = (part.decode() for part in abi.decode(message))
        self.bench.ran.append(f"{name} {cause} {attempt}")
        try:
            return self.bench.behaviour(f"{namespace}/{name}")
        except GuestFailed:
            self.alive = False
            raise

    def map(self, message: bytes, *, deadline: Deadline) -> bytes:
        watch, kind, new, old = (part.decode() for part in abi.decode(message))
        self.bench.mapped.append(f"{watch} {kind} {new} {old}".strip())
        try:
            return self.bench.mapping(new)
        except GuestFailed:
            self.alive = False
            raise

    def stop(self, reason: str) -> None:
        self.bench.stopped.append(reason)

    def private_bytes(self) -> int:
        return self.bench.guest_bytes

    def snapshot(self, path: Path, *, epoch: int, wake: int) -> int:
        path.write_bytes(b"state")
        self.bench.on_snapshot()
        return 5

    def close(self) -> None:
        self.alive, self.closed = False, True


class Subscriptions:
    def __init__(self) -> None:
        self.present: list[Subscription] = []
        self.count = 0

    def subscribe(self, owner: Any, name: str) -> Subscription:
        self.count += 1
        self.present.append(Subscription(self.count, name, owner))
        return self.present[-1]

    def unsubscribe(self, subscription: Subscription) -> None:
        self.present.remove(subscription)

    def progressed(self, owner: Any) -> None: ...


class Installed:
    sha256, form, filename, manifest, image, image_refusal, image_bytes = "0" * 64, "core", "f", b"{}", None, None, 0
    maps = True


class Bench:
    def __init__(self, folder: Path, budget: int = 1 << 30) -> None:
        self.clock = StepClock()
        self.timers = Timers(self.clock)
        self.workers, self.installers = StepWorkers(), StepWorkers()
        self.subscriptions = Subscriptions()
        self.posted: deque[Callable[[], None]] = deque()
        self.logs = GuestLogs(self.clock, self.posted.append)
        self.lease = ""
        self.behaviour: Callable[[str], bytes] = lambda key: abi.encode([b"done"])
        self.mapping: Callable[[str], bytes] = lambda obj: abi.encode([b""])
        self.mapped: list[str] = []
        self.load_error: Exception | None = None
        self.install_problem: Problem | None = None
        self.on_snapshot: Callable[[], None] = lambda: None
        self.guest_bytes = 1 << 20
        self.ran: list[str] = []
        self.stopped: list[str] = []
        self.loads: list[Guest] = []
        self.verified: list[OperatorId] = []
        self.sequence = 0
        self.operators = Operators(
            host="host-0",
            clock=self.clock,
            timers=self.timers,
            subscriber=self.subscriptions,  # type: ignore[arg-type]
            workers=self.workers,  # type: ignore[arg-type]
            install_workers=self.installers,  # type: ignore[arg-type]
            installer=self,  # type: ignore[arg-type]
            requests=None,  # type: ignore[arg-type]
            logs=self.logs,
            post=self.posted.append,
            lease_refusal=lambda: self.lease,
            memory_budget_bytes=budget,
            rand=lambda: 0.0,
        )
        self.operators.verify_assignment = self.verified.append
        self.operators.mappings.mapper = Mapper(
            load=self.load,
            workers=self.workers,  # type: ignore[arg-type]
            clock=self.clock,
            post=self.posted.append,
            cpu_s=self.clock.monotonic_s,
        )
        self.operators.reconciler = Reconciler(
            load=self.load,
            workers=self.workers,  # type: ignore[arg-type]
            clock=self.clock,
            post=self.posted.append,
            listener=self.operators,
            snapshot_folder=folder,
            read_ahead=self._read_ahead,
            cpu_s=self.clock.monotonic_s,
        )

    def _read_ahead(self, operator: Operator) -> ReadAhead:
        """Of guests that read nothing."""
        assert operator.spec is not None
        resource = operator.spec.primary.resource
        return ReadAhead(operator, resource, None, operator.queue.peek, self.clock.monotonic_s)  # type: ignore[arg-type]

    # what Installer and the loader would do
    def install(self, obj: Mapping[str, Any], ask: object) -> Installation | Problem:
        if self.install_problem is not None:
            return self.install_problem
        spec = operator_spec.resolve(operator_spec.declared(obj), b"{}")
        return Installation(spec, Installed(), False)  # type: ignore[arg-type]

    def load(self, operator: Operator, snapshot: Expected | None) -> Loaded:
        if self.load_error is not None:
            raise self.load_error
        assert operator.actor is not None
        guest = Guest(self)
        self.loads.append(guest)
        calls = GuestCalls(
            operator.actor,
            requests=None,  # type: ignore[arg-type]
            outbound=Outbound(),
            positions=operator.positions,
            fence=operator,
            logs=self.logs,
            slot=NO_SLOT,
        )
        return Loaded(guest, calls)

    # what happens
    def adopt(self, *, epoch: int = 1, generation: int = 1, name: str = "op", **spec: Any) -> Operator:
        obj = {
            "apiVersion": crd.API_VERSION,
            "kind": crd.KIND,
            "metadata": {"namespace": "default", "name": name, "uid": name, "generation": generation},
            "spec": {
                "module": {"file": "x.wasm"},
                "serviceAccountName": "x",
                "for": {"resource": "v1/configmaps"},
                "owns": [{"resource": "v1/secrets"}],
                "unload": {"policy": "idle", "idleAfter": "5s"},
                **spec,
            },
        }
        operator = self.operators.adopt(obj, epoch)
        self.run()
        return operator

    def event(
        self, operator: Operator, name: str, kind: int = Event.MODIFIED, *, watch: int = 0, live: int = 1
    ) -> None:
        key = cache_pb2.ObjectKey(namespace="default", name=name)
        message = Event(type=kind, key=key, uid=f"uid-{name}", received_unix_ns=live)  # type: ignore[arg-type]
        self.sequence += 1
        self.operators.on_event(operator, operator.subscriptions[watch], [Key("default", name)], message, self.sequence)

    def change(
        self,
        operator: Operator,
        name: str,
        new: str,
        old: str = "",
        *,
        kind: int = Event.MODIFIED,
        watch: int = 1,
        live: int = 1,
    ) -> None:
        """Of an object that code maps."""
        message = Event(
            type=kind,  # type: ignore[arg-type]
            key=cache_pb2.ObjectKey(name=name),
            uid=f"uid-{name}",
            object=new.encode(),
            old_object=old.encode(),
            received_unix_ns=live,
        )
        self.sequence += 1
        self.operators.on_event(operator, operator.subscriptions[watch], [], message, self.sequence)

    def loop(self) -> None:
        while self.posted:
            self.posted.popleft()()

    def run(self) -> None:
        """Everything that can run without time passing."""
        while self.posted or self.workers.jobs or self.installers.jobs or self._due():
            self.loop()
            for workers in (self.installers, self.workers):
                if workers.jobs:
                    workers.jobs.popleft()()
                    self.loop()
            self.timers.fire_due()

    def _due(self) -> bool:
        due_s = self.timers.next_due_s()
        return due_s is not None and due_s <= self.clock.now_s

    def advance(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.run()
