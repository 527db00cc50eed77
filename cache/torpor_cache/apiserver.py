"""The one way to the Kubernetes API server: a connection pool, the cache's credentials, and errors in our words.

Owns the aiohttp session. Knows HTTP and nothing of resources or watches. An answer of any status is a `Reply`;
`ApiUnavailable` means that there was none. Requests are not repeated here, but for one case in which the server cannot
have acted: 401 with credentials that have changed since.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import tempfile
from asyncio import sslproto
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import quote, urlencode

import msgspec
from torpor_services.clock import Clock, SystemClock
from torpor_services.errors import TorporError, one_line
from yarl import URL

from torpor_cache.http_library import aiohttp

REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
REPLY_BYTES_MAX = 256 * 1024 * 1024
CREDENTIALS_REREAD_S = 60.0  # as client-go: the kubelet replaces token files at 80 % of their life
READ_BUFFER_BYTES = 256 * 1024  # aiohttp pauses a connection at twice this
TLS_BUFFER_BYTES = 64 * 1024
# aiohttp takes pooled connections in turn, the longest unused first: with a long time here a burst's connections stay
# open for as long as there is one request now and then for each.
IDLE_CONNECTION_S = 10.0

# A peer that is gone without a word is found after 30 + 4 · 10 = 70 s, within the 75 s that are promised.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 30, 10, 4

# Who the request is from is decided here alone.
_OWN_HEADERS = frozenset(
    {"authorization", "host", "connection", "content-length", "transfer-encoding", "accept-encoding"}
)


class ApiUnavailable(TorporError):
    """No answer of the API server exists.

    `retryable`: it may work later as it is (False: a certificate that is not trusted, an answer that is too large).
    `sent`: the request may have reached the server and been executed, so that only a read may simply be repeated.
    `nobody_listens`: the connection was refused, so trying again costs no server anything.
    """

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = True,
        retry_after_s: float | None = None,
        sent: bool = False,
        nobody_listens: bool = False,
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.sent = sent
        self.nobody_listens = nobody_listens


class ReplyTooLarge(ApiUnavailable):
    """The answer is longer than the caller takes."""

    def __init__(self, what: str, bytes_max: int) -> None:
        super().__init__(f"{what}: the answer is longer than {bytes_max} bytes", retryable=False, sent=True)


class CredentialsUnavailable(ApiUnavailable):
    """The cache cannot say who it is; the message names the file or plugin to mend."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message, retryable=retryable)


