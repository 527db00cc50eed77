"""Snapshots: state across an unload, used once, for the right assignment only."""

import dataclasses
from pathlib import Path

import pytest
from torpor_host.install import InstalledModule
from torpor_host.instance import Instance
from torpor_host.limits import InstanceLimits
from torpor_host.snapshots import Expected, SnapshotImpossible, SnapshotUnusable
from torpor_host.testing import Guests, wat_guest

# Counts in a global and in memory, and grows by a page each time.
COUNTER = wat_guest(
    f"""(global.set $count (i64.add (global.get $count) (i64.const 1)))
      (i64.store (i32.const 8192) (global.get $count))
      (i64.store (i32.const 8200) (i64.add (i64.load (i32.const 8200)) (i64.const 1)))
      (drop (memory.grow (i32.const 1)))
      (memory.fill (i32.mul (i32.sub (memory.size) (i32.const 1)) (i32.const 65536))
        (i32.wrap_i64 (global.get $count)) (i32.const 65536))
      (i64.store (i32.const 8208) (i64.load (i32.sub (i32.mul (memory.size) (i32.const 65536)) (i32.const 65544))))
      (drop (call $clock (i32.const 1) (i64.const 0) (i32.const 8216)))
      (i64.const {8192 << 32 | 32})""",
    imports='(import "wasi_snapshot_preview1" "clock_time_get" (func $clock (param i32 i64 i32) (result i32)))',
    fields="(global $count (mut i64) (i64.const 0))",
)


@pytest.fixture
def module(guests: Guests) -> InstalledModule:
    return guests.install(COUNTER)


def counts(guests: Guests, instance: Instance) -> list[int]:
    result = guests.run(instance)
    return [int.from_bytes(result[at : at + 8], "little") for at in (0, 8, 16, 24)]


def resume(guests: Guests, module: InstalledModule, expected: Expected) -> Instance:
    return guests.engine.load(module, InstanceLimits(), guests.calls, snapshot=expected)


def test_state_goes_on_where_it_was(guests: Guests, module: InstalledModule, tmp_path: Path):
    path = tmp_path / "state"
    first = guests.wake(module)
    counts(guests, first)
    before = counts(guests, first)
    assert before[:2] == [2, 2]
    size = first.snapshot(path, epoch=3, wake=7)
    assert path.stat().st_size == size < 4096
    assert path.stat().st_mode & 0o777 == 0o600
    first.close()
    second = resume(guests, module, Expected(path, 3, 7))
    after = counts(guests, second)
    assert after[:2] == [3, 3]
    assert after[2] == 0x0202020202020202  # a page that was grown and filled before the snapshot
    assert after[3] > before[3]  # the monotonic clock
    second.close()


def test_snapshot_is_gone_once_it_is_used(guests: Guests, module: InstalledModule, tmp_path: Path):
    path = tmp_path / "state"
    instance = guests.wake(module)
    counts(guests, instance)
    instance.snapshot(path, epoch=1, wake=1)
    resume(guests, module, Expected(path, 1, 1)).close()
    assert list(tmp_path.iterdir()) == [guests.engine.store.root]
    with pytest.raises(SnapshotUnusable, match="No such file"):
        resume(guests, module, Expected(path, 1, 1))


@pytest.mark.parametrize("expected", [(2, 1), (1, 2)])
def test_snapshot_of_another_epoch_or_wake_is_refused_and_gone(
    guests: Guests, module: InstalledModule, tmp_path: Path, expected: tuple[int, int]
):
    path = tmp_path / "state"
    guests.wake(module).snapshot(path, epoch=1, wake=1)
    with pytest.raises(SnapshotUnusable, match="is of epoch 1, wake 1; wanted"):
        resume(guests, module, Expected(path, *expected))
    assert not path.exists()


@pytest.mark.parametrize("position", [0, 9, 40, 100, 150, 180, -40, -5])
def test_damaged_snapshot_is_refused_and_gone(guests: Guests, module: InstalledModule, tmp_path: Path, position: int):
    path = tmp_path / "state"
    instance = guests.wake(module)
    counts(guests, instance)
    instance.snapshot(path, epoch=1, wake=1)
    content = bytearray(path.read_bytes())
    content[position] ^= 0x55
    path.write_bytes(content)
    with pytest.raises(SnapshotUnusable):
        resume(guests, module, Expected(path, 1, 1))
    assert not path.exists()
    assert guests.engine.maps.held == 4 + 1 + 0  # the first instance's; the failed one is closed


def test_truncated_snapshot_is_refused(guests: Guests, module: InstalledModule, tmp_path: Path):
    path = tmp_path / "state"
    instance = guests.wake(module)
    counts(guests, instance)
    instance.snapshot(path, epoch=1, wake=1)
    content = path.read_bytes()
    for length in (0, 7, 11, 100, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(SnapshotUnusable):
            resume(guests, module, Expected(path, 1, 1))


def test_snapshot_over_another_image_is_refused(guests: Guests, module: InstalledModule, tmp_path: Path):
    other = guests.install(wat_guest(pages=3))
    guests.wake(other).snapshot(tmp_path / "state", epoch=1, wake=1)
    with pytest.raises(SnapshotUnusable, match="another image"):
        resume(guests, module, Expected(tmp_path / "state", 1, 1))


def test_module_without_an_image_has_no_snapshots(guests: Guests, module: InstalledModule, tmp_path: Path):
    plain = dataclasses.replace(module, image=None, image_refusal="for this test")
    instance = guests.wake(plain)
    with pytest.raises(SnapshotImpossible):
        instance.snapshot(tmp_path / "state", epoch=1, wake=1)
    assert counts(guests, instance)[0] == 1


def test_snapshot_that_cannot_be_written_leaves_nothing(guests: Guests, module: InstalledModule, tmp_path: Path):
    instance = guests.wake(module)
    with pytest.raises(OSError, match="No such file"):
        instance.snapshot(tmp_path / "missing" / "state", epoch=1, wake=1)
    assert counts(guests, instance)[0] == 1
