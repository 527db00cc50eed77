"""The command line as a user meets it: help, errors, and a whole `torpor run` on the devcluster."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TORPOR = [sys.executable, "-m", "torpor_cli"]
COMMANDS = ["up", "run", "ls", "describe", "top", "logs", "explain", "new", "install-crds", "apply", "demo"]


@pytest.fixture
def environment(tmp_path_factory):
    """Short: sockets lie below it."""
    runtime = tmp_path_factory.mktemp("r")
    return {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "COLUMNS": "120"}


def torpor(environment, *arguments, timeout=60):
    return subprocess.run(
        [*TORPOR, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_every_command_has_help_with_an_example(environment):
    from torpor_cli.app import app

    for command in COMMANDS:
        assert f"Example: torpor {command}" in app[command].help, command


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ls"], "no mesh is running here"),
        (["run", "missing"], "missing is not a folder"),
        (["up", "--devcluster", "--kubeconfig", "x"], "exclude each other"),
        (["install-crds", "--kubeconfig", "missing"], "kubeconfig missing does not exist"),
        (["up", "--python-runtime", "missing.wasm"], "missing.wasm does not exist"),
        (["describe", "a/b/c"], "no mesh is running here"),
        (["up", "--devcluster", "--modules", "/nope"], "/nope is not a folder"),
        (["logs", "--tail", "-1"], "--tail -1: lines cannot be fewer than 0"),
        (["ls", "--mesh", "../x"], "'../x' is not a name"),
        (["top", "--count", "0"], "--count 0: it refreshes at least once"),
        (["top", "--count", "-1"], "--count -1: it refreshes at least once"),
        (["logs", "--service", "../../../etc/passwd"], "is none of cache, host, scheduler, devcluster"),
        (["logs", "x", "--service", "host"], "exclude each other"),
        (["logs", "--service", "host"], "no log of host: No such file"),
    ],
)
def test_an_error_is_one_line_and_exit_code_one(environment, arguments, says):
    result = torpor(environment, *arguments)
    assert result.returncode == 1
    assert says in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


class Running:
    """`torpor run` of a folder, on a devcluster."""

    def __init__(self, environment, folder, log):
        self.environment = environment
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*TORPOR, "run", str(folder), "--devcluster"], env=environment, stdout=file, stderr=file
            )

    def until(self, condition, timeout_s=180):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            value = condition()
            if value:
                return value
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def json(self, *arguments):
        result = torpor(self.environment, *arguments, "-o", "json")
        return json.loads(result.stdout) if result.returncode == 0 else None

    def descendants(self):
        found, wanted = [], [self.process.pid]
        while wanted:
            for path in Path(f"/proc/{wanted.pop()}/task").glob("*/children"):
                pids = [int(pid) for pid in path.read_text().split()]
                found += pids
                wanted += pids
        return found


def test_a_new_operator_runs_on_the_devcluster_and_ctrl_c_leaves_nothing(environment, tmp_path):
    assert torpor(environment, "new", "greeter", "--folder", tmp_path).returncode == 0
    mesh = Running(environment, tmp_path / "greeter", tmp_path / "log")
    try:
        mesh.until(lambda: "the mesh is up" in mesh.log.read_text())
        assert "default/greeter is ready" in mesh.log.read_text()
        kubeconfig = Path(environment["XDG_RUNTIME_DIR"]) / f"torpor-{os.getuid()}" / "default" / "kubeconfig"
        (tmp_path / "try").mkdir()
        sample = (tmp_path / "greeter" / "sample.yaml").read_text()
        (tmp_path / "try" / "config-map.yaml").write_text(sample)
        applied = torpor(environment, "apply", tmp_path / "try", "--kubeconfig", kubeconfig)
        assert "applied ConfigMap default/greeter-sample" in applied.stdout, applied.stderr
        state = mesh.until(lambda: next((s for s in mesh.json("ls") or [] if s["reconciles"]), None))
        assert (state["operator"], state["errors"], state["form"]) == ("default/greeter", 0, "python")
        details = mesh.json("describe", "greeter")
        assert {c["type"]: c["status"] for c in details["conditions"]}["Ready"] == "True"
        assert "default/greeter" in mesh.until(lambda: mesh.json("explain", "greeter"))["sentence"]
        assert "greeter" in torpor(environment, "top", "--count", "1").stdout
        assert torpor(environment, "logs", "--service", "host").stdout
        for service in ("cache", "scheduler", "host"):
            said = torpor(environment, "logs", "--service", service).stdout
            assert '"level":"error"' not in said.replace(" ", ""), "nothing fails at a first start"
        assert "a mesh already runs" in torpor(environment, "up", "--devcluster").stderr
        children = mesh.descendants()
        assert len(children) >= 4
    finally:
        mesh.process.send_signal(signal.SIGINT)
        mesh.process.wait(60)
    assert mesh.process.returncode == 130
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert torpor(environment, "ls").returncode == 1


def write_operator(folder, name, content):
    (folder / f"{name}.py").write_text(content)
    (folder / f"{name}.yaml").write_text(
        f"""apiVersion: v1
kind: ServiceAccount
metadata: {{name: {name}, namespace: default}}
---
apiVersion: torpor.dev/v1alpha1
kind: WasmOperator
metadata: {{name: {name}, namespace: default}}
spec: {{module: {{file: {name}.py}}, serviceAccountName: {name}}}
"""
    )


def test_a_folder_of_which_nothing_can_be_installed_ends_at_once_with_the_reason(environment, tmp_path):
    write_operator(tmp_path, "broken", "raise ValueError('not today')\n")
    result = torpor(environment, "run", tmp_path, "--devcluster", timeout=120)
    assert result.returncode == 1
    assert "default/broken was refused:" in result.stdout and "ValueError: not today" in result.stdout
    assert "no operator of" in result.stderr and "the mesh is up" not in result.stdout


def test_an_operator_that_is_refused_is_told_and_the_others_run(environment, tmp_path):
    assert torpor(environment, "new", "greeter", "--folder", tmp_path).returncode == 0
    write_operator(tmp_path / "greeter", "broken", "raise ValueError('not today')\n")
    mesh = Running(environment, tmp_path / "greeter", tmp_path / "log")
    try:
        text = mesh.until(lambda: "the mesh is up" in mesh.log.read_text() and mesh.log.read_text())
    finally:
        mesh.process.send_signal(signal.SIGINT)
        mesh.process.wait(60)
    assert "default/greeter is ready" in text and "ValueError: not today" in text
    assert "the mesh is up, without default/broken" in text and mesh.process.returncode == 130
