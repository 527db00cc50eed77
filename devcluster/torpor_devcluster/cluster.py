"""`DevCluster`: the parts put together, started and stopped."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from torpor_devcluster import bootstrap
from torpor_devcluster.authn import MASTERS, Authenticator, User, account_name
from torpor_devcluster.catalogue import Catalogue
from torpor_devcluster.certificates import make_server_context
from torpor_devcluster.config import Config
from torpor_devcluster.crd_controller import CrdController
from torpor_devcluster.faults import Faults
from torpor_devcluster.gc import Controllers
from torpor_devcluster.handlers import Handlers
from torpor_devcluster.rbac import Authorizer
from torpor_devcluster.reads import WatchSettings
from torpor_devcluster.registry import Registry
from torpor_devcluster.requestlog import RequestLog
from torpor_devcluster.resources import SERVICE_ACCOUNTS, ResourceKey
from torpor_devcluster.server import Server
from torpor_devcluster.storage import Storage

Json = dict[str, Any]

# A URL may carry a long label selector (200 names and more).
_LINE_BYTES_MAX = 256 * 1024


class DevCluster:
    """An API server on loopback, in this process and this loop.

    `async with DevCluster() as cluster:` serves at `cluster.url`; `cluster.admin_token` may do everything. Nothing is
    kept after the block.
    """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self.admin_token = secrets.token_urlsafe(24)
        self.requests = RequestLog(self.config.request_log_max)
        self._folder: Path | None = None
        self._port = 0
        self._runner: web.ServerRunner | None = None
        self._task: asyncio.Task[None] | None = None
        self._build()

    def _build(self) -> None:
        config, clock = self.config, self.config.clock
        self.storage = Storage(
            clock, history_window_s=config.history_window_s, history_events_max=config.history_events_max
        )
        catalogue = Catalogue()
        self.registry = Registry(self.storage, catalogue, clock)
        tokens = {self.admin_token: User("devcluster-admin", (MASTERS,)), **config.tokens}
        self._authenticator = Authenticator(self.storage, clock, tokens, issuer=config.issuer)
        authorizer = Authorizer(self.storage)
        self.faults = Faults(lambda: self._server.live_watches(), self.storage.compact)
        handlers = Handlers(
            self.registry,
            self._authenticator,
            authorizer,
            clock,
            WatchSettings(config.bookmark_interval_s, config.watch_timeout_s),
        )
        self._server = Server(
            storage=self.storage,
            catalogue=catalogue,
            handlers=handlers,
            authenticator=self._authenticator,
            authorizer=authorizer,
            faults=self.faults,
            requests=self.requests,
            clock=clock,
            anonymous=config.anonymous,
        )
        self._controllers = Controllers(self.registry) if config.controllers else None
        # Last, because it writes while it observes: the others have then seen what it reacts to.
        self._crds = CrdController(self.registry, on_gone=self._end_watches)
        bootstrap.fill(self.registry)

    def _end_watches(self, key: ResourceKey) -> None:
        for _, watch in self._server.live_watches():
            if watch.resource.key == key:
                watch.close()

    async def __aenter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="torpor-devcluster-"))
        context = make_server_context(self._folder) if self.config.tls else None
        server = web.Server(
            self._server.handle,
            handler_cancellation=True,
            access_log=None,
            max_line_size=_LINE_BYTES_MAX,
            max_field_size=_LINE_BYTES_MAX,
            keepalive_timeout=300.0,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=2.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.config.host, self.config.port, ssl_context=context)
        try:
            await site.start()
        except OSError:
            await self.__aexit__(None, None, None)
            raise
        self._port = self._runner.addresses[0][1]
        if self._controllers is not None:
            self._task = asyncio.create_task(self._controllers.run(), name="devcluster-controllers")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.faults.clear()
        self._server.close_watches()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        """`https://127.0.0.1:PORT`, without a slash at the end."""
        return f"{'https' if self.config.tls else 'http'}://{self.config.host}:{self._port}"

    @property
    def ca_file(self) -> Path | None:
        """The CA certificate (PEM); None without TLS."""
        assert self._folder is not None, "the cluster has been started"
        return self._folder / "ca.crt" if self.config.tls else None

    def add_token(self, token: str, user: User) -> None:
        """Accept a further static bearer token."""
        self._authenticator.add_token(token, user)

    def service_account_token(self, namespace: str, name: str, *, expiration_s: int = 3600) -> str:
        """A token of an existing ServiceAccount. Raises KeyError when there is none."""
        stored = self.storage.get(SERVICE_ACCOUNTS, (namespace, name))
        if stored is None:
            raise KeyError(f"no ServiceAccount {account_name(namespace, name)}")
        return self._authenticator.issue(stored.object, expiration_s=expiration_s)[0]

    async def settle(self) -> None:
        """Wait until the controllers have nothing left to do."""
        if self._controllers is not None:
            await self._controllers.idle()

    def kubeconfig(self, token: str | None = None) -> Json:
        """A kubeconfig object for the admin, or for the holder of `token`; the CA is inside."""
        cluster: Json = {"server": self.url}
        if self.ca_file is not None:
            import base64

            cluster["certificate-authority-data"] = base64.b64encode(self.ca_file.read_bytes()).decode()
        return {
            "kind": "Config",
            "apiVersion": "v1",
            "clusters": [{"name": "devcluster", "cluster": cluster}],
            "users": [{"name": "devcluster", "user": {"token": token or self.admin_token}}],
            "contexts": [{"name": "devcluster", "context": {"cluster": "devcluster", "user": "devcluster"}}],
            "current-context": "devcluster",
        }

    def write_kubeconfig(self, path: Path | str, token: str | None = None) -> Path:
        """Write a kubeconfig (mode 0600; JSON, which is YAML) and return its path."""
        target = Path(path)
        target.touch(mode=0o600)
        target.chmod(0o600)
        target.write_bytes(msgspec.json.format(msgspec.json.encode(self.kubeconfig(token)), indent=2))
        return target
