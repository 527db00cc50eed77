"""Unit tests for operators, without Wasm and without a cluster.

>>> from torpor_sdk import Operator
>>> op = Operator(for_="example.com/v1/databases")
>>> @op.reconcile
... def _(request, kube):
...     kube.patch_status(kube.get(request), {"ready": True})
>>> kube = FakeKube()
>>> db = kube.add({"apiVersion": "example.com/v1", "kind": "Database", "metadata": {"name": "a", "namespace": "x"}})
>>> reconcile(op, db, kube)
>>> kube.must_get("example.com/v1/databases", "a", "x").status
{'ready': True}

Never imported in a guest.
"""

from ._asserts import assert_condition, assert_event, assert_owned, assert_settled
from ._cluster import Sent
from ._fake import FakeKube
from ._run import converge, map_event, reconcile

__all__ = [
    "FakeKube",
    "Sent",
    "assert_condition",
    "assert_event",
    "assert_owned",
    "assert_settled",
    "converge",
    "map_event",
    "reconcile",
]
