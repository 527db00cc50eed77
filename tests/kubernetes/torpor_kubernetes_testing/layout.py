"""The folder of one control plane, and the flags that make each program use it.

Versions differ little here: the flags are understood by Kubernetes 1.29 and later, and etcd 3.5 and later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torpor_kubernetes_testing.certificates import KeyFiles


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths in `folder`, which is private to the control plane and deleted with it."""

    folder: Path

    @property
    def etcd_socket(self) -> Path:
        return self.folder / "etcd.sock"

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens.csv"

    @property
    def audit_policy(self) -> Path:
        return self.folder / "audit-policy.yaml"

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    @property
    def admin_kubeconfig(self) -> Path:
        return self.folder / "admin.kubeconfig"

    @property
    def controller_manager_kubeconfig(self) -> Path:
        return self.folder / "controller-manager.kubeconfig"

    def log_of(self, program: str) -> Path:
        return self.folder / f"{program}.log"


def etcd_flags(layout: Layout) -> list[str]:
    clients, peers = f"unix://{layout.etcd_socket}", f"unix://{layout.folder / 'peer.sock'}"
    return [
        f"--data-dir={layout.folder / 'etcd'}",
        "--unsafe-no-fsync",  # Its data need not survive the machine.
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        "--log-level=warn",
    ]


def apiserver_flags(layout: Layout, keys: KeyFiles, *, port: int, compaction_interval_s: int | None) -> list[str]:
    flags = [
        f"--etcd-servers=unix://{layout.etcd_socket}",
        f"--cert-dir={layout.folder}",
        "--bind-address=127.0.0.1",
        # For the `kubernetes` service, which takes no loopback address; nobody connects there (RFC 5737).
        "--advertise-address=192.0.2.1",
        f"--secure-port={port}",
        "--permit-port-sharing",  # with the socket that reserves the port
        f"--tls-cert-file={keys.serving_certificate}",
        f"--tls-private-key-file={keys.serving_key}",
        "--anonymous-auth=false",
        f"--token-auth-file={layout.tokens}",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={keys.service_account_public_key}",
        f"--service-account-signing-key-file={keys.service_account_key}",
        "--service-cluster-ip-range=10.0.0.0/24",
        f"--audit-policy-file={layout.audit_policy}",
        f"--audit-log-path={layout.audit_log}",
        "--audit-log-maxsize=100000",  # MiB: one file, never rotated (0 means 100)
    ]
    if compaction_interval_s is not None:
        flags.append(f"--etcd-compaction-interval={compaction_interval_s}s")
    return flags


def controller_manager_flags(layout: Layout, keys: KeyFiles, controllers: Sequence[str]) -> list[str]:
    return [
        f"--kubeconfig={layout.controller_manager_kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
        f"--controllers={','.join(controllers)}",
        f"--service-account-private-key-file={keys.service_account_key}",
        f"--root-ca-file={keys.ca}",
    ]
