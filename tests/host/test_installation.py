"""From a WasmOperator to something that runs, and every reason why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torpor_host.failures import InstallFailed, InstallRefused
from torpor_host.hostcalls import CallError, CallResponse, KubeRequest
from torpor_host.installation import Installer, Problem
from torpor_host.limits import Deadline, InstanceLimits
from torpor_host.operator_record import Installation
from torpor_services import crd

WASM = b"\0asm\x01\0\0\0"
COMPONENT = b"\0asm\x0d\x00\x01\x00"


class Installed:
    manifest = b'{"for": {"resource": "example.com/v1/databases"}, "resync": "1h"}'
    maps = True
    form = "core"


def wasm_operator(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": crd.API_VERSION,
        "kind": crd.KIND,
        "metadata": {"name": "op", "namespace": "ns", "uid": "u", "generation": 3},
        "spec": {"module": {"file": "op.wasm"}, "serviceAccountName": "op", **spec},
    }


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.sources: list[tuple[str, bytes, str, InstanceLimits]] = []
        self.error: Exception | None = None
        self.answer: Callable[[str], CallResponse] = self.api
        (folder / "op.wasm").write_bytes(WASM)

    def api(self, path: str) -> CallResponse:
        if path == "/apis/example.com/v1":
            kinds = [{"name": "databases", "namespaced": False}, {"name": "databases/status", "namespaced": False}]
            return CallResponse(200, "application/json", msgspec.json.encode({"resources": kinds}))
        return CallResponse(404, "application/json", b'{"message": "not found"}')

    def install(self, obj: dict[str, Any]) -> Installation | Problem:
        def ask(request: KubeRequest, deadline: Deadline) -> CallResponse:
            self.asked.append(request.path)
            return self.answer(request.path)

        def install_module(source: Any, limits: InstanceLimits, discovery: Any) -> Any:
            self.sources.append((source.form, source.content, source.filename, limits))
            if self.error is not None:
                raise self.error
            return Installed()

        return Installer(install_module, self.folder).install(obj, ask)

    def problem(self, obj: dict[str, Any]) -> Problem:
        outcome = self.install(obj)
        assert isinstance(outcome, Problem), outcome
        return outcome


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_object_is_laid_over_the_manifest(bench: Bench) -> None:
    outcome = bench.install(wasm_operator(resync="2h", limits={"memory": "64Mi", "cpu": "2s"}))
    assert isinstance(outcome, Installation)
    assert str(outcome.spec.primary.resource) == "example.com/v1/databases" and outcome.spec.resync_s == 7200
    assert outcome.cluster_scoped, "as discovery says"
    form, _, filename, limits = bench.sources[0]
    assert (form, filename, limits.memory_bytes, limits.cpu_budget_s) == ("core", "op.wasm", 64 << 20, 2.0)


def test_a_python_file_and_a_zip_are_told_by_their_content(bench: Bench) -> None:
    (bench.folder / "op.py").write_bytes(b"x = 1")
    (bench.folder / "op.zip").write_bytes(b"PK\x03\x04")
    for name in ("op.py", "op.zip"):
        assert isinstance(bench.install(wasm_operator(module={"file": name})), Installation)
    assert [source[0] for source in bench.sources] == ["python", "python"]


def test_a_config_map_is_read_as_the_operator(bench: Bench) -> None:
    def answer(path: str) -> CallResponse:
        if path == "/api/v1/namespaces/ns/configmaps/code":
            return CallResponse(200, "application/json", msgspec.json.encode({"data": {"op.py": "x = 1"}}))
        return bench.api(path)

    bench.answer = answer
    assert isinstance(
        bench.install(wasm_operator(module={"configMap": {"name": "code", "key": "op.py"}})), Installation
    )
    assert bench.sources[0][1] == b"x = 1"


@pytest.mark.parametrize(
    ("spec", "reason", "says", "final"),
    [
        ({"colour": "red"}, "InvalidSpec", "colour", True),
        ({"module": {}}, "InvalidSpec", "exactly one", True),
        ({"module": {"oci": "x/y"}}, "Unsupported", "oci", True),
        ({"module": {"file": "absent.wasm"}}, "ModuleUnavailable", "absent.wasm", False),
        ({"module": {"file": "op.wasm", "sha256": "0" * 64}}, "ModuleUnavailable", "sha256", True),
        ({"module": {"configMap": {"name": "no", "key": "k"}}}, "ModuleUnavailable", "ns/no", False),
        ({"resync": "often"}, "InvalidSpec", "resync", True),
    ],
)
def test_what_is_wrong_is_named(bench: Bench, spec: dict[str, Any], reason: str, says: str, final: bool) -> None:
    problem = bench.problem(wasm_operator(**spec))
    assert (problem.reason, problem.final) == (reason, final) and says in problem.message


def test_a_mapping_in_code_needs_a_module_that_exports_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    obj = wasm_operator(watches=[{"resource": "v1/secrets", "mapping": {"code": True}}])
    assert isinstance(bench.install(obj), Installation)
    monkeypatch.setattr(Installed, "maps", False)
    problem = bench.problem(obj)
    assert (problem.reason, problem.final) == ("ModuleRefused", True)
    assert "watches/0" in problem.message and "torpor_map" in problem.message


def test_a_mapping_in_python_code_keeps_its_place(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = {"resource": "v1/secrets", "mapping": {"self": True}}
    coded = {"resource": "v1/nodes", "mapping": {"code": True}}
    manifest = {"for": {"resource": "example.com/v1/databases"}, "watches": [declared, coded]}
    monkeypatch.setattr(Installed, "manifest", msgspec.json.encode(manifest))
    monkeypatch.setattr(Installed, "form", "python")
    assert isinstance(bench.install(wasm_operator()), Installation)
    assert isinstance(bench.install(wasm_operator(watches=[declared, coded])), Installation)
    problem = bench.problem(wasm_operator(watches=[coded]))
    assert problem.reason == "InvalidSpec" and "watches/0" in problem.message and "@op.map" in problem.message


def test_a_component_and_a_wrong_file_are_refused_by_name(bench: Bench) -> None:
    (bench.folder / "op.wasm").write_bytes(COMPONENT)
    assert "component" in bench.problem(wasm_operator()).message
    (bench.folder / "op.wasm").write_bytes(b"MZ")
    assert "no WebAssembly module" in bench.problem(wasm_operator()).message


def test_a_refused_module_is_final_and_a_full_disk_is_not(bench: Bench) -> None:
    bench.error = InstallRefused("it exports no torpor_reconcile")
    problem = bench.problem(wasm_operator())
    assert (problem.reason, problem.message, problem.final) == ("ModuleRefused", "it exports no torpor_reconcile", True)
    bench.error = InstallFailed("no space left")
    assert not bench.problem(wasm_operator()).final


def test_a_fault_of_the_host_is_told_and_tried_again(bench: Bench) -> None:
    bench.error = RuntimeError("a bug")
    problem = bench.problem(wasm_operator())
    assert (problem.reason, problem.final) == ("InstallFailed", False) and "a bug" in problem.message


def test_without_an_answer_of_discovery_nothing_is_guessed(bench: Bench) -> None:
    bench.answer = lambda path: CallResponse.failed(CallError.DENIED, "the account does not exist")
    problem = bench.problem(wasm_operator())
    assert not problem.final and "does not exist" in problem.message


def test_a_kind_that_does_not_exist_yet_counts_as_namespaced(bench: Bench) -> None:
    bench.answer = lambda path: CallResponse(404, "application/json", b"{}")
    outcome = bench.install(wasm_operator())
    assert isinstance(outcome, Installation) and not outcome.cluster_scoped


def test_an_answer_of_discovery_nested_too_deeply_is_no_answer(bench: Bench) -> None:
    bench.answer = lambda path: CallResponse(200, "application/json", b"[" * 100_000)
    outcome = bench.install(wasm_operator())
    assert isinstance(outcome, Installation) and not outcome.cluster_scoped
