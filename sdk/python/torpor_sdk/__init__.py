"""Write a Kubernetes operator in one Python file.

>>> from torpor_sdk import Operator, Request, requeue_after
>>> op = Operator(for_="example.com/v1/databases", owns=["v1/secrets"])
>>> @op.reconcile
... def reconcile(request: Request, kube):
...     db = kube.get(request)
...     if db is None:
...         return
...     kube.patch_status(db, {"ready": True})
...     return requeue_after(minutes=30)

It runs as a Wasm guest that is loaded when a change concerns it and costs nothing in between. There are no sockets,
threads, files or native extensions in a guest; `kube` and `http` are the ways out.
"""

from . import http
from .clock import now, parse_timestamp, timestamp
from .conditions import get_condition, is_true, set_condition
from .errors import (
    AlreadyExists,
    ApiError,
    BadRequest,
    CallError,
    Conflict,
    DeadlineExceeded,
    Denied,
    Expired,
    Fenced,
    Forbidden,
    Invalid,
    NotFound,
    OperatorError,
    ServerError,
    TooManyRequests,
    TorporError,
    Unauthorized,
    Unavailable,
)
from .http import HTTPError
from .kube import Kube, retry_on_conflict
from .logs import log
from .manifest import Owned, Watch, by_annotation, by_label, by_owner, by_self
from .objects import Resource, owner_reference, set_owner
from .operators import Event, Operator, __version__
from .requests import Request, Requeue, requeue_after, requeue_at
from .settings import config, env

__all__ = [
    "AlreadyExists",
    "ApiError",
    "BadRequest",
    "CallError",
    "Conflict",
    "DeadlineExceeded",
    "Denied",
    "Event",
    "Expired",
    "Fenced",
    "Forbidden",
    "HTTPError",
    "Invalid",
    "Kube",
    "NotFound",
    "Operator",
    "OperatorError",
    "Owned",
    "Request",
    "Requeue",
    "Resource",
    "ServerError",
    "TooManyRequests",
    "TorporError",
    "Unauthorized",
    "Unavailable",
    "Watch",
    "__version__",
    "by_annotation",
    "by_label",
    "by_owner",
    "by_self",
    "config",
    "env",
    "get_condition",
    "http",
    "is_true",
    "log",
    "now",
    "owner_reference",
    "parse_timestamp",
    "requeue_after",
    "requeue_at",
    "retry_on_conflict",
    "set_condition",
    "set_owner",
    "timestamp",
]
