"""Generate `torpor_devcluster/data/types.json`: the fields of the built-in types, from the Go sources of k8s.io/api.

    python devcluster/tools/generate_types.py [--version v0.36.3] [--check]

Reads the struct tags and the `+listType` comments of the modules in the Go module cache (`go mod download` fetches
them). The table says of each field: its JSON name, type, protobuf number, whether a zero is left out, and how lists
merge in strategic merge patches and in server-side apply. Only what the built-in kinds reach is kept.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "torpor_devcluster" / "data" / "types.json"
MODULES = {
    "k8s.io/api": ["core/v1", "apps/v1", "batch/v1", "coordination/v1", "networking/v1", "policy/v1", "rbac/v1",
                   "discovery/v1", "events/v1", "scheduling/v1", "storage/v1", "authorization/v1",
                   "authentication/v1", "autoscaling/v1"],
    "k8s.io/apimachinery": ["pkg/apis/meta/v1"],
}  # fmt: skip
ROOTS = {
    "core/v1": "Namespace Pod Service ConfigMap Secret ServiceAccount Event Node PersistentVolumeClaim "
    "PersistentVolume Endpoints LimitRange ResourceQuota Binding",
    "apps/v1": "Deployment StatefulSet DaemonSet ReplicaSet ControllerRevision",
    "batch/v1": "Job CronJob",
    "coordination/v1": "Lease",
    "networking/v1": "Ingress NetworkPolicy",
    "policy/v1": "PodDisruptionBudget Eviction",
    "rbac/v1": "Role RoleBinding ClusterRole ClusterRoleBinding",
    "discovery/v1": "EndpointSlice",
    "events/v1": "Event",
    "scheduling/v1": "PriorityClass",
    "storage/v1": "StorageClass",
    "authorization/v1": "SubjectAccessReview SelfSubjectAccessReview LocalSubjectAccessReview SelfSubjectRulesReview",
    "authentication/v1": "TokenReview TokenRequest SelfSubjectReview",
    "autoscaling/v1": "Scale",
    "meta/v1": "DeleteOptions Status",
}
LEAVES = {
    "string": "string", "bool": "bool", "int": "int", "int32": "int", "int64": "int", "uint8": "int",
    "uint32": "int", "uint64": "int", "float64": "float", "byte": "int", "interface{}": "any", "any": "any",
    "meta/v1.Time": "time", "meta/v1.MicroTime": "microtime", "meta/v1.FieldsV1": "raw",
    "meta/v1.Duration": "string",
}  # fmt: skip
OUTSIDE = {
    "k8s.io/apimachinery/pkg/api/resource": "quantity",
    "k8s.io/apimachinery/pkg/util/intstr": "intstr",
    "k8s.io/apimachinery/pkg/runtime": "raw",
    "k8s.io/apimachinery/pkg/types": "string",
}


@dataclass
class Package:
    """The Go declarations of one API package: structs by name (their lines), other types by name (their text)."""

    name: str
    structs: dict[str, list[str]] = field(default_factory=dict)
    comments: dict[str, list[str]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)


def package_name(directory: str) -> str:
    return directory.removeprefix("pkg/apis/")


def read_package(folder: Path, name: str) -> Package:
    package = Package(name)
    for file in sorted(folder.glob("*.go")):
        if not file.name.endswith("_test.go") and not file.name.startswith("zz_generated"):
            read_file(package, file.read_text().splitlines())
    return package


def read_file(package: Package, lines: list[str]) -> None:
    comments: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        imported = re.match(r'\s+(?:(\w+) )?"(k8s\.io/[\w./-]+)"$', line)
        if imported:
            path = imported.group(2)
            package.imports[imported.group(1) or path.rpartition("/")[2]] = path
        if line.startswith("//"):
            comments.append(line[2:].strip())
            continue
        struct = re.match(r"type (\w+) struct \{$", line)
        alias = re.match(r"type (\w+) (?!struct|interface)(\S.*)$", line)
        if struct:
            end = lines.index("}", at)
            package.structs[struct.group(1)] = lines[at:end]
            package.comments[struct.group(1)] = comments
            at = end
        elif alias:
            package.aliases[alias.group(1)] = alias.group(2).split("//")[0].strip().removeprefix("= ")
        if line.strip():
            comments = []


class Generator:
    def __init__(self, packages: dict[str, Package]) -> None:
        self.packages = packages
        self.types: dict[str, Any] = {}

    def add(self, name: str) -> None:
        """Add a struct and all that it reaches, by qualified name (`core/v1.Pod`)."""
        if name in self.types:
            return
        package, _, struct = name.rpartition(".")
        entry: dict[str, Any] = {"fields": {}, "inline": []}
        self.types[name] = entry
        for comments, line in fields_of(self.packages[package].structs[struct]):
            self.add_field(self.packages[package], entry, comments, line)
        if not entry["inline"]:
            del entry["inline"]

    def add_field(self, package: Package, entry: dict[str, Any], comments: list[str], line: str) -> None:
        match = re.match(r"\s*(?:(\w+)\s+)?([\w.\[\]*{}]+)\s+`([^`]*)`", line)
        if match is None:
            return
        tags = dict(re.findall(r'(\w+):"([^"]*)"', match.group(3)))
        json_name, *options = tags.get("json", "").split(",")
        go_type = match.group(2)
        if json_name == "-" or "json" not in tags:
            return
        resolved = self.resolve(package, go_type.lstrip("*"))
        number = int(tags["protobuf"].split(",")[1]) if "protobuf" in tags else 0
        if not json_name:
            if resolved == "@meta/v1.TypeMeta":
                # Numberless: in protobuf they are in the envelope.
                entry["fields"].update({"kind": {"t": "string"}, "apiVersion": {"t": "string"}})
            else:
                entry["inline"].append({"t": resolved, **({"n": number} if number else {})})
            return
        described: dict[str, Any] = {"t": resolved}
        if number:
            described["n"] = number
        if not go_type.startswith("*") and ("omitempty" in options or "omitzero" in options):
            described["z"] = 1
        default = next((c.removeprefix("+default=") for c in comments if c.startswith("+default=")), None)
        if default is not None and not default.startswith("ref("):
            described["d"] = json.loads(default)
        described.update(merging(resolved, tags, comments, self.struct_comments(resolved)))
        entry["fields"][json_name] = described

    def struct_comments(self, resolved: str) -> list[str]:
        package, _, struct = resolved.removeprefix("@").rpartition(".")
        found = self.packages.get(package)
        return found.comments.get(struct, []) if found else []

    def resolve(self, package: Package, go_type: str) -> str:
        """string, int, bool, float, bytes, time, microtime, quantity, intstr, raw, any, []T, {}T or @package.Struct."""
        if go_type == "[]byte":
            return "bytes"
        if go_type.startswith("[]"):
            return "[]" + self.resolve(package, go_type[2:].lstrip("*"))
        mapped = re.match(r"map\[[\w.]+\](.+)$", go_type)
        if mapped:
            return "{}" + self.resolve(package, mapped.group(1).lstrip("*"))
        alias, dot, name = go_type.rpartition(".")
        if dot:
            path = package.imports[alias]
            if path in OUTSIDE:
                return OUTSIDE[path]
            target = re.sub(r"^k8s\.io/(api/|apimachinery/pkg/apis/)", "", path)
            return self.resolve(self.packages[target], name)
        qualified = f"{package.name}.{go_type}"
        if go_type in LEAVES or qualified in LEAVES:
            return LEAVES.get(qualified) or LEAVES[go_type]
        if go_type in package.aliases:
            return self.resolve(package, package.aliases[go_type])
        if go_type not in package.structs:
            raise SystemExit(f"generate_types: {qualified} is not known; teach LEAVES or OUTSIDE about it")
        self.add(qualified)
        return f"@{qualified}"


def merging(resolved: str, tags: dict[str, str], comments: list[str], of_struct: list[str]) -> dict[str, Any]:
    """How a list, map or struct merges: l (set, map or atomic), k (its keys), m (patch merge key), r (retainKeys)."""
    markers: dict[str, list[str]] = {}
    for comment in comments + of_struct:
        marker = re.match(r"\+(listType|listMapKey|mapType|structType)=(\w+)", comment)
        if marker:
            markers.setdefault(marker.group(1), []).append(marker.group(2))
    found: dict[str, Any] = {}
    kinds = (
        markers.get("listType") if resolved.startswith("[]") else (markers.get("mapType") or markers.get("structType"))
    )
    if kinds and kinds[0] != "granular":
        found["l"] = kinds[0]
    if markers.get("listMapKey"):
        found["k"] = markers["listMapKey"]
    strategy = tags.get("patchStrategy", "").split(",")
    if "merge" in strategy:
        found["m"] = tags.get("patchMergeKey", "")
    if "retainKeys" in strategy:
        found["r"] = 1
    # As kube-openapi does: what only says patchStrategy is a map or a set for server-side apply too.
    if "merge" in strategy and resolved.startswith("[]") and "l" not in found:
        found["l"] = "map" if found["m"] else "set"
        if found["m"]:
            found["k"] = [found["m"]]
    return found


def fields_of(lines: list[str]) -> Iterator[tuple[list[str], str]]:
    comments: list[str] = []
    for line in lines:
        text = line.strip()
        if text.startswith("//"):
            comments.append(text[2:].strip())
        elif text:
            yield comments, text
            comments = []


def module_folder(modcache: Path, module: str, version: str) -> Path:
    folder = modcache / f"{module}@{version}"
    if not folder.is_dir():
        raise SystemExit(
            f"generate_types: {module}@{version} is not in the Go module cache: go mod download {module}@{version}"
        )
    return folder


def generate(version: str) -> str:
    modcache = Path(
        subprocess.run(["go", "env", "GOMODCACHE"], check=True, capture_output=True, text=True).stdout.strip()
    )
    packages = {
        package_name(directory): read_package(
            module_folder(modcache, module, version) / directory, package_name(directory)
        )
        for module, directories in MODULES.items()
        for directory in directories
    }
    generator = Generator(packages)
    for package, kinds in ROOTS.items():
        for kind in kinds.split():
            generator.add(f"{package}.{kind}")
    rows = ",\n".join(
        f"{json.dumps(name)}:{json.dumps(generator.types[name], separators=(',', ':'))}"
        for name in sorted(generator.types)
    )
    return f'{{"source":"k8s.io/api {version}",\n"types":{{\n{rows}\n}}}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="v0.36.3", help="of k8s.io/api and k8s.io/apimachinery")
    parser.add_argument("--check", action="store_true", help="fail if the committed table differs")
    arguments = parser.parse_args()
    text = generate(arguments.version)
    if arguments.check:
        if DATA.read_text() != text:
            print(f"{DATA.name} is out of date: run {Path(__file__).name}", file=sys.stderr)
            return 1
        return 0
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
