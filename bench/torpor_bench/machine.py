"""On what was measured: the machine, and the versions of what took part."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("wasmtime", "grpcio", "protobuf", "msgspec", "aiohttp", "opentelemetry-sdk", "ziglang")


def machine() -> dict[str, str | int | float]:
    """Processor, cores, memory, kernel, and the load average of the last minute."""
    return {
        "processor": _field(Path("/proc/cpuinfo"), "model name"),
        "cores": os.cpu_count() or 0,
        "memory_mb": int(_field(Path("/proc/meminfo"), "MemTotal").split()[0]) // 1024,
        "kernel": platform.release(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


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
