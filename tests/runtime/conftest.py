"""Fixtures for the Python runtime. It is built first where it is missing, which takes minutes once."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import wasmtime

RUNTIME = Path(__file__).resolve().parents[2] / "sdk" / "python" / "runtime"
sys.path.insert(0, str(RUNTIME))

from torpor_runtime.testing import WASM_STACK_BYTES, Guest  # noqa: E402


@pytest.fixture(scope="session")
def build_script() -> ModuleType:
    """`build.py`, as a module."""
    spec = importlib.util.spec_from_file_location("torpor_runtime_build", RUNTIME / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def runtime_wasm(build_script: ModuleType) -> Path:
    """The built module; from the cache, where it was built before."""
    path = build_script.runtime_module(os.environ)
    assert isinstance(path, Path)
    return path


@pytest.fixture(scope="session")
def engine() -> wasmtime.Engine:
    config = wasmtime.Config()
    config.max_wasm_stack = WASM_STACK_BYTES
    return wasmtime.Engine(config)


@pytest.fixture(scope="session")
def module(engine: wasmtime.Engine, runtime_wasm: Path) -> wasmtime.Module:
    return wasmtime.Module.from_file(engine, str(runtime_wasm))


@pytest.fixture
def guest(engine: wasmtime.Engine, module: wasmtime.Module) -> Iterator[Guest]:
    """A started guest without an operator."""
    guest = Guest(engine, module)
    try:
        yield guest.start()
    finally:
        guest.close()


@pytest.fixture
def second_guest(engine: wasmtime.Engine, module: wasmtime.Module) -> Iterator[Guest]:
    second = Guest(engine, module)
    try:
        yield second.start()
    finally:
        second.close()
