"""The resources that are questions: access reviews, token reviews and token requests. Nothing is stored."""

from __future__ import annotations

from typing import Any

from torpor_devcluster import errors
from torpor_devcluster.authn import Authenticator, User
from torpor_devcluster.clock import rfc3339
from torpor_devcluster.errors import Cause
from torpor_devcluster.rbac import Attributes, Authorizer
from torpor_devcluster.resources import ResourceType

Json = dict[str, Any]

# The real server's bounds for TokenRequest; the upper one is its default of --service-account-max-token-expiration.
EXPIRATION_S_MIN = 600
EXPIRATION_S_DEFAULT = 3600
EXPIRATION_S_MAX = 2**32


class Reviews:
    def __init__(self, authenticator: Authenticator, authorizer: Authorizer) -> None:
        self._authenticator = authenticator
        self._authorizer = authorizer

    def answer(self, resource: ResourceType, namespace: str, obj: Json, user: User) -> Json:
        """The review with its status filled in. Raises 400 for one that asks nothing."""
        spec = obj.get("spec")
        if not isinstance(spec, dict):
            spec = {}
        match resource.plural:
            case "subjectaccessreviews" | "localsubjectaccessreviews":
                status = self._access(resource, namespace, spec)
            case "selfsubjectaccessreviews":
                status = self._decide(resource, user, spec)
            case "selfsubjectrulesreviews":
                status = self._rules(user, spec)
            case "selfsubjectreviews":
                status = {"userInfo": user.info()}
            case "tokenreviews":
                status = self._token(spec)
            case other:
                raise AssertionError(f"{other} is not a review")
        metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
        return {
            "kind": resource.kind,
            "apiVersion": resource.api_version,
            "metadata": metadata or {"creationTimestamp": None},
            "spec": spec,
            "status": status,
        }

    def _access(self, resource: ResourceType, namespace: str, spec: Json) -> Json:
        if not spec.get("user") and not spec.get("groups"):
            message = "Required value: at least one of user or group must be specified"
            raise errors.invalid_object(resource, "", [Cause("spec.user", message, "FieldValueRequired")])
        asked = spec.get("resourceAttributes")
        if resource.plural == "localsubjectaccessreviews" and (asked or {}).get("namespace") != namespace:
            message = f'Invalid value: "{(asked or {}).get("namespace", "")}": must match metadata.namespace'
            raise errors.invalid_object(resource, "", [Cause("spec.resourceAttributes.namespace", message)])
        extra = {key: tuple(values) for key, values in (spec.get("extra") or {}).items()}
        user = User(str(spec.get("user", "")), tuple(spec.get("groups") or ()), str(spec.get("uid", "")), extra)
        return self._decide(resource, user, spec)

    def _decide(self, resource: ResourceType, user: User, spec: Json) -> Json:
        reason = self._authorizer.reason(user, _attributes(resource, spec))
        if reason is None:
            return {"allowed": False}
        return {"allowed": True, "reason": reason} if reason else {"allowed": True}

    def _rules(self, user: User, spec: Json) -> Json:
        resource_rules, url_rules = [], []
        for rule in self._authorizer.rules_of(user, str(spec.get("namespace", ""))):
            if rule.urls:
                url_rules.append({"verbs": sorted(rule.verbs), "nonResourceURLs": sorted(rule.urls)})
            else:
                entry = {
                    "verbs": sorted(rule.verbs),
                    "apiGroups": sorted(rule.groups),
                    "resources": sorted(rule.resources),
                }
                if rule.names:
                    entry["resourceNames"] = sorted(rule.names)
                resource_rules.append(entry)
        return {"resourceRules": resource_rules, "nonResourceRules": url_rules, "incomplete": False}

    def _token(self, spec: Json) -> Json:
        audiences = tuple(spec.get("audiences") or ())
        user = self._authenticator.authenticate(str(spec.get("token", "")), audiences)
        if user is None:
            return {"user": {}, "error": "[invalid bearer token]"}
        return {
            "authenticated": True,
            "user": user.info(),
            "audiences": list(audiences or (self._authenticator.issuer,)),
        }

    def issue(self, resource: ResourceType, account: Json, obj: Json, audience: str) -> Json:
        """TokenRequest: a token for a ServiceAccount object."""
        spec = obj.get("spec") or {}
        expiration_s = spec.get("expirationSeconds") or EXPIRATION_S_DEFAULT
        field = "spec.expirationSeconds"
        if expiration_s < EXPIRATION_S_MIN:
            message = f"Invalid value: {expiration_s}: may not specify a duration less than 10 minutes"
            raise errors.invalid("TokenRequest", "authentication.k8s.io", "", [Cause(field, message)])
        if expiration_s > EXPIRATION_S_MAX:
            message = f"Invalid value: {expiration_s}: may not specify a duration larger than 2^32 seconds"
            raise errors.invalid("TokenRequest", "authentication.k8s.io", "", [Cause(field, message)])
        audiences = tuple(spec.get("audiences") or ()) or (audience,)
        token, expires_s = self._authenticator.issue(account, expiration_s=expiration_s, audiences=audiences)
        metadata = account["metadata"]
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "spec": {"audiences": list(audiences), "expirationSeconds": expiration_s, "boundObjectRef": None},
            "status": {"token": token, "expirationTimestamp": rfc3339(expires_s)},
        }


def _attributes(resource: ResourceType, spec: Json) -> Attributes:
    asked, path = spec.get("resourceAttributes"), spec.get("nonResourceAttributes")
    if bool(asked) == bool(path):
        message = "Invalid value: exactly one of nonResourceAttributes or resourceAttributes must be specified"
        raise errors.invalid_object(resource, "", [Cause("spec.resourceAttributes", message)])
    if path:
        return Attributes(str(path.get("verb", "")), path=str(path.get("path", "")))
    assert asked is not None, "one of the two is given"

    def text(field: str) -> str:
        return str(asked.get(field) or "")

    return Attributes(
        text("verb"),
        text("group"),
        text("version"),
        text("resource"),
        text("subresource"),
        text("namespace"),
        text("name"),
    )
