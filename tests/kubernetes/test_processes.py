"""Server processes never outlive the one that started them, and say why they failed."""

import os
import select
import signal
import subprocess
import sys

import pytest
from torpor_kubernetes_testing.metrics import Metrics
from torpor_kubernetes_testing.processes import ProcessFailed, ServerProcess

# Starts a server as a test would, tells its pid, and waits to be killed.
PARENT = """
import pathlib, sys
from torpor_kubernetes_testing.processes import ServerProcess
server = ServerProcess(["/bin/sleep", "600"], log=pathlib.Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


def test_server_dies_with_its_killed_parent(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        server = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        assert select.select([server], [], [], 10)[0], "the server still runs"
    finally:
        os.close(server)


async def test_server_that_ends_early_fails_with_its_own_words(tmp_path):
    server = ServerProcess(["/bin/sh", "-c", "echo no such port >&2; exit 3"], log=tmp_path / "log")
    server.start()

    async def never():
        return False

    with pytest.raises(ProcessFailed, match="sh ended before it was ready\nno such port"):
        await server.ready(never, timeout_s=10)


async def test_stopped_server_can_be_killed(tmp_path):
    server = ServerProcess(["/bin/sleep", "600"], log=tmp_path / "log")
    server.start()
    server.send(signal.SIGSTOP)
    await server.kill()
    assert not server.running
    with pytest.raises(ProcessFailed, match="sleep is not running"):
        server.send(signal.SIGCONT)


def test_metrics_are_summed_by_the_labels_asked_for():
    metrics = Metrics.parse(
        "# HELP requests Some help.\n"
        "# TYPE requests counter\n"
        'requests{verb="GET",path="/a \\"quoted\\", \\\\ {b}"} 2\n'
        'requests{verb="GET",path="/b"} 3 1700000000000\n'
        'requests{verb="PUT",path="/b"} 1e1\n'
        "up 1\n"
        "not a sample\n"
    )
    assert metrics.value("requests") == 15
    assert metrics.value("requests", path="/b") == 13
    assert metrics.value("requests", path='/a "quoted", \\ {b}') == 2
    assert metrics.by("requests", "verb") == {("GET",): 5, ("PUT",): 10}
    assert metrics.by("requests", "verb", path="/b") == {("GET",): 3, ("PUT",): 10}
    assert (metrics.value("up"), metrics.value("down")) == (1, 0)
