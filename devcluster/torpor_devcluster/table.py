"""Objects as `kubectl get` shows them: meta.k8s.io/v1 Tables and PartialObjectMetadata.

Columns of custom resources come from their CRD, by JSONPath; those of the usual built-in types are functions here.
Other types show name and age.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from torpor_devcluster.resources import PrinterColumn, ResourceType

Json = dict[str, Any]

_NAME = PrinterColumn("Name", format="name", description="Name must be unique within a namespace.")
_AGE = PrinterColumn(
    "Created At", "date", json_path=".metadata.creationTimestamp", description="When the object was created."
)


def partial(obj: Json) -> Json:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


def partial_list(objects: Sequence[Json], metadata: Json) -> Json:
    return {
        "kind": "PartialObjectMetadataList",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "items": [partial(obj) for obj in objects],
    }


def table(resource: ResourceType, objects: Sequence[Json], metadata: Json, *, include: str, now_s: float) -> Json:
    """`include` is None, Metadata or Object: what each row carries beside its cells."""
    columns = _columns(resource)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [_definition(column) for column in columns],
        "rows": [_row(columns, obj, include, now_s) for obj in objects],
    }


def _definition(column: PrinterColumn) -> Json:
    return {
        "name": column.name,
        "type": column.type,
        "format": column.format,
        "description": column.description,
        "priority": column.priority,
    }


def _row(columns: Sequence[PrinterColumn], obj: Json, include: str, now_s: float) -> Json:
    row: Json = {"cells": [_cell(column, obj, now_s) for column in columns]}
    match include:
        case "Object":
            row["object"] = obj
        case "Metadata" | "":
            row["object"] = partial(obj)
    return row


def _columns(resource: ResourceType) -> tuple[PrinterColumn, ...]:
    if resource.custom:
        return (_NAME, *resource.columns) if resource.columns else (_NAME, _CRD_AGE)
    return _BUILT_IN.get(resource.qualified, (_NAME, _built_in_age()))


def _cell(column: PrinterColumn, obj: Json, now_s: float) -> Any:
    if column.cell is not None:
        return column.cell(obj)
    if column.name == "Name" and not column.json_path:
        return obj["metadata"]["name"]
    if column.type == "date":
        return age(_first(obj, column.json_path), now_s)
    value = _first(obj, column.json_path)
    if value is None:
        return None
    if column.type == "string":
        return value if isinstance(value, str) else _text(value)
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def age(timestamp: Any, now_s: float) -> str:
    """`2d3h`, as duration.HumanDuration rounds it."""
    if not isinstance(timestamp, str):
        return "<unknown>"
    try:
        then = datetime.fromisoformat(timestamp.replace("Z", "+00:00")).astimezone(UTC).timestamp()
    except ValueError:
        return "<invalid>"
    return human_duration(int(now_s - then))


def human_duration(seconds: int) -> str:
    if seconds < -1:
        return "<invalid>"
    seconds = max(seconds, 0)
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    if days < 365 * 2:
        return f"{days}d"
    if days < 365 * 8:
        return f"{days // 365}y{days % 365}d" if days % 365 else f"{days // 365}y"
    return f"{days // 365}y"


_STEP = re.compile(r"\.?([\w/-]+)|\['([^']+)'\]|\[\?\(@\.([\w.]+)\s*==\s*[\"']([^\"']*)[\"']\)\]|\[(\d+|\*)\]")


def _first(obj: Any, json_path: str) -> Any:
    """The first value at a JSONPath: members, indexes, [*] and the `[?(@.type=="Ready")]` filter."""
    values = find(obj, json_path)
    return values[0] if values else None


def find(obj: Any, json_path: str) -> list[Any]:
    """All values at a JSONPath of the small dialect that printer columns use; nothing for what it cannot read."""
    path = json_path.strip("{}").removeprefix("$").replace(r"\.", "\0")
    values, place = [obj], 0
    while place < len(path):
        match = re.match(r"\.?([^.\[\]]+)", path[place:]) if path[place] != "[" else None
        if match is not None:
            values = _members(values, match.group(1).replace("\0", "."))
            place += match.end()
            continue
        match = _STEP.match(path, place)
        if match is None:
            return []
        values = _step(values, match)
        place = match.end()
    return values


def _members(values: list[Any], name: str) -> list[Any]:
    return [value[name] for value in values if isinstance(value, dict) and value.get(name) is not None]


def _step(values: list[Any], match: re.Match[str]) -> list[Any]:
    name, quoted, filter_path, wanted, index = match.groups()
    if name or quoted:
        return _members(values, (name or quoted).replace("\0", "."))
    lists = [value for value in values if isinstance(value, list)]
    if index == "*":
        return [item for items in lists for item in items]
    if index is not None:
        return [items[int(index)] for items in lists if int(index) < len(items)]
    return [item for items in lists for item in items if [wanted] == find(item, f".{filter_path}")]


_CRD_AGE = PrinterColumn("Age", "date", json_path=".metadata.creationTimestamp")


def _built_in_age() -> PrinterColumn:
    return PrinterColumn("Age", "date", json_path=".metadata.creationTimestamp", description=_AGE.description)


def _column(name: str, cell: Callable[[Json], Any], kind: str = "string", priority: int = 0) -> PrinterColumn:
    return PrinterColumn(name, kind, cell=cell, priority=priority)


def _path(name: str, json_path: str, kind: str = "string", default: Any = "", priority: int = 0) -> PrinterColumn:
    def cell(obj: Json) -> Any:
        value = _first(obj, json_path)
        return default if value is None else value

    return PrinterColumn(name, kind, cell=cell, priority=priority)


def _ready_containers(pod: Json) -> str:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    ready = sum(1 for status in statuses if status.get("ready"))
    return f"{ready}/{len((pod.get('spec') or {}).get('containers') or [])}"


def _pod_status(pod: Json) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    status = pod.get("status") or {}
    return str(status.get("reason") or status.get("phase") or "Unknown")


def _restarts(pod: Json) -> str:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return str(sum(int(status.get("restartCount", 0)) for status in statuses))


def _ready_replicas(workload: Json) -> str:
    ready = (workload.get("status") or {}).get("readyReplicas", 0)
    return f"{ready}/{(workload.get('spec') or {}).get('replicas', 1)}"


def _ports(service: Json) -> str:
    ports = (service.get("spec") or {}).get("ports") or []
    return ",".join(f"{port.get('port')}/{port.get('protocol', 'TCP')}" for port in ports) or "<none>"


def _node_status(node: Json) -> str:
    conditions = (node.get("status") or {}).get("conditions") or []
    ready = next((c for c in conditions if c.get("type") == "Ready"), None)
    words = ["Unknown" if ready is None else "Ready" if ready.get("status") == "True" else "NotReady"]
    if (node.get("spec") or {}).get("unschedulable"):
        words.append("SchedulingDisabled")
    return ",".join(words)


def _role_ref(binding: Json) -> str:
    role_ref = binding.get("roleRef") or {}
    return f"{role_ref.get('kind')}/{role_ref.get('name')}"


def _involved(event: Json) -> str:
    involved = event.get("involvedObject") or event.get("regarding") or {}
    return f"{str(involved.get('kind', '')).lower()}/{involved.get('name', '')}"


def _job_completions(job: Json) -> str:
    succeeded = (job.get("status") or {}).get("succeeded", 0)
    return f"{succeeded}/{(job.get('spec') or {}).get('completions', 1)}"


def _count(field: str) -> Callable[[Json], int]:
    return lambda obj: len(obj.get(field) or {})


_BUILT_IN: dict[str, tuple[PrinterColumn, ...]] = {
    name: (_NAME, *columns, _built_in_age())
    for name, columns in {
        "namespaces": (_path("Status", ".status.phase"),),
        "pods": (
            _column("Ready", _ready_containers),
            _column("Status", _pod_status),
            _column("Restarts", _restarts),
        ),
        "services": (
            _path("Type", ".spec.type"),
            _path("Cluster-IP", ".spec.clusterIP", default="<none>"),
            _path("External-IP", ".status.loadBalancer.ingress[0].ip", default="<none>"),
            _column("Port(s)", _ports),
        ),
        "configmaps": (_column("Data", _count("data"), "integer"),),
        "secrets": (_path("Type", ".type"), _column("Data", _count("data"), "integer")),
        "nodes": (_column("Status", _node_status), _path("Version", ".status.nodeInfo.kubeletVersion")),
        "persistentvolumeclaims": (
            _path("Status", ".status.phase"),
            _path("Volume", ".spec.volumeName"),
            _path("StorageClass", ".spec.storageClassName"),
        ),
        "deployments.apps": (
            _column("Ready", _ready_replicas),
            _path("Up-to-date", ".status.updatedReplicas", "integer", 0),
            _path("Available", ".status.availableReplicas", "integer", 0),
        ),
        "statefulsets.apps": (_column("Ready", _ready_replicas),),
        "daemonsets.apps": (
            _path("Desired", ".status.desiredNumberScheduled", "integer", 0),
            _path("Ready", ".status.numberReady", "integer", 0),
        ),
        "replicasets.apps": (
            _path("Desired", ".spec.replicas", "integer", 0),
            _path("Current", ".status.replicas", "integer", 0),
            _path("Ready", ".status.readyReplicas", "integer", 0),
        ),
        "jobs.batch": (_column("Completions", _job_completions),),
        "cronjobs.batch": (
            _path("Schedule", ".spec.schedule"),
            _path("Suspend", ".spec.suspend", "boolean", False),
        ),
        "leases.coordination.k8s.io": (_path("Holder", ".spec.holderIdentity"),),
        "rolebindings.rbac.authorization.k8s.io": (_column("Role", _role_ref),),
        "clusterrolebindings.rbac.authorization.k8s.io": (_column("Role", _role_ref),),
    }.items()
}
_BUILT_IN["customresourcedefinitions.apiextensions.k8s.io"] = (
    _NAME,
    PrinterColumn("Created At", "date", cell=lambda crd: crd["metadata"]["creationTimestamp"]),
)
_BUILT_IN["roles.rbac.authorization.k8s.io"] = (
    _NAME,
    PrinterColumn("Created At", "date", cell=lambda role: role["metadata"]["creationTimestamp"]),
)
_BUILT_IN["clusterroles.rbac.authorization.k8s.io"] = _BUILT_IN["roles.rbac.authorization.k8s.io"]
_BUILT_IN["events"] = (
    PrinterColumn("Last Seen", "date", json_path=".lastTimestamp"),
    _path("Type", ".type"),
    _path("Reason", ".reason"),
    _column("Object", _involved),
    _path("Message", ".message"),
)
