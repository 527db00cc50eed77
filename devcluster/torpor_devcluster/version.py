"""What /version says. The minor version is that of the Kubernetes whose replies the conformance tests compare."""

from __future__ import annotations

import platform
import sys

_MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())

VERSION = {
    "major": "1",
    "minor": "36",
    "emulationMajor": "1",
    "emulationMinor": "36",
    "gitVersion": "v1.36.3+torpor-devcluster",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": f"python{sys.version_info.major}.{sys.version_info.minor}",
    "platform": f"linux/{_MACHINE}",
}
