"""The table of built-in types is generated: what is committed must be what the Go sources say."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem + "_for_types", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_table_is_what_the_sources_generate():
    build = load(ROOT / "tests" / "kubernetes" / "build.py")
    go = build.go_program(build.cache_root(os.environ))
    result = subprocess.run(
        [sys.executable, ROOT / "devcluster" / "tools" / "generate_types.py", "--check"],
        env=build.go_environment(go), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
