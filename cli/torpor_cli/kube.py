"""A small Kubernetes client for commands that install or apply things.

Takes address and credentials from a kubeconfig, or, where that names a plugin, by kubernetes_asyncio, whose import
costs a second and 55 MB: commands that stay (`up`, `run`) do such work in a short-lived process of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torpor_services.kubeconfig import StaticContext, static

from torpor_cli.errors import CommandFailed

FIELD_MANAGER = "torpor"


class ApiError(CommandFailed):
    """The API server refused a request."""

    def __init__(self, what: str, status: int, message: str) -> None:
        super().__init__(f"{what}: {status} {message}")
        self.status = status


@dataclass
class KubeClient:
    """Requests with JSON bodies; resources are found by discovery, once a group and version."""

    session: Any  # aiohttp.ClientSession
    server: str
    headers: Mapping[str, str]
    _plurals: dict[str, dict[str, tuple[str, bool]]] = field(default_factory=dict)

    async def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> tuple[int, Any]:
        """(status, decoded body). Raises CommandFailed if the server cannot be reached."""
        import aiohttp

        headers = {**self.headers, "Content-Type": content_type, "Accept": "application/json"}
        data = None if body is None else json.dumps(body)
        try:
            async with self.session.request(method, self.server + path, data=data, headers=headers) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise CommandFailed(f"the API server {self.server} cannot be reached: {exc}") from exc
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, {"message": text[:300]}

    async def apply(self, obj: Mapping[str, Any]) -> None:
        """Server-side apply, or create and merge where the server has none for the kind; raises ApiError."""
        path = await self.path_of(obj)
        query = f"?fieldManager={FIELD_MANAGER}&force=true"
        status, answer = await self.request("PATCH", path + query, obj, "application/apply-patch+yaml")
        if status == 415:
            status, answer = await self.request("POST", path.rpartition("/")[0], obj)
            if status == 409:
                status, answer = await self.request("PATCH", path, obj, "application/merge-patch+json")
        if status not in (200, 201):
            raise ApiError(f"{obj['kind']} {name_of(obj)}", status, answer.get("message", ""))

    async def delete(self, obj: Mapping[str, Any]) -> None:
        """Deletes it if it is there."""
        status, answer = await self.request("DELETE", await self.path_of(obj))
        if status not in (200, 202, 404):
            raise ApiError(f"{obj['kind']} {name_of(obj)}", status, answer.get("message", ""))

    async def path_of(self, obj: Mapping[str, Any]) -> str:
        """The path of an object; raises ApiError where its kind is not served."""
        api_version, kind, metadata = obj["apiVersion"], obj["kind"], obj["metadata"]
        root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        if kind not in self._plurals.get(api_version, {}):
            self._plurals[api_version] = await self._discover(root)
        if kind not in self._plurals[api_version]:
            raise ApiError(f"{kind} {name_of(obj)}", 404, f"the API server serves no {kind} in {api_version}")
        plural, namespaced = self._plurals[api_version][kind]
        namespace = f"/namespaces/{metadata.get('namespace', 'default')}" if namespaced else ""
        return f"{root}{namespace}/{plural}/{metadata['name']}"

    async def _discover(self, root: str) -> dict[str, tuple[str, bool]]:
        status, answer = await self.request("GET", root)
        if status == 404:
            return {}
        if status != 200:
            raise ApiError(f"discovery of {root}", status, answer.get("message", ""))
        resources = (resource for resource in answer["resources"] if "/" not in resource["name"])
        return {resource["kind"]: (resource["name"], resource["namespaced"]) for resource in resources}


@asynccontextmanager
async def connect(kubeconfig: Path | None, context: str = "") -> AsyncIterator[KubeClient]:
    """A client for the cluster of a kubeconfig (or KUBECONFIG, ~/.kube/config, the pod); raises CommandFailed."""
    import aiohttp

    access = await asyncio.to_thread(static, kubeconfig, context) if kubeconfig else None
    if access is None:
        access = await _resolved(kubeconfig, context)
    headers = {"Authorization": f"Bearer {access.token}"} if access.token else {}
    connector = aiohttp.TCPConnector(ssl=await asyncio.to_thread(_tls, access))
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield KubeClient(session, access.server, headers)


async def _resolved(kubeconfig: Path | None, context: str) -> StaticContext:
    """By kubernetes_asyncio: plugins, several files, the pod's own credentials."""
    from kubernetes_asyncio import client, config

    settings = client.Configuration()
    if kubeconfig is not None and not await asyncio.to_thread(kubeconfig.is_file):
        raise CommandFailed(f"kubeconfig {kubeconfig} does not exist")
    try:
        if kubeconfig is None and not _has_default():
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(
                config_file=str(kubeconfig) if kubeconfig else None,
                context=context or None,
                client_configuration=settings,
            )
    except (config.ConfigException, OSError, ValueError) as exc:
        where = f"kubeconfig {kubeconfig}" if kubeconfig else "the kubeconfig"
        raise CommandFailed(f"{where} cannot be used: {exc}; give --kubeconfig, or use --devcluster") from exc
    header = await settings.get_api_key_with_prefix("BearerToken") or ""
    return StaticContext(
        server=str(settings.host).rstrip("/"),
        ca_pem=_text_of(settings.ssl_ca_cert),
        client_certificate_pem=_text_of(settings.cert_file),
        client_key_pem=_text_of(settings.key_file),
        token=header.removeprefix("Bearer "),
        insecure_skip_tls_verify=not settings.verify_ssl,
    )


def _tls(access: StaticContext) -> ssl.SSLContext | bool:
    if not access.server.startswith("https"):
        return True
    tls = ssl.create_default_context(cadata=access.ca_pem or None)
    if access.insecure_skip_tls_verify:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    if access.client_certificate_pem:
        # The ssl module reads client certificates from files only.
        with tempfile.NamedTemporaryFile("w") as pem:
            pem.write(f"{access.client_certificate_pem}\n{access.client_key_pem}")
            pem.flush()
            tls.load_cert_chain(pem.name)
    return tls


def _text_of(path: Any) -> str:
    return Path(path).read_text() if path else ""


def _has_default() -> bool:
    location = os.environ.get("KUBECONFIG") or "~/.kube/config"
    return Path(location.split(":", maxsplit=1)[0]).expanduser().exists()


def name_of(obj: Mapping[str, Any]) -> str:
    """namespace/name, or the name of a cluster-scoped object."""
    metadata = obj.get("metadata", {})
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata.get('name')}" if namespace else str(metadata.get("name"))
