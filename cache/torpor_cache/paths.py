"""What a request to the Kubernetes API is about, read from its path as the API server reads it.

Only what Torpor forwards is let through, in a normal form made of the parts: /api, /apis, /version and /openapi. Parts
that could lead elsewhere (`..`, empty, a slash or control characters in disguise) and connections that are no requests
(`proxy`, `exec`, `attach`, `portforward`, watches) are refused by name. Source of the grammar: RequestInfoFactory in
k8s.io/apiserver/pkg/endpoints/request/requestinfo.go.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode

from torpor_services.errors import TorporError

from torpor_cache.resources import InvalidResource, Resource

PATH_LENGTH_MAX = 16 * 1024
PARAMETERS_MAX = 100
_ROOTS = ("api", "apis", "version", "openapi")
_CONNECTIONS = ("proxy", "exec", "attach", "portforward")
_NAMESPACE_SUBRESOURCES = ("status", "finalize")
_FALSE = ("", "0", "f", "F", "false", "False", "FALSE")


class RefusedRequest(TorporError):
    """A request that is not forwarded. `code` and `reason` are those of the Status that tells it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ApiPath:
    """A path and what it names. `resource` is None for discovery, versions and the like."""

    path: str
    query: tuple[tuple[str, str], ...] = ()
    resource: Resource | None = None
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def target(self) -> str:
        """Path and query as they are sent."""
        return f"{self.path}?{urlencode(self.query)}" if self.query else self.path

    def parameter(self, name: str) -> str:
        """Of the query; the first of that name, as the API server takes it. Empty where missing."""
        return next((value for key, value in self.query if key == name), "")


def parse_path(text: str) -> ApiPath:
    """Raises RefusedRequest."""
    if len(text) > PATH_LENGTH_MAX:
        raise RefusedRequest(
            414, "RequestURITooLong", f"a path of {len(text)} characters; {PATH_LENGTH_MAX} are allowed"
        )
    raw_path, _, raw_query = text.partition("?")
    if not raw_path.startswith("/") or not text.isascii() or any(c <= " " or c == "#" or c == "\x7f" for c in text):
        raise RefusedRequest(400, "BadRequest", f"{raw_path[:80]!r} is no path of the Kubernetes API")
    parts = [_part(part, raw_path) for part in raw_path[1:].rstrip("/").split("/")]
    if parts[0] not in _ROOTS:
        raise RefusedRequest(403, "Forbidden", f"/{parts[0][:80]} is not forwarded; {', '.join(_ROOTS)} are")
    path = "/" + "/".join(quote(part, safe=":@") for part in parts)
    query = _query(raw_query)
    if any(key == "watch" and value not in _FALSE for key, value in query):
        raise RefusedRequest(405, "MethodNotAllowed", "watch=true is not served here; subscribe with Watch")
    found = _named(path, query, parts)
    if found.subresource == "log" and any(key == "follow" and value not in _FALSE for key, value in query):
        raise RefusedRequest(405, "MethodNotAllowed", "follow=true is not served: a log is read as it is now")
    return found


def _query(raw: str) -> tuple[tuple[str, str], ...]:
    if not raw:
        return ()
    try:
        return tuple(parse_qsl(raw, keep_blank_values=True, max_num_fields=PARAMETERS_MAX))
    except ValueError as exc:
        raise RefusedRequest(400, "BadRequest", f"more than {PARAMETERS_MAX} query parameters") from exc


def _part(part: str, path: str) -> str:
    decoded = unquote(part)
    if decoded in ("", ".", "..") or any(c in "/\\%?#" or c < " " or c == "\x7f" for c in decoded):
        raise RefusedRequest(400, "BadRequest", f"{path[:200]!r}: {decoded[:80]!r} cannot be part of a path")
    return decoded


def _named(path: str, query: tuple[tuple[str, str], ...], parts: list[str]) -> ApiPath:
    match parts:
        case ["api", version, *rest] if rest:
            group = ""
        case ["apis", group, version, *rest] if rest:
            pass
        case _:
            return ApiPath(path, query)
    if rest[0] in ("watch", "proxy"):
        raise RefusedRequest(
            405, "MethodNotAllowed", f"the path prefix {rest[0]!r} is not served; subscribe with Watch"
        )
    namespace, rest = _namespace(rest)
    try:
        resource = Resource.checked(group, version, rest[0])
    except InvalidResource as exc:
        raise RefusedRequest(400, "BadRequest", str(exc)) from exc
    name = rest[1] if len(rest) > 1 else ""
    subresource = rest[2] if len(rest) > 2 else ""
    if subresource in _CONNECTIONS:
        raise RefusedRequest(405, "MethodNotAllowed", f"the subresource {subresource!r} is a connection and not served")
    return ApiPath(path, query, resource, namespace, name, subresource)


def _namespace(rest: list[str]) -> tuple[str, list[str]]:
    """The namespace, and what follows it. A Namespace itself, and its subresources, are in none."""
    match rest:
        case ["namespaces", _, subresource, *_] if subresource in _NAMESPACE_SUBRESOURCES:
            return "", rest
        case ["namespaces", namespace, *inside] if inside:
            return namespace, inside
        case _:
            return "", rest
