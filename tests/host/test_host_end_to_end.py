"""A whole host on a real cache and the in-memory API server: change → wake → write, and what goes wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import yaml
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torpor.host.v1 import host_pb2, host_pb2_grpc
from torpor.scheduler.v1 import scheduler_pb2
from torpor_cache.apiserver import Credentials
from torpor_cache.config import CacheConfig
from torpor_cache.service import running as running_cache
from torpor_devcluster import Config, DevCluster
from torpor_host.artifacts import ArtifactStore
from torpor_host.config import GuestConfig, HostConfig, LeaseConfig
from torpor_host.engine import GuestEngine
from torpor_host.engine_config import EngineConfig
from torpor_host.install import python_base
from torpor_host.residency import Phase
from torpor_host.service import Host, running_host
from torpor_host.testing import c_guest
from torpor_kubernetes_testing import KubeClient
from torpor_scheduler.config import SchedulerConfig
from torpor_scheduler.service import running as running_scheduler
from torpor_services import crd, telemetry

WAIT_S = 20.0
ROOT = Path(__file__).parents[2]

# Marks each ConfigMap it is woken for with an annotation; a ConfigMap named "trap…" traps, "again…" asks to come back.
MARKER = r"""
static char key_namespace[256], key_name[256];
static uint32_t get_field(const uint8_t **at, char *into, uint32_t max) {
    uint32_t len; memcpy(&len, *at, 4); *at += 4;
    uint32_t n = len < max - 1 ? len : max - 1; memcpy(into, *at, n); into[n] = 0; *at += len; return n;
}
static char call[8192]; static uint32_t call_len;
static void put(const char *text) {
    uint32_t len = strlen(text);
    memcpy(call + call_len, &len, 4); memcpy(call + call_len + 4, text, len); call_len += 4 + len;
}
static char answer[65536];
static int status_of(void) {
    uint32_t len; char digits[8] = {0};
    memcpy(&len, answer, 4); memcpy(digits, answer + 4, len < 7 ? len : 7); return atoi(digits);
}
static int ask(const char *method, const char *path, const char *type, const char *body) {
    call_len = 0; put(method); put(path); put("application/json"); put(type); put(body);
    int32_t n = kube_request(call, call_len);
    if (n < 0 || n > (int32_t)sizeof answer - 1) return -1;
    take(answer, n); answer[n] = 0;
    return status_of();
}
EXPORT(torpor_reconcile) uint64_t reconcile(const uint8_t *in, uint32_t len) {
    char path[600], line[600];
    get_field(&in, key_namespace, sizeof key_namespace);
    get_field(&in, key_name, sizeof key_name);
    if (!strncmp(key_name, "trap", 4)) __builtin_trap();
    if (!strncmp(key_name, "spin", 4)) for (volatile int i = 0;; i++) {}
    snprintf(path, sizeof path, "/api/v1/namespaces/%s/configmaps/%s", key_namespace, key_name);
    int status = ask("GET", path, "", "");
    snprintf(line, sizeof line, "reconciled %s/%s: %d", key_namespace, key_name, status);
    host_log(1, line, strlen(line));
    if (status == 404) { out_len = 0; field("done", 4); return result(); }
    if (status != 200) return tell("GET failed");
    if (!strstr(answer, "\"seen\":\"yes\"")) {
        status = ask("PATCH", path, "application/merge-patch+json", "{\"data\":{\"seen\":\"yes\"}}");
        if (status != 200) return tell("PATCH failed");
    }
    out_len = 0;
    if (!strncmp(key_name, "again", 5)) { field("requeue", 7); field("50", 2); } else field("done", 4);
    return result();
}
"""


@dataclass
class Admin:
    """The cache's credentials, without a kubeconfig and the process that reads one."""

    cluster: DevCluster

    async def load(self) -> Credentials:
        assert self.cluster.ca_file is not None
        ca_pem = await asyncio.to_thread(self.cluster.ca_file.read_text)
        return Credentials(self.cluster.url, ca_pem=ca_pem, token=self.cluster.admin_token)


