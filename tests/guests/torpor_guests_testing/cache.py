"""Files that are built once and found again by what they were built from.

`${XDG_CACHE_HOME:-~/.cache}/torpor/guests/<key>` holds one built file. It is written in a folder beside it and renamed,
under a lock of the builder's own, so that a file under its own name is whole and two runs never build it twice. The
last thousand are kept.
"""

import contextlib
import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

KEPT = 1000
BUILD_TIMEOUT_S = 600.0
ERROR_LINES = 15


class BuildFailed(Exception):
    """A compiler failed or is not to be had; the message says which, and ends with what it said."""


def cache_root() -> Path:
    # The XDG specification tells to ignore relative paths.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "torpor" / "guests"


def key_of(*parts: str | bytes | Path) -> str:
    """Of texts, and of files and folders by their names and content."""
    digest = hashlib.sha256()
    for part in parts:
        for piece in _pieces(part):
            digest.update(hashlib.sha256(piece).digest())
    return digest.hexdigest()[:24]


def built(tool: str, key: str, build: Callable[[Path], None]) -> Path:
    """The file of `key`; where it is missing, `build(output)` makes it, one at a time for each tool."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    path = root / key
    if not path.is_file():
        with exclusive_lock(root / f"{tool}.lock"):
            if not path.is_file():
                with tempfile.TemporaryDirectory(dir=root, prefix=f".{tool}.") as scratch:
                    output = Path(scratch) / "output"
                    build(output)
                    output.replace(path)
                _remove_old(root)
    os.utime(path)
    return path


def run(command: Sequence[str], *, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Standard output. Raises BuildFailed."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=os.environ | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[-ERROR_LINES:])
        raise BuildFailed(f"{' '.join(command)}: exit status {done.returncode}\n{said}")
    return done.stdout


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold `path` locked; the kernel releases it however this process ends."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pieces(part: str | bytes | Path) -> Iterable[bytes]:
    match part:
        case str():
            yield part.encode()
        case bytes():
            yield part
        case Path() if part.is_dir():
            for path in sorted(part.rglob("*")):
                if path.is_file() and not _is_output(path.relative_to(part)):
                    yield str(path.relative_to(part)).encode()
                    yield path.read_bytes()
        case Path():
            yield part.read_bytes()


def _is_output(path: Path) -> bool:
    return any(name in {"target", "Cargo.lock", "__pycache__"} or name.startswith(".") for name in path.parts)


def _remove_old(root: Path) -> None:
    files = [path for path in root.iterdir() if path.is_file() and path.suffix != ".lock"]
    files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[KEPT:]:
        path.unlink(missing_ok=True)
