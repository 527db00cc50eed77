"""May this user do that: RBAC over the stored Roles and Bindings, with the escalation rules for writing them.

Compiled rules are kept until any RBAC object changes. `system:masters` may do everything, before any rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torpor_devcluster.authn import ACCOUNT_PREFIX, MASTERS, User
from torpor_devcluster.errors import ApiError, access_denied
from torpor_devcluster.history import Event
from torpor_devcluster.resources import (
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    RBAC_GROUP,
    ROLE_BINDINGS,
    ROLES,
    ResourceKey,
)
from torpor_devcluster.storage import Storage

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Attributes:
    """What is asked. For a path that is no resource, `path` is set and the resource fields are empty."""

    verb: str
    group: str = ""
    version: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""

    @property
    def resource_path(self) -> str:
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


@dataclass(frozen=True, slots=True)
class Rule:
    """One PolicyRule, its lists as sets."""

    verbs: frozenset[str]
    groups: frozenset[str]
    resources: frozenset[str]
    names: frozenset[str]
    urls: frozenset[str]

    @classmethod
    def of(cls, rule: Json) -> Rule:
        def strings(field: str) -> frozenset[str]:
            return frozenset(rule.get(field) or ())

        return cls(
            strings("verbs"),
            strings("apiGroups"),
            strings("resources"),
            strings("resourceNames"),
            strings("nonResourceURLs"),
        )

    def allows(self, asked: Attributes) -> bool:
        if "*" not in self.verbs and asked.verb not in self.verbs:
            return False
        if asked.path:
            return any(_url_matches(url, asked.path) for url in self.urls)
        return (
            ("*" in self.groups or asked.group in self.groups)
            and self._has_resource(asked)
            and (not self.names or asked.name in self.names)
        )

    def _has_resource(self, asked: Attributes) -> bool:
        if "*" in self.resources or asked.resource_path in self.resources:
            return True
        return bool(asked.subresource) and f"*/{asked.subresource}" in self.resources

    def parts(self) -> Iterator[Attributes]:
        """The single rights that this rule is made of, for the escalation check."""
        for verb in self.verbs:
            for url in self.urls:
                yield Attributes(verb, path=url)
            for group in self.groups:
                for resource in self.resources:
                    main, _, subresource = resource.partition("/")
                    for name in self.names or ("",):
                        yield Attributes(verb, group, "", main, subresource, "", name)


def _url_matches(pattern: str, path: str) -> bool:
    if pattern == "*" or pattern == path:
        return True
    return pattern.endswith("*") and path.startswith(pattern[:-1])


@dataclass(frozen=True, slots=True)
class _Binding:
    """The rules that one binding gives, to whom."""

    namespace: str
    """Empty for a ClusterRoleBinding."""
    described: str
    """`RoleBinding "b/ns" of Role "r"`, for the reason of an answer."""
    users: Mapping[str, str]
    """Username → how the subject is called in a reason."""
    groups: Mapping[str, str]
    rules: tuple[Rule, ...]

    def subject(self, user: User) -> str | None:
        """How this binding speaks of the user; None if it does not concern them."""
        if user.name in self.users:
            return self.users[user.name]
        return next((self.groups[group] for group in user.groups if group in self.groups), None)


class Authorizer:
    """Answers from compiled bindings; `storage` tells it when they are out of date."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._bindings: tuple[_Binding, ...] | None = None
        self._answers: dict[tuple[str, tuple[str, ...], Attributes], str | None] = {}
        storage.observe(self._on_event)

    def _on_event(self, resource: ResourceKey, _event: Event) -> None:
        if resource.group == RBAC_GROUP:
            self._bindings = None
            self._answers.clear()

    def allows(self, user: User, asked: Attributes) -> bool:
        return self.reason(user, asked) is not None

    def reason(self, user: User, asked: Attributes) -> str | None:
        """Why it is allowed (empty for system:masters, whom no rule is asked about); None when it is not."""
        if MASTERS in user.groups:
            return ""
        question = (user.name, user.groups, asked)
        if question not in self._answers:
            # Bounded by dropping everything: names of objects make the questions endless.
            if len(self._answers) > 10_000:
                self._answers.clear()
            self._answers[question] = self._decide(user, asked)
        return self._answers[question]

    def _decide(self, user: User, asked: Attributes) -> str | None:
        for binding, subject in self._concerning(user, asked.namespace):
            if any(rule.allows(asked) for rule in binding.rules):
                return f"RBAC: allowed by {binding.described} to {subject}"
        return None

    def require(self, user: User, asked: Attributes) -> None:
        if not self.allows(user, asked):
            raise denial(user, asked)

    def rules_of(self, user: User, namespace: str) -> list[Rule]:
        return [rule for binding, _ in self._concerning(user, namespace) for rule in binding.rules]

    def _concerning(self, user: User, namespace: str) -> Iterator[tuple[_Binding, str]]:
        if self._bindings is None:
            self._bindings = tuple(self._compile())
        for binding in self._bindings:
            if binding.namespace in ("", namespace):
                subject = binding.subject(user)
                if subject is not None:
                    yield binding, subject

    def _compile(self) -> Iterator[_Binding]:
        for resource in (CLUSTER_ROLE_BINDINGS, ROLE_BINDINGS):
            for stored in self._storage.table(resource).objects.values():
                yield self._compile_binding(stored.object)

    def _compile_binding(self, binding: Json) -> _Binding:
        namespace = binding["metadata"].get("namespace", "")
        users: dict[str, str] = {}
        groups: dict[str, str] = {}
        for subject in binding.get("subjects") or []:
            kind, name = subject.get("kind"), str(subject.get("name", ""))
            if kind == "ServiceAccount":
                account_namespace = subject.get("namespace") or namespace
                users[f"{ACCOUNT_PREFIX}{account_namespace}:{name}"] = f'ServiceAccount "{name}/{account_namespace}"'
            elif kind == "User":
                users[name] = f'User "{name}"'
            elif kind == "Group":
                groups[name] = f'Group "{name}"'
        role_ref = binding.get("roleRef") or {}
        rules = tuple(Rule.of(rule) for rule in self.role_rules(role_ref, namespace))
        return _Binding(namespace, _describe(binding, role_ref), users, groups, rules)

    def role_rules(self, role_ref: Json, namespace: str) -> list[Json]:
        """The rules of the role that a binding names; none when it does not exist (yet)."""
        name = role_ref.get("name", "")
        if role_ref.get("kind") == "ClusterRole":
            stored = self._storage.get(CLUSTER_ROLES, ("", name))
        else:
            stored = self._storage.get(ROLES, (namespace, name))
        return list((stored.object.get("rules") if stored else None) or [])

    def missing(self, user: User, rules: list[Json], namespace: str) -> list[Attributes]:
        """The rights in `rules` that `user` does not hold: granting them would be an escalation."""
        if MASTERS in user.groups:
            return []
        held = self.rules_of(user, namespace)
        wanted = (part for rule in rules for part in Rule.of(rule).parts())
        return [part for part in wanted if not any(_covers(rule, part) for rule in held)]


