"""A gRPC server of a Torpor service: listen, health, reflection, drain on SIGTERM.

async with serving(ServerConfig(...), add=lambda server: …, names=[…], readiness=readiness) as server:
    await server.wait_stopped()
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

from torpor_services.channels import COMMON_OPTIONS
from torpor_services.config import setting
from torpor_services.errors import AddressInUse, InvalidSetting
from torpor_services.health import Readiness
from torpor_services.memory import bound_heap, trim_heap
from torpor_services.reflection import LazyReflection
from torpor_services.security import TlsFiles, is_local

log = logging.getLogger(__name__)

_SERVER_OPTIONS: Sequence[tuple[str, Any]] = (
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second process on the same port must fail, not share it
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where a service listens."""

    listen: str = setting("TORPOR_LISTEN", "127.0.0.1:0", "host:port or unix:/path of the gRPC server.")
    drain_s: float = setting("TORPOR_DRAIN_S", 10.0, "Seconds that running calls get to end at shutdown.", minimum=0)
    tls: TlsFiles = field(default_factory=TlsFiles)


class RunningServer:
    """A server that listens. `address` is where, with the port it got."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Asks for the drain; returns at once."""
        self._stop.set()

    async def wait_stopped(self) -> None:
        """Until `stop`, SIGTERM or SIGINT."""
        await self._stop.wait()


@asynccontextmanager
async def serving(
    config: ServerConfig,
    *,
    add: Callable[[grpc.aio.Server], None],
    names: Sequence[str],
    readiness: Readiness,
    handle_signals: bool = True,
) -> AsyncIterator[RunningServer]:
    """Listens, serves what `add` registers under the full service `names`, and drains at the end.

    Raises AddressInUse, or InvalidSetting for an address that others could reach without TLS.
    """
    bound_heap()
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    add(server)
    health_pb2_grpc.add_HealthServicer_to_server(readiness.servicer, server)
    server.add_generic_rpc_handlers((LazyReflection([*names, health.SERVICE_NAME]),))
    running = RunningServer(_bind(server, config))
    await server.start()
    tasks = [asyncio.create_task(readiness.publish()), asyncio.create_task(_trim_once_ready(readiness))]
    if handle_signals:
        _stop_on_signals(running)
    log.info("listening", extra={"address": running.address})
    try:
        yield running
    finally:
        readiness.drain()
        await server.stop(config.drain_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _trim_once_ready(readiness: Readiness) -> None:
    """Importing and the first lists leave holes in the heap that are not needed again soon."""
    await readiness.wait_ready()
    await asyncio.to_thread(trim_heap)


def _bind(server: grpc.aio.Server, config: ServerConfig) -> str:
    if not config.tls.enabled and not is_local(config.listen):
        raise InvalidSetting(
            "TORPOR_TLS_CA, _CERT and _KEY", f"are needed to listen on {config.listen}, which other machines can reach"
        )
    if config.listen.startswith("unix:"):
        _remove_dead_socket(Path(config.listen.removeprefix("unix:")))
    try:
        if config.tls.enabled:
            port = server.add_secure_port(config.listen, config.tls.server_credentials())
        else:
            port = server.add_insecure_port(config.listen)
    except RuntimeError as exc:
        raise AddressInUse(config.listen) from exc
    if config.listen.startswith("unix:"):
        return config.listen
    if port == 0:
        raise AddressInUse(config.listen)
    return f"{config.listen.rpartition(':')[0]}:{port}"


def _remove_dead_socket(path: Path) -> None:
    """gRPC does not unlink the socket of a process that was killed; one that answers stays."""
    import socket

    if not path.exists():
        return
    probe = socket.socket(socket.AF_UNIX)
    try:
        probe.connect(str(path))
    except OSError:
        path.unlink(missing_ok=True)
    else:
        raise AddressInUse(f"unix:{path}")
    finally:
        probe.close()


def _stop_on_signals(running: RunningServer) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.stop)
