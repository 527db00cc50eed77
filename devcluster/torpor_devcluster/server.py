"""The HTTP side: authentication, authorisation, paths that are no resources, and answers on the wire."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from torpor_devcluster import errors, openapi
from torpor_devcluster.authn import ANONYMOUS, Authenticator, User
from torpor_devcluster.calls import Call, Reply
from torpor_devcluster.catalogue import Catalogue
from torpor_devcluster.clock import Clock
from torpor_devcluster.errors import ApiError
from torpor_devcluster.faults import Faults, Rule
from torpor_devcluster.handlers import Handlers
from torpor_devcluster.impersonation import impersonated
from torpor_devcluster.negotiate import negotiate
from torpor_devcluster.rbac import Attributes, Authorizer
from torpor_devcluster.requestinfo import RequestInfo, parse_request
from torpor_devcluster.requestlog import RequestLog, RequestRecord
from torpor_devcluster.storage import Storage
from torpor_devcluster.version import VERSION
from torpor_devcluster.watch import Watch

Json = dict[str, Any]
log = logging.getLogger(__name__)

_OPEN_PATHS = frozenset({"/healthz", "/livez", "/readyz", "/version"})


@dataclass(slots=True)
class _Exchange:
    """What is known of a request, for its record."""

    info: RequestInfo
    user: str = ""
    impersonated: str = ""
    code: int = 0


class Server:
    """`handle` is the aiohttp handler. `close_watches` ends what would otherwise last."""

    def __init__(
        self,
        *,
        storage: Storage,
        catalogue: Catalogue,
        handlers: Handlers,
        authenticator: Authenticator,
        authorizer: Authorizer,
        faults: Faults,
        requests: RequestLog,
        clock: Clock,
        anonymous: bool,
    ) -> None:
        self._storage = storage
        self._catalogue = catalogue
        self._handlers = handlers
        self._authenticator = authenticator
        self._authorizer = authorizer
        self._faults = faults
        self._requests = requests
        self._clock = clock
        self._anonymous = anonymous
        self._watches: dict[Watch, RequestInfo] = {}

    def live_watches(self) -> list[tuple[RequestInfo, Watch]]:
        return [(info, watch) for watch, info in self._watches.items()]

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        began_s = self._clock.monotonic_s()
        exchange = _Exchange(parse_request(request.method, request.rel_url.raw_path, request.query))
        try:
            return await self._answer(request, exchange)
        except ApiError as error:
            exchange.code = error.code
            return _json(error.status(), error.code, error.headers)
        except ConnectionError:
            # The client went away while it was being answered.
            raise
        except Exception as error:
            log.exception("devcluster: %s %s failed", request.method, request.path)
            exchange.code = 500
            return _json(errors.internal(str(error)).status(), 500)
        finally:
            self._record(request, exchange, self._clock.monotonic_s() - began_s)

    async def _answer(self, request: web.BaseRequest, exchange: _Exchange) -> web.StreamResponse:
        info = exchange.info
        rule = self._faults.take(info)
        if rule is not None and not rule.after_write:
            await _suffer(rule)
        user = self._identify(request, exchange)
        if not info.is_resource:
            return self._plain(request, exchange, user)
        call = self._call(request, info, user)
        answer = await self._handlers.handle(call)
        if rule is not None and rule.after_write:
            await _suffer(rule)
        if isinstance(answer, Watch):
            return await self._stream(request, exchange, answer)
        exchange.code = answer.code
        return _reply(answer, call.warnings)

    def _call(self, request: web.BaseRequest, info: RequestInfo, user: User) -> Call:
        """Authorise and resolve. A resource that is not served is 403 to those who may not touch it, else 404."""
        resource = self._catalogue.find(info.group, info.version, info.plural)
        name = info.name
        if info.verb in ("list", "watch") and resource is not None:
            # As in the real server: a field selector on the name counts as the name.
            name = _selected_name(request.query.get("fieldSelector", "")) or name
        namespace = info.namespace if resource is None or resource.namespaced else ""
        if info.plural == "namespaces" and info.name:
            namespace = info.name
        attributes = Attributes(info.verb, info.group, info.version, info.plural, info.subresource, namespace, name)
        self._authorizer.require(user, attributes)
        if resource is None:
            raise errors.no_such_resource(info.path)
        accepted = negotiate(request.headers.get("Accept", ""))
        return Call(info, resource, request.query, user, accepted, request)

    # Who

    def _identify(self, request: web.BaseRequest, exchange: _Exchange) -> User:
        caller = self._authenticate(request, exchange.info.path)
        exchange.user = caller.name
        acted_as = impersonated(caller, request, self._authorizer)
        if acted_as is None:
            return caller
        exchange.impersonated = acted_as.name
        return acted_as

    def _authenticate(self, request: web.BaseRequest, path: str) -> User:
        header = request.headers.get("Authorization", "")
        scheme, _, token = header.partition(" ")
        if not header:
            if self._anonymous or path.rstrip("/") in _OPEN_PATHS:
                return ANONYMOUS
            raise errors.unauthorized()
        user = self._authenticator.authenticate(token.strip()) if scheme.lower() == "bearer" else None
        if user is None:
            raise errors.unauthorized()
        return user

    # Paths that are no resources

    def _plain(self, request: web.BaseRequest, exchange: _Exchange, user: User) -> web.StreamResponse:
        path = exchange.info.path
        self._authorizer.require(user, Attributes(exchange.info.verb, path=path))
        exchange.code = 200
        match path.strip("/").split("/"):
            case ["healthz" | "livez" | "readyz", *_]:
                return web.Response(text="ok")
            case ["version"]:
                return _json(VERSION)
            case ["metrics"]:
                objects = {str(table.resource): len(table.objects) for table in self._storage.tables()}
                return web.Response(text=self._requests.metrics(objects))
            case [""]:
                return _json({"paths": ["/api", "/apis", "/healthz", "/livez", "/metrics", "/readyz", "/version"]})
            case ["openapi", "v3", *rest]:
                document = openapi.document(self._catalogue, "/".join(rest))
                if document is not None:
                    return _json(document)
            case ["openapi", *_]:
                raise errors.no_such_resource("the devcluster has no OpenAPI v2 document: use /openapi/v3")
            case ["api" | "apis", *_]:
                found = self._discovery(request, path.strip("/").split("/"))
                if found is not None:
                    return found
        raise errors.no_such_resource(path)

    def _discovery(self, request: web.BaseRequest, parts: list[str]) -> web.StreamResponse | None:
        document: Json | None = None
        match parts:
            case ["api" | "apis"]:
                wanted = _discovery_wish(request)
                if wanted is not None:
                    document = self._catalogue.aggregated(core=parts == ["api"])
                    return _json(document, content_type=wanted)
                document = self._catalogue.group_list() if parts == ["apis"] else _core_versions(request)
            case ["api", version]:
                document = self._catalogue.resource_list("", version)
            case ["apis", group]:
                document = self._catalogue.group(group)
            case ["apis", group, version]:
                document = self._catalogue.resource_list(group, version)
        return None if document is None else _json(document)

    # Watches

    async def _stream(self, request: web.BaseRequest, exchange: _Exchange, watch: Watch) -> web.StreamResponse:
        exchange.code = 200
        response = web.StreamResponse(
            headers={"Content-Type": "application/json", "Cache-Control": "no-cache, private"}
        )
        response.enable_chunked_encoding()
        labels = self._requests.watch_began(exchange.info)
        self._watches[watch] = exchange.info
        try:
            await response.prepare(request)
            async for chunk in watch.stream():
                await response.write(chunk)
            await response.write_eof()
        finally:
            del self._watches[watch]
            self._requests.watch_ended(labels)
        return response

    def close_watches(self) -> None:
        for watch in list(self._watches):
            watch.close()

    def _record(self, request: web.BaseRequest, exchange: _Exchange, duration_s: float) -> None:
        info = exchange.info
        record = RequestRecord(
            user=exchange.user,
            impersonated=exchange.impersonated,
            verb=info.verb,
            group=info.group,
            version=info.version,
            resource=info.plural,
            subresource=info.subresource,
            namespace=info.namespace,
            name=info.name,
            path=request.path_qs,
            user_agent=request.headers.get("User-Agent", ""),
            code=exchange.code,
            duration_s=duration_s,
        )
        self._requests.add(record, info.scope if info.is_resource else "")


async def _suffer(rule: Rule) -> None:
    if rule.code:
        raise rule.error()
    await rule.released.wait()


def _selected_name(field_selector: str) -> str:
    for part in field_selector.split(","):
        label, _, value = part.partition("=")
        if label == "metadata.name":
            return value.lstrip("=")
    return ""


def _discovery_wish(request: web.BaseRequest) -> str | None:
    """The content type of aggregated discovery, if the client puts it before the plain lists."""
    try:
        accepted = negotiate(request.headers.get("Accept", ""), discovery=True)
    except ApiError:
        return None
    return accepted.content_type if accepted.shape == "discovery" else None


def _core_versions(request: web.BaseRequest) -> Json:
    address = {"clientCIDR": "0.0.0.0/0", "serverAddress": request.host}
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [address]}


def _reply(answer: Reply, warnings: list[str]) -> web.Response:
    response = web.Response(body=answer.body, status=answer.code, content_type=answer.content_type)
    response.headers["Cache-Control"] = "no-cache, private"
    for warning in warnings:
        # A field's name is the client's own text: no control characters may reach a header.
        printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in warning)
        quoted = printable.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{quoted}"')
    return response


def _json(
    document: Json,
    code: int = 200,
    headers: dict[str, str] | None = None,
    *,
    content_type: str = "application/json",
) -> web.Response:
    # aiohttp takes parameters of the content type only through the header.
    every = {"Content-Type": content_type, "Cache-Control": "no-cache, private", **(headers or {})}
    reason = HTTPStatus(code).phrase if code in HTTPStatus._value2member_map_ else None
    return web.Response(body=msgspec.json.encode(document), status=code, reason=reason, headers=every)
