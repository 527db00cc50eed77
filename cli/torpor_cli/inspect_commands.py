"""Commands that look at a running mesh: ls, describe, top, logs, explain."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import grpc
from torpor.host.v1 import host_pb2 as pb
from torpor.scheduler.v1 import scheduler_pb2 as scheduler

from torpor_cli.clients import Services, operator_id, services
from torpor_cli.errors import CommandFailed
from torpor_cli.output import Format, print_json, print_table, seconds, size, table, terminal_width
from torpor_cli.service_logs import service_log
from torpor_cli.views import as_json, fitting, operator_name


async def ls(mesh: str, output: Format) -> None:
    """Every operator of the mesh's host, one a line."""
    async with services(mesh) as mesh_services:
        answer = await mesh_services.host.ListOperators(pb.ListOperatorsRequest())
    states = sorted(answer.operators, key=lambda state: operator_name(state.operator))
    if output == "json":
        print_json([as_json(state) for state in states])
        return
    columns, rows = fitting(states, terminal_width())
    print_table(columns, rows, "no operators yet; `torpor run FOLDER` starts some")


async def describe(operator: str, mesh: str, output: Format) -> None:
    """All that is known of one operator."""
    async with services(mesh) as mesh_services:
        request = pb.DescribeOperatorRequest(operator=operator_id(operator))
        answer = await mesh_services.host.DescribeOperator(request)
    details = {
        **as_json(answer.state),
        "module_sha256": answer.module_sha256,
        "image": answer.image_state,
        "image_bytes": answer.image_bytes,
        "manifest": answer.manifest,
        "conditions": [
            {"type": c.type, "status": c.status, "reason": c.reason, "message": c.message} for c in answer.conditions
        ],
    }
    if output == "json":
        print_json(details)
        return
    rows = [(_label(key), _shown(key, value)) for key, value in details.items() if key != "conditions"]
    print_table(("FIELD", "VALUE"), rows, "")
    conditions = [(c.type, c.status, c.reason, c.message) for c in answer.conditions]
    print_table(("CONDITION", "STATUS", "REASON", "MESSAGE"), conditions, "no conditions")


async def top(mesh: str, *, count: int | None) -> None:
    """A live table until Ctrl-C, or `count` refreshes, one a second."""
    from rich.live import Live

    if count is not None and count < 1:
        raise CommandFailed(f"--count {count}: it refreshes at least once; leave it out to go on until Ctrl-C")
    async with services(mesh) as mesh_services:
        with Live(auto_refresh=False) as live:
            while count is None or count > 0:
                live.update(await top_view(mesh_services), refresh=True)
                count = None if count is None else count - 1
                await asyncio.sleep(1.0)


async def top_view(mesh_services: Services) -> Any:
    """What `top` shows: a line for the host, then the busiest operators that fit the terminal."""
    from rich.console import Console, Group

    answer = await mesh_services.host.ListOperators(pb.ListOperatorsRequest())
    states = sorted(answer.operators, key=lambda s: (-s.last_event_unix_ns, operator_name(s.operator)))
    awake = sum(1 for state in states if state.private_bytes)
    wakes = sum(state.wakes for state in states)
    head = (
        f"host {answer.host}: {len(states)} operators, {awake} in memory "
        f"({size(answer.memory_used_bytes)} of {size(answer.memory_budget_bytes)}), {wakes} wakes"
    )
    lines = max(5, Console().size.height - 6)
    shown = table(*fitting(states[:lines], terminal_width()))
    hidden = len(states) - lines
    return Group(head, shown, f"… and {hidden} more" if hidden > 0 else "")


async def logs(
    operator: str | None, mesh: str, *, follow: bool, tail: int, service: str | None, output: Format
) -> None:
    """An operator's log, all operators' logs, or the end of a service's own."""
    if tail < 0:
        raise CommandFailed(f"--tail {tail}: lines cannot be fewer than 0, which stands for all")
    if service is not None:
        if operator is not None:
            raise CommandFailed(f"--service {service} and the operator {operator} exclude each other")
        await service_log(mesh, service, follow=follow, tail=tail, output=output)
        return
    request = pb.LogsRequest(follow=follow, tail=tail)
    if operator is not None:
        request.operator.CopyFrom(operator_id(operator))
    async with services(mesh) as mesh_services:
        async for line in mesh_services.host.Logs(request):
            _print_line(line, output)


async def explain(operator: str, mesh: str, output: Format) -> None:
    """Why an operator is in memory or not, and when that changes."""
    async with services(mesh) as mesh_services:
        if mesh_services.scheduler is None:
            raise CommandFailed(
                "no scheduler runs; the host keeps to its break-even rule (start without --no-scheduler)"
            )
        request = scheduler.ExplainRequest(operator=operator_id(operator))
        try:
            answer = await mesh_services.scheduler.Explain(request)
        except grpc.aio.AioRpcError as exc:
            raise CommandFailed(f"the scheduler says: {exc.details()}") from exc
    figures = [(figure.name, _figure(figure)) for figure in answer.figures]
    if output == "json":
        print_json(
            {
                "sentence": answer.sentence,
                "policy": answer.policy,
                "host": answer.host,
                "epoch": answer.epoch,
                "figures": {figure.name: {"value": figure.value, "unit": figure.unit} for figure in answer.figures},
                "windows": [[window.from_unix_ns, window.to_unix_ns or None] for window in answer.windows],
                "alternatives": {a.name: a.expected_cost for a in answer.alternatives},
            }
        )
        return
    print(answer.sentence)
    print_table(("FIGURE", "VALUE"), figures, "")


def _figure(figure: scheduler.Figure) -> str:
    if figure.unit == "s":
        return seconds(figure.value)
    if figure.unit == "bytes":
        return size(int(figure.value))
    return f"{figure.value:.3g} {figure.unit}".strip()


def _label(key: str) -> str:
    """A field's name without its unit, which stands with the value."""
    return key.removesuffix("_unix_ns").removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def _shown(key: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    if key.endswith("_bytes"):
        return size(value)
    if key.endswith("_s"):
        return seconds(value)
    if key.endswith("_unix_ns"):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value / 1e9))
    return str(value)


def _print_line(line: pb.LogLine, output: Format) -> None:
    if output == "json":
        print_json({"operator": operator_name(line.operator), "unix_ns": line.unix_ns, "level": line.level,
                    "text": line.text, "trace_id": line.trace_id})  # fmt: skip
        sys.stdout.flush()
        return
    stamp = time.strftime("%H:%M:%S", time.localtime(line.unix_ns / 1e9))
    print(f"{stamp} {line.level:7} {operator_name(line.operator)}: {line.text}", flush=True)
