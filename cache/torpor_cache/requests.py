"""The Kubernetes API as somebody: reads from memory where a live watch covers them, everything else upstream.

A read from memory is one that the caller may make by a SubjectAccessReview of its own account, that a synced informer
covers wholly (a selector narrower than the read's would turn objects into false 404s), and that is at least as new as
the positions the caller sends with it; it waits `fresh_wait_s` for those, then fails to be retried. Whatever is asked
for exactly (`resourceVersion`, `continue`, a Table, another media type, `live`) goes upstream, as does a read that
the review refuses: the API server words its own refusal. Nothing but managedFields is missing from an answer.

A request that may have reached the API server is never sent again here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec
from torpor_services.errors import TorporError

from torpor_cache.access import Access, Question, ReviewFailed
from torpor_cache.apiserver import ApiServer, ApiUnavailable, ReplyTooLarge, StreamedReply, parse_retry_after_s
from torpor_cache.config import RequestLimits
from torpor_cache.fields import evaluable
from torpor_cache.identity import Subject
from torpor_cache.informers import Informer, Informers, NotFresh, NotSynced, WatchScope
from torpor_cache.objects import StoredObject
from torpor_cache.paths import ApiPath, RefusedRequest, parse_path
from torpor_cache.resources import (
    InvalidResourceVersion,
    ObjectKey,
    Position,
    Resource,
    ResourceVersion,
    parse_resource_version,
)
from torpor_cache.selectors import FieldRequirement, FieldSelector, InvalidSelector, LabelSelector
from torpor_cache.statuses import not_found, status_json

JSON = "application/json"
WRITES = ("POST", "PUT", "PATCH", "DELETE")
WRITE_REPLY_BYTES_MAX = 16 * 1024 * 1024  # an object has at most 1.5 MB in etcd, 3 MB in a request
_LIST_PARAMETERS = frozenset(
    {"labelSelector", "fieldSelector", "limit", "resourceVersion", "timeoutSeconds", "watch", "continue"}
)


class Unanswered(TorporError):
    """There is no answer of the API server. `sent`: the request may have been executed all the same."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        sent: bool = False,
        too_large: bool = False,
        timed_out: bool = False,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.sent = sent
        self.too_large = too_large
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """What is asked for. `minimum`: positions that a read must have reached."""

    method: str
    path: str
    accept: str = ""
    content_type: str = ""
    body: bytes = b""
    minimum: Sequence[tuple[Resource, Position]] = ()
    live: bool = False


@dataclass(slots=True)
class Head:
    """The answer before its body."""

    status: int
    content_type: str = JSON
    from_cache: bool = False
    written: tuple[Resource, Position] | None = None
    read_live: bool = False
    retry_after_s: int = 0
    warning: str = ""


@dataclass
class Answer:
    """A head, and body parts of any length. `async with answer` ends what is still coming."""

    head: Head
    body: AsyncIterator[bytes] | Sequence[bytes] = ()
    upstream: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.upstream.aclose()


class _WrittenMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    deletion_timestamp: str | None = None
    finalizers: list[str] | None = None


class _Written(msgspec.Struct):
    kind: str = ""
    metadata: _WrittenMetadata = msgspec.field(default_factory=_WrittenMetadata)


_written = msgspec.json.Decoder(_Written)


