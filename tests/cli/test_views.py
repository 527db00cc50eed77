"""Operators as rows."""

import time

from torpor.host.v1 import host_pb2 as pb
from torpor.scheduler.v1 import scheduler_pb2 as scheduler
from torpor_cli.output import age, seconds, size
from torpor_cli.views import COLUMNS, fitting


def state() -> pb.OperatorState:
    return pb.OperatorState(
        operator=scheduler.OperatorId(namespace="databases-01", name="database"),
        phase=scheduler.RESIDENT,
        last_event_unix_ns=time.time_ns() - 90_000_000_000,
        next_wake_unix_ns=time.time_ns() + 3_600_000_000_000,
        wakes=12_345, reconciles=67_890, wake_p50_s=0.0012, wake_p99_s=0.0098, private_bytes=500_000,
    )  # fmt: skip


def test_a_wide_terminal_shows_every_column():
    columns, (row,) = fitting([state()], 120)
    assert columns == COLUMNS
    assert row == (
        "databases-01/database",
        "Resident",
        "90.0s",
        "60m",
        "12345",
        "67890",
        "0",
        "1.2ms",
        "9.8ms",
        "488 KiB",
    )


def test_a_narrow_terminal_shows_what_matters_uncut():
    columns, (row,) = fitting([state()], 80)
    assert columns == ("OPERATOR", "PHASE", "LAST", "NEXT", "WAKES", "p50", "MEMORY")
    widths = [max(len(name), len(cell)) for name, cell in zip(columns, row, strict=True)]
    assert sum(widths) + 2 * len(widths) <= 80


def test_errors_are_shown_on_any_terminal():
    assert "ERRORS" in fitting([state(), pb.OperatorState(errors=1)], 80)[0]


def test_spans_and_sizes_are_short():
    assert [age(n) for n in (0, -5, 300_000_000, 61_000_000_000)] == ["now", "now", "0.3s", "61.0s"]
    assert [seconds(s) for s in (0.00034, 0.0012, 5, 180, 7200)] == ["340µs", "1.2ms", "5.0s", "3m", "2h"]
    assert [size(n) for n in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2 KiB", "3 MiB", "5.0 GiB"]


def test_an_operator_that_fails_all_the_time_is_shown_as_degraded():
    degraded = pb.OperatorState(phase=scheduler.RESIDENT, degraded=True)
    assert fitting([degraded], 120)[1][0][1] == "Degraded"
    assert fitting([pb.OperatorState(phase=scheduler.FAILED, degraded=True)], 120)[1][0][1] == "Failed"
