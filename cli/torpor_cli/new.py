"""`torpor new NAME`: a folder with an operator that runs, to change from there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from torpor_cli.errors import CommandFailed

Language = Literal["python"]

_NAME = re.compile(r"^[a-z]([-a-z0-9]{0,50}[a-z0-9])?$")

_OPERATOR = '''"""Keeps a greeting in every ConfigMap labelled `{name}.example.com/greet`."""

from torpor_sdk import Operator, Request

op = Operator(for_="v1/configmaps")


@op.reconcile
def reconcile(request: Request, kube):
    config_map = kube.get(request)
    if config_map is None:
        return
    greeting = "hello " + config_map["metadata"]["labels"]["{name}.example.com/greet"]
    if config_map.get("data", {{}}).get("greeting") != greeting:
        kube.patch(config_map, {{"data": {{"greeting": greeting}}}})
'''

_MANIFEST = """apiVersion: torpor.dev/v1alpha1
kind: WasmOperator
metadata:
  name: {name}
  namespace: default
spec:
  module:
    file: operator.py
  serviceAccountName: {name}
  for:
    resource: v1/configmaps
    namespace: default
    labelSelector: {name}.example.com/greet
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {name}
  namespace: default
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {name}
  namespace: default
rules:
  - apiGroups: [""]
    resources: [configmaps]
    verbs: [get, list, watch, patch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {name}
  namespace: default
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: {name}}}
subjects:
  - {{kind: ServiceAccount, name: {name}, namespace: default}}
"""

_SAMPLE = """apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}-sample
  namespace: default
  labels:
    {name}.example.com/greet: world
"""


def create(name: str, parent: Path) -> list[Path]:
    """Writes the files below `parent/name`; refuses a folder that exists."""
    if not _NAME.match(name):
        raise CommandFailed(
            f"{name!r} is not a name of lower-case letters, digits and dashes that begins with a letter"
        )
    folder = parent / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError as exc:
        raise CommandFailed(f"{folder} exists already") from exc
    except OSError as exc:
        raise CommandFailed(f"{folder} cannot be made: {exc.strerror}") from exc
    written = []
    for file, text in (("operator.py", _OPERATOR), ("wasmoperator.yaml", _MANIFEST), ("sample.yaml", _SAMPLE)):
        path = folder / file
        path.write_text(text.format(name=name))
        written.append(path)
    return written
