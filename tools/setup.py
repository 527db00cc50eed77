"""Makes `.venv` with everything pinned in `requirements.lock` and our distributions, editable.

Needs only python3 (3.11 or later) with venv. Runs in a few seconds when the packages are in uv's cache.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STARTED = time.monotonic()


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - an older python3 is what this is for
        found = ".".join(map(str, sys.version_info[:3]))
        return _fail(f"Python 3.11 or later is needed, {sys.executable} is {found}; try: make PYTHON=python3.12 …")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return _fail("Python's venv module is missing; on Debian or Ubuntu: apt-get install python3-venv")
    from members import members

    _say("making .venv")
    _run(sys.executable, "-m", "venv", "--clear", str(VENV))
    python = str(VENV / "bin" / "python")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as bootstrap:
        bootstrap.write(_locked("uv"))
        bootstrap.flush()
        _run(
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--require-hashes",
            "-r",
            bootstrap.name,
        )
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--quiet", "--python", python]
    _say("installing pinned packages")
    _run(*uv, "--require-hashes", "-r", str(ROOT / "requirements.lock"))
    _say("installing Torpor's own distributions")
    editable = [argument for member in members() for argument in ("-e", str(member))]
    _run(*uv, "--no-deps", "--no-build-isolation", *editable)
    (VENV / "complete").touch()
    _say("ready")
    return 0


def _locked(name: str) -> str:
    """The lines of one package in requirements.lock, hashes included."""
    lines, inside = [], False
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if not line.startswith((" ", "#")):
            inside = line.startswith(f"{name}==")
        if inside and not line.strip().startswith("#"):
            lines.append(line)
    return "\n".join(lines) + "\n"


def _run(*command: str) -> None:
    result = subprocess.run(command, cwd=ROOT, check=False)
    if result.returncode:
        sys.exit(_fail(f"`{' '.join(command[:6])} …` failed with {result.returncode}; see above"))


def _say(text: str) -> None:
    print(f"setup  {time.monotonic() - STARTED:5.1f} s  {text}", flush=True)


def _fail(text: str) -> int:
    print(f"setup: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
