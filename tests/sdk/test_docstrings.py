"""The examples in the docstrings are true."""

import ast
import doctest
import importlib
import pkgutil
import sys
import tomllib
from pathlib import Path

import pytest
import torpor_sdk
from torpor_sdk import testing

NAMES = ["torpor_sdk", *(found.name for found in pkgutil.walk_packages(torpor_sdk.__path__, "torpor_sdk."))]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_everything_that_is_exported_is_documented() -> None:
    exported = {
        name: getattr(module, name)
        for module in (torpor_sdk, testing)
        for name in module.__all__
        if name != "__version__"
    }
    members = {
        f"{name}.{member}": below
        for name, value in exported.items()
        if isinstance(value, type)
        for member, below in vars(value).items()
        if not member.startswith("_") and callable(below)
    }
    undocumented = [name for name, value in {**exported, **members}.items() if not value.__doc__]
    assert undocumented == []


def test_the_version_is_the_distributions() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "sdk" / "python" / "pyproject.toml").read_text())["project"]
    assert project["version"] == torpor_sdk.__version__
    assert project["dependencies"] == []


def test_the_sdk_needs_the_standard_library_only() -> None:
    imported = {
        name.partition(".")[0]
        for path in Path(torpor_sdk.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in names_imported(node)
    }
    assert imported - sys.stdlib_module_names == {"torpor_sdk"}


def names_imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    return []
