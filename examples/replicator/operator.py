"""Copies Secrets and ConfigMaps into other namespaces and keeps the copies in step.

A source opts in by the label `replicator.example.com/class`, by which the cluster is filtered before anyone wakes,
and says where to in an annotation: `.../to` (names with wildcards) or `.../to-selector` (labels of namespaces).

Nothing is remembered: copies carry a mark of their source. So a source that has gone, was moved to another class or
names fewer namespaces is put right by looking at the copies, also after any time away. A copy that someone changed or
deleted brings its source up for reconciling by the annotation it carries.
"""

import hashlib
from fnmatch import fnmatchcase
from typing import Any

from torpor_sdk import Event, Kube, Operator, Request, Resource, Watch, by_annotation, by_self, config, log

PREFIX = "replicator.example.com"
CLASS = f"{PREFIX}/class"  # label of a source
TO = f"{PREFIX}/to"  # annotations of a source
TO_SELECTOR = f"{PREFIX}/to-selector"
COPIED_BY = f"{PREFIX}/copied-by"  # labels of a copy: the class, and a hash of the source's key
COPY_OF = f"{PREFIX}/copy-of"
SOURCE = f"{PREFIX}/source"  # annotation of a copy: the key itself, which is too long for a label

CONTENT = ("type", "data", "binaryData")
SOURCES = {"v1/secrets": "Secret", "v1/configmaps": "ConfigMap"}

op = Operator(
    for_=Watch("v1/secrets", labels={CLASS: "default"}),
    watches=[
        # One key stands for both: the Secret and the ConfigMap of that name.
        Watch("v1/configmaps", labels={CLASS: "default"}, mapping=by_self()),
        Watch("v1/secrets", labels={COPIED_BY: "default"}, mapping=by_annotation(SOURCE)),
        Watch("v1/configmaps", labels={COPIED_BY: "default"}, mapping=by_annotation(SOURCE)),
    ],
)


@op.map("v1/namespaces", predicates=["labels"])
def sources_for(event: Event, kube: Kube) -> list[tuple[str, str]]:
    """A namespace that comes, or changes its labels, concerns every source."""
    return [
        (source.namespace, source.name)
        for resource in SOURCES
        for source in kube.list(resource, labels={CLASS: own_class()})
    ]


@op.reconcile
def reconcile(request: Request, kube: Kube) -> None:
    for resource in SOURCES:
        replicate(resource, request, kube)


def replicate(resource: str, request: Request, kube: Kube) -> None:
    source = kube.get(resource, request.name, request.namespace)
    copies = kube.list(resource, labels={COPY_OF: mark(request), COPIED_BY: own_class()})
    targets = target_namespaces(source, kube) if source is not None and is_wanted(source) else set()
    for copy in copies:
        if copy.namespace not in targets:
            log.info("%s in %s is no longer wanted", request.key, copy.namespace)
            kube.delete(copy)
    there = {copy.namespace: copy for copy in copies}
    for namespace in sorted(targets):
        assert source is not None  # else there were no targets
        put(resource, source, namespace, there.get(namespace), kube)


def put(resource: str, source: Resource, namespace: str, copy: Resource | None, kube: Kube) -> None:
    if copy is None and kube.get(resource, source.name, namespace) is not None:
        kube.event(source, "NameTaken", f"{namespace} has one of this name that is no copy", "Warning")
        return
    fresh = copy_of(resource, source, namespace)
    if copy is None:
        kube.create(fresh)
    elif copy.get("type") != source.get("type"):
        kube.delete(copy)  # a Secret's type cannot change
        kube.create(fresh)
    elif any(copy.get(field) != fresh.get(field) for field in CONTENT):
        # Replaced, not applied: what someone added to a copy has to go.
        kube.update({**fresh, "metadata": copy.metadata})


def is_wanted(source: Resource) -> bool:
    return source.labels.get(CLASS) == own_class() and not source.deleting


def target_namespaces(source: Resource, kube: Kube) -> set[str]:
    patterns = [pattern.strip() for pattern in source.annotations.get(TO, "").split(",") if pattern.strip()]
    selector = source.annotations.get(TO_SELECTOR, "").strip()
    found: list[Resource] = []
    if patterns:
        found += [ns for ns in kube.list("v1/namespaces") if any(fnmatchcase(ns.name, p) for p in patterns)]
    if selector:
        found += kube.list("v1/namespaces", labels=selector)
    return {ns.name for ns in found if not ns.deleting} - {source.namespace}


def copy_of(resource: str, source: Resource, namespace: str) -> dict[str, Any]:
    copy = {
        "apiVersion": "v1",
        "kind": SOURCES[resource],
        "metadata": {
            "name": source.name,
            "namespace": namespace,
            "labels": {COPIED_BY: own_class(), COPY_OF: mark(source)},
            "annotations": {SOURCE: f"{source.namespace}/{source.name}"},
        },
    }
    return copy | {field: source[field] for field in CONTENT if source.get(field)}


def mark(source: Request | Resource) -> str:
    return hashlib.sha256(f"{source.namespace}/{source.name}".encode()).hexdigest()[:32]


def own_class() -> str:
    return str(config().get("class", "default"))
