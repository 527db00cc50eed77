"""What a host derives and may lose: compiled modules and images, on disk, by key.

`ROOT/<kind>/<key>/<sha256>` is a file that is complete, immutable and 0600 in folders of 0700: written under a unique
name, fsynced, renamed. Compiled files are native code, so a reader asks `verified` first: a file whose bytes are not
those of its name is removed and counts as missing. Nothing here is the only copy of anything; deleting ROOT while no
host runs is safe.

An image file that is mapped must never be edited or truncated (SIGBUS ends the process); removing or replacing a name
is harmless. Locks (`lock`) order the work of processes that share ROOT; readers take none. Disk is bounded by `prune`:
what nobody has used for a week goes, longest unused first; a key's folder carries the time of its last use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_KEY = re.compile(r"[0-9a-f]{16,64}\Z")
_KIND = re.compile(r"[a-z][a-z-]{0,31}\Z")
_LOCKS = 64  # lock files are never removed (removing one that is held splits it), so they are few and shared
_BLOCK = 1 << 20
_UNUSED_S = 7 * 24 * 3600.0
_TOUCH_S = 3600.0


class ArtifactStoreFailed(Exception):
    """The folder cannot be used: no space, no rights, no folder. Says what to do; may be tried again after."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file of the store. `sha256` is what its content must have; only `ArtifactStore.verified` proves it has."""

    # Absolute. A Path that has been used is five times as large, and a sleeping operator has three.
    name: str
    sha256: str
    size: int

    @property
    def path(self) -> Path:
        return Path(self.name)


_Signature = tuple[int, int, int, int, int]


