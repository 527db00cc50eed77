"""What a dev cluster can be told. Every setting has a default that suits a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torpor_devcluster.authn import User
from torpor_devcluster.clock import Clock, SystemClock


@dataclass(frozen=True, slots=True)
class Config:
    host: str = "127.0.0.1"
    """Only loopback makes sense: the admin token is in a file."""
    port: int = 0
    """0 takes a free one."""
    tls: bool = True
    """False serves plain HTTP. kubectl and other client-go programs send no token then: they need TLS."""
    anonymous: bool = False
    """True treats requests without a token as system:anonymous (403 where RBAC says so) instead of 401."""
    tokens: Mapping[str, User] = field(default_factory=dict)
    """Static bearer tokens beside the admin's own."""
    bookmark_interval_s: float = 60.0
    """How often a watch that asked for bookmarks gets one; the real server takes about a minute."""
    watch_timeout_s: float = 3600.0
    """How long a watch lives that names no timeoutSeconds; shorter makes clients reconnect more often."""
    history_window_s: float = 300.0
    """How far back a watch may begin and a continue token reach; older is 410. etcd compacts every 5 minutes."""
    history_events_max: int = 50_000
    """The same, as a number of events of one resource; it bounds memory (about 3 kB each)."""
    request_log_max: int = 20_000
    """How many finished requests `cluster.requests` keeps; older ones are dropped."""
    controllers: bool = True
    """False switches off garbage collection, namespace deletion and default accounts, as a bare API server is."""
    issuer: str = "https://kubernetes.default.svc"
    """Issuer and default audience of ServiceAccount tokens."""
    clock: Clock = field(default_factory=SystemClock)
    """Wall and monotonic time; tests advance their own."""
