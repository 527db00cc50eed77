"""A real Kubernetes control plane for tests, and a plain client of any Kubernetes API server.

async with ControlPlane(built_assets()) as control_plane:
    async with control_plane.admin_client() as kube:
        await kube.create("v1/configmaps", {"metadata": {"name": "a", "namespace": "default"}})
"""

from torpor_kubernetes_testing.access import create_service_account, grant, until_allowed
from torpor_kubernetes_testing.assets import AssetsMissing, built_assets
from torpor_kubernetes_testing.audit import AuditEvent
from torpor_kubernetes_testing.client import ApiError, KubeClient, WatchEvent
from torpor_kubernetes_testing.control_plane import ControlPlane
from torpor_kubernetes_testing.definitions import install_crd, remove_crd
from torpor_kubernetes_testing.metrics import Metrics
from torpor_kubernetes_testing.namespaces import temporary_namespace
from torpor_kubernetes_testing.processes import ProcessFailed
from torpor_kubernetes_testing.users import User

__all__ = [
    "ApiError",
    "AssetsMissing",
    "AuditEvent",
    "ControlPlane",
    "KubeClient",
    "Metrics",
    "ProcessFailed",
    "User",
    "WatchEvent",
    "built_assets",
    "create_service_account",
    "grant",
    "install_crd",
    "remove_crd",
    "temporary_namespace",
    "until_allowed",
]
