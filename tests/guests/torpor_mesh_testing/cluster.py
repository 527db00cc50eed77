"""The objects that a test of the mesh puts into a cluster."""

from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import yaml
from torpor_kubernetes_testing import ApiError, KubeClient, install_crd
from torpor_kubernetes_testing.client import Json

WASM_OPERATORS = "torpor.dev/v1alpha1/wasmoperators"
CRDS = "apiextensions.k8s.io/v1/customresourcedefinitions"
EXAMPLE_KINDS = ("widgets", "gadgets", "gizmos")
_PLURALS = {
    "Namespace": "v1/namespaces",
    "ServiceAccount": "v1/serviceaccounts",
    "ClusterRole": "rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "rbac.authorization.k8s.io/v1/roles",
    "RoleBinding": "rbac.authorization.k8s.io/v1/rolebindings",
}


async def install_torpor(kube: KubeClient) -> None:
    """The CRD, namespace, accounts and rights that the services come with. Installing twice changes nothing."""
    manifests = files("torpor_services.manifests")
    await _install_definition(kube, yaml.safe_load((manifests / "wasmoperator-crd.yaml").read_text()))
    for obj in yaml.safe_load_all((manifests / "rbac.yaml").read_text()):
        await kube.apply(_PLURALS[obj["kind"]], obj)


async def install_kinds(kube: KubeClient, plurals: Iterable[str] = EXAMPLE_KINDS) -> None:
    """example.com's kinds, each with a `spec.value`."""
    for plural in plurals:
        await _install_definition(kube, definition(plural))


def definition(plural: str) -> Json:
    kind = plural.removesuffix("s").capitalize()
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.example.com"},
        "spec": {
            "group": "example.com",
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
            },
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "properties": {"spec": {"type": "object", "properties": {"value": {"type": "string"}}}},
                        }
                    },
                }
            ],
        },
    }


def operator_object(
    name: str,
    namespace: str,
    file: str,
    *,
    resource: str = "widgets",
    selector: str = "",
    account: str = "",
    config: Json | None = None,
    **spec: Any,
) -> Json:
    """A WasmOperator for example.com's `resource` in its own namespace; `account` is its own name by default."""
    watch: Json = {"resource": f"example.com/v1/{resource}", "namespace": namespace}
    if selector:
        watch["labelSelector"] = selector
    return {
        "apiVersion": "torpor.dev/v1alpha1",
        "kind": "WasmOperator",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "module": {"file": file},
            "serviceAccountName": account or name,
            "for": watch,
            "config": {"suffix": name, "resource": resource} | (config or {}),
            **spec,
        },
    }


def mirror_rules(resource: str = "widgets") -> Sequence[Json]:
    """What a mirror needs, and no more."""
    return [
        {"apiGroups": ["example.com"], "resources": [resource], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create", "patch", "delete"]},
    ]


def conditions_of(obj: Json | None) -> dict[str, Json]:
    return {c["type"]: c for c in ((obj or {}).get("status") or {}).get("conditions") or []}


def condition_of(obj: Json | None, kind: str) -> tuple[str, str, str]:
    """Status, reason and message of a condition; empty where it is not there."""
    found = conditions_of(obj).get(kind, {})
    return found.get("status", ""), found.get("reason", ""), found.get("message", "")


async def _install_definition(kube: KubeClient, crd: Json) -> None:
    try:
        await install_crd(kube, crd)
    except ApiError as error:
        if error.status != 409:
            raise
