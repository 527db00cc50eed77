"""Operators as rows and as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torpor.host.v1 import host_pb2 as pb
from torpor.scheduler.v1 import scheduler_pb2 as scheduler

from torpor_cli.output import age, seconds, size

COLUMNS = ("OPERATOR", "PHASE", "LAST", "NEXT", "WAKES", "RUNS", "ERRORS", "p50", "p99", "MEMORY")
# What is left out first where the terminal is narrow.
_LEFT_OUT_NARROW = ("RUNS", "p99", "ERRORS")
_WIDTH_MIN = 104


def phase(state: pb.OperatorState) -> str:
    """As the WasmOperator's status has it: Cold, Resident, …"""
    return scheduler.Phase.Name(state.phase).capitalize()


def shown_phase(state: pb.OperatorState) -> str:
    """Degraded instead, as `kubectl get pods` shows CrashLoopBackOff, where its reconciles fail one after another."""
    return "Degraded" if state.degraded and state.phase != scheduler.FAILED else phase(state)


def operator_name(operator: scheduler.OperatorId) -> str:
    return f"{operator.namespace}/{operator.name}"


def row(state: pb.OperatorState) -> tuple[str, ...]:
    """One line of `ls` and `top`: time since the last event and to the next known one, runs are reconciles, p50 and
    p99 those of a wake."""
    now_ns = time.time_ns()
    return (
        operator_name(state.operator),
        shown_phase(state),
        age(now_ns - state.last_event_unix_ns) if state.last_event_unix_ns else "-",
        age(state.next_wake_unix_ns - now_ns) if state.next_wake_unix_ns else "-",
        str(state.wakes),
        str(state.reconciles),
        str(state.errors),
        seconds(state.wake_p50_s) if state.wakes else "-",
        seconds(state.wake_p99_s) if state.wakes else "-",
        size(state.private_bytes) if state.private_bytes else "-",
    )


def fitting(states: Sequence[pb.OperatorState], width: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows that fit a terminal of so many characters; errors are shown wherever there are any."""
    hidden = set(_LEFT_OUT_NARROW) if width < _WIDTH_MIN else set()
    if any(state.errors for state in states):
        hidden.discard("ERRORS")
    keep = [index for index, name in enumerate(COLUMNS) if name not in hidden]
    rows = [row(state) for state in states]
    return tuple(COLUMNS[i] for i in keep), [tuple(cells[i] for i in keep) for cells in rows]


def as_json(state: pb.OperatorState) -> dict[str, Any]:
    """The same with every field and unit in the name."""
    return {
        "operator": operator_name(state.operator),
        "phase": phase(state),
        "ready": state.ready,
        "degraded": state.degraded,
        "epoch": state.epoch,
        "form": state.form,
        "last_event_unix_ns": state.last_event_unix_ns or None,
        "next_wake_unix_ns": state.next_wake_unix_ns or None,
        "wakes": state.wakes,
        "reconciles": state.reconciles,
        "own_writes": state.own_writes,
        "errors": state.errors,
        "last_error": state.last_error,
        "queued": state.queued,
        "running": state.running,
        "wake_p50_s": state.wake_p50_s,
        "wake_p99_s": state.wake_p99_s,
        "private_bytes": state.private_bytes,
        "residency_reason": state.residency_reason,
    }
