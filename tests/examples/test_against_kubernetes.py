"""The examples on the real API server, each as its own ServiceAccount with the rights of its manifest and no others."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import pytest
from torpor_kubernetes_testing.access import until_allowed
from torpor_kubernetes_testing.client import KubeClient
from torpor_kubernetes_testing.control_plane import ControlPlane
from torpor_kubernetes_testing.definitions import install_crd, remove_crd
from torpor_kubernetes_testing.namespaces import remove_namespace
from torpor_sdk import Conflict, Forbidden, Operator, Request, Requeue, Resource, _host, clock, settings
from torpor_sdk.kinds import Kind, built_in
from torpor_sdk.kube import Kube
from torpor_sdk.testing._run import FakeHost

NUMBER = 91  # of the instance: its namespaces are database-91, …


class Live:
    """One instance of an example, with a client that is its ServiceAccount's. Runs in a thread, as guests do."""

    def __init__(self, op: Operator, client: KubeClient, namespace: str, config: dict[str, Any]) -> None:
        self.namespace = namespace
        self._op = op
        self._client = client
        self._config = config
        self._loop = asyncio.get_running_loop()

    def send(
        self, method: str, path: str, *, accept: str, content_type: str, body: bytes, timeout_s: float | None
    ) -> _host.Answer:
        asked = self._client.raw(method, path, body=body or None, content_type=content_type)
        status, answer = asyncio.run_coroutine_threadsafe(asked, self._loop).result(timeout=30)
        return _host.Answer(status, "application/json", answer)

    async def call(self, function: Callable[[Kube], Any], *, now: datetime | None = None) -> Any:
        def run() -> Any:
            settings.forget()
            with _host.replaced(FakeHost(self._config, {}, None)), clock.frozen(now or datetime.now(UTC)):
                return function(self._op.kube(self.send))

        return await asyncio.to_thread(run)

    async def reconcile(self, name: str, *, now: datetime | None = None) -> Requeue | None:
        request = Request(self.namespace, name)
        result: Requeue | None = await self.call(lambda kube: self._op.run(request, kube), now=now)
        return result


Start = Callable[[str], Any]


@pytest.fixture
async def start(
    control_plane: ControlPlane, kube: KubeClient, example: Callable[[str], ModuleType]
) -> AsyncIterator[Start]:
    """Sets an example's instance up with its samples, and gives it as `Live`."""
    fleet = example("fleet")
    clients: list[KubeClient] = []
    namespaces: set[str] = set()
    cluster_wide: list[tuple[str, str]] = []
    installed: list[str] = []

    async def start_one(name: str) -> Live:
        namespace = fleet.namespace_of(name, NUMBER)
        for crd in fleet.fleet(0) if name == "database" else ():
            installed.append(crd["metadata"]["name"])
            await install_crd(kube, crd)
        samples = fleet.samples(name, NUMBER)
        for wanted in {namespace, *(obj["metadata"]["name"] for obj in samples if obj["kind"] == "Namespace")}:
            namespaces.add(wanted)
            await kube.create("v1/namespaces", {"metadata": {"name": wanted}})
        operator, *access = fleet.instance(name, NUMBER)
        for obj in access + samples:
            kind = resource_of(obj)
            if not obj["metadata"].get("namespace") and obj["kind"] != "Namespace":
                cluster_wide.append((str(kind), obj["metadata"]["name"]))
            await kube.apply(str(kind), obj)
        account = operator["spec"]["serviceAccountName"]
        client = control_plane.client(await control_plane.service_account_token(namespace, account))
        clients.append(await client.__aenter__())
        for watch in [operator["spec"]["for"], *operator["spec"].get("owns", [])]:
            kind = Kind.parse(watch["resource"])
            where = watch.get("namespace")
            await until_allowed(client, "watch", kind.resource, group=kind.group, namespace=where)
        op = example(f"{name}/operator").op
        return Live(op, client, namespace, operator["spec"].get("config", {}))

    yield start_one
    for client in clients:
        await client.__aexit__(None, None, None)
    for resource, name in cluster_wide:
        await kube.delete(resource, name)
    for namespace in namespaces:
        await remove_namespace(kube, namespace)
    for crd in installed:
        await remove_crd(kube, crd)


def resource_of(obj: dict[str, Any]) -> Kind:
    served = built_in().get((obj["apiVersion"], obj["kind"]))
    return served.kind if served else Kind.parse(f"{obj['apiVersion']}/{obj['kind'].lower()}s")


