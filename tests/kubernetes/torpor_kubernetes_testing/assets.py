"""Where the binaries of the control plane are: `../build.py`, asked from Python.

The build is a program of its own, so that it runs before anything is installed; this module only runs it and
reads the folder that it prints. It needs the checkout beside it, as an editable installation has.
"""

import subprocess
import sys
from pathlib import Path
from typing import IO

BUILD = Path(__file__).resolve().parent.parent / "build.py"


class AssetsMissing(Exception):
    """The control plane's binaries are neither there nor can be built; the message says why and what to do."""


def built_assets(progress: IO[str] | None = None) -> Path:
    """The folder with etcd, kube-apiserver, kubectl and, where built, kube-controller-manager.

    Builds what is missing, which takes minutes the first time; `progress` (a real file, standard error by
    default) gets a line for each step. Raises AssetsMissing with one line.
    """
    if not BUILD.exists():
        raise AssetsMissing(f"{BUILD} is missing: install torpor-kubernetes-testing editable, from a checkout")
    with subprocess.Popen(
        [sys.executable, str(BUILD)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as build:
        assert build.stdout is not None and build.stderr is not None
        last = ""
        for last in build.stderr:
            print(last, end="", file=progress or sys.stderr, flush=True)
        folder = build.stdout.read().strip()
    if build.returncode != 0:
        raise AssetsMissing(last.strip() or f"{BUILD.name} ended with status {build.returncode}")
    return Path(folder)
