"""Loading and unloading leaves nothing: descriptors, threads, maps, memory, whatever way the guest ended."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from torpor_host.engine import GuestEngine
from torpor_host.failures import GuestFailed
from torpor_host.install import InstalledModule
from torpor_host.limits import InstanceLimits
from torpor_host.native import trim_heap
from torpor_host.testing import DONE, Guests, wat_guest

CYCLES = 200
EXIT = '(import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))'
HEAP = """(func (export "_initialize") (drop (memory.grow (i32.const 64)))
  (memory.fill (i32.const 131072) (i32.const 7) (i32.const 4194304)))"""
TOUCH = "(memory.fill (i32.const 131072) (i32.const 8) (i32.const 4194304))"


def held() -> tuple[int, int, int]:
    """Descriptors, threads, maps."""
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), maps


def resident_kib() -> int:
    gc.collect()
    trim_heap()
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])


def check(cycle: Callable[[], None]) -> None:
    for _ in range(20):
        cycle()
    memory, before = resident_kib(), held()  # in this order: what earlier tests left is collected first
    for _ in range(CYCLES):
        cycle()
    grown = resident_kib() - memory
    descriptors, threads, maps = held()
    assert descriptors <= before[0] and threads <= before[1]
    assert maps <= before[2] + 10
    # 4 MiB written in each cycle: one that stayed would show.
    assert grown < 4096, f"{grown} KiB more after {CYCLES} cycles"


def cycle_of(guests: Guests, module: InstalledModule, limits: InstanceLimits | None = None) -> Callable[[], None]:
    def cycle() -> None:
        instance = guests.engine.load(module, limits or InstanceLimits(), guests.calls)
        try:
            assert guests.run(instance) == DONE
        except GuestFailed:
            pass
        finally:
            instance.close()

    return cycle


@pytest.mark.parametrize("ending", ["$done", "(unreachable)", "(call $exit (i32.const 1)) (unreachable)"])
def test_two_hundred_wakes_leave_nothing(guests: Guests, ending: str):
    module = guests.install(wat_guest(TOUCH + ending, fields=HEAP, imports=EXIT))
    assert module.image is not None
    check(cycle_of(guests, module))
    assert guests.engine.maps.held == 0


def test_two_hundred_starts_without_an_image_leave_nothing(guests: Guests):
    module = guests.install(
        wat_guest(TOUCH + "$done", fields=HEAP + "(global (mut funcref) (ref.null func))", imports=EXIT)
    )
    assert module.image is None
    check(cycle_of(guests, module))


def test_wakes_that_fail_leave_nothing(guests: Guests):
    module = guests.install(wat_guest(fields=HEAP + '(func (export "torpor_wake") (unreachable))'))

    def cycle() -> None:
        with pytest.raises(GuestFailed):
            guests.engine.load(module, InstanceLimits(), guests.calls)

    check(cycle)
    assert guests.engine.maps.held == 0


def test_idle_modules_are_dropped_and_loaded_again(engine: GuestEngine, guests: Guests):
    object.__setattr__(engine.config, "modules_idle_max", 2)
    engine.modules._idle_max = 2
    modules = [guests.install(wat_guest(pages=pages)) for pages in range(2, 8)]
    assert engine.modules.loaded_count() == 2
    for module in modules:
        instance = guests.wake(module)
        assert guests.run(instance) == DONE
        instance.close()
    assert engine.modules.loaded_count() == 2


def test_instances_on_many_threads_at_once_do_not_mix(guests: Guests):
    wasm = wat_guest(
        "(i64.or (i64.shl (i64.extend_i32_u (local.get $ptr)) (i64.const 32)) (i64.extend_i32_u (local.get $len)))"
    )
    module = guests.install(wasm)
    wrong: list[object] = []

    def work(name: str) -> None:
        try:
            for _ in range(50):
                instance = guests.engine.load(module, InstanceLimits(), guests.calls)
                if name.encode() not in guests.run(instance, name):
                    wrong.append(name)
                instance.close()
        except Exception as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(f"name-{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert guests.engine.maps.held == 0
