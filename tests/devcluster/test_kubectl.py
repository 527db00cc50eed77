"""kubectl, the real one, against the dev cluster."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from torpor_devcluster import DevCluster

Kubectl = Callable[..., Awaitable[str]]

DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - {name: web, image: "web:1", ports: [{containerPort: 80}]}
      - {name: side, image: "side:1"}
"""

CRD = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.torpor.dev}
spec:
  group: torpor.dev
  scope: Namespaced
  names: {plural: widgets, kind: Widget, shortNames: [wd]}
  versions:
  - name: v1
    served: true
    storage: true
    additionalPrinterColumns: [{name: Size, type: integer, jsonPath: .spec.size}]
    schema:
      openAPIV3Schema:
        type: object
        properties: {spec: {type: object, properties: {size: {type: integer}}}}
"""

WIDGET = """
apiVersion: torpor.dev/v1
kind: Widget
metadata: {name: a, namespace: default}
spec: {size: 3}
"""


class KubectlFailed(Exception):
    pass


@pytest.fixture
def kubectl(cluster: DevCluster, kubernetes_assets: Path, tmp_path: Path) -> Kubectl:
    kubeconfig = cluster.write_kubeconfig(tmp_path / "kubeconfig")

    async def run(*arguments: str, stdin: str = "") -> str:
        process = await asyncio.create_subprocess_exec(
            kubernetes_assets / "kubectl",
            *("--kubeconfig", kubeconfig, f"--cache-dir={tmp_path / 'cache'}", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, error = await asyncio.wait_for(process.communicate(stdin.encode()), 30)
        if process.returncode != 0:
            raise KubectlFailed(error.decode())
        return output.decode()

    return run


async def test_it_creates_labels_annotates_gets_and_deletes(kubectl: Kubectl) -> None:
    # Imperative commands send protobuf, the others patches.
    assert await kubectl("create", "configmap", "a", "--from-literal=k=v") == "configmap/a created\n"
    await kubectl("label", "configmap", "a", "tier=x")
    await kubectl("annotate", "configmap", "a", "note=y")
    shown = json.loads(await kubectl("get", "configmap", "a", "-o", "json"))
    assert shown["data"] == {"k": "v"}
    assert shown["metadata"]["labels"] == {"tier": "x"}
    assert shown["metadata"]["annotations"] == {"note": "y"}
    table = await kubectl("get", "configmaps", "-l", "tier=x")
    assert table.splitlines()[0].split() == ["NAME", "DATA", "AGE"]
    assert await kubectl("delete", "configmap", "a") == 'configmap "a" deleted from default namespace\n'
    with pytest.raises(KubectlFailed, match=r'configmaps "a" not found'):
        await kubectl("get", "configmap", "a")


async def test_protobuf_of_many_kinds_is_understood(kubectl: Kubectl) -> None:
    await kubectl("create", "namespace", "ns")
    await kubectl("create", "deployment", "web", "--image=web:1", "--replicas=0", "-n", "ns")
    await kubectl("create", "service", "clusterip", "web", "--tcp=80:8080", "-n", "ns")
    await kubectl("create", "secret", "generic", "s", "--from-literal=k=v", "-n", "ns")
    await kubectl("create", "serviceaccount", "bob", "-n", "ns")
    await kubectl("create", "role", "r", "--verb=get,list", "--resource=pods,deployments.apps", "-n", "ns")
    await kubectl("create", "rolebinding", "r", "--role=r", "--serviceaccount=ns:bob", "-n", "ns")
    await kubectl("create", "cronjob", "c", "--image=c:1", "--schedule=* * * * *", "-n", "ns")
    await kubectl("create", "quota", "q", "--hard=cpu=1,pods=2", "-n", "ns")
    await kubectl("create", "ingress", "i", "--rule=x.dev/p=web:80", "-n", "ns")
    await kubectl("create", "poddisruptionbudget", "p", "--selector=app=web", "--min-available=1", "-n", "ns")
    deployment = json.loads(await kubectl("get", "deployment", "web", "-n", "ns", "-o", "json"))
    assert deployment["spec"]["replicas"] == 0
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "web:1"
    service = json.loads(await kubectl("get", "service", "web", "-n", "ns", "-o", "json"))
    assert service["spec"]["ports"] == [{"name": "80-8080", "port": 80, "protocol": "TCP", "targetPort": 8080}]
    quota = json.loads(await kubectl("get", "quota", "q", "-n", "ns", "-o", "json"))
    assert quota["spec"]["hard"] == {"cpu": "1", "pods": "2"}
    assert (await kubectl("get", "secret", "s", "-n", "ns", "-o", "jsonpath={.data.k}")) == "dg=="
    can = await kubectl("auth", "can-i", "list", "pods", "-n", "ns", "--as", "system:serviceaccount:ns:bob")
    assert can == "yes\n"
    token = (await kubectl("create", "token", "bob", "-n", "ns")).strip()
    whoami = await kubectl("auth", "whoami", "--token", token, "-o", "jsonpath={.status.userInfo.username}")
    assert whoami == "system:serviceaccount:ns:bob"


async def test_server_side_apply_adds_keeps_and_removes(kubectl: Kubectl) -> None:
    await kubectl("apply", "--server-side", "-f", "-", stdin=DEPLOYMENT)
    await kubectl("scale", "deployment", "web", "--replicas=5")
    with pytest.raises(KubectlFailed, match=r"conflict with .*: \.spec\.replicas"):
        await kubectl("apply", "--server-side", "-f", "-", stdin=DEPLOYMENT)
    without = "\n".join(line for line in DEPLOYMENT.splitlines() if "replicas" not in line and "side" not in line)
    await kubectl("apply", "--server-side", "-f", "-", stdin=without)
    shown = json.loads(await kubectl("get", "deployment", "web", "-o", "json"))
    assert shown["spec"]["replicas"] == 5
    assert [c["name"] for c in shown["spec"]["template"]["spec"]["containers"]] == ["web"]


async def test_client_side_apply_works_on_its_annotation(kubectl: Kubectl) -> None:
    assert "created" in await kubectl("apply", "-f", "-", stdin=DEPLOYMENT)
    assert "unchanged" in await kubectl("apply", "-f", "-", stdin=DEPLOYMENT)
    changed = DEPLOYMENT.replace("web:1", "web:2").replace('      - {name: side, image: "side:1"}\n', "")
    assert "configured" in await kubectl("apply", "-f", "-", stdin=changed)
    shown = json.loads(await kubectl("get", "deployment", "web", "-o", "json"))
    assert [c["image"] for c in shown["spec"]["template"]["spec"]["containers"]] == ["web:2"]


async def test_custom_resources_are_found_by_their_short_name(kubectl: Kubectl) -> None:
    await kubectl("apply", "-f", "-", stdin=CRD)
    await kubectl("wait", "--for=condition=Established", "crd/widgets.torpor.dev", "--timeout=5s")
    await kubectl("create", "-f", "-", stdin=WIDGET)
    assert (await kubectl("get", "wd")).splitlines()[1].split() == ["a", "3"]
    await kubectl("label", "wd", "a", "x=y")
    with pytest.raises(KubectlFailed, match=r'unknown field "spec\.colour"'):
        await kubectl("create", "-f", "-", stdin=WIDGET.replace("{size: 3}", "{size: 3, colour: red}"))
    await kubectl("delete", "crd", "widgets.torpor.dev")
    with pytest.raises(KubectlFailed, match="the server could not find the requested resource"):
        await kubectl("get", "wd")


async def test_a_namespace_is_deleted_with_what_is_in_it(kubectl: Kubectl) -> None:
    await kubectl("create", "namespace", "ns")
    await kubectl("create", "configmap", "a", "-n", "ns")
    # kubectl waits for the end on a watch.
    assert await kubectl("delete", "namespace", "ns") == 'namespace "ns" deleted\n'


async def test_what_is_not_built_is_refused_by_name(kubectl: Kubectl) -> None:
    await kubectl("create", "serviceaccount", "bob")
    await kubectl("run", "p", "--image=p:1", "--overrides", '{"spec":{"serviceAccountName":"bob"}}')
    with pytest.raises(KubectlFailed, match="pods has no subresource log"):
        await kubectl("logs", "p")
