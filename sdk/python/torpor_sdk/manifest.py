"""What an operator watches, and the manifest that says so to the host (`abi.md`).

A mapping says which key to reconcile when a watched object changes. Declared ones (owner, label, annotation, self)
are evaluated by the cache without waking anyone; code (`Operator.map`) wakes the operator.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from .errors import OperatorError
from .kinds import Kind

Predicate = Literal["generation", "labels", "annotations", "deletion", "notOwnWrite"]
PREDICATES: tuple[Predicate, ...] = ("generation", "labels", "annotations", "deletion", "notOwnWrite")
Selector = str | Mapping[str, str | Sequence[str] | None]
CONCURRENCY_MAX = 16


def by_owner(which: Literal["controller", "any"] = "controller") -> dict[str, Any]:
    """To the primary that owns the object: its controller, or any owner."""
    return {"owner": which}


def by_label(key: str) -> dict[str, Any]:
    """To the primary that the label's value names, in the object's namespace."""
    return {"label": key}


def by_annotation(key: str) -> dict[str, Any]:
    """To the primary that the annotation's value names: `name` or `namespace/name`."""
    return {"annotation": key}


def by_self() -> dict[str, Any]:
    """To the key of the object itself: a primary of another kind with the same name."""
    return {"self": True}


class Watch:
    """A resource to watch.

    >>> Watch("v1/configmaps", mapping=by_label("example.com/database")).manifest()
    {'resource': 'v1/configmaps', 'mapping': {'label': 'example.com/database'}}

    `labels` and `fields` select objects: a selector as kubectl takes it, or a mapping (`{"app": "web"}`; a list for
    *in*, None for *exists*). `predicates` must all pass for a change to count: `generation` (the spec changed; not
    for kinds without a generation, as Secrets), `labels`, `annotations`, `deletion`, `notOwnWrite`.
    """

    def __init__(
        self,
        resource: str,
        *,
        namespace: str | None = None,
        labels: Selector | None = None,
        fields: Selector | None = None,
        predicates: Iterable[Predicate] = (),
        mapping: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            self.kind = Kind.parse(resource)
        except ValueError as exc:
            raise OperatorError(str(exc)) from None
        self.namespace = namespace
        self.labels = selector(labels)
        self.fields = selector(fields)
        self.predicates = list(predicates)
        self.mapping = dict(mapping) if mapping is not None else None
        unknown = [name for name in self.predicates if name not in PREDICATES]
        if unknown:
            raise OperatorError(f"{resource}: no predicate {unknown[0]!r}; there are {', '.join(PREDICATES)}")

    def manifest(self) -> dict[str, Any]:
        """As the manifest has it, without what is empty."""
        entry: dict[str, Any] = {
            "resource": str(self.kind),
            "namespace": self.namespace,
            "labelSelector": self.labels,
            "fieldSelector": self.fields,
            "predicates": self.predicates,
            "mapping": self.mapping,
        }
        return {key: value for key, value in entry.items() if value}


class Owned(Watch):
    """A resource whose objects have the primary as controller (`kube.apply(obj, owner=primary)` sees to it)."""

    def __init__(
        self,
        resource: str,
        *,
        namespace: str | None = None,
        labels: Selector | None = None,
        fields: Selector | None = None,
        predicates: Iterable[Predicate] = (),
    ) -> None:
        super().__init__(resource, namespace=namespace, labels=labels, fields=fields, predicates=predicates)


def selector(given: Selector | None) -> str:
    """A label or field selector as the API takes it.

    >>> selector({"app": "web", "tier": ["a", "b"], "team": None})
    'app=web,tier in (a,b),team'
    """
    if given is None or isinstance(given, str):
        return given or ""
    return ",".join(_requirement(key, value) for key, value in given.items())


def _requirement(key: str, value: str | Sequence[str] | None) -> str:
    if value is None:
        return key
    if isinstance(value, str):
        return f"{key}={value}"
    return f"{key} in ({','.join(value)})"


_GO_DURATION = re.compile(r"0|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+")


def duration(given: str | timedelta) -> str:
    """A duration in Go's notation. Raises `OperatorError`.

    >>> duration(timedelta(minutes=90))
    '5400s'
    """
    if isinstance(given, timedelta):
        seconds = given.total_seconds()
        if seconds < 0:
            raise OperatorError(f"{given} is no duration: it is negative")
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    if not _GO_DURATION.fullmatch(given):
        raise OperatorError(f"{given!r} is no duration; write it as 10h, 90m or 1h30m, or 0 for never")
    return given