class ArtifactStore:
    """The folder of one installation, shared by its host processes. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._verified: dict[str, _Signature] = {}
        self._touched: dict[str, float] = {}
        with _explained(root):
            for folder in (root, root / "tmp", root / "locks"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _refuse_foreign(folder)
            self._sweep()

    def find(self, kind: str, key: str) -> Artifact | None:
        """The artifact under this key, unverified; None if there is none."""
        folder = self._folder(kind, key)
        try:
            paths = sorted(folder.iterdir())
        except FileNotFoundError:
            return None
        for path in paths:
            if len(path.name) == 64 and _KEY.match(path.name):
                with contextlib.suppress(FileNotFoundError):
                    return Artifact(str(path), path.name, path.stat().st_size)
        return None

    def verified(self, artifact: Artifact) -> bool:
        """Whether the file has the content it was written with. Reads it whole once a process and change of the file
        (1 GB/s); a wrong one is removed."""
        try:
            signature = _signature(artifact.name)
            self._touch(artifact.name)
            if self._verified.get(artifact.name) == signature:
                return True
            digest = sha256_of_file(artifact.path)
        except FileNotFoundError:
            return False
        if digest == artifact.sha256 and signature == _signature(artifact.name):
            self._verified[artifact.name] = signature
            return True
        self.remove(artifact)
        return False

    def opened(self, artifact: Artifact) -> int | None:
        """A descriptor of a file that is `verified` and has its size, to be closed by the caller; None if it is
        missing or damaged. It is the file opened that was verified, whatever its name means meanwhile."""
        try:
            descriptor = os.open(artifact.name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        signature = _signature_of(os.fstat(descriptor))
        if self._verified.get(artifact.name) == signature:
            self._touch(artifact.name)
        elif not self.verified(artifact) or self._verified.get(artifact.name) != signature:
            os.close(descriptor)
            return None
        if signature[2] != artifact.size:
            os.close(descriptor)
            return None
        return descriptor

    def load(self, kind: str, key: str) -> Artifact | None:
        """`find` and `verified` in one."""
        artifact = self.find(kind, key)
        return artifact if artifact is not None and self.verified(artifact) else None

    def write(self, kind: str, key: str, produce: Callable[[BinaryIO], object]) -> Artifact:
        """Writes what `produce` writes (holes by seeking included) and replaces an older file under the same key."""
        folder = self._folder(kind, key)
        with _explained(self.root):
            descriptor, name = tempfile.mkstemp(prefix=f"{os.getpid()}-", dir=self.root / "tmp")
            temporary = Path(name)
            try:
                with os.fdopen(descriptor, "w+b") as file:
                    produce(file)
                    file.flush()
                    size = max(file.tell(), os.fstat(file.fileno()).st_size)
                    file.truncate(size)
                    _fill_holes(file.fileno(), size)
                    os.fsync(file.fileno())
                return self._adopt(temporary, folder)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()

    def write_bytes(self, kind: str, key: str, content: bytes) -> Artifact:
        return self.write(kind, key, lambda file: file.write(content))

    def adopt(self, kind: str, key: str, temporary: Path) -> Artifact:
        """Takes a finished file made under `scratch` (by another process, say) into the store."""
        with _explained(self.root):
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            return self._adopt(temporary, self._folder(kind, key))

    def remove(self, artifact: Artifact) -> None:
        """Forgets a file. Who has it mapped keeps it."""
        self._verified.pop(artifact.name, None)
        self._touched.pop(artifact.name, None)
        with contextlib.suppress(FileNotFoundError):
            artifact.path.unlink()
        with contextlib.suppress(OSError):
            artifact.path.parent.rmdir()

    def prune(self, bytes_max: int, *, unused_s: float = _UNUSED_S) -> int:
        """Removes what was not used for `unused_s` until the rest takes `bytes_max` of disk; returns bytes freed."""
        found: list[tuple[float, int, Artifact]] = []
        for path in self.root.glob("*/*/*"):
            with contextlib.suppress(FileNotFoundError):
                if _KEY.match(path.name) and path.is_file():
                    used, status = path.parent.stat().st_mtime, path.stat()
                    found.append((used, status.st_blocks * 512, Artifact(str(path), path.name, status.st_size)))
        excess, freed, now = sum(size for _used, size, _artifact in found) - bytes_max, 0, time.time()
        for used, size, artifact in sorted(found, key=lambda item: item[0]):
            if freed >= excess or now - used < unused_s:
                break
            self.remove(artifact)
            freed += size
        return freed

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder of one's own on the store's file system, removed at the end."""
        with _explained(self.root):
            folder = tempfile.TemporaryDirectory(
                prefix=f"{os.getpid()}-", dir=self.root / "tmp", ignore_cleanup_errors=True
            )
        with folder as name:
            yield Path(name)

    @contextlib.contextmanager
    def lock(self, kind: str, key: str) -> Iterator[None]:
        """Held by one thread of one process at a time, for making what is under the key. Blocks, so not on a loop.

        Keys share a few locks: never take one while holding another of the same kind.
        """
        number = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % _LOCKS
        self._folder(kind, key)
        with _explained(self.root):
            descriptor = os.open(self.root / "locks" / f"{kind}-{number}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # by open file, so it excludes threads of this process too
            yield
        finally:
            os.close(descriptor)

    def secret(self, name: str) -> bytes:
        """32 random bytes of this installation, made at the first call, the same for ever after."""
        path = self.root / name
        if not _KIND.match(name):
            raise ValueError(f"secret name {name!r}")
        with _explained(self.root):
            with self.lock("secret", hashlib.sha256(name.encode()).hexdigest()):
                if path.exists() and path.stat().st_size == 32:
                    return path.read_bytes()
                temporary = self.root / "tmp" / f"{os.getpid()}-{secrets.token_hex(8)}"
                value = os.urandom(32)
                temporary.touch(mode=0o600)
                with temporary.open("wb") as file:
                    file.write(value)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
                return value

    def _touch(self, name: str) -> None:
        """Notes a use, at most once an hour: this is asked at every wake."""
        now = time.monotonic()
        if now - self._touched.get(name, -_TOUCH_S) >= _TOUCH_S:
            self._touched[name] = now
            with contextlib.suppress(OSError):
                os.utime(Path(name).parent)

    def _folder(self, kind: str, key: str) -> Path:
        if not _KIND.match(kind) or not _KEY.match(key):
            raise ValueError(f"artifact kind {kind!r}, key {key!r}: want lower-case words and hexadecimal digits")
        return self.root / kind / key

    def _adopt(self, temporary: Path, folder: Path) -> Artifact:
        temporary.chmod(0o600)
        digest = sha256_of_file(temporary)
        size = temporary.stat().st_size
        path = folder / digest
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        temporary.replace(path)
        _fsync_folder(folder)
        for other in folder.iterdir():
            if other != path:
                self.remove(Artifact(str(other), other.name, 0))
        artifact = Artifact(str(path), digest, size)
        self._verified[artifact.name] = _signature(artifact.name)
        return artifact

    def _sweep(self) -> None:
        """Removes temporaries of processes that are gone."""
        for path in (self.root / "tmp").iterdir():
            owner = path.name.partition("-")[0]
            if owner.isdigit() and not Path("/proc", owner).exists():
                _remove_tree(path)


def sha256_of_file(path: Path) -> str:
    """Hexadecimal digest, read in blocks."""
    digest = hashlib.sha256()
    block = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


def _signature(name: str) -> _Signature:
    """Changes whenever the content may have changed (ctime cannot be set back without root)."""
    return _signature_of(Path(name).stat())


def _signature_of(status: os.stat_result) -> _Signature:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _refuse_foreign(folder: Path) -> None:
    """Whoever can write here can run code as the host."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise ArtifactStoreFailed(f"{folder} belongs to user {status.st_uid}, not to this one: choose another folder")
    if status.st_mode & 0o077:
        folder.chmod(0o700)


_TMPFS_MAGIC = 0x01021994


def _fill_holes(descriptor: int, size: int) -> None:
    """On a tmpfs a hole takes memory as soon as a mapping of it is read, and where none is left that is SIGBUS. Taken
    now, it is ENOSPC."""
    if size and _on_tmpfs(descriptor):
        os.posix_fallocate(descriptor, 0, size)


def _on_tmpfs(descriptor: int) -> bool:
    """From `f_type`, the first word of a `struct statfs`, which `os.fstatvfs` leaves out."""
    buffer = (ctypes.c_long * 64)()
    return ctypes.CDLL(None).fstatfs(descriptor, buffer) == 0 and buffer[0] == _TMPFS_MAGIC


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_tree(path: Path) -> None:
    import shutil

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    """Turns an OSError of the store into one that names the folder and the way out."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise ArtifactStoreFailed(
                f"no space left in {root} for compiled modules and images: free some, or set another folder"
            ) from exc
        raise ArtifactStoreFailed(f"cannot use {root} for compiled modules and images: {exc}") from exc
