"""The table of built-in kinds is what the real API server serves."""

from torpor_kubernetes_testing.client import KubeClient
from torpor_sdk.kinds import built_in, group_version_path


async def test_the_table_of_built_in_kinds_is_true(kube: KubeClient) -> None:
    table = {key: served for key, served in built_in().items() if key[0] != "torpor.dev/v1alpha1"}
    wrong = []
    for api_version in sorted({api_version for api_version, _ in table}):
        discovered = (await kube.request("GET", group_version_path(api_version)))["resources"]
        real = {entry["kind"]: entry for entry in discovered if "/" not in entry["name"]}
        for (version, kind), served in table.items():
            if version == api_version:
                entry = real.get(kind, {})
                if (entry.get("name"), entry.get("namespaced")) != (served.kind.resource, served.namespaced):
                    wrong.append((version, kind, entry.get("name"), entry.get("namespaced")))
    assert wrong == []
