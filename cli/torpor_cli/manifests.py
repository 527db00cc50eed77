"""Objects from YAML files: read, checked, put in an order in which they can be applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from torpor_services import crd

from torpor_cli.errors import CommandFailed

# What others stand on comes first; a namespace before what is in it, a definition before its objects.
_ORDER = ("Namespace", "CustomResourceDefinition", "ServiceAccount", "ClusterRole", "Role", "ClusterRoleBinding",
          "RoleBinding", "ConfigMap", "Secret")  # fmt: skip
_FILE_BYTES_MAX = 16 << 20

Objects = list[dict[str, Any]]


def torpor_objects() -> Objects:
    """The WasmOperator definition and the accounts and rights of Torpor's services."""
    import yaml

    folder = resources.files("torpor_services.manifests")
    rbac = list(yaml.safe_load_all(folder.joinpath("rbac.yaml").read_bytes()))
    return in_order([crd.definition(), *rbac])


def read_folder(folder: Path) -> Objects:
    """Every object of every .yaml file below the folder, in order; raises CommandFailed naming file and problem.

    Files named `sample*.yaml` are left alone: they are for trying an operator out, not for installing it.
    """
    if not folder.is_dir():
        raise CommandFailed(f"{folder} is not a folder")
    files = sorted(path for path in folder.rglob("*.y*ml") if path.suffix in {".yaml", ".yml"})
    objects = [obj for path in files if not path.name.startswith("sample") for obj in read_file(path)]
    if not objects:
        raise CommandFailed(f"{folder} holds no .yaml file with objects; `torpor new NAME` makes one")
    return in_order(objects)


def read_file(path: Path) -> Objects:
    """The objects of one file, `List`s taken apart."""
    import yaml

    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise CommandFailed(f"{path}: is larger than {_FILE_BYTES_MAX >> 20} MiB")
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as exc:
        raise CommandFailed(f"{path}: cannot be read as YAML: {' '.join(str(exc).split())}") from exc
    objects: Objects = []
    for document in documents:
        if document is not None:
            objects += _checked(document, path)
    return objects


def in_order(objects: Iterable[dict[str, Any]]) -> Objects:
    rank = {kind: index for index, kind in enumerate(_ORDER)}
    return sorted(objects, key=lambda obj: rank.get(obj["kind"], len(rank)))


def _checked(document: Any, path: Path) -> Objects:
    if not isinstance(document, Mapping) or not isinstance(document.get("kind"), str):
        raise CommandFailed(f"{path}: holds a document that is no Kubernetes object (no kind)")
    if document["kind"] == "List":
        return [obj for item in document.get("items") or [] for obj in _checked(item, path)]
    metadata = document.get("metadata")
    if not isinstance(document.get("apiVersion"), str) or not isinstance(metadata, Mapping) or not metadata.get("name"):
        raise CommandFailed(f"{path}: {document['kind']}: apiVersion and metadata.name are needed")
    obj = dict(document)
    if obj["kind"] == crd.KIND:
        obj["metadata"] = {"namespace": "default", **metadata}
        problems = crd.violations(obj)
        if problems:
            raise CommandFailed(f"{path}: WasmOperator {metadata['name']}: " + "; ".join(problems))
    return [obj]
