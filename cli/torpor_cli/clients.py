"""Calls to the services of a running mesh, with their errors told as one line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from torpor.host.v1.host_pb2_grpc import HostStub
from torpor.scheduler.v1.scheduler_pb2 import OperatorId
from torpor.scheduler.v1.scheduler_pb2_grpc import SchedulerStub
from torpor_services.channels import open_channel
from torpor_services.security import TlsFiles

from torpor_cli.errors import CommandFailed
from torpor_cli.mesh import CLIENT
from torpor_cli.rundir import RunDir

if TYPE_CHECKING:
    from torpor.host.v1.host_pb2_grpc import HostAsyncStub
    from torpor.scheduler.v1.scheduler_pb2_grpc import SchedulerAsyncStub


@dataclass(frozen=True, slots=True)
class Services:
    """Stubs of a mesh. `scheduler` is None where none was started."""

    host: HostAsyncStub
    scheduler: SchedulerAsyncStub | None
    host_name: str


@asynccontextmanager
async def services(name: str) -> AsyncIterator[Services]:
    """The services of the mesh of this name; gRPC errors become CommandFailed."""
    mesh = RunDir.named(name).read()
    channels = [open_channel(address, CLIENT, TlsFiles()) for address in (mesh.host, mesh.scheduler) if address]
    try:
        scheduler = SchedulerStub(channels[1]) if mesh.scheduler else None
        yield Services(HostStub(channels[0]), scheduler, mesh.host_name)
    except grpc.aio.AioRpcError as exc:
        raise CommandFailed(_told(exc)) from exc
    finally:
        for channel in channels:
            await channel.close(None)


def operator_id(text: str) -> OperatorId:
    """From `namespace/name`, or `name` in the namespace default."""
    namespace, _, name = text.rpartition("/")
    if not name or "/" in namespace:
        raise CommandFailed(f"{text!r} is not NAME or NAMESPACE/NAME")
    return OperatorId(namespace=namespace or "default", name=name)


def _told(error: grpc.aio.AioRpcError) -> str:
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return "the service does not answer; it may be starting: see `torpor logs --service host`"
    return error.details() or error.code().name
