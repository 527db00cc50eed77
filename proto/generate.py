"""Generates the Python code of the contracts into `gen/python`.

Runs the pinned grpcio-tools 1.76 in an environment of its own: its output loads with protobuf 6 and later, what newer
versions generate loads only with 7. `--check` compares with what is committed and fails on any difference.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTPUT = HERE / "gen" / "python"
TOOLS = ("grpcio-tools==1.76.0", "mypy-protobuf==3.7.0", "setuptools==80.9.0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with what is committed, write nothing")
    check: bool = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) if check else OUTPUT
        target.mkdir(parents=True, exist_ok=True)
        _generate(_tools_python(), target)
        if check:
            return _compare(target)
    return 0


def _tools_python() -> Path:
    """The interpreter of the generator's environment, made on first use and kept in the user's cache."""
    key = hashlib.sha256("\n".join([sys.version, *TOOLS]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torpor" / "proto-tools" / key
    python = cache / "bin" / "python"
    done = cache / "complete"
    if not done.exists():
        venv.create(cache, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TOOLS], check=True)
        done.touch()
    return python


def _generate(python: Path, target: Path) -> None:
    protos = sorted(str(path.relative_to(HERE)) for path in HERE.glob("torpor/**/*.proto"))
    environment = dict(os.environ, PATH=f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command = [str(python), "-m", "grpc_tools.protoc", f"-I{HERE}", *outputs, *protos]
    subprocess.run(command, check=True, cwd=HERE, env=environment, stdout=subprocess.DEVNULL)


def _compare(fresh: Path) -> int:
    def names(root: Path) -> set[str]:
        files = (path for path in root.rglob("*.py*") if path.suffix in {".py", ".pyi"})
        return {str(path.relative_to(root)) for path in files}

    wanted, present = names(fresh), names(OUTPUT)
    differing = wanted ^ present
    differing |= {n for n in wanted & present if not filecmp.cmp(fresh / n, OUTPUT / n, shallow=False)}
    for name in sorted(differing):
        print(f"proto/gen/python/{name} is not what proto/ generates: run `make proto`", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
