"""A Database becomes a Secret, a ConfigMap, a Service and a StatefulSet, and says how it is doing.

The password is made once and kept: the Secret is its only place. Changed parameters restart the servers, by a
checksum in the pod template. Volumes outlive a StatefulSet, so a finalizer deletes them, unless the Database says to
retain them.
"""

import base64
import hashlib
import re
import secrets
from typing import Any

from torpor_sdk import Kube, Operator, Request, Resource, Watch, is_true, log, set_condition

FINALIZER = "example.com/database-volumes"
PORT = 5432
NAME_CHARACTERS_MAX = 40  # a StatefulSet's pods and labels are made of it
PARAMETER = re.compile(r"[a-z][a-z0-9_.]*")

op = Operator(
    # Writes of the status are no change of the spec.
    for_=Watch("example.com/v1/databases", predicates=["generation"]),
    owns=["v1/secrets", "v1/configmaps", "v1/services", "apps/v1/statefulsets"],
)


@op.reconcile
def reconcile(request: Request, kube: Kube) -> None:
    db = kube.get(request)
    if db is None:
        return
    problem = problem_with(db)
    if problem:
        report(db, kube, ready=False, reason="InvalidSpec", message=problem)
        return

    config = config_map(db)
    kube.apply(secret(db, current_password(db, kube) or secrets.token_urlsafe(24)), owner=db)
    kube.apply(config, owner=db)
    kube.apply(service(db), owner=db)
    servers = kube.apply(stateful_set(db, checksum(config)), owner=db)

    ready, wanted = servers.status.get("readyReplicas", 0), db.spec.get("replicas", 1)
    report(
        db,
        kube,
        ready=ready >= wanted,
        reason="Available" if ready >= wanted else "Starting",
        message=f"{ready} of {wanted} servers are ready",
        readyReplicas=ready,
        endpoint=f"{db.name}.{db.namespace}.svc:{PORT}",
        secretName=f"{db.name}-credentials",
    )


@op.finalizer(FINALIZER)
def delete_volumes(db: Resource, kube: Kube) -> None:
    if db.spec.get("deletionPolicy", "Delete") == "Retain":
        log.info("%s/%s: its volumes are retained", db.namespace, db.name)
        return
    for claim in kube.list("v1/persistentvolumeclaims", db.namespace, labels=labels(db)):
        kube.delete(claim)


def problem_with(db: Resource) -> str | None:
    """What no amount of retrying will mend; the CRD's schema catches the rest."""
    if len(db.name) > NAME_CHARACTERS_MAX:
        return f"the name has {len(db.name)} characters, at most {NAME_CHARACTERS_MAX} are possible"
    for key, value in db.spec.get("parameters", {}).items():
        if not PARAMETER.fullmatch(key) or "\n" in str(value):
            return f"parameter {key!r} is none that a configuration file can hold"
    return None


def report(db: Resource, kube: Kube, *, ready: bool, reason: str, message: str, **status: object) -> None:
    """Status, condition, and an event when it turns."""
    was_ready = is_true(db, "Ready")
    set_condition(db, "Ready", ready, reason, message)
    status |= {
        "phase": "Ready" if ready else reason,
        "observedGeneration": db.generation,
        "conditions": db.conditions,
    }
    kube.patch_status(db, status)
    if ready != was_ready or reason == "InvalidSpec":
        kube.event(db, reason, message, "Warning" if reason == "InvalidSpec" else "Normal")


def current_password(db: Resource, kube: Kube) -> str | None:
    existing = kube.get("v1/secrets", f"{db.name}-credentials", db.namespace)
    encoded = existing.get("data", {}).get("password") if existing else None
    return base64.b64decode(encoded).decode() if encoded else None


def secret(db: Resource, password: str) -> dict[str, Any]:
    user = db.spec.get("user", db.name)
    url = f"postgresql://{user}:{password}@{db.name}.{db.namespace}.svc:{PORT}/{db.name}"
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(db, "-credentials"),
        "type": "Opaque",
        "data": {
            key: base64.b64encode(value.encode()).decode()
            for key, value in {"username": user, "password": password, "url": url}.items()
        },
    }


def config_map(db: Resource) -> dict[str, Any]:
    parameters = {"listen_addresses": "*", "max_connections": "100"} | db.spec.get("parameters", {})
    lines = [f"{key} = '{str(value).replace(chr(39), chr(39) * 2)}'" for key, value in sorted(parameters.items())]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(db, "-config"),
        "data": {"postgresql.conf": "\n".join(lines) + "\n"},
    }


def service(db: Resource) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(db),
        "spec": {
            "clusterIP": "None",
            "selector": labels(db),
            "ports": [{"name": "postgresql", "port": PORT, "targetPort": PORT, "protocol": "TCP"}],
        },
    }


def stateful_set(db: Resource, config_checksum: str) -> dict[str, Any]:
    credentials = f"{db.name}-credentials"

    def from_secret(variable: str, key: str) -> dict[str, Any]:
        return {"name": variable, "valueFrom": {"secretKeyRef": {"name": credentials, "key": key}}}

    container = {
        "name": "postgresql",
        "image": f"postgres:{db.spec.get('version', '17')}",
        "args": ["-c", "config_file=/etc/postgresql/postgresql.conf"],
        "ports": [{"name": "postgresql", "containerPort": PORT, "protocol": "TCP"}],
        "env": [
            from_secret("POSTGRES_USER", "username"),
            from_secret("POSTGRES_PASSWORD", "password"),
            {"name": "POSTGRES_DB", "value": db.name},
            {"name": "PGDATA", "value": "/var/lib/postgresql/data/pgdata"},
        ],
        "volumeMounts": [
            {"name": "data", "mountPath": "/var/lib/postgresql/data"},
            {"name": "config", "mountPath": "/etc/postgresql"},
        ],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 5},
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "labels": labels(db)},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": db.spec.get("storage", "1Gi")}},
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(db),
        "spec": {
            "serviceName": db.name,
            "replicas": db.spec.get("replicas", 1),
            "selector": {"matchLabels": labels(db)},
            "template": {
                "metadata": {"labels": labels(db), "annotations": {"example.com/config": config_checksum}},
                "spec": {
                    "containers": [container],
                    "volumes": [{"name": "config", "configMap": {"name": f"{db.name}-config"}}],
                },
            },
            "volumeClaimTemplates": [claim],
        },
    }


def labels(db: Resource) -> dict[str, str]:
    return {"app.kubernetes.io/name": "database", "app.kubernetes.io/instance": db.name}


def metadata(db: Resource, suffix: str = "") -> dict[str, Any]:
    return {"name": f"{db.name}{suffix}", "namespace": db.namespace, "labels": labels(db)}


def checksum(config: dict[str, Any]) -> str:
    return hashlib.sha256(config["data"]["postgresql.conf"].encode()).hexdigest()[:16]
