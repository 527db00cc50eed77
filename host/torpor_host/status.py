"""Writes the status of WasmOperators: soon when a person would want to see it, seldom otherwise, never in a loop.

Conditions, a first error and the installed module go out at once (a second apart for one operator); another phase or
another error at most every 10 s; counts alone at most every minute, otherwise they ride along. What is equal to what
was last written is not written again, so that the watch event of our own write leads to nothing. Each write is
conditional on the version last seen: an assignment that moved meanwhile is never overwritten. Nothing is written while
the Lease does not hold.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from torpor_services import crd
from torpor_services.clock import Clock
from torpor_services.errors import shortened

from torpor_host.api import MERGE_PATCH, ApiUnavailable, KubeApi
from torpor_host.operator_record import MESSAGE_CHARACTERS_MAX, Operator
from torpor_host.operator_spec import OperatorId
from torpor_host.reconciler import TurnReport
from torpor_host.timers import Timer, Timers

log = logging.getLogger(__name__)

_DEBOUNCE_S = 0.2
_URGENT_EVERY_S, _PHASE_EVERY_S, _COUNTS_EVERY_S = 1.0, 10.0, 60.0
_AT_ONCE = 8


class Versions(Protocol):
    """What `assignments.Assignments` knows of the objects."""

    def resource_version(self, operator_id: OperatorId) -> tuple[str, str] | None: ...

    def version_seen(self, operator_id: OperatorId, resource_version: str) -> None: ...


@dataclass(slots=True)
class _Written:
    at_s: float = float("-inf")
    again: Timer | None = None
    urgent: bytes = b""  # a digest: the text is as long as what it is about
    phase: str = ""
    last_error: str | None = None
    counts: tuple[int, ...] = ()


class StatusWriter:
    """An `Observer`; `run` is its task."""

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        timers: Timers,
        versions: Versions,
        *,
        allowed: Callable[[], bool],
        next_wake_s: Callable[[Operator], float | None],
        private_bytes: Callable[[Operator], int],
    ) -> None:
        self._api = api
        self._clock = clock
        self._timers = timers
        self._versions = versions
        self._allowed = allowed
        self._next_wake_s = next_wake_s
        self._private_bytes = private_bytes
        self._dirty: dict[Operator, None] = {}
        self._written: dict[Operator, _Written] = {}
        self._wake = asyncio.Event()
        self.writes = 0

    # -- Observer ----------------------------------------------------------------------------------------------------

    def phase_changed(self, operator: Operator) -> None:
        self._mark(operator)

    def changed(self, operator: Operator, *, urgent: bool) -> None:
        self._mark(operator)

    def turn_began(self, operator: Operator, report: TurnReport) -> None:
        """Counts ride along."""

    def idle(self, operator: Operator) -> None:
        """Timers ride along."""

    def removed(self, operator: Operator) -> None:
        self._dirty.pop(operator, None)
        written = self._written.pop(operator, None)
        if written is not None:
            self._timers.cancel(written.again)

    def _mark(self, operator: Operator) -> None:
        if operator not in self._dirty:
            self._dirty[operator] = None
            self._wake.set()

    # -- writing -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._clock.sleep(_DEBOUNCE_S)
            await self.write_due()

    async def write_due(self) -> None:
        """Writes what is due, plans the rest."""
        due: list[tuple[Operator, dict[str, Any]]] = []
        for operator in list(self._dirty):
            status = self.status(operator)
            wait_s = self._wait_s(operator, status)
            if wait_s is None:
                del self._dirty[operator]
            elif wait_s <= 0:
                del self._dirty[operator]
                due.append((operator, status))
            else:
                # Not dirty meanwhile: a change of more weight marks it again and is looked at then.
                del self._dirty[operator]
                self._look_again(operator, wait_s)
        for start in range(0, len(due), _AT_ONCE):
            await asyncio.gather(*(self._write(*item) for item in due[start : start + _AT_ONCE]))

    async def flush(self) -> None:
        """Before the end: the phase that a person would otherwise go on seeing."""
        stale = [
            (operator, status)
            for operator, written in self._written.items()
            if (status := self.status(operator))["phase"] != written.phase
        ]
        for start in range(0, len(stale), _AT_ONCE):
            await asyncio.gather(*(self._write(*item) for item in stale[start : start + _AT_ONCE]))

    def _look_again(self, operator: Operator, wait_s: float) -> None:
        """One timer an operator, the earliest."""
        written = self._written.setdefault(operator, _Written())
        due_s = self._clock.monotonic_s() + wait_s
        if written.again is not None and written.again.pending:
            if written.again.due_s <= due_s:
                return
            self._timers.cancel(written.again)
        written.again = self._timers.schedule(due_s, self._mark_again, operator)

    def _mark_again(self, operator: Operator) -> None:
        if not operator.gone:
            self._mark(operator)

    def _wait_s(self, operator: Operator, status: dict[str, Any]) -> float | None:
        """How long this status is to wait; None: nothing of it is new."""
        written = self._written.get(operator) or _Written()
        if _urgent(status) != written.urgent:
            every_s = _URGENT_EVERY_S
        elif (status["phase"], status["lastError"]) != (written.phase, written.last_error):
            every_s = _PHASE_EVERY_S
        elif _counts(status) != written.counts:
            every_s = _COUNTS_EVERY_S
        else:
            return None
        return max(0.0, written.at_s + every_s - self._clock.monotonic_s())

    async def _write(self, operator: Operator, status: dict[str, Any]) -> None:
        known = self._versions.resource_version(operator.id)
        if operator.gone or known is None:
            return
        if not self._allowed():
            self._look_again(operator, _URGENT_EVERY_S)
            return
        uid, version = known
        namespace, name = operator.id
        path = f"/apis/{crd.GROUP}/{crd.VERSION}/namespaces/{namespace}/{crd.PLURAL}/{name}/status"
        body = {"metadata": {"uid": uid, "resourceVersion": version}, "status": status}
        try:
            answer = await self._api.request("PATCH", path, body=body, content_type=MERGE_PATCH, timeout_s=5.0)
        except ApiUnavailable as exc:
            log.debug("a status could not be written: %s", exc, extra={"operator": operator.text})
            self._look_again(operator, _URGENT_EVERY_S * 2)
            return
        if answer.ok:
            self.writes += 1
            written = self._written.setdefault(operator, _Written())
            written.at_s = self._clock.monotonic_s()
            written.urgent, written.counts = _urgent(status), _counts(status)
            written.phase, written.last_error = status["phase"], status["lastError"]
            metadata = answer.json().get("metadata")
            if isinstance(metadata, dict):
                self._versions.version_seen(operator.id, str(metadata.get("resourceVersion", "")))
        elif answer.status == 409:  # the watch brings the new version
            self._look_again(operator, _URGENT_EVERY_S)
        elif answer.status != 404:
            log.warning("a status was refused: %s", answer.message, extra={"operator": operator.text})
            self._look_again(operator, _PHASE_EVERY_S)

    def status(self, operator: Operator) -> dict[str, Any]:
        """The fields of `status` that are a host's to write, as a merge patch; host and epoch are the assignment's."""
        status: dict[str, Any] = {
            "phase": operator.shown_phase.value,
            "observedGeneration": operator.observed_generation,
            "wakes": operator.wakes,
            "reconciles": operator.reconciles,
            "errors": operator.errors,
            "memoryBytes": self._private_bytes(operator),
            "lastError": shortened(operator.last_error, MESSAGE_CHARACTERS_MAX) or None,
            "lastEvent": _time(operator.last_event_unix_ns),
            "nextWake": self._next_wake(operator),
            "conditions": [
                {
                    "type": condition.type,
                    "status": condition.status,
                    "reason": condition.reason,
                    "message": condition.message,
                    "lastTransitionTime": _time(condition.since_unix_ns),
                    "observedGeneration": operator.observed_generation,
                }
                for condition in sorted(operator.conditions, key=lambda c: c.type)
            ],
        }
        if operator.installed is not None:
            status["module"] = {
                "sha256": operator.installed.sha256,
                "form": operator.installed.form,
                "image": operator.installed.image_refusal or "image",
            }
        return status

    def _next_wake(self, operator: Operator) -> str | None:
        due_s = self._next_wake_s(operator)
        if due_s is None:
            return None
        return _time(self._clock.unix_ns() + round((due_s - self._clock.monotonic_s()) * 1e9))


def _urgent(status: dict[str, Any]) -> bytes:
    names = ("observedGeneration", "conditions", "module")
    text = msgspec.json.encode([status["lastError"] is None, *(status.get(name) for name in names)])
    return hashlib.blake2b(text, digest_size=16).digest()


def _counts(status: dict[str, Any]) -> tuple[int, ...]:
    return (status["wakes"], status["reconciles"], status["errors"])


def _time(unix_ns: int) -> str | None:
    """RFC 3339, whole seconds; None for never and for what no calendar holds."""
    if not unix_ns:
        return None
    try:
        return datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return None
