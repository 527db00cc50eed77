"""The distributions of the workspace and what they require, read from their `pyproject.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def members() -> list[Path]:
    """The folders of all distributions, in the order of the workspace's list."""
    names = _toml(ROOT / "pyproject.toml")["tool"]["uv"]["workspace"]["members"]
    return [ROOT / name for name in names]


def package_of(member: Path) -> str:
    """The import package of a distribution."""
    packages = _toml(member / "pyproject.toml")["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return Path(packages[0]).name


def outside_requirements() -> list[str]:
    """Every requirement of every distribution and of the tools, our own distributions left out."""
    found = set(_toml(ROOT / "pyproject.toml")["dependency-groups"]["dev"])
    for member in members():
        project = _toml(member / "pyproject.toml")["project"]
        found.update(project.get("dependencies", ()))
        for extra in project.get("optional-dependencies", {}).values():
            found.update(extra)
    return sorted(requirement for requirement in found if not requirement.startswith("torpor-"))


def _toml(path: Path) -> dict:
    return tomllib.loads(path.read_text())
