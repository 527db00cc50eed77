"""etcd and kube-apiserver, real ones, in a temporary folder of their own.

Authentication by token, authorization by RBAC, an audit log, no anonymous requests. The API server may be
killed, stopped and started again under the same address, and keeps its data. No event loop owns a ControlPlane,
so one may serve a whole test session; its clients belong to the loop that enters them.
"""

import asyncio
import json
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from torpor_kubernetes_testing import audit, etcd
from torpor_kubernetes_testing.certificates import KeyFiles, write_keys
from torpor_kubernetes_testing.client import ApiError, KubeClient
from torpor_kubernetes_testing.layout import Layout, apiserver_flags, controller_manager_flags, etcd_flags
from torpor_kubernetes_testing.metrics import Metrics
from torpor_kubernetes_testing.processes import ProcessFailed, ServerProcess
from torpor_kubernetes_testing.users import User, token_file, write_kubeconfig

READY_TIMEOUT_S = 60.0  # About 2.5 s alone on 2 cores; a loaded CI machine takes several times that.
SOCKET_PATH_BYTES_MAX = 107  # sun_path less its terminating zero

# Owner references, namespaces and default accounts behave as on a cluster; no pods are made.
DEFAULT_CONTROLLERS = (
    "garbage-collector-controller",
    "namespace-controller",
    "serviceaccount-controller",
)


ADMIN_NAME = "torpor-test-admin"
ADMIN_GROUPS = ("system:masters",)
CONTROLLER_MANAGER_NAME = "system:kube-controller-manager"


