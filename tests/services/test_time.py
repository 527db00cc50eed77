"""The manual clock and back-off."""

import asyncio

import pytest
from torpor_services.backoff import Backoff
from torpor_services.clock import ManualClock, SystemClock


async def test_sleepers_wake_in_the_order_of_their_times_and_see_their_own_time():
    clock, seen = ManualClock(), []

    async def sleeper(seconds):
        await clock.sleep(seconds)
        seen.append((seconds, clock.monotonic_s()))

    async with asyncio.TaskGroup() as tasks:
        for seconds in (3.0, 1.0, 2.0):
            tasks.create_task(sleeper(seconds))
        await clock.advance(2.5)
        assert seen == [(1.0, 1.0), (2.0, 2.0)]
        await clock.advance(1.0)
    assert seen[-1] == (3.0, 3.0)


async def test_unix_time_moves_with_monotonic_time():
    clock = ManualClock(unix_ns=5)
    await clock.advance(1.5)
    assert clock.unix_ns() == 1_500_000_005


def test_the_system_clock_counts_suspend():
    import time

    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= SystemClock().monotonic_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)


async def test_backoff_doubles_up_to_its_maximum_and_forgets_after_two_minutes_of_health():
    clock = ManualClock()
    backoff = Backoff(clock, random=lambda: 0.5)
    assert [backoff.next_delay_s() for _ in range(7)] == pytest.approx([0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0])
    backoff.succeeded()
    await clock.advance(119)
    assert backoff.next_delay_s() == pytest.approx(30.0)
    backoff.succeeded()
    await clock.advance(121)
    assert backoff.next_delay_s() == pytest.approx(0.8)


def test_a_lower_bound_for_cheap_failures_does_not_carry_over_to_dear_ones():
    backoff = Backoff(ManualClock(), random=lambda: 0.5)
    assert [backoff.next_delay_s(4.0) for _ in range(9)] == pytest.approx([0.8, 1.6, 3.2] + [4.0] * 6)
    assert [backoff.next_delay_s() for _ in range(4)] == pytest.approx([6.4, 12.8, 25.6, 30.0])


def test_jitter_spreads_a_delay_by_a_quarter_of_itself():
    low = Backoff(ManualClock(), random=lambda: 0.0).next_delay_s()
    high = Backoff(ManualClock(), random=lambda: 1.0).next_delay_s()
    assert (low, high) == pytest.approx((0.6, 1.0))
