"""Installs each distribution alone, with our own it names, in a fresh environment and imports every module of it.

An import that no `pyproject.toml` declares fails here and nowhere else.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from members import ROOT, members, package_of

_IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def main() -> int:
    failed = [member.name for member in members() if not _imports_alone(member)]
    for name in failed:
        print(f"{name}: does not import with only its declared dependencies", file=sys.stderr)
    return 1 if failed else 0


def _imports_alone(member: Path) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        uv = str(Path(sys.executable).parent / "uv")
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
        python = f"{folder}/bin/python"
        own = [str(m) for m in _with_own_dependencies(member)]
        install = [uv, "pip", "install", "--quiet", "--python", python, "--constraint", _constraints(folder)]
        subprocess.run([*install, *own], check=True, cwd=ROOT)
        print(f"isolated: {member.relative_to(ROOT)}", flush=True)
        return subprocess.run([python, "-c", _IMPORT_ALL, package_of(member)], cwd=folder, check=False).returncode == 0


def _constraints(folder: str) -> str:
    """The pins without hashes: built wheels of our own have none."""
    pins = [line.rstrip(" \\") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line]
    path = Path(folder) / "constraints.txt"
    path.write_text("\n".join(pins) + "\n")
    return str(path)


def _with_own_dependencies(member: Path) -> list[Path]:
    by_name = {_project(m)["name"]: m for m in members()}
    wanted, found = [member], []
    while wanted:
        current = wanted.pop()
        if current not in found:
            found.append(current)
            requirements = _project(current).get("dependencies", ())
            names = [requirement.partition("=")[0].split("[")[0] for requirement in requirements]
            wanted += [by_name[name] for name in names if name in by_name]
    return found


def _project(member: Path) -> dict:
    return tomllib.loads((member / "pyproject.toml").read_text())["project"]


if __name__ == "__main__":
    sys.exit(main())
