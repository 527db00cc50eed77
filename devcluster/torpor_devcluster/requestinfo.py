"""What a URL asks for: the verb, the resource and its name, as the API server's RequestInfo resolves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from torpor_devcluster.errors import bad_request

_VERBS = {
    "POST": "create",
    "PUT": "update",
    "PATCH": "patch",
    "GET": "get",
    "HEAD": "get",
    "DELETE": "delete",
}
# Under /namespaces/{name}/ these are subresources of the namespace, everything else is a resource in it.
_NAMESPACE_SUBRESOURCES = frozenset({"status", "finalize"})


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request's subject. For a path that is no resource only `verb` (the HTTP method's) and `path` are set."""

    verb: str
    path: str
    is_resource: bool = False
    group: str = ""
    version: str = ""
    namespace: str = ""
    plural: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def scope(self) -> str:
        """cluster, namespace or resource: as metrics label it."""
        if self.name:
            return "resource"
        return "namespace" if self.namespace else "cluster"


def parse_request(method: str, raw_path: str, query: Mapping[str, str]) -> RequestInfo:
    """`raw_path` is still percent-encoded, so that a name may hold a slash-like byte."""
    path = unquote(raw_path)
    plain = RequestInfo(method.lower(), path)
    parts = [unquote(part) for part in raw_path.strip("/").split("/")]
    if parts[0] == "api" and len(parts) >= 3:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) >= 4:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return plain
    namespace = ""
    if rest[0] == "namespaces" and len(rest) >= 2:
        namespace = rest[1]
        if len(rest) >= 3 and rest[2] not in _NAMESPACE_SUBRESOURCES:
            rest = rest[2:]
    name = rest[1] if len(rest) > 1 else ""
    subresource = rest[2] if len(rest) > 2 else ""
    verb = _collection_verb(method, query) if not name else _VERBS.get(method, method.lower())
    return RequestInfo(verb, path, True, group, version, namespace, rest[0], name, subresource)


def _collection_verb(method: str, query: Mapping[str, str]) -> str:
    if method in ("GET", "HEAD"):
        return "watch" if flag(query, "watch") else "list"
    if method == "DELETE":
        return "deletecollection"
    return _VERBS.get(method, method.lower())


def flag(query: Mapping[str, str], name: str) -> bool:
    """A boolean query parameter: absent, false and 0 are false; everything else is true, as in the real server."""
    return query.get(name, "false").lower() not in ("false", "0")


def number(query: Mapping[str, str], name: str) -> int | None:
    """A whole number in the query, or None when absent. Raises 400."""
    text = query.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise bad_request(f'invalid value "{text}" for {name}: must be a whole number') from None
