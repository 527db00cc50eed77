"""Contexts of a kubeconfig that need nothing but the file: a server, a CA, and a token or a client certificate.

Most kubeconfigs are such; reading them here saves the second and 55 MB that the full library costs to import. For all
else (plugins, token files, passwords, several files, anything odd) `static` says None, and whoever asked goes to the
library, which also words what is wrong.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BYTES_MAX = 4 << 20
_USER_FIELDS = frozenset({"token", "client-certificate", "client-certificate-data", "client-key", "client-key-data"})
_CLUSTER_FIELDS = frozenset(
    {"server", "certificate-authority", "certificate-authority-data", "tls-server-name", "insecure-skip-tls-verify"}
)


@dataclass(frozen=True, slots=True)
class StaticContext:
    """What a client needs. PEM texts and the token are empty where the file has none."""

    server: str
    ca_pem: str = ""
    client_certificate_pem: str = ""
    client_key_pem: str = ""
    token: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False


def static(path: Path, context: str = "") -> StaticContext | None:
    """The context of this name (the current one if empty), or None where the file alone does not say it all."""
    import yaml

    try:
        if path.stat().st_size > _BYTES_MAX:
            return None
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _static(document, context, path.resolve().parent)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, KeyError, TypeError, binascii.Error):
        return None


def _static(document: Mapping[str, Any], context: str, folder: Path) -> StaticContext | None:
    chosen = _named(document["contexts"], context or document["current-context"])["context"]
    cluster = _named(document["clusters"], chosen["cluster"])["cluster"]
    user = _named(document["users"], chosen["user"])["user"] or {}
    if not _CLUSTER_FIELDS.issuperset(cluster) or not _USER_FIELDS.issuperset(user):
        return None
    return StaticContext(
        server=_text(cluster["server"]).rstrip("/"),
        ca_pem=_pem(cluster, "certificate-authority", folder),
        client_certificate_pem=_pem(user, "client-certificate", folder),
        client_key_pem=_pem(user, "client-key", folder),
        token=_text(user.get("token", "")),
        tls_server_name=_text(cluster.get("tls-server-name", "")),
        insecure_skip_tls_verify=cluster.get("insecure-skip-tls-verify", False) is True,
    )


def _named(entries: list[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    for entry in entries:
        if entry["name"] == name:
            return entry
    raise KeyError(name)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(type(value).__name__)
    return value


def _pem(fields: Mapping[str, Any], name: str, folder: Path) -> str:
    """`name-data` in base64, else the file that `name` names, from the kubeconfig's folder."""
    if fields.get(f"{name}-data"):
        return base64.b64decode(fields[f"{name}-data"], validate=True).decode("utf-8", "replace")
    return (folder / _text(fields[name])).read_text(encoding="utf-8") if fields.get(name) else ""
