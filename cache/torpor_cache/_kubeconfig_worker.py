"""Resolves a kubeconfig, plugins included, prints the result as JSON, and ends.

    python -m torpor_cache._kubeconfig_worker PATH CONTEXT      (either may be empty)

A process of its own, since importing kubernetes_asyncio costs 55 MB, and the parser of YAML 2. Start-up waits for it,
so it imports little where the file alone says it all. On failure it says why on stderr and exits 1.
"""

from __future__ import annotations

import base64
import dataclasses
import sys
from pathlib import Path
from typing import Any

import msgspec
from torpor_services.errors import one_line
from torpor_services.kubeconfig import static

from torpor_cache.resolved import Resolved


def resolve(path: str, context: str) -> Resolved:
    """Raises what kubernetes_asyncio raises, which is imported only where the file alone does not say it all."""
    found = static(Path(path), context) if path else None
    if found is not None:
        return Resolved(**dataclasses.asdict(found))
    import asyncio

    return asyncio.run(_resolve_by_library(path, context))


async def _resolve_by_library(path: str, context: str) -> Resolved:
    from kubernetes_asyncio.client import Configuration
    from kubernetes_asyncio.config import kube_config

    merger = kube_config.KubeConfigMerger(path or kube_config.KUBE_CONFIG_DEFAULT_LOCATION)
    if merger.config is None:
        raise FileNotFoundError(f"no file {path or kube_config.KUBE_CONFIG_DEFAULT_LOCATION}")
    loader = kube_config.KubeConfigLoader(
        config_dict=merger.config, active_context=context or None, config_base_path=None
    )
    if loader._user is None:
        # A context without a user is allowed; the loader trips over it.
        loader._user = kube_config.ConfigNode("user", {}, path)
    configuration = Configuration()
    await loader.load_and_set(configuration)
    expiry = getattr(loader, "exec_plugin_expiry", None)
    return Resolved(
        server=configuration.host or "",
        ca_pem=_text_of(configuration.ssl_ca_cert),
        client_certificate_pem=_text_of(configuration.cert_file),
        client_key_pem=_text_of(configuration.key_file),
        tls_server_name=configuration.tls_server_name or "",
        insecure_skip_tls_verify=not configuration.verify_ssl,
        proxy_url=configuration.proxy or "",
        expires_unix_s=expiry.timestamp() if expiry is not None else None,
        **_authentication(configuration.api_key.get("BearerToken", ""), loader),
    )


def _authentication(header: str, loader: Any) -> dict[str, str]:
    kind, _, value = header.partition(" ")
    if kind == "Basic":
        username, _, password = base64.b64decode(value).decode().partition(":")
        return {"username": username, "password": password}
    user = loader._user
    token_file = user.safe_get("tokenFile")
    if token_file and not user.safe_get("token") and not user.safe_get("exec"):
        return {"token_file": str((Path(user.path or "").resolve().parent / token_file).resolve())}
    return {"token": value.strip()}


def _text_of(path: str | None) -> str:
    return Path(path).read_text() if path else ""


def main() -> int:
    path, context = sys.argv[1:3]
    try:
        resolved = resolve(path, context)
    except Exception as exc:
        # Whatever the library raises is the answer: this process has no other caller to tell.
        sys.stderr.write(one_line(exc) + "\n")
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(resolved))
    return 0


if __name__ == "__main__":
    sys.exit(main())
