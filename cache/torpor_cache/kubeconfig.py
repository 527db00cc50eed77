"""Where credentials come from: given fields, the files of a pod, or a kubeconfig.

A kubeconfig is resolved in a process of its own that ends at once (`_kubeconfig_worker`): the library that understands
it costs 55 MB to import, and exec plugins run there too. It hands over server, CA, credential and expiry; when they
expire it is run again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
from torpor_services.errors import one_line

from torpor_cache.apiserver import Credentials, CredentialSource, CredentialsUnavailable
from torpor_cache.resolved import Resolved

IN_CLUSTER_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RESOLVE_TIMEOUT_S = 60.0  # a plugin may ask an identity provider over the network
CREDENTIAL_FILE_BYTES_MAX = 1024 * 1024


class FixedCredentials:
    """Given fields that never change; `token_file` is read again as its writer replaces it."""

    def __init__(
        self, credentials: Credentials, *, token_file: Path | None = None, ca_file: Path | None = None
    ) -> None:
        self._credentials = credentials
        self._token_file = token_file
        self._ca_file = ca_file

    async def load(self) -> Credentials:
        loaded = self._credentials
        if self._ca_file is not None:
            loaded = replace(loaded, ca_pem=await _read(self._ca_file))
        if self._token_file is not None:
            loaded = replace(loaded, token=(await _read(self._token_file)).strip(), rereads=True)
        return loaded


class InClusterCredentials:
    """The files that the kubelet mounts into a pod, and the address it puts into the environment."""

    def __init__(self, environ: Mapping[str, str] = os.environ, folder: Path = IN_CLUSTER_FOLDER) -> None:
        self._environ = environ
        self._folder = folder

    async def load(self) -> Credentials:
        host = self._environ.get("KUBERNETES_SERVICE_HOST", "")
        port = self._environ.get("KUBERNETES_SERVICE_PORT", "")
        if not host or not port:
            raise CredentialsUnavailable(
                "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: this is no pod; name a kubeconfig",
                retryable=False,
            )
        token = (await _read(self._folder / "token")).strip()
        ca_pem = await _read(self._folder / "ca.crt")
        address = f"[{host}]" if ":" in host else host
        return Credentials(f"https://{address}:{port}", ca_pem=ca_pem, token=token, rereads=True)


class KubeconfigCredentials:
    """A context of a kubeconfig. No path: $KUBECONFIG, or ~/.kube/config; no context: its current one."""

    def __init__(self, path: Path | None = None, context: str = "", *, timeout_s: float = RESOLVE_TIMEOUT_S) -> None:
        self._path = path
        self._context = context
        self._timeout_s = timeout_s
        self._resolved: Resolved | None = None

    async def load(self) -> Credentials:
        # With a token file nothing else moves, so that reading it again needs no process.
        if self._resolved is None or not self._resolved.token_file:
            self._resolved = await self._resolve()
        return await _credentials(self._resolved)

    async def _resolve(self) -> Resolved:
        what = f"kubeconfig {self._path}" if self._path is not None else "the default kubeconfig"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "torpor_cache._kubeconfig_worker", str(self._path or ""), self._context),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a group of its own, so that its plugin ends with it
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                output, errors = await process.communicate()
        except TimeoutError as exc:
            raise CredentialsUnavailable(
                f"{what}: its credential plugin gave no answer within {self._timeout_s:g} s"
            ) from exc
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode != 0:
            raise CredentialsUnavailable(f"{what}: {one_line(ValueError(errors.decode(errors='replace')))}")
        return msgspec.json.decode(output, type=Resolved)


def source_for(kubeconfig: Path | None, context: str = "", environ: Mapping[str, str] = os.environ) -> CredentialSource:
    """The named kubeconfig; else a pod's credentials where this is a pod; else the default kubeconfig."""
    if kubeconfig is None and not context and environ.get("KUBERNETES_SERVICE_HOST"):
        return InClusterCredentials(environ)
    return KubeconfigCredentials(kubeconfig, context)


async def _credentials(resolved: Resolved) -> Credentials:
    fields = msgspec.structs.asdict(resolved)
    token_file = fields.pop("token_file")
    if token_file:
        fields["token"] = (await _read(Path(token_file))).strip()
    return Credentials(**fields, rereads=bool(token_file))


async def _read(path: Path) -> str:
    def read() -> str:
        with path.open(encoding="utf-8") as file:
            return file.read(CREDENTIAL_FILE_BYTES_MAX)

    try:
        return await asyncio.to_thread(read)
    except (OSError, UnicodeDecodeError) as exc:
        raise CredentialsUnavailable(f"{path} cannot be read: {one_line(exc)}") from exc
