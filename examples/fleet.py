"""Many different operators from the examples, side by side: each in a namespace and under a ServiceAccount of its own.

Prints a `List` for kubectl, or gives the objects to whoever imports it: `fleet(30)`. Instances are made from the
examples' own `wasmoperator.yaml` by changing namespace, name and class, nothing else, so that what is shown is what
the examples are.
"""

import argparse
import copy
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
EXAMPLES = ("database", "replicator", "ttl")
Objects = list[dict[str, Any]]


def fleet(count: int) -> Objects:
    """CRDs, then namespaces, rights and WasmOperators of `count` instances, an equal share of each example."""
    objects = documents("database/crd.yaml")
    for example, number in instances(count):
        objects.append({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace_of(example, number)}})
        objects += instance(example, number)
    return objects


def instances(count: int) -> Iterator[tuple[str, int]]:
    """Which examples, with the number that tells each apart."""
    for index in range(count):
        yield EXAMPLES[index % len(EXAMPLES)], index // len(EXAMPLES) + 1


def namespace_of(example: str, number: int) -> str:
    return f"{example}-{number:02d}"


def instance(example: str, number: int) -> Objects:
    """One operator with its ServiceAccount and rights."""
    name = namespace_of(example, number)
    objects = documents(f"{example}/wasmoperator.yaml")
    # The namespace that the file is written for becomes the instance's, the class its number.
    written_for = objects[0]["metadata"]["namespace"]
    return [_renamed(obj, example, written_for, name) for obj in objects]


def samples(example: str, number: int) -> Objects:
    """The example's sample objects, for one instance; namespaces among them are the instance's own."""
    name = namespace_of(example, number)
    objects = documents(f"{example}/sample.yaml")
    text = json.dumps(objects)
    text = re.sub(r'(example\.com/class": )"default"', rf'\1"{name}"', text)
    text = re.sub(r'"(team-[a-z*]+)"', rf'"{name}-\1"', text)
    text = text.replace('"production"', f'"{name}"').replace("stage=production", f"stage={name}")
    written_for = documents(f"{example}/wasmoperator.yaml")[0]["metadata"]["namespace"]
    moved: Objects = json.loads(text.replace(f'"namespace": "{written_for}"', f'"namespace": "{name}"'))
    return moved


def documents(path: str) -> Objects:
    """The objects of a file of the examples."""
    with (HERE / path).open(encoding="utf-8") as file:
        return [document for document in yaml.safe_load_all(file) if document]


def _renamed(obj: dict[str, Any], example: str, written_for: str, name: str) -> dict[str, Any]:
    renamed: dict[str, Any] = _replace(copy.deepcopy(obj), written_for, name)
    metadata = renamed["metadata"]
    if "namespace" not in metadata:
        # Cluster-wide rights are told apart by their names.
        metadata["name"] = name
        if "roleRef" in renamed:
            renamed["roleRef"]["name"] = name
    elif renamed["kind"] == "WasmOperator":
        metadata["labels"] = {"torpor.dev/example": example}
    return renamed


def _replace(value: Any, written_for: str, name: str) -> Any:
    """Namespaces and classes, wherever they stand."""
    if isinstance(value, dict):
        return {
            key: name
            if (key == "namespace" and below == written_for) or (key == "class" and below == "default")
            else _replace(below, written_for, name)
            for key, below in value.items()
        }
    if isinstance(value, list):
        return [_replace(below, written_for, name) for below in value]
    if isinstance(value, str):
        return re.sub(r"(example\.com/(?:class|copied-by))=default", rf"\1={name}", value)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=30, help="operators (default 30)")
    parser.add_argument("--samples", action="store_true", help="the sample objects for them instead")
    arguments = parser.parse_args()
    objects = (
        [obj for example, number in instances(arguments.count) for obj in samples(example, number)]
        if arguments.samples
        else fleet(arguments.count)
    )
    json.dump({"apiVersion": "v1", "kind": "List", "items": objects}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
