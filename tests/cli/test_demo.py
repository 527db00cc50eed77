"""`torpor demo`, as `make demo` runs it but shorter."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEMO = [sys.executable, "-m", "torpor_cli", "demo"]


@pytest.fixture
def environment(tmp_path_factory):
    return {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("r"))}


def processes_below(folder: str) -> list[str]:
    """Command lines of processes that were told of the folder: the services of the demo's mesh."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"XDG_RUNTIME_DIR={folder}".encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
    return found


@pytest.mark.timeout(600)
def test_the_demo_wakes_every_operator_and_shows_the_path_of_a_change(environment):
    result = subprocess.run(
        [*DEMO, "--operators", "30", "--seconds", "8", "-o", "json"],
        env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["operators"] == 30 and summary["failed"] == []
    assert summary["reconciles"] >= summary["changes"] > 0 and summary["wakes"] > 0
    assert 0 < summary["most_resident"] <= 30
    path = "\n".join(summary["trace"])
    for step in ("watch event", "fan", "queue wait", "wake", "reconcile", "kube"):
        assert step in path, path
    assert processes_below(environment["XDG_RUNTIME_DIR"]) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("after_s", [1.0, 4.0, 9.0])
def test_ctrl_c_at_any_time_leaves_nothing_running(environment, after_s):
    demo = subprocess.Popen(DEMO, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=120)
    assert demo.returncode == 130 and "Traceback" not in errors, errors
    assert processes_below(environment["XDG_RUNTIME_DIR"]) == []
