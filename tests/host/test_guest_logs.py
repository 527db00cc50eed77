"""The last lines of each operator: bounded, rated, followed."""

from torpor_host import guest_logs
from torpor_host.guest_logs import GuestLogs
from torpor_host.operator_spec import OperatorId
from torpor_services.clock import ManualClock

A, B = OperatorId(("ns", "a")), OperatorId(("ns", "b"))


def logs_with(clock: ManualClock) -> GuestLogs:
    return GuestLogs(clock, post=lambda call: call())


async def test_the_last_lines_are_kept() -> None:
    clock = ManualClock()
    logs = logs_with(clock)
    for i in range(300):
        logs.write(A, 1, f"line {i}", f"00-{'a' * 32}-{'b' * 16}-01")
        await clock.advance(0.02)
    lines = logs.tail(A)
    assert len(lines) == guest_logs.LINES_MAX and lines[-1].text == "line 299"
    assert [line.text for line in logs.tail(A, 2)] == ["line 298", "line 299"]
    assert lines[-1].level == "info" and lines[-1].trace_id == "a" * 32


async def test_a_flood_is_dropped_and_said_so_and_costs_the_others_nothing() -> None:
    clock = ManualClock()
    logs = logs_with(clock)
    logs.write(B, 1, "quiet")
    for i in range(10_000):
        logs.write(A, 1, f"flood {i}")
    await clock.advance(1)
    logs.write(A, 1, "after")
    assert [line.text for line in logs.tail(A, 2)] == ["9600 lines were dropped here", "after"]
    assert [line.text for line in logs.tail(B)] == ["quiet"]


async def test_all_lines_together_are_bounded_in_bytes() -> None:
    clock = ManualClock()
    logs = logs_with(clock)
    for i in range(3000):
        logs.write(OperatorId(("ns", str(i % 50))), 1, "x" * 100_000)
        await clock.advance(0.01)
    assert logs.bytes <= guest_logs.BYTES_MAX
    logs.forget(OperatorId(("ns", "49")))
    assert not logs.tail(OperatorId(("ns", "49")))


async def test_a_follower_hears_its_operator_and_is_told_what_it_missed() -> None:
    clock = ManualClock()
    logs = logs_with(clock)
    follower = logs.follow(A)
    logs.write(B, 1, "not mine")
    for i in range(1500):
        logs.write(A, 1, str(i))
        await clock.advance(0.02)
    assert follower.lost == 500 and follower.lines[-1].text == "1499"
    logs.unfollow(follower)
    logs.write(A, 1, "later")
    assert follower.lines[-1].text == "1499"


async def test_a_line_of_an_unknown_level_is_still_a_line() -> None:
    logs = logs_with(ManualClock())
    logs.write(A, 99, "odd\n")
    assert (logs.tail(A)[0].level, logs.tail(A)[0].text) == ("info", "odd")
