"""The examples as modules and as manifests, and their rights as something to ask."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from torpor_sdk.testing import FakeKube

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example() -> Iterator[Callable[[str], ModuleType]]:
    """Loads `examples/NAME/operator.py` anew."""
    loaded: list[str] = []

    def load(name: str) -> ModuleType:
        loaded.append(f"example_{name.replace('/', '_')}")
        spec = importlib.util.spec_from_file_location(loaded[-1], EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[loaded[-1]] = module
        spec.loader.exec_module(module)
        return module

    yield load
    for name in loaded:
        del sys.modules[name]


@pytest.fixture
def documents() -> Callable[[str], list[dict[str, Any]]]:
    """The objects of a YAML file below `examples/`."""

    def load(path: str) -> list[dict[str, Any]]:
        return [document for document in yaml.safe_load_all((EXAMPLES / path).read_text()) if document]

    return load


@pytest.fixture
def add_all() -> Callable[[FakeKube, list[dict[str, Any]]], None]:
    """Puts sample objects into a cluster, as an API server would store them."""

    def add(kube: FakeKube, objects: list[dict[str, Any]]) -> None:
        for obj in objects:
            if obj["kind"] == "Secret" and "stringData" in obj:
                obj = {**obj, "data": obj["stringData"]}
                del obj["stringData"]
            kube.add(obj)

    return add


class Rights:
    """What the rules of a manifest's Roles and ClusterRoles allow."""

    def __init__(self, objects: list[dict[str, Any]]) -> None:
        self._rules = [
            (rule, obj["metadata"].get("namespace") if obj["kind"] == "Role" else None)
            for obj in objects
            if obj["kind"] in ("Role", "ClusterRole")
            for rule in obj["rules"]
        ]

    def allow(self, verb: str, group: str, resource: str, namespace: str) -> bool:
        return any(
            verb in rule["verbs"]
            and group in rule["apiGroups"]
            and resource in rule["resources"]
            and where in (None, namespace)
            for rule, where in self._rules
        )

    def missing(self, kube: FakeKube) -> set[tuple[str, str, str, str]]:
        """Of all that the operator sent, what would be forbidden: verb, group, resource, namespace."""
        return {
            (verb, group, resource, namespace)
            for sent in kube.sent
            for verb, group, resource, namespace in _asked(sent.method, sent.path, sent.query)
            if not self.allow(verb, group, resource, namespace)
        }


def _asked(method: str, path: str, query: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    segments = path.strip("/").split("/")
    group = "" if segments[0] == "api" else segments[1]
    rest = segments[2:] if segments[0] == "api" else segments[3:]
    if not rest:
        return  # discovery
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    resource, named = rest[0], len(rest) > 1
    if len(rest) > 2:
        resource = f"{resource}/{rest[2]}"
    verbs = {
        "GET": ["get"] if named else ["list"],
        "POST": ["create"],
        "PUT": ["update"],
        # Server-side apply may create.
        "PATCH": ["patch", "create"] if "force" in query else ["patch"],
        "DELETE": ["delete"],
    }
    for verb in verbs[method]:
        yield verb, group, resource, namespace


@pytest.fixture
def rights() -> type[Rights]:
    return Rights
