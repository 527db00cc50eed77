"""`http.fetch`: outbound HTTP of guests, to the hosts that their WasmOperator lists and nowhere else.

The name is resolved here, each address is checked, and the connection goes to the checked address, so that a name
cannot change its meaning in between. Loopback and link-local addresses (the cloud's metadata service among them) are
reached only where they are listed themselves: as an address, or as `localhost`. Redirects are handed to the guest,
whose next request is checked like any other. No proxy, no cookies, no connection kept. At-least-once: the receiver sees
operator, epoch and reconcile in headers.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Iterable, Sequence
from functools import cache
from urllib.parse import SplitResult, urlsplit

from torpor_services.errors import one_line

from torpor_host.hostcalls import CallError, FetchRequest, FetchResponse
from torpor_host.in_flight import InFlight
from torpor_host.limits import Deadline
from torpor_host.timers import Timers

REQUEST_BYTES_MAX = 8 << 20
RESPONSE_BYTES_MAX = 8 << 20
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Set here; a guest's own would contradict them.
_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect"})
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Refused(Exception):
    def __init__(self, error: CallError, message: str) -> None:
        super().__init__(message)
        self.error = error


class Outbound:
    """One a process. `timers` ends a request at its deadline even if the peer sends a byte a second."""

    def __init__(self, timers: Timers | None = None) -> None:
        self._timers = timers

    def fetch(
        self,
        request: FetchRequest,
        allowed: Sequence[str],
        headers: Sequence[tuple[str, str]],
        deadline: Deadline,
        in_flight: InFlight | None = None,
    ) -> FetchResponse:
        """The answer, or why there is none. Blocks to the deadline at most (name resolution may exceed it), and once
        connected not beyond `in_flight.stop()`."""
        in_flight = in_flight or InFlight()
        try:
            url = _checked(request, allowed)
            address = _resolve(url, allowed)
            return self._exchange(request, url, address, headers, deadline, in_flight)
        except _Refused as exc:
            return FetchResponse.failed(exc.error, str(exc))
        except (OSError, http.client.HTTPException) as exc:
            if in_flight.stopped():
                return FetchResponse.failed(CallError.FENCED, "the guest is stopped; the request may have arrived")
            if deadline.passed or isinstance(exc, TimeoutError):
                return FetchResponse.failed(CallError.DEADLINE, f"no answer of {_place(request.url)} in time")
            return FetchResponse.failed(CallError.UNAVAILABLE, f"{_place(request.url)}: {one_line(exc)}")
        except ValueError as exc:
            return FetchResponse.failed(CallError.INVALID, one_line(exc))

    def _exchange(
        self,
        request: FetchRequest,
        url: SplitResult,
        address: tuple[str, int],
        headers: Sequence[tuple[str, str]],
        deadline: Deadline,
        in_flight: InFlight,
    ) -> FetchResponse:
        connection = _connection(url, address, max(deadline.remaining_s(), 0.001))
        connection.connect()
        sock = connection.sock
        assert sock is not None
        timer = self._timers.after(deadline.remaining_s(), _cut, sock) if self._timers else None
        try:
            with in_flight.waiting(lambda: _cut(sock)):
                answer = self._ask(connection, request, url, headers, deadline)
            # A connection that was cut may look like the end of an answer.
            if in_flight.stopped() or deadline.passed:
                raise TimeoutError
            return answer
        finally:
            if self._timers:
                self._timers.cancel(timer)
            connection.close()

    @staticmethod
    def _ask(
        connection: http.client.HTTPConnection,
        request: FetchRequest,
        url: SplitResult,
        headers: Sequence[tuple[str, str]],
        deadline: Deadline,
    ) -> FetchResponse:
        target = url._replace(scheme="", netloc="", fragment="").geturl() or "/"
        connection.putrequest(request.method.upper(), target, skip_accept_encoding=True)
        for name, value in (*_kept(request.headers), *headers):
            connection.putheader(name, value)
        if request.body or request.method.upper() in {"POST", "PUT", "PATCH"}:
            connection.putheader("Content-Length", str(len(request.body)))
        connection.putheader("Connection", "close")
        connection.endheaders(request.body or None)
        assert connection.sock is not None
        connection.sock.settimeout(max(deadline.remaining_s(), 0.001))
        answer = connection.getresponse()
        body = answer.read(RESPONSE_BYTES_MAX + 1)
        if len(body) > RESPONSE_BYTES_MAX:
            raise _Refused(CallError.TOO_LARGE, f"the answer is larger than {RESPONSE_BYTES_MAX >> 20} MiB")
        return FetchResponse(status=answer.status, headers=tuple(answer.getheaders()), body=body)


def allows(allowed: Iterable[str], host: str, port: int) -> bool:
    """Whether the list has the host. Entries: `host`, `host:port`, `*.suffix`, `*.suffix:port`; addresses likewise."""
    return any(_matches(entry, host, port) for entry in allowed)


def _matches(entry: str, host: str, port: int) -> bool:
    name, wanted_port = _split_entry(entry.strip().lower().rstrip("."))
    if wanted_port is not None and wanted_port != port:
        return False
    if name.startswith("*."):
        return host.endswith(name[1:]) and len(host) > len(name) - 1
    return bool(name) and host == name


def _split_entry(entry: str) -> tuple[str, int | None]:
    try:
        return str(ipaddress.ip_address(entry.strip("[]"))), None
    except ValueError:
        pass
    name, colon, port = entry.rpartition(":")
    if not colon:
        return entry, None
    name = name.strip("[]")
    try:
        name = str(ipaddress.ip_address(name))
    except ValueError:
        pass
    return (name, int(port)) if port.isdigit() else ("", None)


def _checked(request: FetchRequest, allowed: Sequence[str]) -> SplitResult:
    if request.method.upper() not in _METHODS:
        raise _Refused(CallError.INVALID, f"method {request.method[:16]!r} is none of {', '.join(sorted(_METHODS))}")
    if len(request.body) > REQUEST_BYTES_MAX:
        raise _Refused(CallError.TOO_LARGE, f"the body is larger than {REQUEST_BYTES_MAX >> 20} MiB")
    url = urlsplit(request.url)
    if url.scheme not in {"http", "https"} or not url.hostname:
        raise _Refused(CallError.INVALID, f"{request.url[:80]!r} is no http or https URL")
    if url.username or url.password:
        raise _Refused(CallError.INVALID, "credentials belong into a header, not into the URL")
    if not request.url.isascii() or not request.url.isprintable() or " " in request.url:
        raise _Refused(CallError.INVALID, "the URL has characters that must be escaped")
    if not allows(allowed, _host(url), _port(url)):
        listed = ", ".join(allowed) or "nothing"
        raise _Refused(
            CallError.DENIED, f"{_host(url)}:{_port(url)} is not in spec.limits.outboundHosts, which lists {listed}"
        )
    return url


def _resolve(url: SplitResult, allowed: Sequence[str]) -> tuple[str, int]:
    host, port = _host(url), _port(url)
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise _Refused(CallError.UNAVAILABLE, f"{host}: {exc.strerror or exc}") from exc
    refused = ""
    for answer in answers:
        address = ipaddress.ip_address(str(answer[4][0]).partition("%")[0])
        if _reachable(address, host, allowed, port):
            return str(address), port
        refused = str(address)
    raise _Refused(CallError.DENIED, f"{host} is {refused}, which must be listed itself to be reached")


def _reachable(address: _Address, host: str, allowed: Sequence[str], port: int) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if not (address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast):
        return True
    if address.is_loopback and host == "localhost":
        return True  # it was listed, or the name would have been refused
    return host == str(address) and allows(allowed, str(address), port)


def _host(url: SplitResult) -> str:
    host = (url.hostname or "").rstrip(".")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def _port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _place(url: str) -> str:
    """Without path and query, which may hold secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}"


def _kept(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [
        (name, value) for name, value in headers if name.lower() not in _OURS and not name.lower().startswith("torpor-")
    ]


def _cut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it ended just now


class _PinnedHttp(http.client.HTTPConnection):
    """Connects to the address that was checked, whatever the name means now."""

    def __init__(self, url: SplitResult, address: tuple[str, int], timeout_s: float) -> None:
        super().__init__(url.hostname or "", _port(url), timeout=timeout_s)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.create_connection(self._address, self.timeout)


class _PinnedHttps(_PinnedHttp):
    default_port = 443

    def connect(self) -> None:
        super().connect()
        self.sock = _tls().wrap_socket(self.sock, server_hostname=self.host)


def _connection(url: SplitResult, address: tuple[str, int], timeout_s: float) -> http.client.HTTPConnection:
    return (_PinnedHttps if url.scheme == "https" else _PinnedHttp)(url, address, timeout_s)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