def _describe(binding: Json, role_ref: Json) -> str:
    metadata = binding["metadata"]
    name = metadata["name"]
    role = f'{role_ref.get("kind")} "{role_ref.get("name")}"'
    if metadata.get("namespace"):
        return f'RoleBinding "{name}/{metadata["namespace"]}" of {role}'
    return f'ClusterRoleBinding "{name}" of {role}'


def _covers(rule: Rule, part: Attributes) -> bool:
    """`allows`, where a `*` that is asked for must be held as `*`."""
    if part.path:
        return ("*" in rule.verbs or part.verb in rule.verbs) and any(
            url == part.path or (url.endswith("*") and part.path.startswith(url[:-1])) for url in rule.urls
        )
    return rule.allows(part)


def denial(user: User, asked: Attributes) -> ApiError:
    """403 in the words of the real server; it ends where an authorizer would add its reason."""
    who = f'User "{user.name}"'
    if asked.path:
        return access_denied(f'forbidden: {who} cannot {asked.verb} path "{asked.path}"')
    where = f' in the namespace "{asked.namespace}"' if asked.namespace else " at the cluster scope"
    qualified = f"{asked.resource}.{asked.group}" if asked.group else asked.resource
    subject = f'{qualified} "{asked.name}"' if asked.name else qualified
    message = (
        f"{subject} is forbidden: {who} cannot {asked.verb} resource "
        f'"{asked.resource_path}" in API group "{asked.group}"{where}'
    )
    return access_denied(message, group=asked.group, kind=asked.resource, name=asked.name)
