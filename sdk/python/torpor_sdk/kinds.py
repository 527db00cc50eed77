"""Which resource an object is: `group/version/resource` names, and the way from apiVersion and kind to one.

Built-in kinds come from a table, so that they need no call. Everything else is learnt: from answers of the API
server (an object read as `example.com/v1/databases` has kind Database) and by discovery, once for a group and
version. What is learnt while the image is built is in the image.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from .errors import ApiError, NotFound


class Kind(NamedTuple):
    """A resource of one version; `group` is empty for the core group."""

    group: str
    version: str
    resource: str

    @classmethod
    def parse(cls, text: str) -> "Kind":
        """From `apps/v1/deployments`, or `v1/secrets` for the core group. Raises `ValueError`."""
        parts = text.split("/")
        if len(parts) == 2:
            parts.insert(0, "")
        if len(parts) != 3 or not parts[1] or not parts[2]:
            raise ValueError(f"{text!r} is not group/version/resource (or version/resource of the core group)")
        if parts[2] != parts[2].lower():
            raise ValueError(f"{text!r}: the resource is the plural in lower case, as in {text.lower()!r}")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.api_version}/{self.resource}"

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, *, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The API path of the collection, of an object, of its subresource."""
        path = group_version_path(self.api_version)
        if namespace:
            path += f"/namespaces/{quote(namespace, safe='')}"
        path += f"/{self.resource}"
        if name:
            path += f"/{quote(name, safe='')}"
        return f"{path}/{subresource}" if subresource else path


def group_version_path(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


# apiVersion: kinds. Plurals are the kind in lower case with an s, unless given; `-` before a kind: no namespace.
_BUILT_IN = {
    "v1": "ConfigMap Endpoints=endpoints Event LimitRange -Namespace -Node -PersistentVolume PersistentVolumeClaim "
    "Pod PodTemplate ReplicationController ResourceQuota Secret Service ServiceAccount",
    "apps/v1": "ControllerRevision DaemonSet Deployment ReplicaSet StatefulSet",
    "batch/v1": "CronJob Job",
    "autoscaling/v2": "HorizontalPodAutoscaler",
    "policy/v1": "PodDisruptionBudget",
    "networking.k8s.io/v1": "Ingress=ingresses -IngressClass=ingressclasses NetworkPolicy=networkpolicies",
    "rbac.authorization.k8s.io/v1": "-ClusterRole -ClusterRoleBinding Role RoleBinding",
    "coordination.k8s.io/v1": "Lease",
    "discovery.k8s.io/v1": "EndpointSlice",
    "events.k8s.io/v1": "Event",
    "storage.k8s.io/v1": "-CSIDriver -StorageClass=storageclasses -VolumeAttachment",
    "scheduling.k8s.io/v1": "-PriorityClass=priorityclasses",
    "apiextensions.k8s.io/v1": "-CustomResourceDefinition",
    "admissionregistration.k8s.io/v1": "-MutatingWebhookConfiguration -ValidatingWebhookConfiguration",
    "torpor.dev/v1alpha1": "WasmOperator",
}


class Served(NamedTuple):
    """What the API server serves under an apiVersion and kind."""

    kind: Kind
    namespaced: bool


def built_in() -> dict[tuple[str, str], Served]:
    """The table: (apiVersion, kind) to resource and scope."""
    table: dict[tuple[str, str], Served] = {}
    for api_version, words in _BUILT_IN.items():
        group, _, version = api_version.rpartition("/")
        for word in words.split():
            kind, _, plural = word.removeprefix("-").partition("=")
            resource = plural or f"{kind.lower()}s"
            table[api_version, kind] = Served(Kind(group, version, resource), not word.startswith("-"))
    return table


# Reads `/apis/GROUP/VERSION`; raises ApiError or CallError.
Discover = Callable[[str], Any]


# One for all, made at import: in a guest it is in the image that all operators share.
_TABLE = built_in()
_TABLE_VERSIONS = frozenset(api_version for api_version, _ in _TABLE)


class Kinds:
    """apiVersion and kind to resource, cached; `discover` reads what is not known."""

    def __init__(self) -> None:
        self._learnt: dict[tuple[str, str], Served] = {}

    def resource_of(self, obj: Mapping[str, Any], discover: Discover) -> Served:
        """Raises `ValueError` for an object without apiVersion and kind, `NotFound` for one that is not served."""
        api_version, kind = str(obj.get("apiVersion") or ""), str(obj.get("kind") or "")
        if not api_version or not kind:
            raise ValueError(f"an object needs apiVersion and kind; this one has {api_version!r} and {kind!r}")
        served = self._known(api_version, kind)
        if served is None:
            self.read(api_version, discover)
            served = self._known(api_version, kind)
        if served is None:
            raise NotFound(
                404, "NotFound", f"the cluster serves no kind {kind} in {api_version}; is its CRD installed?"
            )
        return served

    def read(self, api_version: str, discover: Discover) -> None:
        """Learns every kind of one group and version. One that is not served teaches nothing."""
        try:
            answer = discover(group_version_path(api_version))
        except NotFound:
            return
        group, _, version = api_version.rpartition("/")
        for entry in _entries(answer):
            resource, kind = str(entry.get("name") or ""), str(entry.get("kind") or "")
            if resource and kind and "/" not in resource:
                self._learnt[api_version, kind] = Served(Kind(group, version, resource), bool(entry.get("namespaced")))

    def read_ahead(self, kinds: Iterable[Kind], discover: Discover) -> None:
        """Discovery for the groups of these resources that the table does not have. Failing costs a call later."""
        for api_version in sorted({kind.api_version for kind in kinds} - _TABLE_VERSIONS):
            try:
                self.read(api_version, discover)
            except Exception:  # The CRD may come later, the host may not answer yet.
                continue

    def learn(self, kind: Kind, obj: Mapping[str, Any], *, namespaced: bool) -> None:
        """From an object that was read as `kind`."""
        name = str(obj.get("kind") or "")
        if name and obj.get("apiVersion") == kind.api_version and self._known(kind.api_version, name) is None:
            self._learnt[kind.api_version, name] = Served(kind, namespaced)

    def _known(self, api_version: str, kind: str) -> Served | None:
        return _TABLE.get((api_version, kind)) or self._learnt.get((api_version, kind))


def _entries(answer: Any) -> list[Mapping[str, Any]]:
    entries = answer.get("resources") if isinstance(answer, Mapping) else None
    if not isinstance(entries, list):
        raise ApiError(200, "BadAnswer", "discovery answered with something else than an APIResourceList")
    return [entry for entry in entries if isinstance(entry, Mapping)]
