"""The one Lease of this host: while it holds, the host may run guests; when its margin is gone, none of them may act.

Validity is counted from before the renewal was sent, on a clock that counts suspend. A Lease that another holder has is
taken only after it has stood still, as seen from here, for its duration plus the longest write deadline: by then no
write of the other can take effect any more. Two shortcuts: a Lease that was released, and one of an earlier life of
this very host (same state folder, whose lock the kernel gave us, so that process is dead; its epochs are refused by the
cache).
Each time it is acquired the host is a new incarnation.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torpor_services.clock import Clock
from torpor_services.errors import TorporError

from torpor_host.api import Answer, ApiUnavailable, KubeApi
from torpor_host.config import WRITE_DEADLINE_S, LeaseConfig

log = logging.getLogger(__name__)

LABELS = {"torpor.dev/component": "host"}
LABEL_SELECTOR = "torpor.dev/component=host"
NAME_PREFIX = "torpor-host-"


class StateFolderInUse(TorporError):
    """Another host process has this state folder."""


@dataclass(frozen=True, slots=True)
class StateFolder:
    """The folder's lock, held for the life of the process, and the id that a host keeps across restarts."""

    path: Path
    id: str
    _descriptor: int

    @classmethod
    def open(cls, path: Path) -> StateFolder:
        """Makes the folder if need be; raises StateFolderInUse, OSError."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(descriptor)
            raise StateFolderInUse(
                f"{path} belongs to another host process; stop it or set TORPOR_HOST_STATE_DIR"
            ) from exc
        content = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
        if len(content) != 16:
            content = secrets.token_hex(8)
            os.pwrite(descriptor, f"{content}\n".encode(), 0)
            os.fsync(descriptor)
        return cls(path, content, descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class Holder:
    """`spec.holderIdentity`: host, state folder, incarnation."""

    host: str
    state: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.host}/{self.state}/{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Holder:
        parts = (*text.split("/"), "", "")
        return cls(parts[0], parts[1], parts[2])


@dataclass(slots=True)
class Observation:
    """A Lease as it was last seen to change, on our own clock: the other's is not trusted."""

    mark: tuple[str, str] = ("", "")
    since_s: float = 0.0
    duration_s: float = 0.0

    def see(self, lease: dict[str, Any], now_s: float) -> None:
        spec = lease.get("spec") or {}
        mark = (str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or ""))
        if mark != self.mark or not self.since_s:
            self.mark, self.since_s = mark, now_s
        duration = spec.get("leaseDurationSeconds")
        self.duration_s = float(duration) if isinstance(duration, int) and duration > 0 else 15.0

    @property
    def released(self) -> bool:
        return not self.mark[0]

    def expires_s(self) -> float:
        """When, on our clock, nobody can act under it any more."""
        return self.since_s if self.released else self.since_s + self.duration_s + WRITE_DEADLINE_S


