"""The guide for authors says what is true: its code compiles, its first example passes its own test, names exist."""

import ast
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torpor_sdk
import yaml
from torpor_sdk import Kube, Operator

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "python-operator.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", GUIDE, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in found]


@pytest.mark.parametrize("code", blocks("python"))
def test_every_block_of_python_compiles(code: str) -> None:
    # Fragments return from a reconcile that is not shown.
    compile("def fragment():\n" + textwrap.indent(code, "    "), "guide", "exec")


def test_the_first_operator_passes_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, test, *_ = blocks("python")
    module = ModuleType("operator_under_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(operator, module.__dict__)
    tested: dict[str, object] = {}
    exec(test, tested)
    run = tested["test_a_greeting_becomes_a_configmap"]
    assert callable(run)
    run()


def test_what_is_imported_from_the_sdk_is_there() -> None:
    for code in blocks("python"):
        for node in ast.walk(ast.parse("def fragment():\n" + textwrap.indent(code, "    "))):
            if isinstance(node, ast.ImportFrom) and node.module == "torpor_sdk":
                assert {alias.name for alias in node.names} <= set(torpor_sdk.__all__)


def test_every_call_on_kube_and_op_is_a_method() -> None:
    for owner, kind in (("kube", Kube), ("op", Operator)):
        called = set(re.findall(rf"\b{owner}\.([a-z_]+)\(", GUIDE))
        assert called - {"add", "must_get", "fail_next"} <= set(dir(kind))


def test_the_yaml_is_yaml() -> None:
    (manifest,) = [yaml.safe_load(text) for text in blocks("yaml")]
    assert manifest["kind"] == "WasmOperator"
