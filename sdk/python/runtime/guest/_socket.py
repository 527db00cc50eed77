"""`_socket` for a guest: what `import socket` needs, the pure functions, and a clear refusal of all the rest.

With it libraries that import `socket`, `asyncio`, `http.client` or `urllib.request` at their top can be imported;
using a socket raises OSError, which libraries already expect of a network.
"""

import errno as _errno

error = OSError
timeout = TimeoutError


class herror(OSError):  # noqa: N801  (the name is socket's)
    pass


class gaierror(OSError):  # noqa: N801
    pass


# The numbers are Linux's: some libraries have them built in.
AF_UNSPEC, AF_UNIX, AF_INET, AF_INET6 = 0, 1, 2, 10
SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_NONBLOCK, SOCK_CLOEXEC = 1, 2, 3, 2048, 524288
SOL_SOCKET, SO_REUSEADDR, SO_ERROR, SO_BROADCAST, SO_SNDBUF, SO_RCVBUF, SO_KEEPALIVE = 1, 2, 4, 6, 7, 8, 9
SO_LINGER, SO_REUSEPORT, SO_TYPE = 13, 15, 3
SOMAXCONN = 4096
IPPROTO_IP, IPPROTO_ICMP, IPPROTO_TCP, IPPROTO_UDP, IPPROTO_IPV6 = 0, 1, 6, 17, 41
TCP_NODELAY, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT = 1, 4, 5, 6
IPV6_V6ONLY = 26
MSG_OOB, MSG_PEEK, MSG_DONTWAIT, MSG_NOSIGNAL = 1, 2, 64, 16384
SHUT_RD, SHUT_WR, SHUT_RDWR = 0, 1, 2
AI_PASSIVE, AI_CANONNAME, AI_NUMERICHOST, AI_NUMERICSERV, AI_ADDRCONFIG = 1, 2, 4, 1024, 32
EAI_BADFLAGS, EAI_NONAME, EAI_AGAIN, EAI_FAIL, EAI_FAMILY, EAI_SOCKTYPE, EAI_SERVICE = -1, -2, -3, -4, -6, -7, -8
NI_NUMERICHOST, NI_NUMERICSERV, NI_NAMEREQD, NI_DGRAM = 1, 2, 8, 16
INADDR_ANY, INADDR_BROADCAST, INADDR_LOOPBACK, INADDR_NONE = 0, 0xFFFFFFFF, 0x7F000001, 0xFFFFFFFF
has_ipv6 = False
CAPI = None

REFUSAL = "a Torpor guest has no sockets: Kubernetes is reached by kube, other hosts by torpor_sdk.http"


def _refuse(*args, **kwargs):
    raise OSError(_errno.ENOTSUP, REFUSAL)


class socket:  # noqa: N801
    """Can be subclassed and named in annotations, but not made."""

    __slots__ = ()  # `socket.socket` declares its own.

    def __init__(self, family=-1, type=-1, proto=-1, fileno=None):
        _refuse()


SocketType = socket

close = dup = socketpair = if_nameindex = if_nametoindex = if_indextoname = sethostname = _refuse
getservbyname = getservbyport = getprotobyname = _refuse


def _refuse_name(*args, **kwargs):
    raise gaierror(EAI_FAIL, REFUSAL)


getaddrinfo = getnameinfo = gethostbyname = gethostbyname_ex = gethostbyaddr = _refuse_name


def gethostname():
    return "operator"


_default_timeout = None


def getdefaulttimeout():
    return _default_timeout


def setdefaulttimeout(timeout, /):
    global _default_timeout
    _default_timeout = None if timeout is None else float(timeout)


def ntohs(x, /):
    return int.from_bytes(x.to_bytes(2, "little"), "big")


def ntohl(x, /):
    return int.from_bytes(x.to_bytes(4, "little"), "big")


htons, htonl = ntohs, ntohl


def inet_aton(text, /):
    """IPv4 in dotted form only; the shorter historical forms are refused."""
    return inet_pton(AF_INET, text)


def inet_ntoa(packed, /):
    return inet_ntop(AF_INET, packed)


def inet_pton(family, text, /):
    import ipaddress

    try:
        return _address_class(ipaddress, family)(text).packed
    except ValueError:
        raise OSError("illegal IP address string passed to inet_pton") from None


def inet_ntop(family, packed, /):
    import ipaddress

    try:
        return str(_address_class(ipaddress, family)(bytes(packed)))
    except ipaddress.AddressValueError:
        raise ValueError("invalid length of packed IP address string") from None


def _address_class(ipaddress, family):
    if family == AF_INET:
        return ipaddress.IPv4Address
    if family == AF_INET6:
        return ipaddress.IPv6Address
    raise OSError(_errno.EAFNOSUPPORT, f"unknown address family {family}")
