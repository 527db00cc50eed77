"""The real kube-controller-manager, which is client-go at its fullest, runs against the dev cluster.

It elects itself by a Lease, lists and watches by informers, sends protobuf, and makes a Deployment's pods.
"""

from pathlib import Path
from typing import Any

from torpor_devcluster import Config, DevCluster
from torpor_kubernetes_testing import KubeClient
from torpor_kubernetes_testing.processes import ServerProcess

Json = dict[str, Any]
CONTROLLERS = ",".join(
    f"{name}-controller" for name in ("deployment", "replicaset", "garbage-collector", "namespace", "serviceaccount")
)


def deployment(name: str, replicas: int) -> Json:
    template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {"metadata": {"name": name, "namespace": "ns"}, "spec": spec}


def observed(replicas: int) -> Any:
    return lambda obj: obj is not None and obj.get("status", {}).get("replicas", 0) == replicas


async def test_a_deployment_gets_its_pods_and_takes_them_along(kubernetes_assets: Path, tmp_path: Path) -> None:
    async with (
        DevCluster(Config(controllers=False)) as cluster,
        KubeClient(cluster.url, token=cluster.admin_token, ca_file=cluster.ca_file) as dev,
    ):
        kubeconfig = cluster.write_kubeconfig(tmp_path / "kubeconfig")
        flags = [f"--{name}kubeconfig={kubeconfig}" for name in ("", "authentication-", "authorization-")]
        command = [
            kubernetes_assets / "kube-controller-manager",
            *flags,
            f"--controllers={CONTROLLERS}",
            "--secure-port=0",
        ]
        manager = ServerProcess([str(part) for part in command], log=tmp_path / "log")
        manager.start()
        try:
            await dev.create("v1/namespaces", {"metadata": {"name": "ns"}})
            account = await dev.until("v1/serviceaccounts", "default", bool, namespace="ns", timeout_s=30)
            assert account is not None
            await dev.create("apps/v1/deployments", deployment("web", 3))
            await dev.until("apps/v1/deployments", "web", observed(3), namespace="ns", timeout_s=20)
            pods = await dev.items("v1/pods", namespace="ns", labelSelector="app=web")
            assert len(pods) == 3
            scale = {"spec": {"replicas": 1}}
            await dev.merge_patch("apps/v1/deployments", "web", scale, namespace="ns", subresource="scale")
            await dev.until("apps/v1/deployments", "web", observed(1), namespace="ns", timeout_s=20)
            await dev.delete("v1/namespaces", "ns")
            await dev.until("v1/namespaces", "ns", lambda obj: obj is None, timeout_s=30)
            assert await dev.items("v1/pods") == []
        finally:
            await manager.kill()
