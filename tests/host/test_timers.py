"""The one heap of timers, in virtual time."""

import asyncio

from torpor_host.timers import Timers
from torpor_services.clock import ManualClock


async def _running(timers: Timers) -> asyncio.Task[None]:
    task = asyncio.create_task(timers.run())
    await asyncio.sleep(0)
    return task


async def test_timers_fire_in_the_order_of_their_times() -> None:
    clock, fired = ManualClock(), list[str]()
    timers = Timers(clock)
    task = await _running(timers)
    timers.after(20, fired.append, "second")
    timers.after(10, fired.append, "first")
    await clock.advance(15)
    assert fired == ["first"]
    await clock.advance(15)
    assert fired == ["first", "second"]
    task.cancel()


async def test_a_cancelled_timer_never_fires() -> None:
    clock, fired = ManualClock(), list[str]()
    timers = Timers(clock)
    task = await _running(timers)
    timer = timers.after(5, fired.append, "cancelled")
    timers.cancel(timer)
    timers.cancel(timer)
    timers.cancel(None)
    await clock.advance(10)
    assert fired == [] and len(timers) == 0
    task.cancel()


async def test_an_earlier_timer_set_from_another_thread_is_not_kept_waiting() -> None:
    clock, fired = ManualClock(), list[str]()
    timers = Timers(clock)
    task = await _running(timers)
    timers.after(1000, fired.append, "late")
    await asyncio.to_thread(timers.after, 1, fired.append, "early")
    await clock.advance(2)
    assert fired == ["early"]
    task.cancel()


async def test_a_failing_callback_harms_no_other() -> None:
    clock, fired = ManualClock(), list[str]()
    timers = Timers(clock)
    task = await _running(timers)

    def fail(_: str) -> None:
        raise RuntimeError("boom")

    timers.after(1, fail, "")
    timers.after(2, fired.append, "after")
    await clock.advance(3)
    assert fired == ["after"]
    task.cancel()


async def test_cancelled_timers_do_not_pile_up() -> None:
    timers = Timers(ManualClock())
    keep = timers.after(1e6, print, "")
    for _ in range(10_000):
        timers.cancel(timers.after(1000, print, ""))
    assert len(timers._heap) < 200
    assert keep.pending and len(timers) == 1
