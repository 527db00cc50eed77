"""Children of a mesh: kept running, stopped, and ended with their parent."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torpor_cli.errors import CommandFailed
from torpor_cli.processes import Child

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def child(tmp_path, command, events=None):
    return Child("x", command, dict(os.environ), tmp_path / "x.log", [].append if events is None else events.append)


async def until(condition, timeout_s=20):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_child_that_dies_is_started_again_and_stop_ends_it(tmp_path):
    events = []
    subject = child(tmp_path, SLEEP, events)
    await subject.start()
    first = subject.pid
    await until(lambda: subject.log.read_text() == "up\n")
    os.kill(first, signal.SIGKILL)
    await until(lambda: subject.restarts == 1 and subject.pid != first)
    assert "x ended with -9" in events[0]
    await subject.stop()
    assert not alive(subject.pid)


async def test_wrong_settings_are_told_with_the_childs_last_line(tmp_path):
    subject = child(
        tmp_path, [sys.executable, "-c", "import sys; print('PORT: is wrong', file=sys.stderr); sys.exit(2)"]
    )
    await subject.start()
    with pytest.raises(CommandFailed, match="x cannot start: PORT: is wrong"):
        await asyncio.wait_for(subject.wait_failed(), 20)


async def test_what_cannot_be_mended_by_a_restart_ends_the_mesh(tmp_path):
    subject = child(tmp_path, [sys.executable, "-c", "print('bye')"])
    subject.lost_with_it = "its objects are gone"
    await subject.start()
    with pytest.raises(CommandFailed, match="x ended with 0: bye; its objects are gone"):
        await asyncio.wait_for(subject.wait_failed(), 20)
    assert subject.restarts == 0


async def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    script = f"""
import asyncio, os, pathlib
from torpor_cli.processes import Child
async def main():
    child = Child("x", {SLEEP!r}, dict(os.environ), pathlib.Path({str(tmp_path)!r}) / "x.log", print)
    await child.start()
    print(child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    pid = int(await parent.stdout.readline())
    await until(lambda: (tmp_path / "x.log").read_text() == "up\n")
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(pid))