class StatusError(TorporError):
    """An answer of 400 or more, for callers that read no bodies. `status` is its Kubernetes Status."""

    def __init__(self, what: str, status: dict[str, Any]) -> None:
        super().__init__(f"{what}: {status.get('code')} {status.get('reason', '')}: {status.get('message', '')}")
        self.status = status
        self.code = int(status.get("code") or 0)
        self.reason = str(status.get("reason") or "")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Where the API server is and who the cache is to it."""

    server: str
    ca_pem: str = ""  # empty: the system's authorities
    client_certificate_pem: str = ""
    client_key_pem: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    username: str = ""
    password: str = field(default="", repr=False)
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    proxy_url: str = ""
    expires_unix_s: float | None = None
    rereads: bool = False  # the source is a file that others replace

    def problem(self) -> str:
        """Why these cannot be used; empty if they can."""
        if not self.server.startswith(("http://", "https://")):
            return f"the server {self.server!r} is no http or https address"
        if bool(self.client_certificate_pem) != bool(self.client_key_pem):
            return "a client certificate needs its key, and a key its certificate"
        return ""


class CredentialSource(Protocol):
    """Explicit fields, a kubeconfig or a pod's files: see `kubeconfig`."""

    async def load(self) -> Credentials:
        """The present credentials; raises CredentialsUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Impersonation:
    """Act as this user. No groups: the server gives the account's own (`Impersonate-Group` would replace them)."""

    user: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, str], ...] = ()

    @classmethod
    def service_account(cls, namespace: str, name: str) -> Impersonation:
        return cls(f"system:serviceaccount:{namespace}:{name}")

    def headers(self) -> list[tuple[str, str]]:
        pairs = [("Impersonate-User", self.user)]
        pairs += [("Impersonate-Group", group) for group in self.groups]
        if self.uid:
            pairs.append(("Impersonate-Uid", self.uid))
        return pairs + [(f"Impersonate-Extra-{quote(key, safe='')}", value) for key, value in self.extra]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, whatever its status. Header names are looked up in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", "")

    @property
    def retry_after_s(self) -> float | None:
        return parse_retry_after_s(self.headers)

    def kubernetes_status(self) -> dict[str, Any]:
        """The body as a Status; one made of the HTTP status where it is none (proxies, "404 page not found")."""
        return status_of(self.status, self.body)

    def raise_for_status(self, what: str) -> Reply:
        """Itself, or StatusError."""
        if self.status >= 400:
            raise StatusError(what, self.kubernetes_status())
        return self

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class StreamedReply:
    """An answer whose body is still coming. `chunk` gives what has arrived, and nothing more at its end."""

    def __init__(self, response: aiohttp.ClientResponse, what: str) -> None:
        self._response = response
        self._what = what
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def chunk(self) -> bytes:
        """At least one byte, or none at the end of the body; raises ApiUnavailable."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            raise _unavailable(self._what, exc) from exc

    async def read(self, bytes_max: int = REPLY_BYTES_MAX) -> bytes:
        """The whole body; raises ReplyTooLarge, ApiUnavailable."""
        parts: list[bytes] = []
        length = 0
        while part := await self.chunk():
            length += len(part)
            if length > bytes_max:
                raise ReplyTooLarge(self._what, bytes_max)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def abort(self, error: Exception) -> None:
        """Whoever waits in `chunk`, and every later caller, gets this error."""
        self._response.content.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Access:
    """Credentials in the form that requests need."""

    credentials: Credentials
    authorization: str
    tls: ssl.SSLContext | None
    loaded_s: float


class ApiServer:
    """`async with ApiServer(source, user_agent="torpor-cache") as api`. Belongs to the loop that entered it."""

    def __init__(
        self,
        source: CredentialSource,
        *,
        user_agent: str,
        clock: Clock | None = None,
        gzip: bool = False,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """`gzip`: trade CPU (15 ms a MB here) for bandwidth; worth it only over a slow network."""
        self._source = source
        self._clock = clock or SystemClock()
        self._headers = {"User-Agent": user_agent, "Accept-Encoding": "gzip" if gzip else "identity"}
        self._connect_timeout_s = connect_timeout_s
        self._access: _Access | None = None
        self._loading = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Each open TLS connection holds a buffer of asyncio's, read or not: 256 KiB by default, 30 MB after a burst of
        # a hundred requests. A TLS record has 16 KiB, so a quarter reads as fast.
        sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S, socket_factory=_keepalive_socket)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, read_bufsize=READ_BUFFER_BYTES, max_line_size=64 * 1024
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        impersonate: Impersonation | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        reply_bytes_max: int = REPLY_BYTES_MAX,
    ) -> Reply:
        """One request; its answer whatever the status. Raises ApiUnavailable, ReplyTooLarge where there is none.

        `path` begins with / and may carry a query; it is sent as it is. Headers that say who asks are ignored.
        """
        try:
            async with asyncio.timeout(timeout_s):
                async with self.stream(
                    method, path, query=query, headers=headers, body=body, impersonate=impersonate
                ) as streamed:
                    return Reply(streamed.status, streamed.headers, await streamed.read(reply_bytes_max))
        except TimeoutError as exc:
            raise ApiUnavailable(f"{method} {_shown(path)}: no answer within {timeout_s:g} s", sent=True) from exc

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        impersonate: Impersonation | None = None,
    ) -> AsyncIterator[StreamedReply]:
        """The same with the body as it comes, without a limit of time. Leaving the block ends the request."""
        what = f"{method} {_shown(path)}"
        access = await self._current()
        response = await self._open(access, what, method, path, query, headers, body, impersonate)
        if response.status == 401 and (renewed := await self._renewed(access)) is not None:
            response.close()
            response = await self._open(renewed, what, method, path, query, headers, body, impersonate)
        try:
            yield StreamedReply(response, what)
        finally:
            # Back to the pool if the body was read to its end, closed otherwise.
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def server(self) -> str:
        """The address in use."""
        return (await self._current()).credentials.server

    async def _open(
        self,
        access: _Access,
        what: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
        body: bytes | None,
        impersonate: Impersonation | None,
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            raise RuntimeError("an ApiServer is used inside `async with`")
        credentials = access.credentials
        try:
            return await self._session.request(
                method,
                _url(credentials.server, path, query),
                headers=_headers(headers, access.authorization, impersonate),
                data=body,
                ssl=access.tls if access.tls is not None else True,
                server_hostname=credentials.tls_server_name or None,
                proxy=credentials.proxy_url or None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=self._connect_timeout_s),
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            raise _unavailable(what, exc) from exc

    async def _current(self) -> _Access:
        access = self._access
        if access is not None and not self._stale(access):
            return access
        return await self._load(access)

    def _stale(self, access: _Access) -> bool:
        expires_unix_s = access.credentials.expires_unix_s
        if expires_unix_s is not None and self._clock.unix_ns() / 1e9 > expires_unix_s - 10:
            return True
        return access.credentials.rereads and self._clock.monotonic_s() - access.loaded_s > CREDENTIALS_REREAD_S

    async def _renewed(self, refused: _Access) -> _Access | None:
        """Other credentials than the refused ones, if there are any now."""
        try:
            access = await self._load(refused)
        except CredentialsUnavailable:
            return None
        return access if access.credentials != refused.credentials else None

    async def _load(self, known: _Access | None) -> _Access:
        """Loads anew, once for all who know the same."""
        async with self._loading:
            if self._access is not known and self._access is not None:
                return self._access
            credentials = await self._source.load()
            if problem := credentials.problem():
                raise CredentialsUnavailable(problem, retryable=False)
            same = self._access is not None and self._access.credentials == credentials
            tls = self._access.tls if same and self._access is not None else await _tls_context(credentials)
            self._access = _Access(credentials, _authorization(credentials), tls, self._clock.monotonic_s())
            return self._access


# ---- leaves ---------------------------------------------------------------------------------------------------------


def status_of(code: int, body: bytes) -> dict[str, Any]:
    """A Kubernetes Status of an answer's body, or one made of its HTTP status."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and parsed.get("kind") == "Status":
        return parsed | {"code": parsed.get("code") if isinstance(parsed.get("code"), int) else code}
    text = one_line(ValueError(body[:2000].decode(errors="replace")), 500)
    return make_status(code, text if body.strip() else f"the server answered {code} without a body")