@dataclass
class Mesh:
    """A cluster, a cache on it and a client of an administrator."""

    cluster: DevCluster
    kube: KubeClient
    cache: str
    folder: Path

    @asynccontextmanager
    async def running_cache(self) -> AsyncIterator[None]:
        """At the address of the one before it, if there was one."""
        config = CacheConfig(listen=self.cache or "127.0.0.1:0", state=self.folder / "cache", drain_s=0.1)
        async with running_cache(config, credentials=Admin(self.cluster)) as cache:
            self.cache = cache.address
            yield

    def environment(self, name: str) -> dict[str, str]:
        return {
            **os.environ,
            "TORPOR_HOST_NAME": name,
            "TORPOR_HOST_CACHE": self.cache,
            "TORPOR_HOST_LISTEN": "127.0.0.1:0",
            "TORPOR_HOST_STATE_DIR": str(self.folder / name),
            "TORPOR_HOST_MODULES_DIR": str(self.folder / "modules"),
        }

    def config(self, name: str = "host-0", **changes: Any) -> HostConfig:
        guests = GuestConfig(state_dir=self.folder / name, modules_dir=self.folder / "modules")
        config = HostConfig(
            name=name, cache=self.cache, listen="127.0.0.1:0", drain_s=5.0, guests=guests, lease=LeaseConfig()
        )
        return replace(config, **changes)

    @asynccontextmanager
    async def host(self, name: str = "host-0", **changes: Any) -> AsyncIterator[Host]:
        async with running_host(self.config(name, **changes)) as host:
            yield host

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        created: dict[str, Any] = await self.kube.create(_resource(obj), obj)
        return created

    async def get(self, obj: dict[str, Any]) -> dict[str, Any] | None:
        metadata = obj["metadata"]
        found: dict[str, Any] | None = await self.kube.find(
            _resource(obj), metadata["name"], namespace=metadata.get("namespace")
        )
        return found

    async def delete(self, obj: dict[str, Any]) -> None:
        metadata = obj["metadata"]
        await self.kube.delete(_resource(obj), metadata["name"], namespace=metadata.get("namespace"))

    async def patch(self, obj: dict[str, Any], change: dict[str, Any]) -> None:
        metadata = obj["metadata"]
        await self.kube.merge_patch(_resource(obj), metadata["name"], change, namespace=metadata.get("namespace"))


PLURALS = {
    "ConfigMap": "configmaps",
    "ServiceAccount": "serviceaccounts",
    "Namespace": "namespaces",
    "WasmOperator": "wasmoperators",
    "Secret": "secrets",
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "CustomResourceDefinition": "customresourcedefinitions",
}


def _resource(obj: dict[str, Any]) -> str:
    return f"{obj['apiVersion']}/{PLURALS[obj['kind']]}"


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "default", "labels": {"watched": "yes"}},
        "data": data,
    }


def operator(name: str = "marker", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": crd.API_VERSION,
        "kind": crd.KIND,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "module": {"file": "marker.wasm"},
            "serviceAccountName": "marker",
            "for": {"resource": "v1/configmaps", "labelSelector": "watched=yes"},
            "unload": {"policy": "idle", "idleAfter": "50ms"},
            **spec,
        },
    }


def _role(name: str, rules: list[dict[str, Any]], namespace: str, account: str) -> list[dict[str, Any]]:
    group = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        },
    ]


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "marker.wasm").write_bytes(c_guest(MARKER))
    (modules / "broken.wasm").write_bytes(b"\0asm\x01\0\0\0 nonsense")
    async with DevCluster(Config(bookmark_interval_s=1.0)) as cluster:
        async with KubeClient(cluster.url, token=cluster.admin_token, ca_file=cluster.ca_file) as kube:
            mesh = Mesh(cluster, kube, "", tmp_path)
            account = {"apiVersion": "v1", "kind": "ServiceAccount"}
            everything = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
            markers = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["*"]}]
            for obj in [
                crd.definition(),
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "torpor-system"}},
                {**account, "metadata": {"name": "torpor-host", "namespace": "torpor-system"}},
                {**account, "metadata": {"name": "marker", "namespace": "default"}},
                *_role("torpor-host", everything, "torpor-system", "torpor-host"),
                *_role("marker", markers, "default", "marker"),
                {**account, "metadata": {"name": "torpor-scheduler", "namespace": "torpor-system"}},
                *_role("torpor-scheduler", everything, "torpor-system", "torpor-scheduler"),
            ]:
                await mesh.create(obj)
            async with mesh.running_cache():
                yield mesh


