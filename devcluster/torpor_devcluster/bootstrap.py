"""What is in a cluster before anyone writes: the namespaces, the default roles, the `kubernetes` service."""

from __future__ import annotations

from typing import Any

from torpor_devcluster.authn import AUTHENTICATED, MASTERS, UNAUTHENTICATED
from torpor_devcluster.registry import Registry, Write
from torpor_devcluster.resources import RBAC_GROUP

Json = dict[str, Any]

_LABEL = {"kubernetes.io/bootstrapping": "rbac-defaults"}
_READ = ["get", "list", "watch"]
_WRITE = ["create", "delete", "deletecollection", "patch", "update"]
_CORE_EDIT = [
    "configmaps",
    "endpoints",
    "events",
    "persistentvolumeclaims",
    "pods",
    "secrets",
    "serviceaccounts",
    "services",
]
_CORE_VIEW = [name for name in _CORE_EDIT if name != "secrets"]
_EDIT_GROUPS: dict[str, list[str]] = {
    "apps": [
        "controllerrevisions",
        "daemonsets",
        "deployments",
        "deployments/scale",
        "replicasets",
        "replicasets/scale",
        "statefulsets",
        "statefulsets/scale",
    ],
    "batch": ["cronjobs", "jobs"],
    "networking.k8s.io": ["ingresses", "networkpolicies"],
    "policy": ["poddisruptionbudgets"],
    "coordination.k8s.io": ["leases"],
}


def fill(registry: Registry) -> None:
    for name in ("default", "kube-system", "kube-public", "kube-node-lease"):
        _create(registry, "", "v1", "namespaces", "", {"metadata": {"name": name}})
    for name, rules in _cluster_roles().items():
        role = {"metadata": {"name": name, "labels": dict(_LABEL)}, "rules": rules}
        _create(registry, RBAC_GROUP, "v1", "clusterroles", "", role)
    for name, groups in _BINDINGS.items():
        _create(registry, RBAC_GROUP, "v1", "clusterrolebindings", "", _binding(name, groups))
    service = {
        "metadata": {"name": "kubernetes", "labels": {"component": "apiserver", "provider": "kubernetes"}},
        "spec": {"clusterIP": "10.96.0.1", "ports": [{"name": "https", "port": 443, "targetPort": 6443}]},
    }
    _create(registry, "", "v1", "services", "default", service)


def _create(registry: Registry, group: str, version: str, plural: str, namespace: str, obj: Json) -> None:
    resource = registry.catalogue.find(group, version, plural)
    assert resource is not None, f"{plural} is built in"
    typed = {"kind": resource.kind, "apiVersion": resource.api_version, **obj}
    registry.create(resource, namespace, typed, Write())


def _rule(verbs: list[str], groups: list[str], resources: list[str]) -> Json:
    return {"verbs": verbs, "apiGroups": groups, "resources": resources}


def _urls(urls: list[str]) -> Json:
    return {"verbs": ["get"], "nonResourceURLs": urls}


def _cluster_roles() -> dict[str, list[Json]]:
    health = ["/healthz", "/livez", "/readyz", "/version", "/version/"]
    discovery = ["/api", "/api/*", "/apis", "/apis/*", "/openapi", "/openapi/*", *health]
    view = [_rule(_READ, [""], [*_CORE_VIEW, "namespaces"])]
    view += [_rule(_READ, [group], names) for group, names in _EDIT_GROUPS.items()]
    edit = [_rule(_READ + _WRITE, [""], _CORE_EDIT), _rule(_READ, [""], ["namespaces"])]
    edit += [_rule(_READ + _WRITE, [group], names) for group, names in _EDIT_GROUPS.items()]
    roles = _rule(_READ + _WRITE, [RBAC_GROUP], ["rolebindings", "roles"])
    reviews = ["selfsubjectaccessreviews", "selfsubjectrulesreviews"]
    return {
        "cluster-admin": [_rule(["*"], ["*"], ["*"]), {"verbs": ["*"], "nonResourceURLs": ["*"]}],
        "admin": [*edit, roles],
        "edit": edit,
        "view": view,
        "system:discovery": [_urls(discovery)],
        "system:public-info-viewer": [_urls(health)],
        "system:basic-user": [
            _rule(["create"], ["authorization.k8s.io"], reviews),
            _rule(["create"], ["authentication.k8s.io"], ["selfsubjectreviews"]),
        ],
        "system:auth-delegator": [
            _rule(["create"], ["authentication.k8s.io"], ["tokenreviews"]),
            _rule(["create"], ["authorization.k8s.io"], ["subjectaccessreviews"]),
        ],
    }


_BINDINGS = {
    "cluster-admin": [MASTERS],
    "system:discovery": [AUTHENTICATED],
    "system:basic-user": [AUTHENTICATED],
    "system:public-info-viewer": [AUTHENTICATED, UNAUTHENTICATED],
}


def _binding(role: str, groups: list[str]) -> Json:
    subjects = [{"kind": "Group", "apiGroup": RBAC_GROUP, "name": group} for group in groups]
    role_ref = {"kind": "ClusterRole", "apiGroup": RBAC_GROUP, "name": role}
    return {"metadata": {"name": role, "labels": dict(_LABEL)}, "subjects": subjects, "roleRef": role_ref}
