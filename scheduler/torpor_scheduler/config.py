"""Settings of the scheduler service."""

from __future__ import annotations

from dataclasses import dataclass, field

from torpor_services.config import setting
from torpor_services.server import ServerConfig


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """All that a scheduler is told at start."""

    cache: str = setting("TORPOR_SCHEDULER_CACHE", description="Address of the cache, host:port or unix:/path.")
    name: str = setting("TORPOR_SCHEDULER_NAME", "scheduler", "Name among schedulers; in the certificate too.")
    namespace: str = setting("TORPOR_NAMESPACE", "torpor-system", "Namespace of the hosts' Leases.")
    log_level: str = setting("TORPOR_LOG_LEVEL", "info", "debug, info, warning or error.")
    server: ServerConfig = field(default_factory=ServerConfig)