async def eventually(check: Callable[[], Awaitable[Any]], what: str, *, timeout_s: float = WAIT_S) -> Any:
    """Polls the API server from outside, as a user would; fails after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        found = await check()
        if found:
            return found
        assert asyncio.get_running_loop().time() < deadline, f"not in {timeout_s} s: {what}"
        await asyncio.sleep(0.005)


async def seen(mesh: Mesh, obj: dict[str, Any]) -> None:
    async def marked() -> bool:
        now = await mesh.get(obj)
        return now is not None and now.get("data", {}).get("seen") == "yes"

    await eventually(marked, f"{obj['metadata']['name']} is marked")


async def condition(
    mesh: Mesh, obj: dict[str, Any], name: str, status: str, *, timeout_s: float = WAIT_S
) -> dict[str, Any]:
    async def found() -> dict[str, Any] | None:
        now = await mesh.get(obj) or {}
        for each in now.get("status", {}).get("conditions", []):
            if (each["type"], each["status"]) == (name, status):
                result: dict[str, Any] = each
                return result
        return None

    result: dict[str, Any] = await eventually(
        found, f"{obj['metadata']['name']} has {name}={status}", timeout_s=timeout_s
    )
    return result


async def asleep(host: Host, name: str = "marker") -> None:
    async def cold() -> bool:
        found = next((o for o in host.operators.all() if o.id[1] == name), None)
        return found is not None and found.spec is not None and found.residency.phase is Phase.COLD and found.queue.idle

    await eventually(cold, f"{name} sleeps")


async def test_a_change_wakes_a_sleeping_operator_which_writes_and_sleeps_again(mesh: Mesh) -> None:
    first, second = config_map("first"), config_map("second")
    await mesh.create(first)
    await mesh.create(operator())
    async with mesh.host() as host:
        await seen(mesh, first)
        await asleep(host)
        wakes = host.operators.all()[0].wakes
        await mesh.create(second)
        await seen(mesh, second)
        await asleep(host)
        assert host.operators.all()[0].wakes > wakes
        await condition(mesh, operator(), "Ready", "True")
        status = (await mesh.get(operator()) or {})["status"]
        assert (status["host"], status["epoch"]) == ("host-0", 1)
        assert status["module"]["image"] == "image"
        lines = [line.text for line in host.logs.tail(None)]
        assert "reconciled default/second: 200" in lines


async def test_what_changes_while_no_host_runs_is_reconciled_after_the_next_start_at_a_new_epoch(mesh: Mesh) -> None:
    early, late = config_map("early"), config_map("late")
    await mesh.create(early)
    await mesh.create(operator())
    async with mesh.host():
        await seen(mesh, early)
    await mesh.create(late)
    async with mesh.host() as host:
        await seen(mesh, late)
        assert host.operators.all()[0].epoch == 2


async def test_a_deleted_object_is_reconciled_once_more_by_a_sleeping_operator(mesh: Mesh) -> None:
    gone = config_map("gone")
    await mesh.create(gone)
    await mesh.create(operator())
    async with mesh.host() as host:
        await seen(mesh, gone)
        await asleep(host)
        await mesh.delete(gone)

        async def told() -> bool:
            return "reconciled default/gone: 404" in [line.text for line in host.logs.tail(None)]

        await eventually(told, "the deletion is reconciled")
        assert len(host.operators.all()[0].known) == 0


async def test_a_bad_operator_says_what_is_wrong_and_disturbs_no_other(mesh: Mesh) -> None:
    bad = {
        "broken": (operator("broken", module={"file": "broken.wasm"}), "Installed", "ModuleRefused"),
        "missing": (operator("missing", module={"file": "missing.wasm"}), "Installed", "ModuleUnavailable"),
        "outside": (operator("outside", module={"file": "../kubeconfig"}), "Installed", "ModuleUnavailable"),
        "coded": (
            operator("coded", watches=[{"resource": "v1/secrets", "mapping": {"code": True}}]),
            "Installed",
            "ModuleRefused",
        ),
        "nobody": (operator("nobody", serviceAccountName="nobody"), "Installed", "InstallFailed"),
        "forbidden": (operator("forbidden", owns=[{"resource": "v1/secrets"}]), "Watching", "Forbidden"),
    }
    for obj, _, _ in bad.values():
        await mesh.create(obj)
    await mesh.create(operator())
    fine = config_map("fine")
    async with mesh.host():
        await mesh.create(fine)
        await seen(mesh, fine)
        for obj, name, reason in bad.values():
            found = await condition(mesh, obj, name, "False")
            assert reason in found["reason"], found
            assert found["message"]
            await condition(mesh, obj, "Ready", "False")


async def test_a_key_that_traps_or_spins_costs_its_instance_and_delays_nobody(mesh: Mesh) -> None:
    await mesh.create(operator(limits={"cpu": "100ms", "deadline": "1s"}))
    await mesh.create(config_map("trap-1"))
    await mesh.create(config_map("spin-1"))
    async with mesh.host() as host:
        others = [config_map(f"fine-{i}") for i in range(5)]
        for other in others:
            await mesh.create(other)
        for other in others:
            await seen(mesh, other)

        async def counted() -> bool:
            found = await mesh.get(operator()) or {}
            return bool(found.get("status", {}).get("lastError"))

        await eventually(counted, "the error is in the status")
        assert host.operators.all()[0].errors >= 1


async def test_a_requeue_wakes_the_operator_again_and_again(mesh: Mesh) -> None:
    again = config_map("again-1")
    await mesh.create(again)
    await mesh.create(operator(unload={"policy": "idle", "idleAfter": "1ms"}))
    async with mesh.host() as host:
        await seen(mesh, again)

        async def often() -> bool:
            return host.operators.all()[0].reconciles >= 5

        await eventually(often, "the timer has come five times")


async def test_a_changed_spec_is_installed_without_a_restart_and_a_deleted_operator_is_forgotten(mesh: Mesh) -> None:
    quiet = {**config_map("quiet"), "metadata": {"name": "quiet", "namespace": "default", "labels": {"other": "yes"}}}
    await mesh.create(quiet)
    await mesh.create(operator())
    async with mesh.host() as host:
        await condition(mesh, operator(), "Ready", "True")
        await mesh.patch(operator(), {"spec": {"for": {"labelSelector": "other=yes"}}})
        await seen(mesh, quiet)
        await mesh.delete(operator())

        async def forgotten() -> bool:
            return not host.operators.all() and not host.operators.moving and host.subscriber.subscriptions == 2

        await eventually(forgotten, "nothing of it is left")


async def test_a_spec_that_cannot_be_installed_leaves_the_running_one_running(mesh: Mesh) -> None:
    await mesh.create(operator())
    async with mesh.host():
        await condition(mesh, operator(), "Ready", "True")
        await mesh.patch(operator(), {"spec": {"module": {"file": "broken.wasm"}}})
        await condition(mesh, operator(), "Installed", "False")
        later = config_map("later")
        await mesh.create(later)
        await seen(mesh, later)


async def test_a_second_host_takes_over_when_the_first_releases_its_lease(mesh: Mesh) -> None:
    await mesh.create(operator())
    first, second = config_map("one"), config_map("two")
    async with mesh.host("host-b") as b:
        async with mesh.host("host-a") as a:
            await mesh.create(first)
            await seen(mesh, first)
            assert len(a.operators) + len(b.operators) == 1
            if b.operators.all():
                return  # the order of the names decides which one; the other way round is the same
        await mesh.create(second)
        await seen(mesh, second)
        assert b.operators.all()[0].epoch == 2


async def test_without_its_lease_a_host_stops_and_claims_anew_when_it_is_regained(mesh: Mesh) -> None:
    await mesh.create(operator())
    before, after = config_map("before"), config_map("after")
    async with mesh.host(lease=LeaseConfig(duration_s=2, renew_s=0.2, margin_s=0.5)) as host:
        await mesh.create(before)
        await seen(mesh, before)
        await mesh.kube.merge_patch(
            "coordination.k8s.io/v1/leases",
            "torpor-host-host-0",
            {"spec": {"holderIdentity": ""}},
            namespace="torpor-system",
        )
        await mesh.create(after)
        await seen(mesh, after)

        async def claimed() -> bool:
            return any(o.epoch >= 2 for o in host.operators.all())

        await eventually(claimed, "it is claimed at a new epoch")


@pytest.fixture(scope="module")
def python_runtime() -> Path:
    """CPython as a core module, built now if it is not there yet."""
    build = ROOT / "sdk" / "python" / "runtime" / "build.py"
    done = subprocess.run([sys.executable, build], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def python_artifacts(python_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the interpreter is compiled, which takes seconds, and a minute on a loaded machine."""
    root = tmp_path_factory.mktemp("python") / "artifacts"
    engine = GuestEngine(EngineConfig(python_runtime=python_runtime), ArtifactStore(root))
    try:
        python_base(engine)
    finally:
        engine.close()
    return root


