"""Acting as someone else: the Impersonate-* headers, checked by the `impersonate` verb for each part."""

from __future__ import annotations

from urllib.parse import unquote

from aiohttp import web

from torpor_devcluster.authn import (
    ANONYMOUS,
    AUTHENTICATED,
    UNAUTHENTICATED,
    User,
    account_groups,
)
from torpor_devcluster.errors import bad_request
from torpor_devcluster.rbac import Attributes, Authorizer

_EXTRA = "impersonate-extra-"


def impersonated(caller: User, request: web.BaseRequest, authorizer: Authorizer) -> User | None:
    """The user that the request acts as, or None without such headers. Raises 400 and 403."""
    headers = request.headers
    name = headers.get("Impersonate-User", "")
    groups = tuple(headers.getall("Impersonate-Group", []))
    uid = headers.get("Impersonate-Uid", "")
    extra = _extra(request)
    if not name:
        if groups or uid or extra:
            raise bad_request("requested groups, uid or extra without impersonating a user")
        return None
    for asked in _questions(name, groups, uid, extra):
        authorizer.require(caller, asked)
    return User(name, _groups(name, groups), uid, extra)


def _extra(request: web.BaseRequest) -> dict[str, tuple[str, ...]]:
    extra: dict[str, tuple[str, ...]] = {}
    for header, value in request.headers.items():
        if header.lower().startswith(_EXTRA):
            key = unquote(header.lower().removeprefix(_EXTRA))
            extra[key] = (*extra.get(key, ()), value)
    return extra


def _questions(name: str, groups: tuple[str, ...], uid: str, extra: dict[str, tuple[str, ...]]) -> list[Attributes]:
    questions = [_user_question(name)]
    questions += [Attributes("impersonate", "", "v1", "groups", name=group) for group in groups]
    authentication = "authentication.k8s.io"
    if uid:
        questions.append(Attributes("impersonate", authentication, "v1", "uids", name=uid))
    for key, values in extra.items():
        for value in values:
            questions.append(Attributes("impersonate", authentication, "v1", "userextras", key, name=value))
    return questions


def _user_question(name: str) -> Attributes:
    if account_groups(name):
        _, _, namespace, account = name.split(":")
        return Attributes("impersonate", "", "v1", "serviceaccounts", "", namespace, account)
    return Attributes("impersonate", "", "v1", "users", name=name)


def _groups(name: str, groups: tuple[str, ...]) -> tuple[str, ...]:
    """A ServiceAccount alone brings its groups; groups that are named replace them. Authentication is added."""
    if name == ANONYMOUS.name:
        return groups or (UNAUTHENTICATED,)
    groups = groups or account_groups(name)
    if AUTHENTICATED in groups or UNAUTHENTICATED in groups:
        return groups
    return (*groups, AUTHENTICATED)
