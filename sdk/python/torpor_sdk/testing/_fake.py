"""The cluster as a test sees it: the same client that an operator has, over a `Cluster` in memory."""

from collections.abc import Mapping
from typing import Any

from torpor_sdk.kube import Kube, Target
from torpor_sdk.objects import Resource, describe, name_of, namespace_of

from ._cluster import Cluster, Sent


class FakeKube(Kube):
    """A cluster in memory. Every method of `Kube` works on it, as a person with kubectl (not as the operator).

    Resources of one's own are served as soon as an object of theirs is added; `define` says it exactly where the
    plural is unusual, the scope is the cluster, or there is no object yet.
    """

    def __init__(self, *objects: Mapping[str, Any]) -> None:
        self.cluster = Cluster()
        super().__init__(manager="test", send=self.cluster.send_unseen)
        for obj in objects:
            self.add(obj)

    def define(self, resource: str, *, kind: str, namespaced: bool = True) -> None:
        """Serves a resource, as installing its CRD would.

        >>> FakeKube().define("example.com/v1/databases", kind="Database")
        """
        self.cluster.define(resource, kind=kind, namespaced=namespaced)

    def add(self, obj: Mapping[str, Any]) -> Resource:
        """Puts an object into the cluster as it is, with its status; replaces one of the same name."""
        self.cluster.put(obj)
        served = self._kinds.resource_of(obj, self._discover)
        return self.must_get(str(served.kind), name_of(obj), namespace_of(obj))

    def must_get(self, target: Target, name: str = "", namespace: str = "") -> Resource:
        """Like `get`, for an object that the test expects to be there."""
        obj = self.get(target, name, namespace)
        if obj is None:
            what = describe(target) if isinstance(target, Mapping) else f"{target} {namespace}/{name}"
            there = sorted(describe(other) for other in self.cluster.all())
            raise AssertionError(f"there is no {what}; there are: {', '.join(there) or 'no objects'}")
        return obj

    def fail_next(self, method: str, path_part: str = "", *, status: int = 500, reason: str = "InternalError") -> None:
        """Answers the operator's next request like this with an error.

        >>> FakeKube().fail_next("PATCH", "/secrets/", status=409, reason="Conflict")
        """
        self.cluster.fail_next(method, path_part, status, reason)

    @property
    def sent(self) -> list[Sent]:
        """All requests of operators so far; `sent.clear()` forgets them."""
        return self.cluster.sent

    @property
    def writes(self) -> list[Sent]:
        """Those that could change something."""
        return [sent for sent in self.cluster.sent if sent.is_write]

    @property
    def changes(self) -> int:
        """How often any object has changed, Kubernetes events left out."""
        return self.cluster.changes