@pytest.fixture
def python_guests(mesh: Mesh, python_runtime: Path, python_artifacts: Path) -> GuestConfig:
    state = mesh.folder / "host-0"
    state.mkdir(mode=0o700)
    shutil.copytree(python_artifacts, state / "artifacts")
    return GuestConfig(state_dir=state, modules_dir=mesh.folder / "modules", python_runtime=python_runtime, workers=4)


POINTED = """
from torpor_sdk import Operator, Watch, log

op = Operator(for_=Watch("v1/configmaps", labels={"watched": "yes"}))

@op.map("v1/configmaps", labels={"pointer": "yes"})
def pointed(event, kube):
    log.info("mapped %s %s", event.type, event.object.name)
    if event.object["data"]["to"] == "nowhere":
        raise RuntimeError("this cannot be mapped")
    return [(each.namespace, each["data"]["to"]) for each in (event.object, event.old) if each]

@op.reconcile
def reconcile(request, kube):
    log.info("reconciled %s %s", request.name, request.cause)
"""


@pytest.mark.timeout(1200)  # the runtime may have to be built
async def test_a_mapping_in_code_wakes_a_sleeping_operator_for_old_and_new_keys(
    mesh: Mesh, python_guests: GuestConfig
) -> None:
    (mesh.folder / "modules" / "pointed.py").write_text(POINTED)
    pointer = config_map("pointer", to="one")
    pointer["metadata"]["labels"] = {"pointer": "yes"}
    pointed = operator("pointed", module={"file": "pointed.py"})
    del pointed["spec"]["for"]
    for obj in (pointed, config_map("one"), config_map("two")):
        await mesh.create(obj)
    async with mesh.host(guests=python_guests) as host:

        async def lines(*wanted: str) -> None:
            """What the guest has logged since the last time, once all of it is there and it sleeps."""

            async def told() -> bool:
                return set(wanted) <= {line.text for line in host.logs.tail(None)}

            await eventually(told, ", ".join(wanted))
            await asleep(host, "pointed")
            host.logs.forget(host.operators.all()[0].id)

        await condition(mesh, pointed, "Ready", "True", timeout_s=120.0)
        await lines("reconciled one start", "reconciled two start")
        await mesh.create(pointer)
        await lines("mapped ADDED pointer", "reconciled one watch")
        await mesh.patch(pointer, {"data": {"to": "two"}})
        await lines("mapped MODIFIED pointer", "reconciled one watch", "reconciled two watch")
        await mesh.delete(pointer)
        await lines("mapped DELETED pointer", "reconciled two watch")
        assert not any("reconciled one" in line.text for line in host.logs.tail(None))
        await mesh.create({**pointer, "data": {"to": "nowhere"}})
        await lines("mapped ADDED pointer", "reconciled one resync", "reconciled two resync")

        async def said() -> bool:
            found = await mesh.get(pointed) or {}
            return "this cannot be mapped" in found.get("status", {}).get("lastError", "")

        await eventually(said, "the error is in the status")
        assert host.operators.all()[0].mapping is not None
        assert host.operators.used_bytes == 0 and host.operators.mappings.memory.held_bytes == 0


