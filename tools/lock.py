"""Writes `requirements.lock` from every `pyproject.toml`, seeded with itself; `--check` compares them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from members import ROOT, outside_requirements
from packaging.requirements import Requirement

LOCK = ROOT / "requirements.lock"


def main() -> int:
    return _check() if "--check" in sys.argv[1:] else _write()


def _write() -> int:
    with tempfile.NamedTemporaryFile("w", suffix=".in") as wanted:
        wanted.write("\n".join(outside_requirements()) + "\n")
        wanted.flush()
        command = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "--quiet", "--universal"]
        command += ["--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"]
        command += ["--no-emit-index-url", "--no-emit-find-links"]
        command += ["--output-file", str(LOCK), wanted.name]
        return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode


def _check() -> int:
    pins: dict[str, str] = {}
    for line in LOCK.read_text().splitlines():
        if "==" in line and not line.startswith((" ", "#")):
            name, _, rest = line.partition("==")
            pins[_normal(name)] = rest.split(" ")[0].split(";")[0].strip()
    wrong = 0
    for text in outside_requirements():
        requirement = Requirement(text)
        pin = pins.get(_normal(requirement.name))
        if pin is None or not requirement.specifier.contains(pin, prereleases=True):
            print(f"requirements.lock: {text} is not satisfied ({pin or 'absent'}); run `make lock`", file=sys.stderr)
            wrong = 1
    return wrong


def _normal(name: str) -> str:
    return name.split("[", maxsplit=1)[0].strip().lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    sys.exit(main())
