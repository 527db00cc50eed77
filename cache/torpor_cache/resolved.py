"""What the process that resolves a kubeconfig hands over; nothing is imported that would make it slow to start."""

from __future__ import annotations

import msgspec


class Resolved(msgspec.Struct, frozen=True):
    """As the worker writes it to its standard output."""

    server: str
    ca_pem: str = ""
    client_certificate_pem: str = ""
    client_key_pem: str = ""
    token: str = ""
    token_file: str = ""
    username: str = ""
    password: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    proxy_url: str = ""
    expires_unix_s: float | None = None