@pytest.mark.timeout(1200)
async def test_the_replicator_serves_a_namespace_that_comes_later(mesh: Mesh, python_guests: GuestConfig) -> None:
    example = ROOT / "examples" / "replicator"
    shutil.copytree(example, mesh.folder / "modules" / "replicator")
    await mesh.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "replicator"}})
    for file in ("wasmoperator.yaml", "sample.yaml"):
        for obj in yaml.safe_load_all((example / file).read_text()):
            await mesh.create(obj)

    async def copied(kind: str, name: str, namespace: str) -> None:
        copy = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": namespace}}
        await eventually(lambda: mesh.get(copy), f"{name} is in {namespace}")

    async with mesh.host(guests=python_guests) as host:
        replicator = operator("replicator")
        replicator["metadata"]["namespace"] = "replicator"
        await condition(mesh, replicator, "Ready", "True", timeout_s=120.0)
        await copied("Secret", "registry", "team-red")
        await copied("Secret", "registry", "team-blue")
        await copied("ConfigMap", "proxy", "team-red")
        await asleep(host, "replicator")
        green = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-green"}}
        await mesh.create(green)
        await copied("Secret", "registry", "team-green")
        await asleep(host, "replicator")
        await mesh.patch(green, {"metadata": {"labels": {"stage": "production"}}})
        await copied("ConfigMap", "proxy", "team-green")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def own_tasks() -> int:
    return sum("torpor_host" in str(getattr(task.get_coro(), "cr_code", "")) for task in asyncio.all_tasks())