async def test_a_database_lives_and_goes(start: Start, kube: KubeClient) -> None:
    live = await start("database")
    databases = "example.com/v1/databases"
    assert await live.reconcile("orders") is None
    orders = await kube.get(databases, "orders", namespace=live.namespace)
    assert orders["metadata"]["finalizers"] == ["example.com/database-volumes"]
    assert orders["status"]["phase"] == "Starting"
    assert orders["status"]["conditions"][0]["observedGeneration"] == orders["metadata"]["generation"]
    servers = await kube.get("apps/v1/statefulsets", "orders", namespace=live.namespace)
    (owner,) = servers["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("Database", orders["metadata"]["uid"], True)
    secret = await kube.get("v1/secrets", "orders-credentials", namespace=live.namespace)

    # Once more changes nothing, down to the version.
    await live.reconcile("orders")
    for resource, before in ((databases, orders), ("apps/v1/statefulsets", servers), ("v1/secrets", secret)):
        after = await kube.get(resource, before["metadata"]["name"], namespace=live.namespace)
        assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"], resource

    await kube.merge_patch(
        "apps/v1/statefulsets",
        "orders",
        {"status": {"replicas": 2, "readyReplicas": 2}},
        namespace=live.namespace,
        subresource="status",
    )
    await live.reconcile("orders")
    orders = await kube.get(databases, "orders", namespace=live.namespace)
    assert (orders["status"]["phase"], orders["status"]["readyReplicas"]) == ("Ready", 2)

    labels = servers["spec"]["selector"]["matchLabels"]
    claim = servers["spec"]["volumeClaimTemplates"][0]["spec"]
    claim = {"metadata": {"name": "data-orders-0", "namespace": live.namespace, "labels": labels}, "spec": claim}
    claim["spec"].pop("volumeMode", None)
    await kube.create("v1/persistentvolumeclaims", claim)
    await kube.delete(databases, "orders", namespace=live.namespace)
    await live.reconcile("orders")
    assert await kube.find(databases, "orders", namespace=live.namespace) is None
    claim = await kube.find("v1/persistentvolumeclaims", "data-orders-0", namespace=live.namespace)
    assert claim is None or claim["metadata"]["deletionTimestamp"]


async def test_copies_follow_their_source(start: Start, kube: KubeClient) -> None:
    live = await start("replicator")
    await live.reconcile("registry")
    await live.reconcile("proxy")
    red, blue = f"{live.namespace}-team-red", f"{live.namespace}-team-blue"
    copy = await kube.get("v1/secrets", "registry", namespace=red)
    assert base64.b64decode(copy["data"]["token"]) == b"not-a-real-one"
    assert await kube.find("v1/secrets", "registry", namespace=blue) is not None
    assert await kube.find("v1/configmaps", "proxy", namespace=red) is not None
    assert await kube.find("v1/configmaps", "proxy", namespace=blue) is None

    await kube.merge_patch("v1/secrets", "registry", {"data": {"added": "eA=="}}, namespace=red)
    to = {"metadata": {"annotations": {"replicator.example.com/to": red}}}
    await kube.merge_patch("v1/secrets", "registry", to, namespace=live.namespace)
    await live.reconcile("registry")
    assert "added" not in (await kube.get("v1/secrets", "registry", namespace=red))["data"]
    assert await kube.find("v1/secrets", "registry", namespace=blue) is None

    await kube.delete("v1/secrets", "registry", namespace=live.namespace)
    await live.reconcile("registry")
    assert await kube.find("v1/secrets", "registry", namespace=red) is None


async def test_an_object_goes_at_its_time(start: Start, kube: KubeClient) -> None:
    live = await start("ttl")
    waiting = await live.reconcile("until-then", now=datetime(2029, 12, 31, tzinfo=UTC))
    assert waiting == Requeue(24 * 3600 * 1000)
    await live.reconcile("until-then", now=datetime(2030, 1, 1, tzinfo=UTC))
    assert await kube.find("v1/configmaps", "until-then", namespace=live.namespace) is None


async def test_the_client_says_what_the_real_api_server_says(start: Start, kube: KubeClient) -> None:
    live = await start("ttl")
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "until-then", "namespace": live.namespace},
    }

    assert await live.call(lambda client: client.get("v1/configmaps", "nobody", live.namespace)) is None
    with pytest.raises(Forbidden, match="cannot create resource"):
        await live.call(lambda client: client.create(config_map))

    obj: Resource = await live.call(lambda client: client.get(config_map))
    await kube.merge_patch("v1/configmaps", "until-then", {"data": {"x": "y"}}, namespace=live.namespace)
    with pytest.raises(Conflict, match="in the precondition"):
        await live.call(lambda client: client.delete(obj, unchanged=True))
    assert await live.call(lambda client: client.delete(obj)) is True
    assert await live.call(lambda client: client.delete(obj)) is False


async def test_the_same_event_counts_up_on_the_real_api_server(start: Start, kube: KubeClient) -> None:
    live = await start("ttl")
    annotation = {"metadata": {"annotations": {"ttl.example.com/ttl": "soon"}}}
    await kube.merge_patch("v1/configmaps", "for-a-minute", annotation, namespace=live.namespace)
    for _ in range(3):
        await live.reconcile("for-a-minute")
    (event,) = await kube.items("v1/events", namespace=live.namespace)
    assert (event["reason"], event["count"], event["type"]) == ("InvalidTTL", 3, "Warning")
    assert event["involvedObject"]["name"] == "for-a-minute"
    assert json.dumps(event["source"]) == '{"component": "torpor-configmaps"}'


async def test_a_list_longer_than_a_page_is_whole(start: Start, kube: KubeClient) -> None:
    live = await start("ttl")
    for number in range(0, 520, 40):
        made = [
            kube.create("v1/configmaps", {"metadata": {"name": f"c{index:03d}", "namespace": live.namespace}})
            for index in range(number, number + 40)
        ]
        await asyncio.gather(*made)
    found = await live.call(lambda client: client.list("v1/configmaps", live.namespace))
    # Its two samples, and those that every namespace has where a controller manager runs.
    assert {f"c{index:03d}" for index in range(520)} <= {obj.name for obj in found}
    assert all(obj.kind == "ConfigMap" for obj in found)
