"""The demo from start to summary."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
from torpor.cache.v1 import cache_pb2
from torpor.cache.v1.cache_pb2_grpc import ResourceCacheStub
from torpor.host.v1 import host_pb2 as pb
from torpor.scheduler.v1 import scheduler_pb2 as scheduler
from torpor_services.channels import open_channel
from torpor_services.security import TlsFiles

from torpor_cli.clients import Services, services
from torpor_cli.demo.load import Load, find_examples
from torpor_cli.demo.residency import ResidencyCount, pss_bytes
from torpor_cli.demo.spans import receiving, tree
from torpor_cli.errors import CommandFailed
from torpor_cli.inspect_commands import top_view
from torpor_cli.kube import connect
from torpor_cli.mesh import CLIENT, MeshOptions, RunningMesh, Say, find_python_runtime, mesh
from torpor_cli.output import Format, print_json, seconds, size
from torpor_cli.up import start_up

MESH = "demo"
_INSTALL_TIMEOUT_S = 120.0
_SETTLE_S = 15.0


async def run_demo(operators: int, duration_s: float, output: Format) -> int:
    """Returns the exit code: 1 if any operator failed."""
    if operators < 1 or duration_s <= 0:
        raise CommandFailed("--operators and --seconds must be positive")
    quiet = output == "json"
    say = _silent if quiet else _stopwatch()
    examples = find_examples()
    runtime = await asyncio.to_thread(find_python_runtime, None)
    async with receiving() as (receiver, address):
        options = MeshOptions(
            name=MESH,
            devcluster=True,
            modules=examples,
            python_runtime=runtime,
            environment={
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}",
                "OTEL_EXPORTER_OTLP_INSECURE": "true",
                "OTEL_BSP_SCHEDULE_DELAY": "500",
            },
        )
        say("starting an in-memory cluster, cache, scheduler and host")
        async with mesh(options, say) as running:
            await start_up(running, None, say)
            async with services(MESH) as mesh_services, connect(running.kubeconfig) as kube:
                load = Load(kube, examples, operators)
                summary = await _shown(load, running, mesh_services, operators, duration_s, say, quiet)
        summary["trace"] = list(tree(receiver.fullest_trace()))
    _print(summary, output)
    return 1 if summary["failed"] else 0


async def _shown(
    load: Load,
    running: RunningMesh,
    mesh_services: Services,
    operators: int,
    duration_s: float,
    say: Say,
    quiet: bool,
) -> dict[str, Any]:
    await load.install()
    say(f"{operators} operators are declared; each is installed (its image taken) and then sleeps")
    count = ResidencyCount(mesh_services.host)
    following = asyncio.create_task(count.follow())
    try:
        await _installed(mesh_services, operators, say)
        say(f"changing objects for {duration_s:.0f} s")
        await _with_table(load.run(duration_s), mesh_services, quiet)
        await _settled(mesh_services)
        return await _summary(load, running, mesh_services, count)
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await following


async def _installed(mesh_services: Services, operators: int, say: Say) -> None:
    """Until every operator has reconciled or sleeps; says how it goes."""
    deadline_s, said = time.monotonic() + _INSTALL_TIMEOUT_S, -1
    while True:
        states = await _states(mesh_services)
        installed = [s for s in states if s.form and s.phase not in (scheduler.FAILED, scheduler.PHASE_UNSPECIFIED)]
        woken = sum(1 for state in states if state.wakes)
        if said < 0 < woken:
            say("the first operator woke")
            said = 0
        if len(installed) >= operators:
            return
        if time.monotonic() > deadline_s:
            failed = "; ".join(f"{s.operator.name}: {s.last_error}" for s in states if s.last_error)[:300]
            raise CommandFailed(
                f"only {len(installed)} of {operators} operators were installed: {failed or 'see logs'}"
            )
        await asyncio.sleep(0.2)


async def _with_table(work: Any, mesh_services: Services, quiet: bool) -> None:
    """The live table while the work goes on."""
    if quiet:
        await work
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    task = asyncio.ensure_future(work)
    try:
        with Live(console=console, auto_refresh=False, transient=console.is_terminal) as live:
            while not task.done():
                live.update(await top_view(mesh_services), refresh=console.is_terminal)
                await asyncio.wait({task}, timeout=1.0)
            live.update(await top_view(mesh_services), refresh=True)
        await task
    finally:
        task.cancel()


async def _settled(mesh_services: Services) -> None:
    """Until nothing is queued or running, at most some seconds."""
    deadline_s = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline_s:
        if not any(state.queued or state.running for state in await _states(mesh_services)):
            return
        await asyncio.sleep(0.2)


async def _summary(load: Load, running: RunningMesh, mesh_services: Services, count: ResidencyCount) -> dict[str, Any]:
    states = await _states(mesh_services)
    woken = [state for state in states if state.wakes]
    pids = [child.pid for child in running.children if child.name != "devcluster"]
    return {
        "operators": len(states),
        "changes": load.changes,
        "wakes": sum(state.wakes for state in states),
        "reconciles": sum(state.reconciles for state in states),
        "errors": sum(state.errors for state in states),
        "failed": [f"{s.operator.name}: {s.last_error}" for s in states if s.phase == scheduler.FAILED],
        "wake_p50_s": statistics.median(state.wake_p50_s for state in woken) if woken else 0.0,
        "wake_p99_s": statistics.median(state.wake_p99_s for state in woken) if woken else 0.0,
        "most_resident": count.most,
        "mesh_pss_bytes": await asyncio.to_thread(pss_bytes, pids),
        "upstream_watches": await _upstream_watches(running),
    }


async def _upstream_watches(running: RunningMesh) -> list[str]:
    async with open_channel(running.run_dir.socket("cache"), CLIENT, TlsFiles()) as channel:
        stats = await ResourceCacheStub(channel).Stats(cache_pb2.StatsRequest())
    return [
        f"{kind.resource.resource} ({kind.subscriptions} subscriptions, {kind.objects} objects)" for kind in stats.kinds
    ]


async def _states(mesh_services: Services) -> Sequence[pb.OperatorState]:
    answer = await mesh_services.host.ListOperators(pb.ListOperatorsRequest())
    return answer.operators


def _print(summary: dict[str, Any], output: Format) -> None:
    if output == "json":
        print_json(summary)
        return
    print("\nThe path of one change (from start, duration, service, span):")
    for line in summary["trace"] or ["no trace arrived"]:
        print(f"  {line}")
    print(
        f"""
{summary["operators"]} operators, {summary["changes"]} changes, {summary["wakes"]} wakes, \
{summary["reconciles"]} reconciles, {summary["errors"]} errors that were tried again
wake: {seconds(summary["wake_p50_s"])} p50, {seconds(summary["wake_p99_s"])} p99 (the median operator)
most in memory at once: {summary["most_resident"]} of {summary["operators"]}
memory of cache, scheduler and host together: {size(summary["mesh_pss_bytes"])} (PSS, telemetry on)
upstream watches: {len(summary["upstream_watches"])}: {", ".join(summary["upstream_watches"])}"""
    )
    for failure in summary["failed"]:
        print(f"failed: {failure}")


def _stopwatch() -> Say:
    started_s = time.monotonic()
    return lambda text: print(f"{time.monotonic() - started_s:6.1f} s  {text}", flush=True)


def _silent(_: str) -> None:
    """The summary alone is printed."""
