"""The Status errors of the Kubernetes API, in the shape and the words of the real server.

Everything that a handler refuses is an `ApiError`; the server turns it into one JSON answer. The constructors here
are the only place where the words are written, because clients (and people) match on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torpor_devcluster.resources import ResourceType

Json = dict[str, Any]
CauseReason = Literal[
    "FieldValueInvalid",
    "FieldValueRequired",
    "FieldValueForbidden",
    "FieldValueNotSupported",
    "FieldValueDuplicate",
    "FieldValueTypeInvalid",
    "FieldValueTooLong",
    "FieldManagerConflict",
]


class ApiError(Exception):
    """A request that ends in a Status. `code` is the HTTP status, `headers` are sent with it."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: Json | None = None,
        metadata: Json | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details
        self.metadata = metadata or {}
        self.headers = headers or {}

    def status(self) -> Json:
        """The `v1/Status` object that is sent as the body, or inside a watch's ERROR event."""
        status: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": self.metadata,
            "status": "Failure",
            "message": self.message,
        }
        if self.reason:
            status["reason"] = self.reason
        if self.details is not None:
            status["details"] = self.details
        status["code"] = self.code
        return status


@dataclass(frozen=True, slots=True)
class Cause:
    """One field that is wrong. `kind` is the word before the value: Invalid value, Required value, Forbidden…"""

    field: str
    message: str
    reason: CauseReason = "FieldValueInvalid"

    def json(self) -> Json:
        return {"reason": self.reason, "message": self.message, "field": self.field}


def _details(resource: ResourceType, name: str, **more: Any) -> Json:
    details: Json = {}
    if name:
        details["name"] = name
    if resource.group:
        details["group"] = resource.group
    details["kind"] = resource.plural
    details.update(more)
    return details


def not_found(resource: ResourceType, name: str) -> ApiError:
    message = f'{resource.qualified} "{name}" not found'
    return ApiError(404, "NotFound", message, details=_details(resource, name))


def no_such_resource(what: str) -> ApiError:
    """404 for a path that no resource answers to. The real server names nothing here; this one says what it is."""
    message = f"the server could not find the requested resource ({what})"
    return ApiError(404, "NotFound", message, details={})


def already_exists(resource: ResourceType, name: str) -> ApiError:
    message = f'{resource.qualified} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, details=_details(resource, name))


MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


def conflict(resource: ResourceType, name: str, why: str = MODIFIED) -> ApiError:
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return ApiError(409, "Conflict", message, details=_details(resource, name))


def invalid(kind: str, group: str, name: str, causes: list[Cause]) -> ApiError:
    """422. With one cause the message is that cause; with more they stand in brackets, as the server prints them."""
    parts = [f"{cause.field}: {cause.message}" for cause in causes]
    text = parts[0] if len(parts) == 1 else "[" + ", ".join(parts) + "]"
    qualified = f"{kind}.{group}" if group else kind
    details: Json = {"name": name} if name else {}
    if group:
        details["group"] = group
    details.update({"kind": kind, "causes": [cause.json() for cause in causes]})
    return ApiError(422, "Invalid", f'{qualified} "{name}" is invalid: {text}', details=details)


def invalid_object(resource: ResourceType, name: str, causes: list[Cause]) -> ApiError:
    return invalid(resource.kind, resource.group, name, causes)


def forbidden(resource: ResourceType, name: str, why: str, **more: Any) -> ApiError:
    """403 for an admission-like refusal of an object, with its reason."""
    message = f'{resource.qualified} "{name}" is forbidden: {why}'
    return ApiError(403, "Forbidden", message, details=_details(resource, name, **more))


def access_denied(message: str, *, group: str = "", kind: str = "", name: str = "") -> ApiError:
    """403 from the authorizer; `message` is the whole sentence (see `rbac.denial`)."""
    details: Json = {}
    if name:
        details["name"] = name
    if group:
        details["group"] = group
    if kind:
        details["kind"] = kind
    return ApiError(403, "Forbidden", message, details=details)


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def expired(message: str, *, continue_token: str | None = None) -> ApiError:
    metadata = {"continue": continue_token} if continue_token is not None else None
    return ApiError(410, "Expired", message, metadata=metadata)


def too_old(requested: int, oldest: int) -> ApiError:
    """What a watch or an exact list gets when history no longer reaches back to `requested`."""
    return expired(f"too old resource version: {requested} ({oldest})")


def too_large(requested: int, current: int) -> ApiError:
    details = {
        "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
        "retryAfterSeconds": 1,
    }
    message = f"Timeout: Too large resource version: {requested}, current: {current}"
    return ApiError(504, "Timeout", message, details=details, headers={"Retry-After": "1"})


def method_not_allowed(message: str) -> ApiError:
    return ApiError(405, "MethodNotAllowed", message, details={})


def method_not_supported(resource: ResourceType, verb: str) -> ApiError:
    message = f'{verb} is not supported on resources of kind "{resource.qualified}"'
    return ApiError(405, "MethodNotAllowed", message, details=_details(resource, ""))


def unsupported_media_type(message: str) -> ApiError:
    return ApiError(415, "UnsupportedMediaType", message, details={})


def not_acceptable(message: str) -> ApiError:
    return ApiError(406, "NotAcceptable", message, details={})


def body_too_large(limit_bytes: int) -> ApiError:
    message = f"Request entity too large: limit is {limit_bytes}"
    return ApiError(413, "RequestEntityTooLarge", message, details={})


def not_built(what: str) -> ApiError:
    """501 for what a real server has and this one has not; `what` names it and the way out where there is one."""
    return ApiError(501, "NotImplemented", f"the devcluster does not have {what}", details={})


def internal(message: str) -> ApiError:
    details = {"causes": [{"message": message}]}
    return ApiError(500, "InternalError", f"Internal error occurred: {message}", details=details)
