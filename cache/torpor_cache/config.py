"""Settings of the cache service, from TORPOR_CACHE_… variables."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torpor_services.config import setting
from torpor_services.errors import InvalidSetting
from torpor_services.security import TlsFiles
from torpor_services.server import ServerConfig

ROLES = ("host", "scheduler", "client")


@dataclass(frozen=True, slots=True)
class RoleAccounts:
    """The ServiceAccounts that services speak as when they name no operator. Empty: such calls are refused."""

    host: str = setting(
        "TORPOR_CACHE_ACCOUNT_HOST", "torpor-system/torpor-host", "namespace/name of the account that hosts speak as."
    )
    scheduler: str = setting(
        "TORPOR_CACHE_ACCOUNT_SCHEDULER",
        "torpor-system/torpor-scheduler",
        "namespace/name of the account that the scheduler speaks as.",
    )
    client: str = setting(
        "TORPOR_CACHE_ACCOUNT_CLIENT", "", "namespace/name of the account that other clients speak as."
    )

    def __post_init__(self) -> None:
        for role in ROLES:
            account = getattr(self, role)
            if account and (account.count("/") != 1 or account.startswith("/") or account.endswith("/")):
                raise InvalidSetting(f"TORPOR_CACHE_ACCOUNT_{role.upper()}", f"{account!r} is not namespace/name")

    def of(self, role: str) -> tuple[str, str] | None:
        """(namespace, name) of the role's account."""
        account = getattr(self, role) if role in ROLES else ""
        namespace, _, name = account.partition("/")
        return (namespace, name) if name else None


@dataclass(frozen=True, slots=True)
class AccessLimits:
    """How long answers about rights are believed. A right that is taken away ends within `allowed_s`."""

    allowed_s: float = setting(
        "TORPOR_CACHE_ACCESS_ALLOWED_S",
        60.0,
        "Seconds for which a granted right is believed; live watches are checked again this often.",
        minimum=1,
    )
    denied_s: float = setting(
        "TORPOR_CACHE_ACCESS_DENIED_S", 10.0, "Seconds for which a refused right is believed.", minimum=0
    )
    reviews_max: int = setting("TORPOR_CACHE_ACCESS_REVIEWS", 16, "SubjectAccessReviews in flight at most.", minimum=1)
    watch_rbac: bool = setting(
        "TORPOR_CACHE_WATCH_RBAC",
        True,
        "Watch Roles and bindings, so that a changed right is noticed in a second instead of at the end of its time.",
    )
    entries_max: int = setting(
        "TORPOR_CACHE_ACCESS_ENTRIES", 20_000, "Answers kept; beyond, the oldest are forgotten.", minimum=100
    )


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What one client's stream may cost."""

    batch_events: int = setting("TORPOR_CACHE_BATCH_EVENTS", 500, "Events in one message at most.", minimum=1)
    batch_bytes: int = setting(
        "TORPOR_CACHE_BATCH_BYTES", 256 * 1024, "Bytes after which a message is closed.", minimum=1024, maximum=8 << 20
    )
    pending_max: int = setting(
        "TORPOR_CACHE_PENDING_MAX",
        100_000,
        "Keys with unsent changes a subscription may have; beyond, it starts anew with RESYNC.",
        minimum=1,
    )
    subscriptions_max: int = setting(
        "TORPOR_CACHE_SUBSCRIPTIONS_MAX", 20_000, "Subscriptions on one stream at most.", minimum=1
    )
    bookmark_s: float = setting(
        "TORPOR_CACHE_BOOKMARK_S", 60.0, "Seconds between bookmarks to idle subscriptions.", minimum=0.05
    )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may cost."""

    fresh_wait_s: float = setting(
        "TORPOR_CACHE_FRESH_WAIT_S", 3.0, "Seconds a read waits for the cache to reach its minimum.", minimum=0
    )
    upstream_s: float = setting(
        "TORPOR_CACHE_UPSTREAM_S", 30.0, "Seconds a request to the API server may take.", minimum=1
    )
    chunk_bytes: int = setting(
        "TORPOR_CACHE_CHUNK_BYTES", 256 * 1024, "Bytes of a body in one message.", minimum=1024, maximum=8 << 20
    )


@dataclass(frozen=True, slots=True)
class WatchChoice:
    """What is watched upstream."""

    wide_objects_max: int = setting(
        "TORPOR_CACHE_WIDE_OBJECTS_MAX",
        5_000,
        "Objects up to which a kind is watched whole, once for all operators, whatever they select (1 KB to 10 KB of "
        "memory each); larger kinds are watched in the scopes asked for. 0: always so.",
        minimum=0,
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The whole service."""

    listen: str = setting("TORPOR_CACHE_LISTEN", "127.0.0.1:7601", "host:port or unix:/path of the gRPC server.")
    kubeconfig: Path | None = setting(
        "TORPOR_CACHE_KUBECONFIG", None, "Kubeconfig file; unset: KUBECONFIG, in-cluster credentials, ~/.kube/config."
    )
    context: str = setting("TORPOR_CACHE_CONTEXT", "", "Context of the kubeconfig; empty: its current one.")
    state: Path | None = setting(
        "TORPOR_CACHE_STATE", None, "Folder for acknowledged positions, mode 0700; unset: they end with the process."
    )
    drain_s: float = setting(
        "TORPOR_CACHE_DRAIN_S", 2.0, "Seconds that running calls get to end at shutdown.", minimum=0
    )
    log_level: str = setting("TORPOR_CACHE_LOG_LEVEL", "info", "debug, info, warning or error.")
    accounts: RoleAccounts = field(default_factory=RoleAccounts)
    access: AccessLimits = field(default_factory=AccessLimits)
    streams: StreamLimits = field(default_factory=StreamLimits)
    requests: RequestLimits = field(default_factory=RequestLimits)
    watches: WatchChoice = field(default_factory=WatchChoice)
    tls: TlsFiles = field(default_factory=TlsFiles)

    @property
    def server(self) -> ServerConfig:
        return ServerConfig(listen=self.listen, drain_s=self.drain_s, tls=self.tls)
