"""The spans of one change form one trace, from the watch event to the write that it caused."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from torpor_cli.demo.spans import Span, SpanReceiver, receiving
from torpor_guests_testing import mirror
from torpor_kubernetes_testing import ControlPlane, KubeClient, create_service_account
from torpor_mesh_testing import WASM_OPERATORS, Mesh, MeshOptions, mirror_rules, operator_object
from torpor_mesh_testing.fleet import until_ready

SOON = {"policy": "idle", "idleAfter": "50ms"}
# Who tells of what. The first is the root; each other one is below the one it names.
PATH = {
    "watch event": ("cache", None),
    "cache.fan_out": ("cache", "watch event"),
    "queue wait": ("host", "cache.fan_out"),
    "wake": ("host", "cache.fan_out"),
    "reconcile": ("host", "cache.fan_out"),
    "kube GET": ("host", "reconcile"),
    "cache.read": ("cache", "kube GET"),
    "kube PATCH": ("host", "reconcile"),
    "cache.write": ("cache", "kube PATCH"),
}


async def test_spans_of_one_change_form_one_trace(
    torpor_installed: ControlPlane,
    kube: KubeClient,
    namespace: str,
    host_state: Path,
    run_mesh: Callable[[Mesh], AbstractAsyncContextManager[Mesh]],
) -> None:
    async with receiving() as (receiver, address):
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "100",  # the default of 5 s is for production
        }
        options = MeshOptions(environment=environment, host_state=host_state)
        async with run_mesh(Mesh(torpor_installed, options)) as mesh:
            await mesh.ready()
            await create_service_account(kube, namespace, "copy", mirror_rules())
            file = mirror("zig", "first").place(mesh.modules)
            await kube.create(WASM_OPERATORS, operator_object("copy", namespace, file, unload=SOON))
            await until_ready(kube, namespace, ["copy"])
            await mesh.until_asleep()
            for name in ("a", "b"):  # the second shows that each change has a trace of its own
                await kube.create("example.com/v1/widgets", widget(namespace, name))
                await kube.until("v1/configmaps", f"{name}-copy", lambda found: found is not None, namespace=namespace)
                await mesh.until_asleep()
            trace = await trace_of(receiver, "a")

    by_name = {span.name: span for span in trace}
    assert set(by_name) == set(PATH) and len(trace) == len(PATH), sorted(span.name for span in trace)
    for name, (service, parent) in PATH.items():
        assert by_name[name].service == service, name
        assert by_name[name].parent_id == (by_name[parent].span_id if parent else b""), f"{name} belongs below {parent}"
        assert not by_name[name].failed, name
    in_order = ["watch event", "queue wait", "wake", "reconcile", "kube GET", "kube PATCH", "cache.write"]
    starts = [by_name[name].start_ns for name in in_order]
    assert starts == sorted(starts), dict(zip(in_order, starts, strict=True))
    assert by_name["kube PATCH"].end_ns <= by_name["reconcile"].end_ns
    assert by_name["watch event"].attributes["k8s.object.name"] == "a"


async def trace_of(receiver: SpanReceiver, name: str) -> list[Span]:
    """All spans of the trace that begins with the creation of this object, once its last ones have come."""

    def trace(spans: list[Span]) -> list[Span]:
        roots = {
            span.trace_id
            for span in spans
            if span.name == "watch event"
            and span.attributes.get("k8s.object.name") == name
            and span.attributes.get("k8s.resource") == "example.com/v1/widgets"
        }
        return [span for span in spans if span.trace_id in roots]

    spans = await receiver.until(lambda spans: {span.name for span in trace(list(spans))} >= set(PATH))
    return trace(list(spans))


def widget(namespace: str, name: str) -> dict[str, object]:
    return {
        "apiVersion": "example.com/v1",
        "kind": "Widget",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"value": "one"},
    }
