"""The store of derived files: whole or not there, private, verified."""

import errno
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import BinaryIO

import pytest
from torpor_host import artifacts
from torpor_host.artifacts import ArtifactStore, ArtifactStoreFailed

KEY = "ab" * 32


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.parent.name != "locks"]


def test_what_was_written_is_found_and_verified(artifact_store: ArtifactStore):
    written = artifact_store.write_bytes("images", KEY, b"content")
    found = artifact_store.load("images", KEY)
    assert found == written
    assert found.path.read_bytes() == b"content"
    assert artifact_store.load("images", "cd" * 32) is None


def test_files_are_0600_in_folders_of_0700_whatever_the_umask(tmp_path: Path):
    old = os.umask(0)
    try:
        store = ArtifactStore(tmp_path / "store")
        written = store.write_bytes("images", KEY, b"content")
        store.secret("hash-seed")
    finally:
        os.umask(old)
    assert written.path.stat().st_mode & 0o777 == 0o600
    assert (store.root / "hash-seed").stat().st_mode & 0o777 == 0o600
    folders = [store.root, *(path for path in store.root.rglob("*") if path.is_dir())]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


def test_open_folder_is_closed_to_others(tmp_path: Path):
    root = tmp_path / "store"
    root.mkdir(mode=0o755)
    ArtifactStore(root)
    assert root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("position", [0, 3, 6])
def test_flipped_byte_is_found_and_the_file_removed(tmp_path: Path, position: int):
    written = ArtifactStore(tmp_path / "s").write_bytes("compiled", KEY, b"content")
    content = bytearray(written.path.read_bytes())
    content[position] ^= 1
    written.path.write_bytes(content)
    store = ArtifactStore(tmp_path / "s")
    assert store.find("compiled", KEY) is not None
    assert store.load("compiled", KEY) is None
    assert not written.path.exists()


def test_file_that_changes_after_it_was_verified_is_verified_again(artifact_store: ArtifactStore):
    written = artifact_store.write_bytes("compiled", KEY, b"content")
    assert artifact_store.verified(written)
    with written.path.open("r+b") as file:
        file.write(b"C")
    assert not artifact_store.verified(written)


def test_newer_artifact_under_a_key_replaces_the_older(artifact_store: ArtifactStore):
    first = artifact_store.write_bytes("images", KEY, b"one")
    second = artifact_store.write_bytes("images", KEY, b"two")
    assert artifact_store.load("images", KEY) == second
    assert not first.path.exists()


def test_zero_pages_written_by_seeking_stay_holes(artifact_store: ArtifactStore):
    def produce(file: BinaryIO) -> None:
        file.seek(8 << 20)
        file.write(b"end")
        file.truncate(16 << 20)

    written = artifact_store.write("images", KEY, produce)
    assert written.size == 16 << 20
    assert written.path.stat().st_blocks * 512 < 1 << 20
    assert artifact_store.verified(written)


def test_full_disk_is_an_error_that_says_so_and_leaves_nothing(artifact_store: ArtifactStore):
    def produce(file: BinaryIO) -> None:
        file.write(b"half")
        Path("/dev/full").write_bytes(b"x" * 65536)

    with pytest.raises(ArtifactStoreFailed, match=r"no space left in .*artifacts.*: free some, or set another folder"):
        artifact_store.write("images", KEY, produce)
    assert files(artifact_store.root) == []
    assert artifact_store.find("images", KEY) is None


def test_failure_while_the_file_is_synced_keeps_the_old_one(
    artifact_store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
):
    old = artifact_store.write_bytes("images", KEY, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ArtifactStoreFailed, match="no space left"):
        artifact_store.write_bytes("images", KEY, b"new")
    assert artifact_store.load("images", KEY) == old
    assert files(artifact_store.root) == [old.path]


def test_folder_that_cannot_be_made_is_an_error_with_its_name(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactStoreFailed, match=r"cannot use .*file/store"):
        ArtifactStore(tmp_path / "file" / "store")


