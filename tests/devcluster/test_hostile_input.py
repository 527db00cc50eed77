"""Nothing that a client sends makes the server fail: every answer is below 500, and the server goes on."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torpor_devcluster.resources import BUILT_IN, ResourceType
from torpor_kubernetes_testing import KubeClient
from torpor_kubernetes_testing.client import path_of

SEED = 20261130
# Member names that the server itself looks at, so that wrong types land where they hurt.
NAMES = [
    "metadata",
    "spec",
    "status",
    "name",
    "labels",
    "annotations",
    "ownerReferences",
    "finalizers",
    "uid",
    "kind",
    "containers",
    "ports",
    "template",
    "selector",
    "matchLabels",
    "rules",
    "subjects",
    "roleRef",
    "data",
    "stringData",
    "versions",
    "names",
    "schema",
    "openAPIV3Schema",
    "properties",
    "group",
    "user",
    "resourceAttributes",
    "extra",
    "token",
    "involvedObject",
    "regarding",
    "strategy",
    "replicas",
    "x",
]
SCHEMA_NAMES = [
    "type",
    "properties",
    "items",
    "additionalProperties",
    "required",
    "enum",
    "pattern",
    "default",
    "nullable",
    "anyOf",
    "not",
    "minimum",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
]
LEAVES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**63,
    -(2**70),
    1.5,
    "",
    "a",
    "a b",
    "\u0000\n",
    "ä",
    "object",
    "array",
    "map",
    "[",
)


def value(chance: random.Random, names: Sequence[str], depth: int = 3) -> Any:
    """Some JSON, often with members of these names."""
    kind = chance.random()
    if depth == 0 or kind < 0.35:
        return chance.choice(LEAVES)
    if kind < 0.5:
        return [value(chance, names, depth - 1) for _ in range(chance.randrange(3))]
    return members(chance, names, depth)


def members(chance: random.Random, names: Sequence[str], depth: int = 3) -> dict[str, Any]:
    return {chance.choice(names): value(chance, names, depth - 1) for _ in range(chance.randrange(1, 5))}


def many(count: int, names: Sequence[str] = NAMES) -> Iterator[dict[str, Any]]:
    chance = random.Random(SEED)
    for _ in range(count):
        yield members(chance, names)


CREATABLE = [resource for resource in BUILT_IN if "create" in resource.verbs]


def collection(resource: ResourceType) -> str:
    written = f"{resource.group}/{resource.version}/{resource.plural}".lstrip("/")
    return path_of(written, "default" if resource.namespaced else None)


@pytest.mark.parametrize("resource", CREATABLE, ids=lambda resource: resource.qualified)
async def test_no_body_makes_a_create_fail(resource: ResourceType, dev: KubeClient) -> None:
    path = collection(resource)
    bodies: list[Any] = [[], "text", 1, None, {"metadata": {"name": "a", "resourceVersion": ""}}]
    for body in many(60):
        bodies += [body, {"metadata": {"name": "a"}, **body}, {"metadata": {"name": "b"}, "spec": body}]
    for body in bodies:
        code, answer = await dev.raw("POST", path, body=json.dumps(body).encode())
        assert code < 500 or code == 501 or b"resourceVersion should not be set" in answer, (body, answer)
    await dev.list("v1/namespaces")


PATCHES = ("merge-patch+json", "strategic-merge-patch+json", "json-patch+json", "apply-patch+yaml")


@pytest.mark.parametrize("kind", PATCHES)
async def test_no_patch_makes_the_server_fail(kind: str, dev: KubeClient) -> None:
    container = {"name": "c", "image": "i"}
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container]}}
    spec = {"selector": {"matchLabels": {"a": "b"}}, "template": template}
    await dev.create("apps/v1/deployments", {"metadata": {"name": "d", "namespace": "default"}, "spec": spec})
    typed = {"apiVersion": "apps/v1", "kind": "Deployment"}
    patches: list[Any] = [[], "x", 1, None]
    chance = random.Random(SEED)
    for body in many(80):
        inner = value(chance, NAMES)
        containers = {"spec": {"template": {"spec": {"containers": inner}}}}
        patches += [body, {**typed, **body}, containers, {**typed, **containers}, inner]
        patches.append(
            [
                {"op": op, "path": f"/spec/{name}", "value": inner, "from": "/spec"}
                for op in ("add", "move")
                for name in body
            ]
        )
        patches.append([body])
    path = "/apis/apps/v1/namespaces/default/deployments/d"
    query = {"fieldManager": "m", "force": True}
    for body in patches:
        data = json.dumps(body).encode()
        code, answer = await dev.raw("PATCH", path, body=data, query=query, content_type=f"application/{kind}")
        assert code < 500, (body, answer)
    await dev.get("apps/v1/deployments", "d", namespace="default")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b"",
        b'{"metadata":{"name":"a"},"data":{"k":"' + b"\\u0000" * 10 + b'"}}',
        b'{"metadata":{"name":"a"},"metadata":{"name":"b"}}',
        b"metadata: {name: a}\ndata: &a {x: *a}",
        b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]",
        b"k8s\x00\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"k8s\x00" + b"\x12\x04" + b"\x08" * 4,
    ],
    ids=[
        "nested lists",
        "nested objects",
        "no UTF-8",
        "nothing",
        "zero bytes",
        "twice",
        "itself",
        "aliases",
        "varint",
        "cut",
    ],
)
@pytest.mark.parametrize(
    "content_type", ["application/json", "application/yaml", "application/vnd.kubernetes.protobuf", "text/x"]
)
async def test_no_bytes_make_a_create_fail(body: bytes, content_type: str, dev: KubeClient) -> None:
    code, answer = await dev.raw("POST", "/api/v1/namespaces/default/configmaps", body=body, content_type=content_type)
    assert code < 500, answer


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "-1"},
        {"limit": "x"},
        {"limit": "9" * 30},
        {"continue": "e30"},
        {"continue": "ä"},
        {"resourceVersion": "-1"},
        {"resourceVersion": "9" * 30, "watch": "1", "timeoutSeconds": "1"},
        {"timeoutSeconds": "x", "watch": "1"},
        {"watch": "1", "timeoutSeconds": "-5"},
        {"labelSelector": "((("},
        {"labelSelector": "a" * 9000},
        {"fieldSelector": "=,=,"},
        {"resourceVersion": "1", "resourceVersionMatch": "Exact"},
        {"pretty": "true"},
        {"dryRun": "All"},
    ],
    ids=str,
)
async def test_no_query_makes_a_list_fail(query: dict[str, str], dev: KubeClient) -> None:
    code, answer = await dev.raw("GET", "/api/v1/configmaps", query=query)
    assert code < 500 or code == 504, answer


async def test_no_schema_of_a_crd_makes_the_server_fail(dev: KubeClient) -> None:
    for index, schema in enumerate(many(100, SCHEMA_NAMES)):
        root = {"type": "object", "properties": {"spec": schema}}
        names = {"plural": f"things{index}", "kind": f"Thing{index}"}
        version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": root}}
        spec = {"group": "torpor.dev", "scope": "Cluster", "names": names, "versions": [version]}
        crd = {"metadata": {"name": f"things{index}.torpor.dev"}, "spec": spec}
        code, answer = await dev.raw("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body=crd)
        assert code < 500, (schema, answer)
        for given in (None, {}, [], [{}], {"a": [1]}, "x", 1):
            body = {"apiVersion": "torpor.dev/v1", "kind": f"Thing{index}", "metadata": {"name": "a"}, "spec": given}
            path, query = f"/apis/torpor.dev/v1/things{index}", {"fieldManager": "m"}
            code, answer = await dev.raw("POST", path, body=body)
            assert code < 500, (schema, given, answer)
            code, answer = await dev.raw(
                "PATCH", f"{path}/a", body=body, query=query, content_type="application/apply-patch+yaml"
            )
            assert code < 500, (schema, given, answer)
