"""Who is at the other end of a connection, and the files that prove it.

With TLS files both ends show a certificate of the same CA, and the peer's identity is the URI
`torpor://ROLE/NAME` among its subject alternative names. Without them a server binds only loopback or a Unix socket,
and the peer says who it is in the `torpor-peer` metadata: who can reach a socket in a 0700 folder is the same user.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from torpor_services.config import setting
from torpor_services.errors import InvalidSetting

PEER_METADATA = "torpor-peer"
_SCHEME = "torpor://"


@dataclass(frozen=True, slots=True)
class Identity:
    """A peer: role (`host`, `scheduler`, `cache`, `client`) and name, unique within the role."""

    role: str
    name: str

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> Identity:
        """From `ROLE/NAME`; raises ValueError."""
        role, _, name = text.partition("/")
        if not role or not name or "/" in name:
            raise ValueError(f"{text!r} is not ROLE/NAME")
        return cls(role, name)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a service. All three or none."""

    ca: Path | None = setting("TORPOR_TLS_CA", None, "PEM file of the CA that signed every service's certificate.")
    certificate: Path | None = setting("TORPOR_TLS_CERT", None, "PEM file of this service's certificate chain.")
    key: Path | None = setting("TORPOR_TLS_KEY", None, "PEM file of this service's private key.")

    def __post_init__(self) -> None:
        given = [name for name in ("ca", "certificate", "key") if getattr(self, name)]
        if given and len(given) != 3:
            raise InvalidSetting("TORPOR_TLS_CA, TORPOR_TLS_CERT, TORPOR_TLS_KEY", f"only {', '.join(given)} is set")

    @property
    def enabled(self) -> bool:
        return self.ca is not None

    def server_credentials(self) -> grpc.ServerCredentials:
        ca, certificate, key = self._read()
        return grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        ca, certificate, key = self._read()
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate)

    def _read(self) -> tuple[bytes, bytes, bytes]:
        assert self.ca and self.certificate and self.key
        return (
            _read("TORPOR_TLS_CA", self.ca),
            _read("TORPOR_TLS_CERT", self.certificate),
            _read("TORPOR_TLS_KEY", self.key),
        )


def _read(variable: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InvalidSetting(variable, f"cannot read {path}: {exc.strerror}") from exc


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def peer_identity(context: grpc.aio.ServicerContext[object, object]) -> Identity | None:
    """The identity of a call's peer, or None where it shows none."""
    auth = context.auth_context()
    if auth.get("transport_security_type") == [b"ssl"]:
        return _from_names(auth.get("x509_subject_alternative_name", ()))
    for key, value in context.invocation_metadata() or ():
        if key == PEER_METADATA:
            try:
                return Identity.parse(value if isinstance(value, str) else value.decode())
            except ValueError:
                return None
    return None


def _from_names(names: object) -> Identity | None:
    for name in names if isinstance(names, list | tuple) else ():
        text = name.decode("utf-8", "replace")
        if text.startswith(_SCHEME):
            try:
                return Identity.parse(text[len(_SCHEME) :])
            except ValueError:
                return None
    return None
