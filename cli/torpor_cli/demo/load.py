"""The objects that the demo creates, changes and deletes, and how often."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import random
from pathlib import Path
from types import ModuleType
from typing import Any

from torpor_cli.apply import apply_all
from torpor_cli.errors import CommandFailed
from torpor_cli.kube import KubeClient

CHANGES_PER_S = 8.0


def find_examples() -> Path:
    """The examples' folder of this checkout."""
    folder = Path(__file__).resolve().parents[3] / "examples"
    if not (folder / "fleet.py").is_file():
        raise CommandFailed("the demo runs the examples of a checkout of Torpor: git clone it and run `make demo`")
    return folder


class Load:
    """A steady stream of small changes to many operators' objects, with a fixed seed."""

    def __init__(self, kube: KubeClient, examples: Path, operators: int) -> None:
        self._kube = kube
        self._fleet = _module(examples / "fleet.py")
        self._instances: list[tuple[str, int]] = list(self._fleet.instances(operators))
        self._operators = operators
        self._random = random.Random(1)
        self._live: list[dict[str, Any]] = []
        self.changes = 0

    async def install(self) -> None:
        """The operators with their namespaces, accounts and rights, and what the samples stand on."""
        await apply_all(self._kube, self._fleet.fleet(self._operators), lambda _: None)
        spaces = [obj for instance in self._instances for obj in self._samples(*instance) if obj["kind"] == "Namespace"]
        await apply_all(self._kube, spaces, lambda _: None)

    async def run(self, seconds: float) -> None:
        """Changes things for so long."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + seconds
        while loop.time() < end_s:
            await self._one_change()
            self.changes += 1
            await asyncio.sleep(self._random.expovariate(CHANGES_PER_S))

    async def _one_change(self) -> None:
        choice = self._random.random()
        if choice < 0.5 or not self._live:
            obj = self._fresh()
            self._live.append(obj)
            await self._kube.apply(obj)
        elif choice < 0.8:
            obj = self._random.choice(self._live)
            annotations = obj["metadata"].setdefault("annotations", {})
            annotations["example.com/touched"] = str(self.changes)
            self._change(obj)
            await self._kube.apply(obj)
        else:
            await self._kube.delete(self._live.pop(self._random.randrange(len(self._live))))

    def _fresh(self) -> dict[str, Any]:
        instance = self._random.choice(self._instances)
        samples = [obj for obj in self._samples(*instance) if obj["kind"] != "Namespace"]
        obj = copy.deepcopy(self._random.choice(samples))
        obj["metadata"]["name"] += f"-{self.changes}"
        annotations = obj["metadata"].get("annotations", {})
        if "ttl.example.com/ttl" in annotations:
            annotations["ttl.example.com/ttl"] = f"{self._random.randint(5, 20)}s"
        return obj

    def _change(self, obj: dict[str, Any]) -> None:
        if obj["kind"] == "Database":
            obj["spec"]["replicas"] = self._random.randint(1, 5)
        elif "data" in obj:
            obj["data"]["changed"] = str(self.changes)

    def _samples(self, example: str, number: int) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = self._fleet.samples(example, number)
        return samples


def _module(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location("torpor_examples_fleet", path)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
