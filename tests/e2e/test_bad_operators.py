"""Bad operators: each says clearly what is wrong with it, and none disturbs a healthy neighbour.

All of them run on one mesh at the same time, beside the neighbour.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from torpor_guests_testing import mirror
from torpor_guests_testing.toolchains import ROOT
from torpor_host.abi import encode
from torpor_host.testing import wat_guest
from torpor_kubernetes_testing import ApiError, KubeClient, create_service_account
from torpor_kubernetes_testing.namespaces import temporary_namespace
from torpor_mesh_testing import WASM_OPERATORS, Mesh, condition_of, mirror_rules, operator_object
from torpor_mesh_testing.fleet import each, until_ready
from wasmtime import wat2wasm

BAD = ROOT / "tests" / "guests" / "bad"
NEIGHBOUR = "neighbour"
MANIFEST = b'{"for": {"resource": "example.com/v1/widgets"}}'
DEEP_JSON = "[" * 100_000
# So short that the misbehaving end within the test, so long that a busy machine does not end the others.
LIMITS = {"memory": "64Mi", "cpu": "1s", "deadline": "3s"}
# The neighbour alone and unloaded takes about 0.1 s; beside those who take the CPU for a second, a few.
NEIGHBOUR_S = 10.0


@dataclass(frozen=True, slots=True)
class Bad:
    """An operator and what is to be read of it: `condition` (type, reason) with a message, or lastError."""

    name: str
    file: str
    content: bytes
    says: str  # a regular expression
    condition: tuple[str, str] = ("", "")
    account: str = "allowed"
    value: str = "x"
    spec: dict[str, Any] = field(default_factory=dict)


def python(name: str, does: str, says: str, **more: Any) -> Bad:
    content = (BAD / "misbehaving.py").read_bytes()
    spec = {"config": {"does": does}, "limits": LIMITS}
    return Bad(name, "misbehaving.py", content, says, spec=spec, **more)


def core(name: str, wasm: bytes, says: str, **more: Any) -> Bad:
    return Bad(name, f"{name}.wasm", wasm, says, **more)


REFUSED = ("Installed", "ModuleRefused")
CASES = [
    core("broken", b"\0asm\x01\0\0\0 and then nonsense", r"module, offset 0x\w+: unknown section", condition=REFUSED),
    core("cut-off", b"\0as", "no WebAssembly", condition=("Installed", "InvalidSpec")),
    core("component", b"\0asm\x0d\0\x01\0", "is a component", condition=("Installed", "Unsupported")),
    core(
        "command",
        wat2wasm('(module (memory (export "memory") 1) (func (export "_start")))'),
        "_start",
        condition=REFUSED,
    ),
    core("no-operator", wat2wasm('(module (memory (export "memory") 1))'), "torpor_", condition=REFUSED),
    core(
        "unknown-field",
        wat_guest(describe_result=encode([b"", b'{"for": {"resource": "v1/secrets"}, "colour": "red"}'])),
        "unknown field 'colour'",
        condition=("Installed", "InvalidSpec"),
    ),
    core("traps", wat_guest("unreachable", describe_result=encode([b"", MANIFEST])), "unreachable"),
    Bad(
        "syntax-error",
        "syntax_error.py",
        (BAD / "syntax_error.py.txt").read_bytes(),
        r"(?s)syntax_error.py.*line 3.*(SyntaxError|never closed)",
        condition=REFUSED,
    ),
    Bad("missing-file", "", b"", "is not in the host's module folder", condition=("Installed", "ModuleUnavailable")),
    python("nobody", "raises", "(?i)service ?account.*nobody", account="nobody", condition=("Ready", "")),
    python(
        "may-not-watch",
        "raises",
        "(?i)forbidden|cannot (list|watch)|may not",
        account="powerless",
        condition=("Watching", ""),
    ),
    python("may-not-write", "may not", "403|[Ff]orbidden"),
    python("raises", "raises", "ValueError: this operator is wrong"),
    python("loops", "loops", "(?i)cpu|processor"),
    python("sleeps", "sleeps", "(?i)deadline"),
    python("eats-memory", "eats memory", "(?i)memory"),
    python("deep-json", "reads deep JSON", "RecursionError", value=DEEP_JSON),
]
NAMES = [case.name for case in CASES]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def crowd(mesh: Mesh) -> AsyncIterator[str]:
    """The namespace in which all of them run, with an object for each."""
    async with mesh.control_plane.admin_client() as kube, temporary_namespace(kube, "crowd") as namespace:
        await create_service_account(kube, namespace, "allowed", mirror_rules())
        await create_service_account(kube, namespace, "powerless")
        file = mirror("zig", "first").place(mesh.modules)
        await kube.create(WASM_OPERATORS, watching(NEIGHBOUR, namespace, file, "allowed"))
        await until_ready(kube, namespace, [NEIGHBOUR])
        for case in CASES:
            if case.file:
                (mesh.modules / case.file).write_bytes(case.content)
        await each(CASES, lambda case: kube.create("example.com/v1/widgets", widget(namespace, case.name, case.value)))
        await each(
            CASES,
            lambda case: kube.create(
                WASM_OPERATORS, watching(case.name, namespace, case.file or "none.py", case.account, **case.spec)
            ),
        )
        yield namespace


@pytest.mark.parametrize("case", CASES, ids=NAMES)
async def test_bad_operator_says_what_is_wrong(kube: KubeClient, crowd: str, case: Bad) -> None:
    def told(obj: dict[str, Any] | None) -> bool:
        return re.search(case.says, saying(obj, case)) is not None

    await kube.until(WASM_OPERATORS, case.name, told, namespace=crowd, timeout_s=60.0)


async def test_unknown_field_of_a_wasmoperator_is_named(kube: KubeClient, namespace: str) -> None:
    """By the API server, as kubectl asks it to."""
    obj = watching("operator", namespace, "none.py", "default", colour="red")
    with pytest.raises(ApiError, match=r'unknown field "spec\.colour"'):
        await kube.create(WASM_OPERATORS, obj, fieldValidation="Strict")


async def test_neighbour_is_served_while_all_others_misbehave(mesh: Mesh, kube: KubeClient, crowd: str) -> None:
    await kube.create("example.com/v1/widgets", widget(crowd, NEIGHBOUR, "one"))
    await kube.until(
        "v1/configmaps",
        f"{NEIGHBOUR}-{NEIGHBOUR}",
        lambda found: found is not None and found["data"]["value"] == "one",
        namespace=crowd,
        timeout_s=NEIGHBOUR_S,
    )
    state = (await mesh.states())[crowd, NEIGHBOUR]
    assert (state.errors, state.last_error) == (0, "")
    stored = await kube.get(WASM_OPERATORS, NEIGHBOUR, namespace=crowd)
    assert condition_of(stored, "Ready")[0] == "True"
    assert await mesh.serving("host") and await mesh.serving("cache")


def saying(obj: dict[str, Any] | None, case: Bad) -> str:
    kind, reason = case.condition
    if not kind:
        return ((obj or {}).get("status") or {}).get("lastError") or ""
    status, found, message = condition_of(obj, kind)
    return message if status == "False" and found.startswith(reason) else ""


def watching(name: str, namespace: str, file: str, account: str, **spec: Any) -> dict[str, Any]:
    return operator_object(name, namespace, file, selector=f"operator={name}", account=account, **spec)


def widget(namespace: str, name: str, value: str) -> dict[str, Any]:
    return {
        "apiVersion": "example.com/v1",
        "kind": "Widget",
        "metadata": {"name": name, "namespace": namespace, "labels": {"operator": name}},
        "spec": {"value": value},
    }
