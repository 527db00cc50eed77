"""The folder of a running mesh."""

import os
import subprocess
import sys

import pytest
from torpor_cli.errors import CommandFailed, MeshNotRunning
from torpor_cli.rundir import MeshFile, RunDir


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run_dir = RunDir.named("test")
    run_dir.create()
    return run_dir


def mesh_file(pid):
    return MeshFile(pid=pid, cache="unix:c", host="unix:h", scheduler="", kubeconfig="", host_name="h")


def test_nobody_else_can_enter(run_dir):
    assert run_dir.root.stat().st_mode & 0o777 == 0o700
    run_dir.root.chmod(0o755)
    with pytest.raises(CommandFailed, match="0700"):
        run_dir.create()


def test_a_second_mesh_of_the_same_name_is_refused(run_dir):
    with run_dir.lock():
        with pytest.raises(CommandFailed, match="a mesh already runs"):
            run_dir.lock()
    run_dir.lock().close()


def test_what_was_written_is_read(run_dir):
    run_dir.write(mesh_file(os.getpid()))
    assert run_dir.read() == mesh_file(os.getpid())


def test_a_mesh_that_died_is_not_running(run_dir):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run_dir.write(mesh_file(ended.pid))
    with pytest.raises(MeshNotRunning, match="torpor up"):
        run_dir.read()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "x"}'])
def test_a_broken_mesh_file_is_as_none(run_dir, content):
    run_dir.mesh_file.write_bytes(content)
    with pytest.raises(MeshNotRunning):
        run_dir.read()


def test_a_path_too_long_for_a_socket_is_said(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(CommandFailed, match="too long a path for sockets"):
        RunDir.named("test").create()


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "a b", ".hidden", "x" * 64])
def test_a_mesh_name_that_leaves_its_folder_is_refused(name):
    with pytest.raises(CommandFailed, match=r"--mesh .* is not a name"):
        RunDir.named(name)
