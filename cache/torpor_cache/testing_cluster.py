"""An administrator of a test cluster: makes what a WasmOperator needs. For the devcluster and the real API server."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec
from torpor.cache.v1 import cache_pb2

from torpor_cache.apiserver import ApiServer, StatusError

Json = dict[str, Any]
RBAC = "/apis/rbac.authorization.k8s.io/v1"
OPERATORS = "/apis/torpor.dev/v1alpha1"
MERGE_PATCH = "application/merge-patch+json"


class Admin:
    """Requests as the owner of an entered ApiServer."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api

    async def do(
        self, method: str, path: str, body: Json | None = None, content_type: str = "application/json"
    ) -> Json:
        """The answer; raises StatusError."""
        reply = await self._api.request(
            method,
            path,
            headers={"Content-Type": content_type, "Accept": "application/json"},
            body=None if body is None else msgspec.json.encode(body),
        )
        answer: Json = reply.raise_for_status(f"{method} {path}").json()
        return answer

    async def ensure(self, path: str, body: Json) -> None:
        """Creates it, unless it is there."""
        try:
            await self.do("POST", path, body)
        except StatusError as exc:
            if exc.code != 409:
                raise

    async def install_crds(self) -> None:
        import yaml

        text = (files("torpor_services.manifests") / "wasmoperator-crd.yaml").read_text()
        await self.ensure("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", yaml.safe_load(text))

    async def namespace(self, name: str) -> None:
        await self.ensure("/api/v1/namespaces", {"metadata": {"name": name}})

    async def account(self, namespace: str, name: str) -> None:
        await self.ensure(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})

    async def allow(
        self,
        namespace: str,
        account: str,
        resources: Sequence[str],
        *,
        groups: Sequence[str] = ("",),
        verbs: Sequence[str] = ("*",),
        names: Sequence[str] = (),
        role: str = "",
        cluster_wide: bool = False,
    ) -> str:
        """Binds the account to a new role; its name, for `disallow`."""
        role = role or f"{account}-{'-'.join(resources)}"
        rule: Json = {"apiGroups": list(groups), "resources": list(resources), "verbs": list(verbs)}
        if names:
            rule["resourceNames"] = list(names)
        kind = "ClusterRole" if cluster_wide else "Role"
        where = "" if cluster_wide else f"/namespaces/{namespace}"
        plural = kind.lower() + "s"
        await self.ensure(f"{RBAC}{where}/{plural}", {"metadata": {"name": role}, "rules": [rule]})
        binding = {
            "metadata": {"name": role},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        }
        await self.ensure(f"{RBAC}{where}/{kind.lower()}bindings", binding)
        return role

    async def disallow(self, namespace: str, role: str) -> None:
        await self.do("DELETE", f"{RBAC}/namespaces/{namespace}/rolebindings/{role}")

    async def operator(
        self, namespace: str, name: str, *, account: str = "op", host: str = "a", epoch: int = 1
    ) -> cache_pb2.Caller:
        """A WasmOperator that is assigned; what its host says as caller."""
        body = {
            "apiVersion": "torpor.dev/v1alpha1",
            "kind": "WasmOperator",
            "metadata": {"name": name},
            "spec": {"serviceAccountName": account, "module": {"file": f"{name}.py"}},
        }
        await self.ensure(f"{OPERATORS}/namespaces/{namespace}/wasmoperators", body)
        return await self.assign(namespace, name, host=host, epoch=epoch)

    async def assign(self, namespace: str, name: str, *, host: str, epoch: int) -> cache_pb2.Caller:
        path = f"{OPERATORS}/namespaces/{namespace}/wasmoperators/{name}/status"
        await self.do("PATCH", path, {"status": {"host": host, "epoch": epoch}}, MERGE_PATCH)
        return cache_pb2.Caller(namespace=namespace, name=name, host=host, epoch=epoch)

    async def config_map(self, namespace: str, name: str, data: Json | None = None, **metadata: Any) -> Json:
        body = {"metadata": {"name": name, **metadata}, "data": data or {}}
        return await self.do("POST", f"/api/v1/namespaces/{namespace}/configmaps", body)

    async def patch_config_map(self, namespace: str, name: str, patch: Json) -> Json:
        return await self.do("PATCH", f"/api/v1/namespaces/{namespace}/configmaps/{name}", patch, MERGE_PATCH)

    async def delete_config_map(self, namespace: str, name: str) -> Json:
        return await self.do("DELETE", f"/api/v1/namespaces/{namespace}/configmaps/{name}")