class Requests:
    """Answers requests of subjects that are resolved already. Raises Unanswered."""

    def __init__(
        self, api: ApiServer, informers: Informers, access: Access, limits: RequestLimits | None = None
    ) -> None:
        self._api = api
        self._informers = informers
        self._access = access
        self._limits = limits or RequestLimits()

    async def answer(self, subject: Subject, request: ApiRequest) -> Answer:
        """The answer of the cache or the API server, errors as the API server words them included."""
        try:
            path = _checked(request)
        except RefusedRequest as exc:
            return _refusal(exc)
        if request.method in WRITES:
            return await self._write(subject, request, path)
        if not request.live:
            cached = await self._from_memory(subject, request, path)
            if cached is not None:
                return cached
        return await self._read_upstream(subject, request, path)

    @property
    def chunk_bytes(self) -> int:
        """How a body is cut for its way to the client."""
        return self._limits.chunk_bytes

    # ---- from memory

    async def _from_memory(self, subject: Subject, request: ApiRequest, path: ApiPath) -> Answer | None:
        """None where the read has to go upstream."""
        resource = path.resource
        if resource is None or path.subresource or not accepts_json(request.accept):
            return None
        read = _read_of(path, resource)
        if read is None:
            return None
        informer = self._covering(read)
        if informer is None:
            return None
        question = _question(subject, read, path)
        try:
            if not (await self._access.may(question)).allowed:
                return None
        except ReviewFailed as exc:
            raise Unanswered(str(exc), retry_after_s=exc.retry_after_s) from exc
        if not await self._is_fresh(informer, resource, request.minimum):
            return None
        # From here on nothing is awaited: informer, store and position are one state.
        if self._covering(read) is not informer:
            return None
        return _object_answer(informer, resource, path) if path.name else _list_answer(informer, read)

    def _covering(self, read: _Read) -> Informer | None:
        if evaluable(read.resource, read.fields.paths):
            whole = self._informers.whole(read.resource, read.namespace)  # the usual case, without parsing selectors
            if whole is not None:
                return whole
        return self._informers.covering(read.scope)

    async def _is_fresh(
        self, informer: Informer, resource: Resource, minimum: Sequence[tuple[Resource, Position]]
    ) -> bool:
        """Waits until the informer has reached the caller's positions; False where only the API server can know."""
        for asked, position in minimum:
            if (asked.group, asked.resource) != (resource.group, resource.resource):
                continue
            if position.history not in ("", informer.position.history):
                return False
            if informer.position.resource_version >= position.resource_version:
                continue
            try:
                await informer.wait_at_least(position.resource_version, self._limits.fresh_wait_s)
            except (NotFresh, NotSynced) as exc:
                raise Unanswered(str(exc), retry_after_s=exc.retry_after_s) from exc
        return True

    # ---- upstream

    async def _read_upstream(self, subject: Subject, request: ApiRequest, path: ApiPath) -> Answer:
        """Streams: the answer may be large, and need not be in memory at once."""
        deadline_s = asyncio.get_running_loop().time() + self._limits.upstream_s
        async with AsyncExitStack() as stack:
            with _translated(f"{request.method} {path.path}"):
                async with asyncio.timeout_at(deadline_s):
                    reply = await stack.enter_async_context(
                        self._api.stream(
                            request.method,
                            path.target,
                            headers=_headers(subject, request),
                            impersonate=subject.impersonation,
                        )
                    )
            return Answer(_head(reply.status, reply.headers), _chunks(reply, path.path, deadline_s), stack.pop_all())

    async def _write(self, subject: Subject, request: ApiRequest, path: ApiPath) -> Answer:
        with _translated(f"{request.method} {path.path}"):
            async with asyncio.timeout(self._limits.upstream_s):
                reply = await self._api.request(
                    request.method,
                    path.target,
                    headers=_headers(subject, request),
                    body=request.body or None,
                    impersonate=subject.impersonation,
                    timeout_s=self._limits.upstream_s + 1.0,  # ours ends first, and is told as a timeout
                    reply_bytes_max=WRITE_REPLY_BYTES_MAX,
                )
        head = _head(reply.status, reply.headers)
        # After a conflict what memory shows is known to be old.
        head.read_live = reply.status == 409
        if 200 <= reply.status < 300 and path.resource is not None and not path.parameter("dryRun"):
            self._place(head, request.method, path.resource, reply.body)
        return Answer(head, (reply.body,) if reply.body else ())

    def _place(self, head: Head, method: str, resource: Resource, body: bytes) -> None:
        """Where the write stands. What is deleted has no version that a later read could wait for."""
        try:
            written = _written.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            head.read_live = True  # another media type, or nested too deep: no version to be read
            return
        metadata = written.metadata
        gone = bool(metadata.deletion_timestamp) and not metadata.finalizers
        if method == "DELETE" or gone or written.kind == "Status":
            head.read_live = True
            return
        try:
            version = parse_resource_version(metadata.resource_version)
        except InvalidResourceVersion:
            return  # a review or token: nothing is stored
        head.written = (resource, Position(self._informers.history_id, version))


# ---- leaves ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Read:
    """A GET or LIST, and what has to be covered for it."""

    resource: Resource
    namespace: str
    labels: LabelSelector
    fields: FieldSelector

    @property
    def scope(self) -> WatchScope:
        return WatchScope(self.resource, self.namespace, str(self.labels), str(self.fields))


_NO_LABELS = LabelSelector()


def accepts_json(accept: str) -> bool:
    """Whether plain JSON is an answer. Tables and PartialObjectMetadata are made by the API server."""
    if ";as=" in accept.replace(" ", "").lower():
        return False
    types = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    return bool(types & {"", JSON, "*/*", "application/*"})