async def test_two_hundred_wakes_leave_threads_files_and_tasks_where_they_were(mesh: Mesh) -> None:
    target = config_map("target")
    await mesh.create(target)
    await mesh.create(operator(unload={"policy": "idle", "idleAfter": "1ms"}))
    async with mesh.host() as host:
        await seen(mesh, target)
        await asleep(host)
        marker = host.operators.all()[0]

        async def cycle() -> None:
            wakes = marker.wakes
            host.operators.wake(marker, None)

            async def slept() -> bool:
                return marker.wakes > wakes and marker.residency.phase is Phase.COLD

            await eventually(slept, "it wakes and sleeps")

        for _ in range(20):
            await cycle()
        files = open_files()
        tasks, timers = own_tasks(), len(host.timers)
        for _ in range(200):
            await cycle()
        assert open_files() <= files + 2
        assert own_tasks() <= tasks + 1
        assert len(host.timers) <= timers + 4
        assert host.workers.threads <= 2


async def test_people_can_list_describe_load_unload_wake_watch_and_read_logs(mesh: Mesh) -> None:
    target = config_map("target")
    await mesh.create(target)
    await mesh.create(operator())
    async with mesh.host() as host, grpc.aio.insecure_channel(host.address) as channel:
        stub: Any = host_pb2_grpc.HostStub(channel)
        await seen(mesh, target)
        await asleep(host)
        who = scheduler_pb2.OperatorId(namespace="default", name="marker")
        listed = await stub.ListOperators(host_pb2.ListOperatorsRequest())
        assert [o.operator.name for o in listed.operators] == ["marker"] and listed.host == "host-0"
        state = listed.operators[0]
        assert state.wakes >= 1 and state.form == "core" and 0 < state.wake_p50_s <= state.wake_p99_s
        described = await stub.DescribeOperator(host_pb2.DescribeOperatorRequest(operator=who))
        assert described.image_state == "image" and {c.type for c in described.conditions} == {
            "Degraded",
            "Installed",
            "Ready",
            "Watching",
        }
        watch = stub.WatchStates(host_pb2.WatchStatesRequest())
        first = await watch.read()
        assert first.initial and first.state.phase == scheduler_pb2.COLD
        await stub.Load(host_pb2.LoadRequest(operator=who))
        phases = {first.state.phase}
        async with asyncio.timeout(WAIT_S):
            while scheduler_pb2.RESIDENT not in phases:
                phases.add((await watch.read()).state.phase)
        await stub.Unload(host_pb2.UnloadRequest(operator=who))
        assert (await stub.Wake(host_pb2.WakeRequest(operator=who))).keys == 1
        logs = stub.Logs(host_pb2.LogsRequest(operator=who, tail=1, follow=True))
        assert "reconciled default/target" in (await logs.read()).text
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Load(host_pb2.LoadRequest(operator=scheduler_pb2.OperatorId(namespace="default", name="no")))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_one_change_is_one_trace(mesh: Mesh) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.use_provider(provider)
    try:
        await mesh.create(operator())
        async with mesh.host() as host:
            await condition(mesh, operator(), "Ready", "True")
            await asleep(host)
            await mesh.create(config_map("traced"))
            await seen(mesh, config_map("traced"))
            await asleep(host)
    finally:
        telemetry.use_provider(None)
    spans = exporter.get_finished_spans()
    patch = next(s for s in spans if s.name == "kube PATCH")
    names = {s.name for s in spans if s.context.trace_id == patch.context.trace_id}
    assert {"queue wait", "wake", "reconcile", "kube GET", "kube PATCH"} <= names
    reconcile = next(s for s in spans if patch.parent and s.context.span_id == patch.parent.span_id)
    assert reconcile.name == "reconcile" and reconcile.parent is not None, "a child of the change"