class ControlPlane:
    """A Kubernetes API for tests: `async with ControlPlane(built_assets()) as control_plane`.

    `users`: who may authenticate besides the admin (the server reads tokens at its start only).
    `compaction_interval_s`: how often the API server compacts etcd; its own default is 300. Two intervals
    after a version was written etcd has forgotten it; the API server's cache of lists follows within 15 s more.
    `forget_history` does it all at once.
    `apiserver_flags`: further flags, last, so that they win.
    """

    def __init__(
        self,
        assets: Path,
        *,
        users: Sequence[User] = (),
        compaction_interval_s: int | None = None,
        apiserver_flags: Sequence[str] = (),
    ) -> None:
        self._assets = assets
        admin = User(ADMIN_NAME, ADMIN_GROUPS)
        # More than its own role, which leaves each controller's rights to an account of the controller's.
        manager = User(CONTROLLER_MANAGER_NAME, ("system:masters",))
        self._users: Mapping[str, User] = {user.name: user for user in (admin, manager, *users)}
        self._compaction_interval_s = compaction_interval_s
        self._apiserver_flags = tuple(apiserver_flags)
        self._folder: Path | None = None
        self._layout: Layout
        self._keys: KeyFiles
        self._etcd: ServerProcess
        self._apiserver: ServerProcess
        self._reserved: socket.socket | None = None
        self._processes: dict[str, ServerProcess] = {}

    # Life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when requests are served, after a few seconds. Raises ProcessFailed with the end of a log."""
        if self._folder is not None:
            raise RuntimeError("this control plane already runs")
        try:
            self._prepare()
            self._etcd.start()
            await self._etcd.ready(self._etcd_answers, timeout_s=READY_TIMEOUT_S)
            await self._start_apiserver()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End all processes and delete the folder, audit log included."""
        # Nothing is kept, so there is nothing to say goodbye to; users first, etcd last.
        for name in ("kube-controller-manager", "kube-apiserver", "etcd"):
            if (process := self._processes.pop(name, None)) is not None:
                await process.kill()
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            self._folder = None

    async def kill_apiserver(self) -> None:
        """`kill -9`: connections are cut, new ones refused; etcd and its data stay."""
        await self._apiserver.kill()

    async def terminate_apiserver(self) -> None:
        """SIGTERM, as in a rolling update: the server ends its watches before it goes."""
        await self._apiserver.terminate()

    async def restart_apiserver(self) -> None:
        """Start the API server again, killed first if it runs: same address, users, keys and data.

        Its watch cache begins anew: a watch from an earlier version is refused with 410 once etcd is compacted.
        """
        await self._apiserver.kill()
        await self._start_apiserver()

    def pause_apiserver(self) -> None:
        """SIGSTOP: connections stay open and nothing answers, as when a machine hangs."""
        self._apiserver.send(signal.SIGSTOP)

    def resume_apiserver(self) -> None:
        self._apiserver.send(signal.SIGCONT)

    async def start_controller_manager(self, controllers: Sequence[str] = DEFAULT_CONTROLLERS) -> None:
        """Run kube-controller-manager with these controllers; returns when they have begun to work.

        The garbage collector looks for new kinds (CRDs) every 30 s only: create those first.
        Raises ProcessFailed where the assets have no kube-controller-manager (KUBEBUILDER_ASSETS often has not).
        """
        process = self._process(
            "kube-controller-manager", controller_manager_flags(self._layout, self._keys, controllers)
        )
        process.start()
        await process.ready(self._controllers_run, timeout_s=READY_TIMEOUT_S)

    async def stop_controller_manager(self) -> None:
        await self._processes["kube-controller-manager"].kill()

    async def compact(self) -> str:
        """Make etcd forget all versions before the present one, which is returned.

        The API server goes on serving what its caches hold: lists for up to 15 s, watches for as long as
        the window of events reaches back. `forget_history` ends that too.
        """
        return await etcd.compact(self._layout.etcd_socket)

    async def forget_history(self) -> str:
        """Compact etcd and restart the API server: every earlier version is now answered with 410."""
        revision = await self.compact()
        await self.restart_apiserver()
        return revision

    # Access

    @property
    def folder(self) -> Path:
        if self._folder is None:
            raise RuntimeError("this control plane does not run")
        return self._folder

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        if self._reserved is None:
            raise RuntimeError("this control plane does not run")
        port: int = self._reserved.getsockname()[1]
        return port

    @property
    def ca_file(self) -> Path:
        return self._keys.ca

    @property
    def admin_token(self) -> str:
        return self.token_of(ADMIN_NAME)

    def token_of(self, user: str) -> str:
        """Raises LookupError for a name that was not among `users`."""
        if (found := self._users.get(user)) is None:
            raise LookupError(f"no user {user!r}; ControlPlane(users=…) has {', '.join(self._users)}")
        return found.token

    def admin_client(self, user_agent: str = "torpor-test") -> KubeClient:
        return self.client(self.admin_token, user_agent=user_agent)

    def client(self, token: str | None, user_agent: str = "torpor-test") -> KubeClient:
        return KubeClient(self.url, token=token, ca_file=self.ca_file, user_agent=user_agent)

    def admin_kubeconfig(self, path: Path) -> Path:
        return self.kubeconfig_for(ADMIN_NAME, path)

    def kubeconfig_for(self, user: str, path: Path, *, namespace: str = "default") -> Path:
        """Write a kubeconfig for one of `users` to `path`, mode 0600."""
        return self.kubeconfig_with(self.token_of(user), path, namespace=namespace)

    def kubeconfig_with(self, token: str, path: Path, *, namespace: str = "default") -> Path:
        """The same for any token, as a service account's."""
        return write_kubeconfig(path, url=self.url, ca_file=self.ca_file, token=token, namespace=namespace)

    async def service_account_token(self, namespace: str, name: str, *, valid_for_s: int = 3600) -> str:
        """A token of an existing service account, through TokenRequest. Kubernetes allows 600 s at least."""
        async with self.admin_client() as kube:
            answer = await kube.request(
                "POST",
                f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token",
                body={
                    "apiVersion": "authentication.k8s.io/v1",
                    "kind": "TokenRequest",
                    "spec": {"expirationSeconds": valid_for_s},
                },
            )
        token: str = answer["status"]["token"]
        return token

    async def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as admin; its standard output. Raises ProcessFailed with what it wrote to standard error."""
        process = await asyncio.create_subprocess_exec(
            *(self._program("kubectl"), "--kubeconfig", self._layout.admin_kubeconfig),
            *(f"--cache-dir={self.folder / 'kubectl-cache'}", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate((stdin or "").encode())
        if process.returncode != 0:
            raise ProcessFailed(f"kubectl {' '.join(arguments)}: {errors.decode(errors='replace').strip()}")
        return output.decode()

    # What the server tells of itself

    @property
    def audit_log(self) -> Path:
        return self.folder / self._layout.audit_log.name

    def audit_events(self) -> list[audit.AuditEvent]:
        """All requests so far, oldest first: see `audit.POLICY` for what is in it."""
        return list(audit.read_events(self.audit_log))

    async def metrics(self) -> Metrics:
        async with self.admin_client() as kube:
            return Metrics.parse(await kube.text("/metrics"))

    def resident_bytes(self) -> dict[str, int]:
        """Resident memory of each running process, by name."""
        return {name: p.resident_bytes() for name, p in self._processes.items() if p.running}

    def log_tail(self, process: str = "kube-apiserver") -> str:
        return self._processes[process].log_tail()

    # How it is made

    def _prepare(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="torpor-kubernetes-"))
        self._layout = layout = Layout(self._folder)
        if len(str(layout.etcd_socket).encode()) > SOCKET_PATH_BYTES_MAX:
            raise ProcessFailed(f"{self._folder} is too long a path for etcd's socket; set TMPDIR to a shorter one")
        self._keys = write_keys(self._folder)
        self._reserved = _reserve_port()
        layout.tokens.write_text(token_file(self._users.values()))
        layout.audit_policy.write_text(json.dumps(audit.POLICY))
        self.admin_kubeconfig(layout.admin_kubeconfig)
        self.kubeconfig_for(CONTROLLER_MANAGER_NAME, layout.controller_manager_kubeconfig)
        self._etcd = self._process("etcd", etcd_flags(layout))
        flags = apiserver_flags(layout, self._keys, port=self.port, compaction_interval_s=self._compaction_interval_s)
        self._apiserver = self._process("kube-apiserver", [*flags, *self._apiserver_flags])

    def _process(self, name: str, flags: Sequence[str]) -> ServerProcess:
        process = ServerProcess([str(self._program(name)), *flags], log=self._layout.log_of(name))
        self._processes[name] = process
        return process

    def _program(self, name: str) -> Path:
        program = self._assets / name
        if not program.is_file():
            raise ProcessFailed(f"{self._assets} has no {name}; unset KUBEBUILDER_ASSETS to have it built")
        return program

    async def _start_apiserver(self) -> None:
        audit.cut_unfinished_line(self.audit_log)
        self._apiserver.start()
        await self._apiserver.ready(self._apiserver_answers, timeout_s=READY_TIMEOUT_S)

    async def _etcd_answers(self) -> bool:
        return await etcd.answers(self._layout.etcd_socket)

    async def _apiserver_answers(self) -> bool:
        try:
            async with self.admin_client() as kube:
                return await kube.text("/readyz") == "ok"
        except (OSError, aiohttp.ClientError, ApiError):
            return False

    async def _controllers_run(self) -> bool:
        # It serves no health here; the first controller whose informers are synced says so in the log.
        return self._processes["kube-controller-manager"].has_logged("Caches are synced")


def _reserve_port() -> socket.socket:
    """A loopback port that stays ours while the API server is down, held by a socket that never listens.

    The server shares it (SO_REUSEPORT, same user only); while it is not running, connections are refused, and
    nobody else is given the port. Choosing a free port and hoping would race with every other process.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