def test_names_that_could_leave_the_folder_are_refused(artifact_store: ArtifactStore):
    for kind, key in (("../x", KEY), ("images", "../../etc/passwd"), ("images", "AB" * 32)):
        with pytest.raises(ValueError, match="artifact kind"):
            artifact_store.find(kind, key)


def test_temporaries_of_dead_processes_are_swept_and_those_of_living_kept(tmp_path: Path):
    store = ArtifactStore(tmp_path / "s")
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()
    dead, alive = store.root / "tmp" / f"{process.pid}-dead", store.root / "tmp" / f"{os.getpid()}-alive"
    dead.mkdir()
    (dead / "half").write_text("x")
    alive.write_text("y")
    ArtifactStore(tmp_path / "s")
    assert not dead.exists()
    assert alive.exists()


def test_lock_is_held_by_one_thread_at_a_time(artifact_store: ArtifactStore):
    inside, most = 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with artifact_store.lock("compiled", KEY):
                with guard:
                    inside += 1
                    most = max(most, inside)
                os.sched_yield()
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def _hold_lock(root: str, taken: "multiprocessing.synchronize.Event", release: "multiprocessing.synchronize.Event"):
    with ArtifactStore(Path(root)).lock("compiled", KEY):
        taken.set()
        release.wait(30)


def test_lock_excludes_other_processes_and_ends_with_its_holder(artifact_store: ArtifactStore):
    context = multiprocessing.get_context("spawn")
    taken, release = context.Event(), context.Event()
    process = context.Process(target=_hold_lock, args=(str(artifact_store.root), taken, release))
    process.start()
    assert taken.wait(30)
    order: list[str] = []

    def wait() -> None:
        with artifact_store.lock("compiled", KEY):
            order.append("ours")

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.2)
    assert order == []
    process.kill()
    process.join()
    thread.join(10)
    assert order == ["ours"]


def test_pruning_removes_the_longest_unused_and_nothing_used_lately(artifact_store: ArtifactStore):
    keys = [f"{number:02x}" * 32 for number in range(4)]
    written = [artifact_store.write_bytes("images", key, os.urandom(64 * 1024)) for key in keys]
    for artifact, days in zip(written, (30, 20, 10, 1), strict=True):
        used = time.time() - days * 24 * 3600
        os.utime(artifact.path.parent, (used, used))
    assert artifact_store.prune(1 << 30) == 0
    assert artifact_store.prune(200 * 1024) == 64 * 1024
    assert [artifact_store.find("images", key) is not None for key in keys] == [False, True, True, True]
    assert ArtifactStore(artifact_store.root).load("images", keys[1]) is not None  # used: it stays longest now
    assert artifact_store.prune(0) == 64 * 1024
    assert [artifact_store.find("images", key) is not None for key in keys] == [False, True, False, True]


def test_secret_is_random_per_installation_and_stays(tmp_path: Path):
    one = ArtifactStore(tmp_path / "one").secret("hash-seed")
    assert len(one) == 32
    assert ArtifactStore(tmp_path / "one").secret("hash-seed") == one
    assert ArtifactStore(tmp_path / "two").secret("hash-seed") != one


def sparse(file: BinaryIO) -> None:
    file.seek(8 << 20)
    file.write(b"end")


def test_on_a_tmpfs_holes_take_their_memory_at_once(artifact_store: ArtifactStore, monkeypatch: pytest.MonkeyPatch):
    assert artifact_store.write("images", KEY, sparse).path.stat().st_blocks * 512 < 1 << 20
    monkeypatch.setattr(artifacts, "_on_tmpfs", lambda descriptor: True)
    assert artifact_store.write("images", "cd" * 32, sparse).path.stat().st_blocks * 512 >= 8 << 20


def test_a_tmpfs_without_room_for_the_holes_is_full(artifact_store: ArtifactStore, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifacts, "_on_tmpfs", lambda descriptor: True)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArtifactStoreFailed, match="no space left"):
        artifact_store.write("images", KEY, sparse)
    assert artifact_store.find("images", KEY) is None


def test_a_tmpfs_is_known_as_one():
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        assert artifacts._on_tmpfs(file.fileno())
    with Path("/proc/self/status").open("rb") as other:
        assert not artifacts._on_tmpfs(other.fileno())
