"""Nobody grants what they do not hold, unless they may `escalate` roles or `bind` them."""

from __future__ import annotations

from typing import Any

from torpor_devcluster import errors
from torpor_devcluster.authn import User
from torpor_devcluster.rbac import Attributes, Authorizer
from torpor_devcluster.resources import RBAC_GROUP, ResourceType

Json = dict[str, Any]


def check(authorizer: Authorizer, user: User, resource: ResourceType, namespace: str, obj: Json) -> None:
    """Raises 403 for a role or binding that gives more than `user` has. Other types pass."""
    if resource.group != RBAC_GROUP:
        return
    if resource.plural in ("roles", "clusterroles"):
        rules = obj.get("rules") or []
        asked = Attributes(
            "escalate", RBAC_GROUP, "v1", resource.plural, "", namespace, obj["metadata"].get("name", "")
        )
    else:
        role_ref = obj.get("roleRef") or {}
        rules = authorizer.role_rules(role_ref, namespace)
        roles = "clusterroles" if role_ref.get("kind") == "ClusterRole" else "roles"
        asked = Attributes("bind", RBAC_GROUP, "v1", roles, "", namespace, role_ref.get("name", ""))
    missing = authorizer.missing(user, rules, namespace)
    if missing and not authorizer.allows(user, asked):
        why = f'user "{user.name}" is attempting to grant RBAC permissions not currently held'
        listed = "\n".join(_rule_text(part) for part in missing)
        raise errors.forbidden(resource, obj["metadata"].get("name", ""), f"{why}:\n{listed}")


def _rule_text(part: Attributes) -> str:
    if part.path:
        return f'{{NonResourceURLs:["{part.path}"], Verbs:["{part.verb}"]}}'
    names = f', ResourceNames:["{part.name}"]' if part.name else ""
    return f'{{APIGroups:["{part.group}"], Resources:["{part.resource_path}"]{names}, Verbs:["{part.verb}"]}}'
