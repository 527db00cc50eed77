"""What is special about single built-in types when they are written: defaults, initial status, some rules.

The real server defaults and validates every field of every built-in type; here only those that clients, controllers
and tests lean on are done. Custom resources are defaulted by their schema (`schema.py`).
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Callable
from typing import Any

from torpor_devcluster import crds
from torpor_devcluster.clock import Clock
from torpor_devcluster.errors import Cause
from torpor_devcluster.resources import SERVICES, ResourceType
from torpor_devcluster.storage import Storage

Json = dict[str, Any]


class Strategies:
    """Hooks by resource. All change the object in place, before it is validated."""

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._defaults: dict[str, Callable[[Json], None]] = {
            "namespaces": _default_namespace,
            "events": _default_event,
            "events.events.k8s.io": _default_new_event,
            "secrets": _default_secret,
            "services": self._default_service,
            "pods": _default_pod,
            "deployments.apps": _default_deployment,
            "statefulsets.apps": _default_statefulset,
            "daemonsets.apps": _default_daemonset,
            "replicasets.apps": _default_replicas,
            "jobs.batch": _default_job,
            "cronjobs.batch": _default_cronjob,
            "persistentvolumeclaims": _default_claim,
            "customresourcedefinitions.apiextensions.k8s.io": crds_defaults,
            "roles.rbac.authorization.k8s.io": _default_rules,
            "clusterroles.rbac.authorization.k8s.io": _default_rules,
            "rolebindings.rbac.authorization.k8s.io": _default_subjects,
            "clusterrolebindings.rbac.authorization.k8s.io": _default_subjects,
        }

    def before_create(self, resource: ResourceType, obj: Json) -> None:
        if resource.has_status and not resource.keeps_status_on_create:
            obj.pop("status", None)
            status = _initial_status(resource)
            if status is not None:
                obj["status"] = status
        self._default(resource, obj)
        if resource.qualified == "pods":
            obj["status"]["qosClass"] = _qos_class(obj.get("spec") or {})

    def before_update(self, resource: ResourceType, old: Json, new: Json, subresource: str) -> None:
        if subresource in ("", "finalize"):
            self._default(resource, new)
        if resource.qualified == "namespaces" and subresource == "" and old.get("spec"):
            new["spec"] = {**(new.get("spec") or {}), **old["spec"]}
        if resource.qualified == "services" and "clusterIP" not in (new.get("spec") or {}):
            for name in ("clusterIP", "clusterIPs"):
                if name in (old.get("spec") or {}):
                    new.setdefault("spec", {})[name] = old["spec"][name]

    def _default(self, resource: ResourceType, obj: Json) -> None:
        default = self._defaults.get(resource.qualified)
        if default is not None:
            default(obj)

    def problems(self, resource: ResourceType, obj: Json) -> list[Cause]:
        check = _CHECKS.get(resource.qualified)
        return check(obj) if check is not None else []

    def deletion_grace_s(self, resource: ResourceType, obj: Json, asked_s: int | None) -> int:
        """Pods on a node are given time; everything else goes at once."""
        if not resource.graceful:
            return 0
        spec, phase = obj.get("spec") or {}, (obj.get("status") or {}).get("phase")
        if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
            return 0
        if asked_s is None:
            asked_s = int(spec.get("terminationGracePeriodSeconds", 30))
        return 1 if asked_s < 0 else asked_s

    def _default_service(self, service: Json) -> None:
        spec = service.setdefault("spec", {})
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("sessionAffinity", "None")
        for port in spec.get("ports") or []:
            port.setdefault("protocol", "TCP")
            port.setdefault("targetPort", port.get("port"))
        if spec["type"] == "ExternalName":
            return
        if not spec.get("clusterIP"):
            spec["clusterIP"] = self._free_cluster_ip()
        spec.setdefault("clusterIPs", [spec["clusterIP"]])
        # A headless service without a selector is taken to have endpoints of both families.
        both = spec["clusterIP"] == "None" and not spec.get("selector")
        spec.setdefault("ipFamilies", ["IPv4", "IPv6"] if both else ["IPv4"])
        spec.setdefault("ipFamilyPolicy", "RequireDualStack" if both else "SingleStack")
        spec.setdefault("internalTrafficPolicy", "Cluster")

    def _free_cluster_ip(self) -> str:
        services = self._storage.table(SERVICES).objects.values()
        taken = {(stored.object.get("spec") or {}).get("clusterIP") for stored in services}
        network = ipaddress.ip_network("10.96.0.0/16")
        return next(str(ip) for ip in network.hosts() if str(ip) not in taken)


def _initial_status(resource: ResourceType) -> Json | None:
    match resource.qualified:
        case "namespaces":
            return {"phase": "Active"}
        case "pods" | "persistentvolumeclaims" | "persistentvolumes":
            return {"phase": "Pending"}
        case "services":
            return {"loadBalancer": {}}
    return None if resource.custom else {}


def _default_namespace(namespace: Json) -> None:
    metadata = namespace["metadata"]
    metadata.setdefault("labels", {})["kubernetes.io/metadata.name"] = metadata["name"]
    spec = namespace.setdefault("spec", {})
    if "deletionTimestamp" not in metadata:
        spec.setdefault("finalizers", ["kubernetes"])


def _default_event(event: Json) -> None:
    """What Go prints although it is empty."""
    for name in ("eventTime", "firstTimestamp", "lastTimestamp"):
        event.setdefault(name, None)
    for name in ("reportingComponent", "reportingInstance"):
        event.setdefault(name, "")
    event.setdefault("source", {})


def _default_new_event(event: Json) -> None:
    for name in ("eventTime", "deprecatedFirstTimestamp", "deprecatedLastTimestamp"):
        event.setdefault(name, None)
    event.setdefault("deprecatedSource", {})


def _default_secret(secret: Json) -> None:
    plain = secret.pop("stringData", None) or {}
    for key, value in plain.items():
        data = secret.get("data") or {}
        secret["data"] = {**data, key: base64.b64encode(str(value).encode()).decode()}
    secret.setdefault("type", "Opaque")


def _default_pod(pod: Json) -> None:
    spec = pod.setdefault("spec", {})
    default_pod_spec(spec)
    spec.setdefault("serviceAccountName", "default")
    # The DefaultTolerationSeconds admission.
    tolerations = spec.setdefault("tolerations", [])
    for condition in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{condition}"
        if not any(toleration.get("key") in (key, None) for toleration in tolerations):
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})
    spec.setdefault("serviceAccount", spec["serviceAccountName"])
    spec.setdefault("enableServiceLinks", True)
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    spec.setdefault("priority", 0)


def _qos_class(spec: Json) -> str:
    containers = [c for c in spec.get("containers") or [] if isinstance(c, dict)]
    resources = [container.get("resources") or {} for container in containers]
    if not any(given.get("requests") or given.get("limits") for given in resources):
        return "BestEffort"
    for given in resources:
        limits = given.get("limits") or {}
        requests = {**limits, **(given.get("requests") or {})}
        if not {"cpu", "memory"} <= limits.keys() or any(requests[name] != limits[name] for name in limits):
            return "Burstable"
    return "Guaranteed"


def default_pod_spec(spec: Json) -> None:
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    for container in (spec.get("initContainers") or []) + (spec.get("containers") or []):
        if isinstance(container, dict):
            _default_container(container)


def _default_container(container: Json) -> None:
    image = str(container.get("image", ""))
    tag = image.rpartition("/")[2].partition(":")[2]
    latest = "@" not in image and tag in ("", "latest")
    container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
    container.setdefault("resources", {})
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    for port in container.get("ports") or []:
        port.setdefault("protocol", "TCP")


def _default_template(spec: Json) -> None:
    template = spec.get("template")
    if isinstance(template, dict):
        template.setdefault("metadata", {})
        default_pod_spec(template.setdefault("spec", {}))


def _default_replicas(workload: Json) -> None:
    spec = workload.setdefault("spec", {})
    spec.setdefault("replicas", 1)
    _default_template(spec)


def _default_deployment(deployment: Json) -> None:
    _default_replicas(deployment)
    spec = deployment["spec"]
    strategy = spec.setdefault("strategy", {})
    if strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
        rolling = strategy.setdefault("rollingUpdate", {})
        rolling.setdefault("maxUnavailable", "25%")
        rolling.setdefault("maxSurge", "25%")
    spec.setdefault("revisionHistoryLimit", 10)
    spec.setdefault("progressDeadlineSeconds", 600)


def _default_statefulset(workload: Json) -> None:
    _default_replicas(workload)
    spec = workload["spec"]
    spec.setdefault("podManagementPolicy", "OrderedReady")
    strategy = spec.setdefault("updateStrategy", {})
    if strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
        strategy.setdefault("rollingUpdate", {}).setdefault("partition", 0)
    spec.setdefault("revisionHistoryLimit", 10)
    retention = spec.setdefault("persistentVolumeClaimRetentionPolicy", {})
    retention.setdefault("whenDeleted", "Retain")
    retention.setdefault("whenScaled", "Retain")


def _default_daemonset(workload: Json) -> None:
    spec = workload.setdefault("spec", {})
    _default_template(spec)
    strategy = spec.setdefault("updateStrategy", {})
    if strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
        rolling = strategy.setdefault("rollingUpdate", {})
        rolling.setdefault("maxUnavailable", 1)
        rolling.setdefault("maxSurge", 0)
    spec.setdefault("revisionHistoryLimit", 10)


def _default_job(job: Json) -> None:
    spec = job.setdefault("spec", {})
    _default_job_spec(spec)
    if spec.get("manualSelector") or "selector" in spec:
        return
    uid = job["metadata"]["uid"]
    spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    labels = spec.setdefault("template", {}).setdefault("metadata", {}).setdefault("labels", {})
    for prefix in ("batch.kubernetes.io/", ""):
        labels[f"{prefix}controller-uid"] = uid
        labels[f"{prefix}job-name"] = job["metadata"]["name"]


def _default_job_spec(spec: Json) -> None:
    spec.setdefault("completions", 1)
    spec.setdefault("parallelism", 1)
    spec.setdefault("backoffLimit", 6)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    spec.setdefault("podReplacementPolicy", "TerminatingOrFailed")
    _default_template(spec)


def _default_cronjob(cronjob: Json) -> None:
    spec = cronjob.setdefault("spec", {})
    spec.setdefault("concurrencyPolicy", "Allow")
    spec.setdefault("suspend", False)
    spec.setdefault("successfulJobsHistoryLimit", 3)
    spec.setdefault("failedJobsHistoryLimit", 1)


def _default_claim(claim: Json) -> None:
    claim.setdefault("spec", {}).setdefault("volumeMode", "Filesystem")


def crds_defaults(crd: Json) -> None:
    spec = crd.get("spec")
    if isinstance(spec, dict) and isinstance(spec.get("names"), dict) and isinstance(spec["names"].get("kind"), str):
        crds.with_defaults(crd)


def _default_rules(role: Json) -> None:
    role.setdefault("rules", None)


def _default_subjects(binding: Json) -> None:
    role_ref = binding.get("roleRef")
    if isinstance(role_ref, dict):
        role_ref.setdefault("apiGroup", "rbac.authorization.k8s.io")
    for subject in binding.get("subjects") or []:
        if subject.get("kind") in ("User", "Group"):
            subject.setdefault("apiGroup", "rbac.authorization.k8s.io")


def _required(obj: Json, *paths: str) -> list[Cause]:
    causes = []
    for path in paths:
        value: Any = obj
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value in (None, "", [], {}):
            causes.append(Cause(path, "Required value", "FieldValueRequired"))
    return causes


def _check_pod(pod: Json) -> list[Cause]:
    causes = _required(pod, "spec.containers")
    for index, container in enumerate((pod.get("spec") or {}).get("containers") or []):
        for name in ("name", "image"):
            if not container.get(name):
                field = f"spec.containers[{index}].{name}"
                causes.append(Cause(field, "Required value", "FieldValueRequired"))
    return causes


def _check_workload(workload: Json) -> list[Cause]:
    causes = _required(workload, "spec.selector", "spec.template.spec.containers")
    spec = workload.get("spec") or {}
    wanted = (spec.get("selector") or {}).get("matchLabels") or {}
    labels = ((spec.get("template") or {}).get("metadata") or {}).get("labels") or {}
    if not causes and any(labels.get(key) != value for key, value in wanted.items()):
        message = "Invalid value: `selector` does not match template `labels`"
        causes.append(Cause("spec.template.metadata.labels", message))
    return causes


def _check_service(service: Json) -> list[Cause]:
    spec = service.get("spec") or {}
    if spec.get("clusterIP") == "None" or spec.get("type") == "ExternalName":
        return []
    return _required(service, "spec.ports")


def _check_event(event: Json) -> list[Cause]:
    involved = event.get("involvedObject") or event.get("regarding") or {}
    namespace, own = involved.get("namespace", ""), event["metadata"].get("namespace")
    if (namespace or "default") != own:
        field = "involvedObject.namespace"
        return [Cause(field, f'Invalid value: "{namespace}": does not match event.namespace')]
    return []


def _check_binding(binding: Json) -> list[Cause]:
    return _required(binding, "roleRef.name", "roleRef.kind")


_CHECKS: dict[str, Callable[[Json], list[Cause]]] = {
    "pods": _check_pod,
    "services": _check_service,
    "events": _check_event,
    "events.events.k8s.io": _check_event,
    "deployments.apps": _check_workload,
    "statefulsets.apps": _check_workload,
    "daemonsets.apps": _check_workload,
    "rolebindings.rbac.authorization.k8s.io": _check_binding,
    "clusterrolebindings.rbac.authorization.k8s.io": _check_binding,
    "jobs.batch": lambda job: _required(job, "spec.template.spec.containers"),
}
