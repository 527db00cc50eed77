"""LIST: which objects, at which revision, in which pages.

A page is a cut through the state at one revision. A continue token carries that revision and the last key; when
history no longer reaches it, the answer is 410 with a token that goes on inconsistently, as in the real server.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from torpor_devcluster import errors
from torpor_devcluster.errors import Cause, CauseReason
from torpor_devcluster.history import ObjectKey, Stored, TooOld
from torpor_devcluster.requestinfo import number
from torpor_devcluster.resources import ResourceType
from torpor_devcluster.selectors import Selector
from torpor_devcluster.storage import Storage

Json = dict[str, Any]

_EXPIRED = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter, or use the continue token in this response to retrieve the remainder of the results. "
    "Continuing with the provided token results in an inconsistent list - objects that were created, modified, or "
    "deleted between the time the first chunk was returned and now may show up in the list."
)


class _Token(msgspec.Struct):
    """A continue token. A revision of -1 means: go on with what is there now."""

    v: str
    rv: int
    start: str


@dataclass(frozen=True, slots=True)
class ListOptions:
    selector: Selector
    limit: int
    """0 is no limit."""
    continue_token: str
    resource_version: str
    match: str


@dataclass(frozen=True, slots=True)
class Page:
    objects: list[Stored]
    revision: int
    continue_token: str = ""
    remaining: int | None = None

    def metadata(self) -> Json:
        metadata: Json = {"resourceVersion": str(self.revision)}
        if self.continue_token:
            metadata["continue"] = self.continue_token
            if self.remaining is not None:
                metadata["remainingItemCount"] = self.remaining
        return metadata

    def list_metadata(self, resource: ResourceType) -> Json:
        """Lists of custom resources print an empty continue, others leave it out."""
        return {"continue": "", **self.metadata()} if resource.custom else self.metadata()


def parse_list_options(selector: Selector, query: Mapping[str, str]) -> ListOptions:
    """Raises ApiError for combinations that the real server refuses."""
    version, match = query.get("resourceVersion", ""), query.get("resourceVersionMatch", "")
    token = query.get("continue", "")
    problem = _options_problem(version, match, token)
    if problem is not None:
        raise errors.invalid("ListOptions", "meta.k8s.io", "", [problem])
    return ListOptions(selector, max(number(query, "limit") or 0, 0), token, version, match)


def _options_problem(version: str, match: str, token: str) -> Cause | None:
    forbidden: CauseReason = "FieldValueForbidden"
    if match and not version:
        message = "Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided"
        return Cause("resourceVersionMatch", message, forbidden)
    if match and token:
        message = "Forbidden: resourceVersionMatch is forbidden when continue is provided"
        return Cause("resourceVersionMatch", message, forbidden)
    if match and match not in ("Exact", "NotOlderThan"):
        message = f'Unsupported value: "{match}": supported values: "Exact", "NotOlderThan", ""'
        return Cause("resourceVersionMatch", message, "FieldValueNotSupported")
    if match == "Exact" and version == "0":
        message = 'Forbidden: resourceVersionMatch "exact" is forbidden for resourceVersion "0"'
        return Cause("resourceVersionMatch", message, forbidden)
    return None


def parse_revision(text: str) -> int:
    """A resourceVersion in a query; empty is 0. Raises 400."""
    if not text:
        return 0
    if not text.isdigit():
        raise errors.bad_request(
            f'resourceVersion: Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax'
        )
    return int(text)


def list_page(storage: Storage, resource: ResourceType, namespace: str | None, options: ListOptions) -> Page:
    """One page. A version in the future has been waited for by the caller. Raises ApiError."""
    if options.continue_token:
        return _continued(storage, resource, namespace, options)
    revision = parse_revision(options.resource_version)
    # At version 0 the server answers from its cache and ignores limit.
    limit = 0 if options.resource_version == "0" else options.limit
    exact = options.match == "Exact" or (revision > 0 and options.limit > 0 and not options.match)
    if exact:
        return _at_revision(storage, resource, namespace, options.selector, limit, revision, after=None)
    return _current(storage, resource, namespace, options.selector, limit, after=None)


def _continued(storage: Storage, resource: ResourceType, namespace: str | None, options: ListOptions) -> Page:
    if options.resource_version not in ("", "0"):
        raise errors.bad_request("specifying resource version is not allowed when using continue")
    token = _decode(options.continue_token)
    first, _, last = token.start.rstrip("\0").rpartition("/")
    after = (first, last)
    if token.rv == -1:
        return _current(storage, resource, namespace, options.selector, options.limit, after)
    try:
        return _at_revision(storage, resource, namespace, options.selector, options.limit, token.rv, after)
    except errors.ApiError as error:
        if error.code != 410:
            raise
        raise errors.expired(_EXPIRED, continue_token=_encode(-1, after)) from None


def _current(
    storage: Storage,
    resource: ResourceType,
    namespace: str | None,
    selector: Selector,
    limit: int,
    after: ObjectKey | None,
) -> Page:
    table = storage.table(resource.key)
    objects = [table.objects[key] for key in table.keys(namespace, after)]
    return _cut(objects, selector, limit, storage.revision)


def _at_revision(
    storage: Storage,
    resource: ResourceType,
    namespace: str | None,
    selector: Selector,
    limit: int,
    revision: int,
    after: ObjectKey | None,
) -> Page:
    try:
        everything = storage.table(resource.key).at(revision)
    except TooOld as error:
        raise errors.expired("The resourceVersion for the provided list is too old.") from error
    if after is not None:
        everything = everything[bisect_right(everything, after, key=lambda stored: stored.key) :]
    objects = [stored for stored in everything if not namespace or stored.key[0] == namespace]
    return _cut(objects, selector, limit, revision)


def _cut(objects: list[Stored], selector: Selector, limit: int, revision: int) -> Page:
    if not selector.empty:
        objects = [stored for stored in objects if selector.matches(stored.object)]
    if not limit or len(objects) <= limit:
        return Page(objects, revision)
    page = objects[:limit]
    remaining = len(objects) - limit if selector.empty else None
    return Page(page, revision, _encode(revision, page[-1].key), remaining)


def _encode(revision: int, after: ObjectKey) -> str:
    token = _Token("meta.k8s.io/v1", revision, f"{after[0]}/{after[1]}\0")
    return base64.urlsafe_b64encode(msgspec.json.encode(token)).rstrip(b"=").decode()


def _decode(text: str) -> _Token:
    try:
        token = msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=_Token)
    except (msgspec.MsgspecError, binascii.Error, ValueError):
        raise errors.bad_request("continue key is not valid: it was not issued by this server") from None
    if token.v != "meta.k8s.io/v1":
        raise errors.bad_request(
            f"continue key is not valid: server does not recognize this encoded version {token.v!r}"
        )
    return token
