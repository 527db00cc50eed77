"""The wasm module itself: what a host asks of a guest, and nothing of the machine that built it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import wasmtime
from torpor_host import wasm_code, wasm_module
from torpor_runtime.testing import RUNTIME

EXPORTS = {
    *("memory", "_initialize", "torpor_abi_version", "torpor_alloc", "torpor_load", "torpor_describe"),
    *("torpor_reconcile", "torpor_map", "torpor_wake"),
}
HOST_FUNCTIONS = {"kube_request", "kube_tree", "http_fetch", "config", "log", "take"}
MODULE_BYTES_MAX = 20 << 20


@pytest.fixture(scope="module")
def wasm(runtime_wasm: Path) -> bytes:
    return runtime_wasm.read_bytes()


def test_it_has_one_mutable_global_and_nothing_an_image_would_miss(wasm: bytes) -> None:
    layout = wasm_module.read_layout(wasm)
    assert sum(variable.mutable for variable in layout.globals) == 1
    assert wasm_module.refusal(layout) is None
    assert wasm_code.image_refusal(wasm, layout) is None
    # Passive segments need this section, and so do the instructions that use and drop them.
    assert layout.section(wasm_module.Section.DATA_COUNT) is None


def test_it_exports_the_abi_and_no_more(module: wasmtime.Module) -> None:
    assert {export.name for export in module.exports} == EXPORTS


def test_it_imports_wasi_and_the_host_functions_only(module: wasmtime.Module) -> None:
    assert {imported.module for imported in module.imports} == {"torpor", "wasi_snapshot_preview1"}
    assert {i.name for i in module.imports if i.module == "torpor"} == HOST_FUNCTIONS


def test_it_names_no_folder_of_the_machine_that_built_it(wasm: bytes, runtime_wasm: Path) -> None:
    for folder in (runtime_wasm.parents[1], RUNTIME, Path(sys.prefix)):
        assert str(folder).encode() not in wasm
    assert b".build-" not in wasm


def test_it_is_not_much_larger_than_it_was(wasm: bytes) -> None:
    assert len(wasm) < MODULE_BYTES_MAX
