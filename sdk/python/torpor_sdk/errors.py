"""What can go wrong, as types: answers of the Kubernetes API (`ApiError`) and calls that got none (`CallError`).

All are raised by the SDK and may simply leave `reconcile`: the host then tries the key again with back-off.
"""

from collections.abc import Mapping
from typing import Any


class TorporError(Exception):
    """The base of every error that the SDK raises on purpose."""


class OperatorError(TorporError):
    """The operator's own definition is wrong: no `Operator`, two of them, no reconcile function, a bad option."""


class CallError(TorporError):
    """A call that got no answer. `code` is one of the ABI's: deadline, unavailable, fenced, denied, too-large,
    unimplemented, invalid."""

    code = "unavailable"

    def __init__(self, code: str, message: str, *, call: str) -> None:
        super().__init__(f"{call}: {message or 'no answer'} ({code})")
        self.code = code
        self.message = message


class DeadlineExceeded(CallError):
    """The call's deadline, or the reconcile's, has passed. Every further call ends the same way."""


class Unavailable(CallError):
    """The cluster or the target cannot be reached now; trying again later may help."""


class Fenced(CallError):
    """This host has lost the operator to another one. End now; the other one reconciles the key."""


class Denied(CallError):
    """Not on the operator's list of outbound hosts, or not possible while the image is built."""


class ApiError(TorporError):
    """The API server refused. `status` is the HTTP code, `reason`, `message` and `details` are its Status object's."""

    def __init__(
        self, status: int, reason: str, message: str, *, request: str = "", body: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"{request + ': ' if request else ''}{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.body: Mapping[str, Any] = body or {}

    @property
    def details(self) -> Mapping[str, Any]:
        """`details` of the Status: name, kind, and for `Invalid` the causes by field."""
        details = self.body.get("details")
        return details if isinstance(details, Mapping) else {}

    @property
    def retry_after_s(self) -> float:
        """What the API server asks for before another try; 0 if it does not."""
        seconds = self.details.get("retryAfterSeconds")
        return float(seconds) if isinstance(seconds, (int, float)) else 0.0


class BadRequest(ApiError):
    """400: the request makes no sense to the API server."""


class Unauthorized(ApiError):
    """401."""


class Forbidden(ApiError):
    """403: the operator's ServiceAccount lacks the right; the message names verb and resource."""


class NotFound(ApiError):
    """404: no such object, or no such resource (is the CRD installed?)."""


class AlreadyExists(ApiError):
    """409 on create."""


class Conflict(ApiError):
    """409: the object has changed since it was read, or another manager owns the field. Read again and retry."""


class Expired(ApiError):
    """410: a page of a list is too old."""


class Invalid(ApiError):
    """422: the object does not pass validation; `details["causes"]` says where."""


class TooManyRequests(ApiError):
    """429: throttled, or an eviction that a budget forbids."""


class ServerError(ApiError):
    """500 and above."""


_CALL_ERRORS: dict[str, type[CallError]] = {
    "deadline": DeadlineExceeded,
    "unavailable": Unavailable,
    "fenced": Fenced,
    "denied": Denied,
}

_API_ERRORS: dict[int, type[ApiError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    422: Invalid,
    429: TooManyRequests,
}


def call_error(code: str, message: str, *, call: str) -> CallError:
    """The error for a code of the ABI."""
    return _CALL_ERRORS.get(code, CallError)(code, message, call=call)


def api_error(status: int, body: Any, *, request: str) -> ApiError:
    """The error for an HTTP status and the Status object that came with it (or whatever else came)."""
    content = body if isinstance(body, Mapping) else {}
    reason = str(content.get("reason") or "Unknown")
    message = str(content.get("message") or (body if isinstance(body, str) and body else "no message"))
    return _api_error_type(status, reason)(status, reason, message, request=request, body=content)


def _api_error_type(status: int, reason: str) -> type[ApiError]:
    if status == 409 and reason == "AlreadyExists":
        return AlreadyExists
    if status >= 500:
        return ServerError
    return _API_ERRORS.get(status, ApiError)
