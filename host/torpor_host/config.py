"""What a host is told at start-up, grouped by concern."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torpor_services.config import setting
from torpor_services.errors import InvalidSetting
from torpor_services.security import TlsFiles

# The longest a write may run once it was sent, and so how long a successor waits after the Lease has ended.
WRITE_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class GuestConfig:
    """Where modules and images are, and what guests may use together."""

    state_dir: Path = setting(
        "TORPOR_HOST_STATE_DIR",
        Path(".torpor/host"),
        "Folder of compiled modules, images and snapshots; 0700, one host a folder.",
    )
    modules_dir: Path | None = setting(
        "TORPOR_HOST_MODULES_DIR", None, "Folder that spec.module.file is looked up in; without it file is refused."
    )
    python_runtime: Path | None = setting(
        "TORPOR_HOST_PYTHON_RUNTIME", None, "CPython as a core module; without it Python operators are refused."
    )
    memory_budget: int = setting(
        "TORPOR_HOST_MEMORY_BUDGET",
        512 << 20,
        "Bytes that loaded guests may hold privately, together; above it idle ones leave at once.",
        minimum=1 << 20,
    )
    workers: int = setting(
        "TORPOR_HOST_WORKERS",
        32,
        "Guests in a call at once, those that wait on the network included; one of them computes at a time.",
        minimum=1,
        maximum=1024,
    )
    installs: int = setting(
        "TORPOR_HOST_INSTALLS", 2, "Modules installed at once; each may take a compiler process.", minimum=1, maximum=16
    )


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """How long this host may believe that it is alone with its operators."""

    duration_s: float = setting(
        "TORPOR_HOST_LEASE_DURATION_S",
        15.0,
        "Seconds a renewed Lease holds; a crashed host's operators wait that long.",
        minimum=2,
    )
    renew_s: float = setting("TORPOR_HOST_LEASE_RENEW_S", 5.0, "Seconds between renewals.", minimum=0.2)
    margin_s: float = setting(
        "TORPOR_HOST_LEASE_MARGIN_S", 2.0, "Seconds before its end at which the Lease counts as lost.", minimum=0.1
    )
    namespace: str = setting("TORPOR_NAMESPACE", "torpor-system", "Namespace of Leases; made if it does not exist.")

    def __post_init__(self) -> None:
        if self.renew_s + self.margin_s >= self.duration_s:
            raise InvalidSetting(
                "TORPOR_HOST_LEASE_RENEW_S",
                f"{self.renew_s} with a margin of {self.margin_s} is not below the duration of {self.duration_s}",
            )


@dataclass(frozen=True, slots=True)
class HostConfig:
    """A host process."""

    name: str = setting(
        "TORPOR_HOST_NAME", "host-0", "Name of this host, unique among those of a cluster; a DNS label."
    )
    cache: str = setting("TORPOR_HOST_CACHE", "127.0.0.1:7601", "Address of the cache.")
    scheduler: str = setting(
        "TORPOR_HOST_SCHEDULER", "", "Address of the scheduler; empty: decide alone, by break-even and by claiming."
    )
    scheduler_away_s: float = setting(
        "TORPOR_HOST_SCHEDULER_AWAY_S",
        10.0,
        "Seconds without the scheduler after which the host decides alone.",
        minimum=0,
    )
    listen: str = setting("TORPOR_HOST_LISTEN", "127.0.0.1:7602", "host:port or unix:/path of the gRPC server.")
    drain_s: float = setting("TORPOR_HOST_DRAIN_S", 20.0, "Seconds that running reconciles get at shutdown.", minimum=0)
    log_level: str = setting("TORPOR_LOG_LEVEL", "info", "debug, info, warning or error.")
    guests: GuestConfig = field(default_factory=GuestConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    tls: TlsFiles = field(default_factory=TlsFiles)