_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


def make_status(code: int, message: str, reason: str = "") -> dict[str, Any]:
    """A Status as the API server would write it."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason or _REASONS.get(code, ""),
        "code": code,
    }


def parse_retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Retry-After in seconds, at most an hour; None where it is missing or a date (Kubernetes writes seconds)."""
    text = headers.get("Retry-After", "").strip()
    return min(float(text), 3600.0) if text.isascii() and text.isdigit() else None


def _url(server: str, path: str, query: Mapping[str, str] | None) -> URL:
    if query:
        path += ("&" if "?" in path else "?") + urlencode(query)
    return URL(server.rstrip("/") + path, encoded=True)


def _shown(path: str) -> str:
    """For messages: without the query, bounded."""
    return path.partition("?")[0][:300]


def _headers(
    given: Mapping[str, str] | None, authorization: str, impersonate: Impersonation | None
) -> Sequence[tuple[str, str]]:
    pairs = [
        (name, value)
        for name, value in (given or {}).items()
        if name.lower() not in _OWN_HEADERS and not name.lower().startswith("impersonate-")
    ]
    if authorization:
        pairs.append(("Authorization", authorization))
    return pairs + (impersonate.headers() if impersonate is not None else [])


def _authorization(credentials: Credentials) -> str:
    if credentials.token:
        return f"Bearer {credentials.token}"
    if credentials.username:
        return "Basic " + b64encode(f"{credentials.username}:{credentials.password}".encode()).decode()
    return ""


async def _tls_context(credentials: Credentials) -> ssl.SSLContext | None:
    if not credentials.server.startswith("https://"):
        return None
    try:
        return await asyncio.to_thread(_make_tls_context, credentials)
    except (ssl.SSLError, ValueError, OSError) as exc:
        raise CredentialsUnavailable(
            f"the CA, client certificate or key for {credentials.server} cannot be used: {one_line(exc)}",
            retryable=False,
        ) from exc


def _make_tls_context(credentials: Credentials) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=credentials.ca_pem or None)
    if credentials.insecure_skip_tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if credentials.client_certificate_pem:
        # The standard library reads client certificates from files only; these are 0600 and gone at once.
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(credentials.client_certificate_pem + "\n" + credentials.client_key_pem)
            file.flush()
            context.load_cert_chain(Path(file.name))
    return context


def _keepalive_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # The same for what was sent and never acknowledged: the kernel's own patience is 15 minutes.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 70_000)
    return made


def _unavailable(what: str, error: Exception) -> ApiUnavailable:
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return ApiUnavailable(
            f"{what}: TLS with the API server failed; check the CA and the server's name: {one_line(error)}",
            retryable=False,
        )
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        refused = isinstance(error, aiohttp.ClientConnectorError) and error.errno == errno.ECONNREFUSED
        return ApiUnavailable(f"{what}: the API server cannot be reached: {one_line(error)}", nobody_listens=refused)
    if isinstance(error, aiohttp.InvalidURL):
        return ApiUnavailable(f"{what}: not a valid address", retryable=False)
    return ApiUnavailable(f"{what}: the connection to the API server broke: {one_line(error)}", sent=True)