def _checked(request: ApiRequest) -> ApiPath:
    if request.method not in ("GET", *WRITES):
        allowed = ", ".join(("GET", *WRITES))
        raise RefusedRequest(405, "MethodNotAllowed", f"{request.method[:20]!r} is no method here; {allowed} are")
    for name, value in (("Accept", request.accept), ("Content-Type", request.content_type)):
        if not value.isascii() or any(c < " " or c == "\x7f" for c in value):
            raise RefusedRequest(400, "BadRequest", f"the {name} header has characters that no header may have")
    return parse_path(request.path)


def _refusal(refused: RefusedRequest) -> Answer:
    return Answer(Head(refused.code, from_cache=True), (status_json(refused.code, refused.reason, str(refused)),))


def _read_of(path: ApiPath, resource: Resource) -> _Read | None:
    """None for a read that asks for something particular."""
    if path.parameter("resourceVersion") not in ("", "0") or path.parameter("continue"):
        return None
    names = {name for name, _ in path.query}
    if path.name:
        if not names <= {"resourceVersion"}:
            return None
        fields = FieldSelector((FieldRequirement("metadata.name", True, path.name),))
        return _Read(resource, path.namespace, _NO_LABELS, fields)
    if not names <= _LIST_PARAMETERS:
        return None
    try:
        labels = LabelSelector.parse(path.parameter("labelSelector"))
        fields = FieldSelector.parse(path.parameter("fieldSelector"))
    except InvalidSelector:
        return None  # the API server words the error
    return _Read(resource, path.namespace, labels, fields)


def _question(subject: Subject, read: _Read, path: ApiPath) -> Question:
    if path.name:
        return Question(subject.account, "get", read.resource, path.namespace, path.name)
    return Question.about_collection(
        subject.account, "list", read.resource, path.namespace, str(read.labels), read.fields
    )


def _object_answer(informer: Informer, resource: Resource, path: ApiPath) -> Answer:
    found = informer.store.get(ObjectKey(path.namespace, path.name))
    if found is None:
        return Answer(Head(404, from_cache=True), (not_found(resource, path.name),))
    return Answer(Head(200, from_cache=True), (found.json,))


def _list_answer(informer: Informer, read: _Read) -> Answer | None:
    if not informer.list_kind:
        return None
    # What the watch selects already, perhaps by fields that only the API server can judge, is not selected again.
    fields = FieldSelector() if str(read.fields) == informer.scope.field_selector else read.fields
    found = informer.store.select(read.namespace, read.labels, fields)
    version = informer.position.resource_version
    return Answer(Head(200, from_cache=True), _list_parts(informer.list_kind, read.resource, version, found))


def _list_parts(
    list_kind: str, resource: Resource, version: ResourceVersion, found: Sequence[StoredObject]
) -> Sequence[bytes]:
    head = {"kind": list_kind, "apiVersion": resource.api_version, "metadata": {"resourceVersion": str(version)}}
    parts = [msgspec.json.encode(head)[:-1] + b',"items":[']
    for index, item in enumerate(found):
        if index:
            parts.append(b",")
        parts.append(item.json)
    parts.append(b"]}")
    return parts


def _headers(subject: Subject, request: ApiRequest) -> dict[str, str]:
    headers = {"User-Agent": subject.user_agent, "Accept": request.accept or JSON}
    if request.body:
        headers["Content-Type"] = request.content_type or JSON
    return headers


def _head(status: int, headers: Mapping[str, str]) -> Head:
    retry_after_s = parse_retry_after_s(headers)
    return Head(
        status,
        headers.get("Content-Type", ""),
        retry_after_s=int(retry_after_s) if retry_after_s is not None else 0,
        warning=headers.get("Warning", "")[:4096],
    )


async def _chunks(reply: StreamedReply, path: str, deadline_s: float) -> AsyncIterator[bytes]:
    while True:
        with _translated(path):
            async with asyncio.timeout_at(deadline_s):
                chunk = await reply.chunk()
        if not chunk:
            return
        yield chunk


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as exc:
        raise Unanswered(f"{what}: no answer in time", sent=True, timed_out=True) from exc
    except ApiUnavailable as exc:
        raise Unanswered(
            str(exc),
            retry_after_s=exc.retry_after_s or 1.0,
            sent=exc.sent,
            too_large=isinstance(exc, ReplyTooLarge),
        ) from exc
