"""The types this server knows: one row a resource, and what is special about each.

A `ResourceType` is one resource in one version. Versions of the same resource share a `ResourceKey`, under which
the objects are stored. Custom resources come from CRDs and look the same. Knows nothing of stored objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Json = dict[str, Any]

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


class ResourceKey(NamedTuple):
    """Where objects live, whatever the version they are read in."""

    group: str
    plural: str

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


@dataclass(frozen=True, slots=True)
class PrinterColumn:
    """One column of `kubectl get`: a JSONPath of a CRD, or a function of the object for built-in types."""

    name: str
    type: str = "string"
    json_path: str = ""
    cell: Callable[[Json], Any] | None = None
    description: str = ""
    format: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Scale:
    """Where an object keeps what its scale subresource shows, as JSONPaths."""

    spec_path: str = ".spec.replicas"
    status_path: str = ".status.replicas"
    selector_path: str = ".spec.selector"
    """A string, or a label selector of which matchLabels are shown; empty: none."""


@dataclass(frozen=True, slots=True, eq=False)
class ResourceType:
    """One resource in one version, with the rules that differ between types."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    singular: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ALL_VERBS
    name_rule: str = "subdomain"
    """subdomain, label or path: the rule for metadata.name (see `names.py`)."""
    has_status: bool = False
    """A `status` subresource exists: the main resource ignores status, the subresource ignores the rest."""
    keeps_status_on_create: bool = False
    """Nodes: what is sent as status at creation is kept although a subresource exists."""
    has_generation: bool = False
    """metadata.generation is kept. For a CR without status subresource every field but metadata counts."""
    custom: bool = False
    """From a CRD: merge patches only, items of a list carry their kind, unknown fields pruned by its schema."""
    graceful: bool = False
    """Pods: deletion has a grace period (which ends at once here unless the pod runs on a node)."""
    returns_deleted: bool = False
    """DELETE answers with the object instead of a Status."""
    create_on_update: bool = False
    """PUT of an absent object creates it."""
    unconditional_update: bool = True
    """PUT without resourceVersion overwrites; custom resources, Leases and budgets refuse it."""
    field_labels: Mapping[str, str] = field(default_factory=dict)
    """Field selectors beyond metadata.name and metadata.namespace: label → path in the object."""
    field_defaults: Mapping[str, str] = field(default_factory=dict)
    """What a selected field reads as when it is absent (`spec.unschedulable` is `false`)."""
    columns: tuple[PrinterColumn, ...] = ()
    schema: Json | None = None
    """The structural schema of a CR (openAPIV3Schema)."""
    storage_version: str = ""
    """The version that is stored, where it is not this one."""
    view_of: ResourceKey | None = None
    """Set where another resource's objects are shown in this type (events.k8s.io over core events)."""
    scale: Scale | None = None
    subresources: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """Further subresources as (name, kind, verbs) for discovery."""

    @property
    def key(self) -> ResourceKey:
        return self.view_of or ResourceKey(self.group, self.plural)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """`deployments.apps`: the name in error messages."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def list_kind(self) -> str:
        return f"{self.kind}List"

    @property
    def singular_name(self) -> str:
        return self.singular or self.kind.lower()


def _core(plural: str, kind: str, **more: Any) -> ResourceType:
    return ResourceType("", "v1", plural, kind, **more)


def _apps(plural: str, kind: str, short: str, **more: Any) -> ResourceType:
    return ResourceType(
        "apps",
        "v1",
        plural,
        kind,
        short_names=(short,),
        categories=("all",),
        has_status=True,
        has_generation=True,
        scale=None if plural == "daemonsets" else Scale(),
        **more,
    )


def _rbac(plural: str, kind: str, *, namespaced: bool) -> ResourceType:
    group = "rbac.authorization.k8s.io"
    return ResourceType(group, "v1", plural, kind, namespaced=namespaced, name_rule="path", create_on_update=True)


_EVENT_FIELDS = {
    "involvedObject.kind": "involvedObject.kind",
    "involvedObject.namespace": "involvedObject.namespace",
    "involvedObject.name": "involvedObject.name",
    "involvedObject.uid": "involvedObject.uid",
    "involvedObject.apiVersion": "involvedObject.apiVersion",
    "involvedObject.resourceVersion": "involvedObject.resourceVersion",
    "involvedObject.fieldPath": "involvedObject.fieldPath",
    "reason": "reason",
    "reportingComponent": "reportingComponent",
    "source": "source.component",
    "type": "type",
}
# The events.k8s.io names of the same fields, as they read in the stored (core) form.
_NEW_EVENT_FIELDS = {
    **{label.replace("involvedObject", "regarding"): path for label, path in _EVENT_FIELDS.items()},
    "reportingController": "reportingComponent",
}

_POD_FIELDS = {
    label: label
    for label in (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    )
}

BUILT_IN: tuple[ResourceType, ...] = (
    _core(
        "namespaces",
        "Namespace",
        returns_deleted=True,
        namespaced=False,
        short_names=("ns",),
        name_rule="label",
        has_status=True,
        verbs=("create", "delete", "get", "list", "patch", "update", "watch"),
        field_labels={"status.phase": "status.phase"},
        subresources=(("finalize", "Namespace", ("update",)),),
    ),
    _core(
        "pods",
        "Pod",
        returns_deleted=True,
        short_names=("po",),
        categories=("all",),
        has_status=True,
        has_generation=True,
        graceful=True,
        field_labels=_POD_FIELDS,
        field_defaults={"spec.hostNetwork": "false"},
        subresources=(
            ("binding", "Binding", ("create",)),
            ("eviction", "Eviction", ("create",)),
        ),
    ),
    _core(
        "services",
        "Service",
        create_on_update=True,
        returns_deleted=True,
        short_names=("svc",),
        categories=("all",),
        name_rule="label",
        has_status=True,
        field_labels={"spec.clusterIP": "spec.clusterIP", "spec.type": "spec.type"},
    ),
    _core("configmaps", "ConfigMap", short_names=("cm",)),
    _core("secrets", "Secret", field_labels={"type": "type"}),
    _core(
        "serviceaccounts",
        "ServiceAccount",
        returns_deleted=True,
        short_names=("sa",),
        subresources=(("token", "TokenRequest", ("create",)),),
    ),
    _core("events", "Event", create_on_update=True, short_names=("ev",), field_labels=_EVENT_FIELDS),
    _core(
        "nodes",
        "Node",
        namespaced=False,
        short_names=("no",),
        has_status=True,
        keeps_status_on_create=True,
        field_labels={"spec.unschedulable": "spec.unschedulable"},
        field_defaults={"spec.unschedulable": "false"},
    ),
    _core(
        "persistentvolumeclaims",
        "PersistentVolumeClaim",
        returns_deleted=True,
        short_names=("pvc",),
        has_status=True,
    ),
    _core(
        "persistentvolumes",
        "PersistentVolume",
        returns_deleted=True,
        namespaced=False,
        short_names=("pv",),
        has_status=True,
    ),
    _core("endpoints", "Endpoints", create_on_update=True, short_names=("ep",)),
    _core("limitranges", "LimitRange", create_on_update=True, short_names=("limits",)),
    _core("resourcequotas", "ResourceQuota", returns_deleted=True, short_names=("quota",), has_status=True),
    ResourceType(
        "discovery.k8s.io",
        "v1",
        "endpointslices",
        "EndpointSlice",
        has_generation=True,
        name_rule="subdomain",
    ),
    _apps("deployments", "Deployment", "deploy"),
    _apps("statefulsets", "StatefulSet", "sts"),
    _apps("daemonsets", "DaemonSet", "ds"),
    _apps(
        "replicasets",
        "ReplicaSet",
        "rs",
        field_labels={"status.replicas": "status.replicas"},
        field_defaults={"status.replicas": "0"},
    ),
    ResourceType("apps", "v1", "controllerrevisions", "ControllerRevision"),
    ResourceType(
        "batch",
        "v1",
        "jobs",
        "Job",
        categories=("all",),
        has_status=True,
        has_generation=True,
        field_labels={"status.successful": "status.succeeded"},
        field_defaults={"status.successful": "0"},
    ),
    ResourceType(
        "batch",
        "v1",
        "cronjobs",
        "CronJob",
        short_names=("cj",),
        categories=("all",),
        has_status=True,
        has_generation=True,
    ),
    ResourceType("coordination.k8s.io", "v1", "leases", "Lease", create_on_update=True, unconditional_update=False),
    ResourceType(
        "networking.k8s.io",
        "v1",
        "ingresses",
        "Ingress",
        short_names=("ing",),
        has_status=True,
        has_generation=True,
    ),
    ResourceType(
        "networking.k8s.io",
        "v1",
        "networkpolicies",
        "NetworkPolicy",
        short_names=("netpol",),
        has_generation=True,
    ),
    ResourceType(
        "policy",
        "v1",
        "poddisruptionbudgets",
        "PodDisruptionBudget",
        unconditional_update=False,
        short_names=("pdb",),
        has_status=True,
        has_generation=True,
    ),
    ResourceType(
        "scheduling.k8s.io",
        "v1",
        "priorityclasses",
        "PriorityClass",
        namespaced=False,
        short_names=("pc",),
        has_generation=True,
    ),
    ResourceType(
        "storage.k8s.io",
        "v1",
        "storageclasses",
        "StorageClass",
        namespaced=False,
        returns_deleted=True,
        short_names=("sc",),
    ),
    _rbac("roles", "Role", namespaced=True),
    _rbac("rolebindings", "RoleBinding", namespaced=True),
    _rbac("clusterroles", "ClusterRole", namespaced=False),
    _rbac("clusterrolebindings", "ClusterRoleBinding", namespaced=False),
    ResourceType(
        "apiextensions.k8s.io",
        "v1",
        "customresourcedefinitions",
        "CustomResourceDefinition",
        namespaced=False,
        short_names=("crd", "crds"),
        categories=("api-extensions",),
        has_status=True,
        has_generation=True,
    ),
    ResourceType(
        "events.k8s.io",
        "v1",
        "events",
        "Event",
        short_names=("ev",),
        field_labels=_NEW_EVENT_FIELDS,
        view_of=ResourceKey("", "events"),
    ),
    ResourceType(
        "authorization.k8s.io",
        "v1",
        "subjectaccessreviews",
        "SubjectAccessReview",
        namespaced=False,
        verbs=("create",),
    ),
    ResourceType(
        "authorization.k8s.io",
        "v1",
        "selfsubjectaccessreviews",
        "SelfSubjectAccessReview",
        namespaced=False,
        verbs=("create",),
    ),
    ResourceType(
        "authorization.k8s.io",
        "v1",
        "localsubjectaccessreviews",
        "LocalSubjectAccessReview",
        verbs=("create",),
    ),
    ResourceType(
        "authorization.k8s.io",
        "v1",
        "selfsubjectrulesreviews",
        "SelfSubjectRulesReview",
        namespaced=False,
        verbs=("create",),
    ),
    ResourceType("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False, verbs=("create",)),
    ResourceType(
        "authentication.k8s.io",
        "v1",
        "selfsubjectreviews",
        "SelfSubjectReview",
        namespaced=False,
        verbs=("create",),
    ),
)

NAMESPACES = ResourceKey("", "namespaces")
PODS = ResourceKey("", "pods")
SERVICES = ResourceKey("", "services")
SECRETS = ResourceKey("", "secrets")
EVENTS = ResourceKey("", "events")
SERVICE_ACCOUNTS = ResourceKey("", "serviceaccounts")
NODES = ResourceKey("", "nodes")
PVCS = ResourceKey("", "persistentvolumeclaims")
CRDS = ResourceKey("apiextensions.k8s.io", "customresourcedefinitions")
RBAC_GROUP = "rbac.authorization.k8s.io"
ROLES = ResourceKey(RBAC_GROUP, "roles")
ROLE_BINDINGS = ResourceKey(RBAC_GROUP, "rolebindings")
CLUSTER_ROLES = ResourceKey(RBAC_GROUP, "clusterroles")
CLUSTER_ROLE_BINDINGS = ResourceKey(RBAC_GROUP, "clusterrolebindings")