async def test_the_scheduler_assigns_and_the_host_runs(mesh: Mesh) -> None:
    target = config_map("target")
    async with running_scheduler(SchedulerConfig(cache=mesh.cache), handle_signals=False) as scheduler:
        async with mesh.host(scheduler=scheduler.address) as host:
            await mesh.create(operator(unload={"policy": "predictive"}))
            await mesh.create(target)
            await seen(mesh, target)
            assert host.link.connected and host.operators.all()[0].epoch == 1


async def test_a_process_drains_on_sigterm_and_leaves_its_lease_free(mesh: Mesh) -> None:
    target = config_map("target")
    await mesh.create(target)
    await mesh.create(operator())
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "torpor_host", env=mesh.environment("process"), stderr=asyncio.subprocess.PIPE
    )
    try:
        await seen(mesh, target)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lease = await mesh.kube.get("coordination.k8s.io/v1/leases", "torpor-host-process", namespace="torpor-system")
    assert lease["spec"]["holderIdentity"] == ""


async def test_a_wrong_setting_ends_the_start_with_its_name() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "torpor_host",
        env={**os.environ, "TORPOR_HOST_WORKERS": "many"},
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WAIT_S):
        _, text = await process.communicate()
    assert process.returncode == 2 and b"TORPOR_HOST_WORKERS" in text


async def test_after_a_kill_nothing_is_missing_and_the_next_life_has_a_new_epoch(mesh: Mesh) -> None:
    before, doomed = config_map("before"), config_map("doomed")
    for obj in (before, doomed, operator()):
        await mesh.create(obj)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "torpor_host", env=mesh.environment("host-0"), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await seen(mesh, doomed)
    finally:
        process.kill()
        await process.wait()
    during = config_map("during")
    await mesh.create(during)
    await mesh.delete(doomed)
    async with mesh.host() as host:
        await seen(mesh, during)

        async def told() -> bool:
            lines = [line.text for line in host.logs.tail(None)]
            return "reconciled default/doomed: 404" in lines and "reconciled default/before: 200" in lines

        await eventually(told, "what was deleted meanwhile is reconciled too")
        assert host.operators.all()[0].epoch == 2


async def test_a_cache_that_restarts_loses_no_change_and_no_deletion(mesh: Mesh, tmp_path: Path) -> None:
    kept, doomed = config_map("kept"), config_map("doomed")
    for obj in (kept, doomed, operator()):
        await mesh.create(obj)
    mesh.cache = ""
    async with AsyncExitStack() as stack:
        async with mesh.running_cache():
            host = await stack.enter_async_context(mesh.host())
            await seen(mesh, kept)
            await seen(mesh, doomed)
            await asleep(host)
        during = config_map("during")
        await mesh.create(during)
        await mesh.delete(doomed)
        async with mesh.running_cache():
            await seen(mesh, during)

            async def told() -> bool:
                return "reconciled default/doomed: 404" in [line.text for line in host.logs.tail(None)]

            await eventually(told, "the deletion during the outage is reconciled")
            assert host.operators.all()[0].epoch == 1, "the operator was this host's all the time"
            await stack.aclose()