@dataclass(slots=True)
class HostLease:
    """`run` is its task; `refusal` may be asked from any thread."""

    api: KubeApi
    clock: Clock
    config: LeaseConfig
    host: str
    state: str
    on_acquired: Callable[[str], None]
    on_lost: Callable[[str], None]
    incarnation: str = ""
    _valid_until_s: float = field(default=float("-inf"), init=False)
    _lease: dict[str, Any] = field(default_factory=dict, init=False)
    _seen: Observation = field(default_factory=Observation, init=False)
    _problem: str = field(default="the Lease was not acquired yet", init=False)
    _last_log: str = field(default="", init=False)

    @property
    def held(self) -> bool:
        """Whether the margin is still there."""
        return self.clock.monotonic_s() < self._valid_until_s - self.config.margin_s

    def refusal(self) -> str:
        """Why guests may not act now; empty if they may."""
        return "" if self.held else f"this host's Lease does not hold: {self._problem}"

    async def run(self) -> None:
        """Acquires and renews, again and again, until cancelled."""
        while True:
            await self._acquire()
            self.on_acquired(self.incarnation)
            problem = await self._hold()
            self._valid_until_s, self._problem = float("-inf"), problem
            log.error("the Lease is lost: guests are stopped until it is regained", extra={"problem": problem})
            self.on_lost(problem)

    async def release(self) -> None:
        """At shutdown, after the guests have ended: others may take over at once."""
        if not self.held:
            return
        self._valid_until_s, self._problem = float("-inf"), "it was released"
        try:
            answer = await self._write({**self._spec(), "holderIdentity": "", "leaseDurationSeconds": 1}, timeout_s=3.0)
            if not answer.ok:
                log.warning("the Lease could not be released: %s", answer.message)
        except ApiUnavailable as exc:
            log.warning("the Lease could not be released: %s", exc)

    # -- acquiring ---------------------------------------------------------------------------------------------------

    async def _acquire(self) -> None:
        while True:
            try:
                wait_s = await self._try_acquire()
            except ApiUnavailable as exc:
                wait_s = 1.0
                self._say(str(exc))
            if wait_s is None:
                self._last_log = ""
                return
            await self.clock.sleep(wait_s)

    async def _try_acquire(self) -> float | None:
        """None once it is ours, else how long to wait."""
        answer = await self.api.request("GET", self._path)
        if answer.status == 404:
            return await self._create()
        if not answer.ok:
            self._say(f"GET {self._path}: {answer.message}")
            return 1.0
        self._lease = answer.json()
        now_s = self.clock.monotonic_s()
        self._seen.see(self._lease, now_s)
        holder = Holder.parse(self._seen.mark[0])
        ours = holder.host == self.host and holder.state == self.state
        if not ours and now_s < self._seen.expires_s():
            self._say(f"{self._name} is held by {holder.host or 'another'}; another host of this name may be running")
            return min(self._seen.expires_s() - now_s, self.config.renew_s)
        return await self._take()

    async def _create(self) -> float | None:
        self._lease = {"metadata": {"name": self._name, "namespace": self.config.namespace, "labels": LABELS}}
        self.incarnation = secrets.token_hex(4)
        return await self._send("POST", self._collection)

    async def _take(self) -> float | None:
        self.incarnation = secrets.token_hex(4)
        transitions = (self._lease.get("spec") or {}).get("leaseTransitions")
        self._lease["spec"] = {"leaseTransitions": (transitions if isinstance(transitions, int) else 0) + 1}
        return await self._send("PUT", self._path)

    async def _send(self, method: str, path: str) -> float | None:
        sent_s = self.clock.monotonic_s()
        body = {**self._lease, **_KIND, "spec": self._spec(acquired=True)}
        answer = await self.api.request(method, path, body=body)
        if answer.ok:
            self._renewed(answer, sent_s)
            return None
        if answer.status == 404 and method == "POST":
            await self._create_namespace()
            return 0.2
        if answer.status != 409:
            self._say(f"{method} {path}: {answer.message}")
        return 0.5

    async def _create_namespace(self) -> None:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.config.namespace}}
        answer = await self.api.request("POST", "/api/v1/namespaces", body=body)
        if not answer.ok and answer.status != 409:
            self._say(f"namespace {self.config.namespace} does not exist and cannot be made: {answer.message}")

    # -- holding -----------------------------------------------------------------------------------------------------

    async def _hold(self) -> str:
        """Renews until it is lost; says why."""
        problem = ""
        next_s = self.clock.monotonic_s() + self.config.renew_s
        while True:
            end_s = self._valid_until_s - self.config.margin_s
            await self.clock.sleep(min(next_s, end_s) - self.clock.monotonic_s())
            if not self.held:
                return problem or "no renewal in time (was the machine suspended?)"
            sent_s = self.clock.monotonic_s()
            try:
                answer = await self._write(self._spec(), timeout_s=max(min(end_s - sent_s, self.config.renew_s), 0.05))
            except ApiUnavailable as exc:
                problem, next_s = str(exc), self.clock.monotonic_s() + min(1.0, self.config.renew_s)
                self._say(problem)
                continue
            if answer.ok:
                self._renewed(answer, sent_s)
                self._last_log = ""
                next_s = sent_s + self.config.renew_s
                continue
            taken = await self._reread() if answer.status in {404, 409} else ""
            if taken:
                return taken
            problem, next_s = answer.message, self.clock.monotonic_s() + 0.5
            self._say(problem)

    async def _reread(self) -> str:
        """After a conflict: who has it now. Empty if still we."""
        try:
            answer = await self.api.request("GET", self._path, timeout_s=2.0)
        except ApiUnavailable:
            return ""
        if answer.status == 404:
            return f"{self._name} was deleted"
        lease = answer.json()
        holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
        if answer.ok and holder != str(self._holder):
            return f"{self._name} was taken by {Holder.parse(holder).host or 'somebody'}"
        if answer.ok:
            self._lease = lease
        return ""

    async def _write(self, spec: dict[str, Any], *, timeout_s: float) -> Answer:
        body = {**self._lease, **_KIND, "spec": spec}
        return await self.api.request("PUT", self._path, body=body, timeout_s=timeout_s)

    def _renewed(self, answer: Answer, sent_s: float) -> None:
        self._lease = answer.json()
        self._valid_until_s = sent_s + self.config.duration_s

    def _spec(self, *, acquired: bool = False) -> dict[str, Any]:
        now = datetime.fromtimestamp(self.clock.unix_ns() / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = dict(self._lease.get("spec") or {})
        spec |= {
            "holderIdentity": str(self._holder),
            "leaseDurationSeconds": max(1, round(self.config.duration_s)),
            "renewTime": now,
        }
        if acquired:
            spec["acquireTime"] = now
        return spec

    def _say(self, problem: str) -> None:
        """Once, not with every try."""
        self._problem = problem
        if problem != self._last_log:
            self._last_log = problem
            log.warning("the Lease of this host: %s", problem)

    @property
    def _holder(self) -> Holder:
        return Holder(self.host, self.state, self.incarnation)

    @property
    def _name(self) -> str:
        return f"{NAME_PREFIX}{self.host}"

    @property
    def _collection(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.config.namespace}/leases"

    @property
    def _path(self) -> str:
        return f"{self._collection}/{self._name}"


_KIND = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
