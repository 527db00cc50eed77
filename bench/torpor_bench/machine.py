"""On what was measured: the machine, and the versions of what took part."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("wasmtime", "grpcio", "protobuf", "msgspec", "aiohttp", "opentelemetry-sdk", "ziglang")


_SPIN = "import time; began = time.perf_counter()\nfor _ in range(3_000_000): pass\nprint(time.perf_counter() - began)"


def machine() -> dict[str, str | int | float]:
    """Processor, cores and what all of them together do of one alone, memory, kernel, load of the last minute."""
    return {
        "processor": _field(Path("/proc/cpuinfo"), "model name"),
        "cores": os.cpu_count() or 0,
        "cores_worth": round(cores_worth(), 2),
        "memory_mb": int(_field(Path("/proc/meminfo"), "MemTotal").split()[0]) // 1024,
        "kernel": platform.release(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def cores_worth() -> float:
    """How many times the work of one busy core all of them do at once: virtual ones may share what they run on, and a
    mesh, which is several processes, then gets less than their number says."""
    cores = os.cpu_count() or 1
    alone_s = min(_spin(1)[0] for _ in range(3))
    together_s = min((_spin(cores) for _ in range(3)), key=sum)
    return sum(alone_s / each_s for each_s in together_s)


def _spin(count: int) -> list[float]:
    """Seconds that each of so many processes took for the same work, all at once."""
    command = [sys.executable, "-c", _SPIN]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return [float(process.communicate()[0]) for process in running]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torpor": _commit()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "0"


def _commit() -> str:
    """The commit, with `+` if the working tree differs from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
