"""The thread in one piece: a change wakes a sleeping operator, which writes; on the real kube-apiserver."""

import pytest
from torpor_guests_testing import mirror
from torpor_kubernetes_testing import KubeClient, create_service_account
from torpor_mesh_testing import WASM_OPERATORS, Mesh, condition_of, mirror_rules, operator_object

# The scheduler would keep a guest this small for a minute and more: it costs less than the next wake-up.
SOON = {"policy": "idle", "idleAfter": "100ms"}
LANGUAGES = ("zig", "rust", "go", "python")


@pytest.mark.parametrize("language", LANGUAGES)
async def test_change_wakes_the_operator_which_writes_and_sleeps_again(
    mesh: Mesh, kube: KubeClient, namespace: str, language: str
) -> None:
    guest = mirror(language, "first")
    await create_service_account(kube, namespace, "copy", mirror_rules())
    operator = operator_object("copy", namespace, guest.place(mesh.modules), unload=SOON)
    await kube.create(WASM_OPERATORS, operator)
    await kube.until(
        WASM_OPERATORS, "copy", lambda o: condition_of(o, "Ready")[0] == "True", namespace=namespace, timeout_s=60.0
    )
    before = await mesh.until_asleep()
    assert before[namespace, "copy"].wakes == 0, "nothing has changed yet"

    await kube.create("example.com/v1/widgets", widget(namespace, "a", "one"))
    await kube.until("v1/configmaps", "a-copy", holds("one", language), namespace=namespace)
    await mesh.until_asleep()
    await kube.merge_patch("example.com/v1/widgets", "a", {"spec": {"value": "two"}}, namespace=namespace)
    await kube.until("v1/configmaps", "a-copy", holds("two", language), namespace=namespace)
    after = (await mesh.until_asleep())[namespace, "copy"]
    await kube.delete("example.com/v1/widgets", "a", namespace=namespace)
    await kube.until("v1/configmaps", "a-copy", lambda found: found is None, namespace=namespace)

    assert (after.errors, after.last_error) == (0, "")
    assert after.wakes == 2, "each change found it asleep"
    assert after.private_bytes == 0, "asleep it holds no memory"
    stored = await kube.get(WASM_OPERATORS, "copy", namespace=namespace)
    assert stored["status"]["module"]["sha256"] == guest.sha256
    assert stored["status"]["module"]["image"] == "image"


def widget(namespace: str, name: str, value: str) -> dict[str, object]:
    return {
        "apiVersion": "example.com/v1",
        "kind": "Widget",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"value": value},
    }


def holds(value: str, language: str):  # type: ignore[no-untyped-def]
    expected = {"value": value, "by": language, "build": "first"}
    return lambda found: found is not None and found["data"] == expected
