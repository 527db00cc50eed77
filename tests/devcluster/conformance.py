"""What the conformance test runs: scripts of calls, and the transcript by which two servers are compared.

A transcript has, for each call, its code and its body without what must differ: uids, times, resourceVersions,
managedFields. A step marked `loose` is compared by code, reason and kind alone: there the words of the real server
come from Go's internals.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from torpor_kubernetes_testing import KubeClient

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"

_DROPPED = {"uid", "resourceVersion", "managedFields", "creationTimestamp", "selfLink", "storageVersionHash"}
_TIMES = {"deletionTimestamp", "lastTransitionTime", "expirationTimestamp"}


@dataclass
class Script:
    """One run of a scenario against one server."""

    kube: KubeClient
    namespace: str
    transcript: list[tuple[str, int, Any]] = field(default_factory=list)

    async def call(
        self,
        label: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Json | None = None,
        content_type: str = "application/json",
        headers: dict[str, str] | None = None,
        loose: bool = False,
        only: str = "",
    ) -> Json:
        """Make a call and note its answer. `only`: a top-level member to compare instead of all, or code."""
        path = path.replace("{ns}", self.namespace)
        code, data = await self.kube.raw(
            method, path, body=body, query=query, content_type=content_type, headers=headers
        )
        answer = _parsed(data)
        noted = normalised(answer)
        if only == "code":
            noted = None
        elif loose:
            noted = (
                {key: _word(noted.get(key)) for key in ("kind", "reason", "status")}
                if isinstance(noted, dict)
                else None
            )
        elif only:
            noted = noted.get(only) if isinstance(noted, dict) else noted
        self.transcript.append((label, code, noted))
        return answer if isinstance(answer, dict) else {}

    def note(self, label: str, value: Any) -> None:
        self.transcript.append((label, 0, normalised(value)))

    async def watch(self, label: str, resource: str, count: int, **query: Any) -> None:
        """Note the first `count` events of a watch."""
        events = []
        async with asyncio.timeout(10), aclosing(self.kube.watch(resource, namespace=self.namespace, **query)) as watch:
            async for event in watch:
                events.append([event.type, normalised(event.object)])
                if len(events) == count:
                    break
        self.transcript.append((label, 0, events))


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def _word(value: Any) -> str | None:
    """The status of a Status; other objects have a whole one."""
    return value if isinstance(value, str) else None


def normalised(value: Any) -> Any:
    if isinstance(value, list):
        return [normalised(item) for item in value]
    if isinstance(value, dict):
        return {
            key: "TIME" if key in _TIMES else normalised(item) for key, item in value.items() if key not in _DROPPED
        }
    if isinstance(value, str):
        value = re.sub(r"^10(\.\d+){3}$", "ADDRESS", value)
        return re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "UID", value)
    return value


Scenario = Callable[[Script], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


CONFIGMAPS = "/api/v1/namespaces/{ns}/configmaps"
SECRETS = "/api/v1/namespaces/{ns}/secrets"
PODS = "/api/v1/namespaces/{ns}/pods"
SERVICES = "/api/v1/namespaces/{ns}/services"
DEPLOYMENTS = "/apis/apps/v1/namespaces/{ns}/deployments"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{ns}/leases"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WIDGETS = "/apis/conformance.torpor.dev/v1/namespaces/{ns}/widgets"
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/roles"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/rolebindings"


def configmap(name: str, *, labels: Json | None = None, **data: str) -> Json:
    metadata: Json = {"name": name}
    if labels:
        metadata["labels"] = labels
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def deployment(name: str, **spec: Any) -> Json:
    template = {
        "metadata": {"labels": {"app": name}},
        "spec": {"containers": [{"name": "web", "image": "web:1", "ports": [{"containerPort": 80}]}]},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"app": name}}, "template": template, **spec},
    }


@scenario
async def configmaps_are_created_read_changed_and_deleted(script: Script) -> None:
    await script.call("create", "POST", CONFIGMAPS, configmap("a", x="1"))
    await script.call("create again", "POST", CONFIGMAPS, configmap("a"))
    await script.call("get", "GET", f"{CONFIGMAPS}/a")
    await script.call("get missing", "GET", f"{CONFIGMAPS}/missing")
    await script.call("watch is for collections", "GET", f"{CONFIGMAPS}/a", query={"watch": True})
    stale = await script.call("put", "PUT", f"{CONFIGMAPS}/a", configmap("a", x="2"))
    await script.call("put again", "PUT", f"{CONFIGMAPS}/a", configmap("a", x="3"))
    await script.call("put stale", "PUT", f"{CONFIGMAPS}/a", stale)
    await script.call("put other name", "PUT", f"{CONFIGMAPS}/a", configmap("b"))
    await script.call("put missing", "PUT", f"{CONFIGMAPS}/missing", configmap("missing"))
    other = configmap("a")
    other["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000"
    await script.call("put other uid", "PUT", f"{CONFIGMAPS}/a", other, loose=True)
    elsewhere = configmap("c")
    elsewhere["metadata"]["namespace"] = "elsewhere"
    await script.call("create elsewhere", "POST", CONFIGMAPS, elsewhere)
    await script.call("delete", "DELETE", f"{CONFIGMAPS}/a")
    await script.call("delete again", "DELETE", f"{CONFIGMAPS}/a")


@scenario
async def patches_of_every_kind(script: Script) -> None:
    path = f"{CONFIGMAPS}/a"
    await script.call("create", "POST", CONFIGMAPS, configmap("a", labels={"l": "1"}, x="1", y="2"))
    await script.call("merge", "PATCH", path, {"data": {"x": None, "z": "3"}}, content_type=MERGE)
    await script.call("strategic", "PATCH", path, {"metadata": {"labels": {"m": "2"}}}, content_type=STRATEGIC)
    operations = [{"op": "add", "path": "/data/w", "value": "4"}, {"op": "remove", "path": "/metadata/labels/l"}]
    await script.call("json", "PATCH", path, operations, content_type=JSON_PATCH)
    failing = [{"op": "test", "path": "/data/w", "value": "5"}]
    await script.call("json test fails", "PATCH", path, failing, content_type=JSON_PATCH, loose=True)
    missing = [{"op": "remove", "path": "/data/nothing"}]
    await script.call("json path is missing", "PATCH", path, missing, content_type=JSON_PATCH, loose=True)
    await script.call("json is no list", "PATCH", path, {"op": "add"}, content_type=JSON_PATCH, loose=True)
    await script.call("unknown kind", "PATCH", path, {}, content_type="application/json", loose=True)
    await script.call("of nothing", "PATCH", f"{CONFIGMAPS}/missing", {"data": {}}, content_type=MERGE)
    stale = {"metadata": {"resourceVersion": "1"}, "data": {"q": "1"}}
    await script.call("stale", "PATCH", path, stale, content_type=MERGE)
    await script.call(
        "bad label", "PATCH", path, {"metadata": {"labels": {"a b": "c"}}}, content_type=MERGE, loose=True
    )
    await script.call("changes nothing", "PATCH", path, {"data": {"z": "3"}}, content_type=MERGE)


@scenario
async def strategic_patches_merge_lists_by_their_keys(script: Script) -> None:
    await script.call("create", "POST", DEPLOYMENTS, deployment("a"))
    path = f"{DEPLOYMENTS}/a"

    async def containers(label: str, patch: list[Json]) -> None:
        body = {"spec": {"template": {"spec": {"containers": patch}}}}
        await script.call(label, "PATCH", path, body, content_type=STRATEGIC)

    await containers("add", [{"name": "side", "image": "side:1"}])
    await containers("change", [{"name": "web", "image": "web:2"}])
    await containers("add port", [{"name": "web", "ports": [{"containerPort": 81, "protocol": "TCP"}]}])
    await containers("delete", [{"name": "side", "$patch": "delete"}])


@scenario
async def workloads_get_defaults_and_generations(script: Script) -> None:
    await script.call("create", "POST", DEPLOYMENTS, {**deployment("a"), "status": {"replicas": 7}})
    path = f"{DEPLOYMENTS}/a"
    await script.call("spec changes", "PATCH", path, {"spec": {"replicas": 3}}, content_type=MERGE)
    await script.call("label changes", "PATCH", path, {"metadata": {"labels": {"a": "b"}}}, content_type=MERGE)
    await script.call("status is ignored", "PATCH", path, {"status": {"replicas": 3}}, content_type=MERGE)
    status = {"status": {"replicas": 3}, "spec": {"replicas": 9}}
    await script.call("status subresource", "PATCH", f"{path}/status", status, content_type=MERGE)
    await script.call("get status", "GET", f"{path}/status")
    await script.call("get scale", "GET", f"{path}/scale")
    scale = {"spec": {"replicas": 5}}
    await script.call("patch scale", "PATCH", f"{path}/scale", scale, content_type=MERGE)
    await script.call("delete", "DELETE", path)


@scenario
async def secrets_and_services_get_defaults(script: Script) -> None:
    await script.call("secret", "POST", SECRETS, {"metadata": {"name": "s"}, "stringData": {"a": "b"}})
    service = {"metadata": {"name": "web"}, "spec": {"ports": [{"port": 80}], "clusterIP": "None"}}
    await script.call("headless service", "POST", SERVICES, service)
    await script.call("service without ports", "POST", SERVICES, {"metadata": {"name": "b"}, "spec": {}})
    await script.call("service name", "POST", SERVICES, {"metadata": {"name": "1b"}, "spec": {"ports": [{"port": 1}]}})
    await script.call("service deleted", "DELETE", f"{SERVICES}/web")


@scenario
async def wrong_objects_are_refused(script: Script) -> None:
    await script.call("bad name", "POST", CONFIGMAPS, configmap("A_b"))
    await script.call("no name", "POST", CONFIGMAPS, {"metadata": {}})
    await script.call("bad label", "POST", CONFIGMAPS, configmap("a", labels={"x": "a b"}))
    await script.call("bad annotation", "POST", CONFIGMAPS, {"metadata": {"name": "a", "annotations": {"a b": ""}}})
    owner = {"metadata": {"name": "a", "ownerReferences": [{"kind": "Pod", "name": "x"}]}}
    await script.call("bad owner", "POST", CONFIGMAPS, owner)
    await script.call(
        "bad finalizer", "POST", CONFIGMAPS, {"metadata": {"name": "a", "finalizers": ["a b"]}}, loose=True
    )
    await script.call(
        "wrong kind", "POST", CONFIGMAPS, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}, loose=True
    )
    await script.call("no JSON", "POST", CONFIGMAPS, b"{", loose=True)
    await script.call("wrong media type", "POST", CONFIGMAPS, b"x", content_type="text/plain", loose=True)
    await script.call("version on create", "POST", CONFIGMAPS, {"metadata": {"name": "a", "resourceVersion": "5"}})
    await script.call("too large", "POST", CONFIGMAPS, configmap("a", x="y" * (3 << 20)), loose=True)
    await script.call("namespace missing", "POST", "/api/v1/namespaces/nowhere/configmaps", configmap("a"))
    strict = {"fieldValidation": "Strict"}
    unknown = {**configmap("a"), "foo": 1}
    await script.call("unknown field", "POST", CONFIGMAPS, unknown, query=strict)
    await script.call("unknown field is dropped", "POST", CONFIGMAPS, unknown)
    await script.call("wrong type", "POST", DEPLOYMENTS, deployment("a", replicas="x"), loose=True)
    await script.call("no containers", "POST", PODS, {"metadata": {"name": "a"}, "spec": {}})
    await script.call("generated name", "POST", CONFIGMAPS, {"metadata": {"generateName": "x-"}}, loose=True)


@scenario
async def unknown_paths_and_verbs_are_refused(script: Script) -> None:
    await script.call("unknown resource", "GET", "/api/v1/foos", only="code")
    await script.call("post to a name", "POST", f"{CONFIGMAPS}/a", configmap("a"), loose=True)
    await script.call("put to a collection", "PUT", CONFIGMAPS, configmap("a"), loose=True)
    await script.call("unknown accept", "GET", CONFIGMAPS, headers={"Accept": "image/png"}, loose=True)
    await script.call("list namespaced without namespace", "POST", "/api/v1/configmaps", configmap("a"), loose=True)


def list_of(answer: Json) -> list[str]:
    return [item["metadata"]["name"] for item in answer.get("items", [])]


@scenario
async def lists_are_selected_and_paged(script: Script) -> None:
    for name, labels in {"a": {"t": "x"}, "b": {"t": "y", "u": ""}, "c": {"t": "x", "u": "1"}, "d": {}}.items():
        await script.call(name, "POST", CONFIGMAPS, configmap(name, labels=labels))
    for selector in ("t=x", "t!=x", "t in (x,y),u", "!u", "t notin (x)", "u=", "u", "t==y", "t,!u", "u>0"):
        answer = await script.call(f"labels {selector}", "GET", CONFIGMAPS, query={"labelSelector": selector})
        script.note(f"names {selector}", list_of(answer))
    for selector in ("metadata.name=a", "metadata.name!=a", "metadata.namespace=nowhere", ""):
        await script.call(f"fields {selector}", "GET", CONFIGMAPS, query={"fieldSelector": selector})
    await script.call("unknown field", "GET", CONFIGMAPS, query={"fieldSelector": "data.x=1"}, loose=True)
    for selector in ("a b", "t in x", "=x", "t in (", "a/b/c=d"):
        await script.call(f"bad {selector}", "GET", CONFIGMAPS, query={"labelSelector": selector}, loose=True)
    first = await script.call("page 1", "GET", CONFIGMAPS, query={"limit": 3}, only="items")
    script.note("remaining", first["metadata"].get("remainingItemCount"))
    token = first["metadata"]["continue"]
    await script.call("created between", "POST", CONFIGMAPS, configmap("e"))
    second = await script.call("page 2", "GET", CONFIGMAPS, query={"limit": 3, "continue": token})
    script.note("same version", first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"])
    await script.call("bad token", "GET", CONFIGMAPS, query={"limit": 3, "continue": "x"}, loose=True)
    whole = await script.call(
        "version 0 ignores limit", "GET", CONFIGMAPS, query={"limit": 1, "resourceVersion": "0"}, loose=True
    )
    del whole
    exact = {"resourceVersion": first["metadata"]["resourceVersion"], "resourceVersionMatch": "Exact"}
    await script.call("exact", "GET", CONFIGMAPS, query=exact)
    await script.call("match alone", "GET", CONFIGMAPS, query={"resourceVersionMatch": "Exact"})
    await script.call("match unknown", "GET", CONFIGMAPS, query={**exact, "resourceVersionMatch": "x"}, loose=True)
    await script.call("exact 0", "GET", CONFIGMAPS, query={**exact, "resourceVersion": "0"}, loose=True)
    await script.call("no number", "GET", CONFIGMAPS, query={"resourceVersion": "x"}, loose=True)
    await script.call("future", "GET", CONFIGMAPS, query={"resourceVersion": "99999999"}, loose=True)


@scenario
async def collections_are_deleted(script: Script) -> None:
    for name, labels in {"a": {"t": "x"}, "b": {"t": "y"}, "c": {"t": "x"}}.items():
        await script.call(name, "POST", CONFIGMAPS, configmap(name, labels=labels))
    await script.call("some", "DELETE", CONFIGMAPS, query={"labelSelector": "t=x"})
    await script.call("left", "GET", CONFIGMAPS)
    await script.call("all", "DELETE", CONFIGMAPS, loose=True)
    await script.call("none left", "GET", CONFIGMAPS)


@scenario
async def watches_tell_changes(script: Script) -> None:
    first = await script.call("a", "POST", CONFIGMAPS, configmap("a", labels={"t": "x"}))
    version = first["metadata"]["resourceVersion"]
    await script.call("b", "POST", CONFIGMAPS, configmap("b"))
    await script.call("a leaves", "PATCH", f"{CONFIGMAPS}/a", {"metadata": {"labels": {"t": "y"}}}, content_type=MERGE)
    await script.call("a returns", "PATCH", f"{CONFIGMAPS}/a", {"metadata": {"labels": {"t": "x"}}}, content_type=MERGE)
    await script.call("a changes", "PATCH", f"{CONFIGMAPS}/a", {"data": {"k": "v"}}, content_type=MERGE)
    await script.call("a goes", "DELETE", f"{CONFIGMAPS}/a")
    await script.watch("all", "v1/configmaps", 5, resourceVersion=version)
    await script.watch("selected", "v1/configmaps", 4, resourceVersion=version, labelSelector="t=x")
    await script.watch("one name", "v1/configmaps", 4, resourceVersion=version, fieldSelector="metadata.name=a")
    await script.watch("present", "v1/configmaps", 1)
    await script.watch("from 0", "v1/configmaps", 1, resourceVersion="0")
    initial = {"sendInitialEvents": True, "allowWatchBookmarks": True, "resourceVersionMatch": "NotOlderThan"}
    await script.watch("initial events", "v1/configmaps", 2, **initial)
    bad = {"watch": True, "sendInitialEvents": True}
    await script.call("initial without match", "GET", CONFIGMAPS, query=bad, loose=True)
    await script.call(
        "match without initial",
        "GET",
        CONFIGMAPS,
        query={"watch": True, "resourceVersionMatch": "NotOlderThan"},
        loose=True,
    )


async def _until_answered(script: Script, path: str, headers: dict[str, str]) -> None:
    """Ask until the answer is 200: the real server's informers hear of a change a moment later, and nobody is told."""
    for attempt in range(200):
        code, _ = await script.kube.raw("GET", path.replace("{ns}", script.namespace), headers=headers)
        if code == 200:
            return
        await asyncio.sleep(min(0.02 * attempt, 0.2))
    raise TimeoutError(f"{path} is still not answered")


def widget_crd() -> Json:
    properties = {
        "spec": {
            "type": "object",
            "required": ["size"],
            "properties": {
                "size": {"type": "integer", "minimum": 1, "maximum": 9},
                "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                "name": {"type": "string", "maxLength": 5, "pattern": "^[a-z]*$"},
                "tags": {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set"},
                "plain": {"type": "array", "items": {"type": "string"}},
                "parts": {
                    "type": "array",
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["name"],
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
                    },
                },
                "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                "map": {"type": "object", "additionalProperties": {"type": "integer"}},
            },
        },
        "status": {"type": "object", "properties": {"ready": {"type": "boolean"}}},
    }
    schema = {"openAPIV3Schema": {"type": "object", "properties": properties}}
    columns = [
        {"name": "Size", "type": "integer", "jsonPath": ".spec.size"},
        {"name": "Ready", "type": "boolean", "jsonPath": ".status.ready"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
    common = {"served": True, "schema": schema, "subresources": {"status": {}}, "additionalPrinterColumns": columns}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "widgets.conformance.torpor.dev"},
        "spec": {
            "group": "conformance.torpor.dev",
            "scope": "Namespaced",
            "names": {"plural": "widgets", "kind": "Widget", "shortNames": ["wd"]},
            "versions": [
                {"name": "v1", "storage": True, **common},
                {"name": "v1beta1", "storage": False, **common},
            ],
        },
    }


def widget(name: str, /, **spec: Any) -> Json:
    return {
        "apiVersion": "conformance.torpor.dev/v1",
        "kind": "Widget",
        "metadata": {"name": name},
        "spec": {"size": 1, **spec},
    }


async def with_widgets(script: Script) -> None:
    """Create the CRD, once a server, and wait until it is served."""
    await script.kube.raw("POST", CRDS, body=widget_crd())

    def established(crd: Json | None) -> bool:
        conditions = ((crd or {}).get("status") or {}).get("conditions") or []
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    await script.kube.until(
        "apiextensions.k8s.io/v1/customresourcedefinitions", "widgets.conformance.torpor.dev", established
    )
    # The real server serves a new CRD a moment after it is Established.
    await _until_answered(script, WIDGETS, {})


@scenario
async def custom_resource_definitions(script: Script) -> None:
    await with_widgets(script)
    await script.call("get", "GET", f"{CRDS}/widgets.conformance.torpor.dev")
    await script.call("group", "GET", "/apis/conformance.torpor.dev", loose=True)
    await script.call("version", "GET", "/apis/conformance.torpor.dev/v1", only="kind")
    await script.call("create again", "POST", CRDS, widget_crd())
    bad = widget_crd()
    bad["metadata"]["name"] = "other"
    await script.call("wrong name", "POST", CRDS, bad)
    bad = widget_crd()
    bad["metadata"]["name"] = "gadgets.conformance.torpor.dev"
    bad["spec"]["names"] = {"plural": "gadgets", "kind": "Gadget"}
    for version in bad["spec"]["versions"]:
        version["storage"] = False
    await script.call("no storage version", "POST", CRDS, bad, loose=True)
    await script.call("no spec", "POST", CRDS, {"metadata": {"name": "x.y"}, "spec": {}}, loose=True)


@scenario
async def custom_resources_are_checked_by_their_schema(script: Script) -> None:
    await with_widgets(script)
    await script.call("create", "POST", WIDGETS, {**widget("a"), "status": {"ready": True}})
    await script.call("pruned", "POST", WIDGETS, widget("b", unknown=1, free={"x": {"y": 1}}, map={"k": 1}))
    await script.call("strict", "POST", WIDGETS, widget("c", unknown=1), query={"fieldValidation": "Strict"})
    await script.call("wrong type", "POST", WIDGETS, widget("c", size="x"))
    await script.call("too small", "POST", WIDGETS, widget("c", size=0))
    await script.call("too big", "POST", WIDGETS, widget("c", size=10))
    await script.call("not in enum", "POST", WIDGETS, widget("c", colour="green"))
    await script.call("pattern", "POST", WIDGETS, widget("c", name="A"))
    await script.call("too long", "POST", WIDGETS, widget("c", name="abcdef"))
    await script.call("duplicate in set", "POST", WIDGETS, widget("c", tags=["a", "a"]))
    await script.call("duplicate key", "POST", WIDGETS, widget("c", parts=[{"name": "x"}, {"name": "x"}]))
    no_size = widget("c")
    del no_size["spec"]["size"]
    await script.call("required", "POST", WIDGETS, no_size)
    await script.call("nested required", "POST", WIDGETS, widget("c", parts=[{"count": 1}]))
    await script.call("map value", "POST", WIDGETS, widget("c", map={"k": "v"}))
    await script.call("null gives way to the default", "POST", WIDGETS, widget("d", colour=None))
    await script.call("no kind", "POST", WIDGETS, {"metadata": {"name": "e"}, "spec": {"size": 1}}, loose=True)
    await script.call("bad name", "POST", WIDGETS, widget("A_b"))


@scenario
async def custom_resources_keep_generation_and_status_apart(script: Script) -> None:
    await with_widgets(script)
    path = f"{WIDGETS}/a"
    created = await script.call("create", "POST", WIDGETS, widget("a"))
    await script.call("spec", "PATCH", path, {"spec": {"size": 2}}, content_type=MERGE)
    await script.call("metadata", "PATCH", path, {"metadata": {"labels": {"a": "b"}}}, content_type=MERGE)
    await script.call("status is ignored", "PATCH", path, {"status": {"ready": True}}, content_type=MERGE)
    body = {"status": {"ready": True}, "spec": {"size": 3}, "metadata": {"labels": {"x": "y"}}}
    await script.call("status", "PATCH", f"{path}/status", body, content_type=MERGE)
    await script.call("bad status", "PATCH", f"{path}/status", {"status": {"ready": 1}}, content_type=MERGE, loose=True)
    await script.call("put without version", "PUT", path, widget("a"))
    await script.call("put stale", "PUT", path, created)
    await script.call("strategic", "PATCH", path, {}, content_type=STRATEGIC, loose=True)
    await script.call("other version", "GET", path.replace("/v1/", "/v1beta1/"))
    beta = {**widget("b"), "apiVersion": "conformance.torpor.dev/v1beta1"}
    await script.call("created in the other version", "POST", WIDGETS.replace("/v1/", "/v1beta1/"), beta)
    await script.call("listed in this one", "GET", WIDGETS)
    await script.call("no scale", "GET", f"{path}/scale", only="code")
    await script.call("field selector", "GET", WIDGETS, query={"fieldSelector": "spec.size=1"}, loose=True)
    await script.call("delete", "DELETE", path)


@scenario
async def finalizers_hold_an_object(script: Script) -> None:
    path = f"{CONFIGMAPS}/a"
    held = {"metadata": {"name": "a", "finalizers": ["torpor.dev/hold"]}}
    await script.call("create", "POST", CONFIGMAPS, held)
    await script.call("delete", "DELETE", path)
    await script.call("still there", "GET", path)
    await script.call("delete again", "DELETE", path)
    more = {"metadata": {"finalizers": ["torpor.dev/hold", "torpor.dev/more"]}}
    await script.call("no more finalizers", "PATCH", path, more, content_type=MERGE, loose=True)
    await script.call("labels may change", "PATCH", path, {"metadata": {"labels": {"a": "b"}}}, content_type=MERGE)
    await script.call("let go", "PATCH", path, {"metadata": {"finalizers": None}}, content_type=MERGE)
    await script.call("gone", "GET", path)
    await with_widgets(script)
    custom = widget("a")
    custom["metadata"]["finalizers"] = ["torpor.dev/hold"]
    await script.call("custom", "POST", WIDGETS, custom)
    await script.call("custom deleted", "DELETE", f"{WIDGETS}/a")
    await script.call("custom let go", "PATCH", f"{WIDGETS}/a", {"metadata": {"finalizers": []}}, content_type=MERGE)
    await script.call("custom gone", "GET", f"{WIDGETS}/a")


@scenario
async def deletions_have_preconditions_and_policies(script: Script) -> None:
    await script.call("create", "POST", CONFIGMAPS, configmap("a"))
    wrong = {"preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}}
    await script.call("wrong uid", "DELETE", f"{CONFIGMAPS}/a", wrong, loose=True)
    await script.call(
        "wrong version", "DELETE", f"{CONFIGMAPS}/a", {"preconditions": {"resourceVersion": "1"}}, loose=True
    )
    await script.call("dry run", "DELETE", f"{CONFIGMAPS}/a", query={"dryRun": "All"})
    await script.call("bad policy", "DELETE", f"{CONFIGMAPS}/a", {"propagationPolicy": "x"}, loose=True)
    await script.call("orphan", "DELETE", f"{CONFIGMAPS}/a", {"propagationPolicy": "Orphan"})
    await script.call("b", "POST", CONFIGMAPS, configmap("b"))
    await script.call("foreground", "DELETE", f"{CONFIGMAPS}/b", {"propagationPolicy": "Foreground"})
    await script.call("c", "POST", CONFIGMAPS, configmap("c"))
    await script.call("background", "DELETE", f"{CONFIGMAPS}/c", {"propagationPolicy": "Background"})


@scenario
async def dry_runs_change_nothing(script: Script) -> None:
    query = {"dryRun": "All"}
    await script.call("create", "POST", CONFIGMAPS, configmap("a"), query=query)
    await script.call("absent", "GET", f"{CONFIGMAPS}/a")
    await script.call("really", "POST", CONFIGMAPS, configmap("a"))
    await script.call("put", "PUT", f"{CONFIGMAPS}/a", configmap("a", x="1"), query=query)
    await script.call("unchanged", "GET", f"{CONFIGMAPS}/a")
    await script.call("bad value", "POST", CONFIGMAPS, configmap("b"), query={"dryRun": "x"}, loose=True)


@scenario
async def other_shapes_of_an_answer(script: Script) -> None:
    await with_widgets(script)
    await script.call("create", "POST", CONFIGMAPS, configmap("a", labels={"t": "x"}, k="v"))
    await script.call("widget", "POST", WIDGETS, widget("a"))
    metadata = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
    await script.call("metadata", "GET", f"{CONFIGMAPS}/a", headers=metadata)
    every = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}
    await script.call("metadata list", "GET", CONFIGMAPS, headers=every)
    table = {"Accept": "application/json;as=Table;g=meta.k8s.io;v=v1"}
    for name, path in (("configmaps", CONFIGMAPS), ("widgets", WIDGETS)):
        answer = await script.kube.request("GET", path.replace("{ns}", script.namespace), headers=table)
        script.note(f"{name} columns", [column["name"] for column in answer["columnDefinitions"]])
        script.note(f"{name} cells", [row["cells"][:-1] for row in answer["rows"]])
        script.note(f"{name} objects", [row["object"]["kind"] for row in answer["rows"]])
    await script.call(
        "protobuf first", "GET", f"{CONFIGMAPS}/a", headers={"Accept": "application/yaml;q=0.1,application/json"}
    )


@scenario
async def writes_that_change_nothing_keep_the_version(script: Script) -> None:
    await with_widgets(script)
    for path, name, body in (
        (CONFIGMAPS, "a", configmap("a", x="1")),
        (WIDGETS, "a", widget("a")),
        (DEPLOYMENTS, "a", deployment("a")),
    ):
        created = await script.call("create", "POST", path, body)
        version = created["metadata"]["resourceVersion"]

        async def same(
            label: str,
            method: str,
            suffix: str,
            change: Any,
            version: str = version,
            path: str = path,
            name: str = name,
            **more: Any,
        ) -> None:
            answer = await script.call(label, method, f"{path}/{name}{suffix}", change, loose=True, **more)
            script.note(f"{label}: same version", answer["metadata"]["resourceVersion"] == version)

        await same("put", "PUT", "", created)
        await same(
            "put without managedFields",
            "PUT",
            "",
            {**created, "metadata": {**created["metadata"], "managedFields": None}},
        )
        await same("merge", "PATCH", "", {"metadata": {"labels": {}}}, content_type=MERGE)
        await same("json", "PATCH", "", [], content_type=JSON_PATCH)
        await same("label", "PATCH", "", {"metadata": {"labels": {"new": "x"}}}, content_type=MERGE)


@scenario
async def status_subresources_change_only_status(script: Script) -> None:
    await with_widgets(script)
    await script.call(
        "account", "POST", "/api/v1/namespaces/{ns}/serviceaccounts", {"metadata": {"name": "default"}}, loose=True
    )
    spec = {"containers": [{"name": "c", "image": "i:1"}], "automountServiceAccountToken": False}
    await script.call("pod", "POST", PODS, {"metadata": {"name": "a"}, "spec": spec}, loose=True)
    await script.call("deployment", "POST", DEPLOYMENTS, deployment("a"), loose=True)
    await script.call("widget", "POST", WIDGETS, widget("a"), loose=True)
    metadata = {"labels": {"l": "1"}, "annotations": {"n": "1"}, "finalizers": ["torpor.dev/f"]}
    for path, status in ((PODS, {"phase": "Running"}), (DEPLOYMENTS, {"replicas": 1}), (WIDGETS, {"ready": True})):
        body = {"metadata": metadata, "status": status}
        await script.call(f"patch of {path}", "PATCH", f"{path}/a/status", body, content_type=MERGE, only="metadata")
        await script.call("get", "GET", f"{path}/a", only="status")
        await script.call("delete", "DELETE", f"{path}/a", only="metadata")


@scenario
async def rules_of_oneself(script: Script) -> None:
    review = {"spec": {"namespace": script.namespace}}
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    answer = await script.call("rules", "POST", path, review, headers={"Impersonate-User": "carol"}, loose=True)
    verbs = [rule["verbs"] for rule in answer["status"]["resourceRules"]]
    script.note("may create reviews", ["create"] in verbs)


@scenario
async def leases_are_created_by_put(script: Script) -> None:
    lease = {"metadata": {"name": "a"}, "spec": {"holderIdentity": "me", "leaseDurationSeconds": 15}}
    await script.call("put creates", "PUT", f"{LEASES}/a", lease)
    await script.call("put without version", "PUT", f"{LEASES}/a", lease)
    current = await script.call("get", "GET", f"{LEASES}/a")
    current["spec"]["renewTime"] = "2026-01-02T03:04:05.678901Z"
    await script.call("renew", "PUT", f"{LEASES}/a", current)
    await script.call("renew stale", "PUT", f"{LEASES}/a", current)


@scenario
async def pods_have_phases_and_grace(script: Script) -> None:
    await script.call(
        "account", "POST", "/api/v1/namespaces/{ns}/serviceaccounts", {"metadata": {"name": "default"}}, loose=True
    )
    spec: Json = {"containers": [{"name": "c", "image": "i:1"}], "automountServiceAccountToken": False}
    await script.call("create", "POST", PODS, {"metadata": {"name": "a"}, "spec": spec})
    await script.call(
        "on a node", "POST", PODS, {"metadata": {"name": "b"}, "spec": {**spec, "nodeName": "n"}}, only="spec"
    )
    running = {"status": {"phase": "Running"}}
    await script.call("running", "PATCH", f"{PODS}/b/status", running, content_type=MERGE, only="status")
    for selector in ("status.phase=Running", "spec.nodeName=n", "spec.nodeName=", "status.phase!=Running"):
        answer = await script.call(selector, "GET", PODS, query={"fieldSelector": selector}, loose=True)
        script.note(f"names {selector}", list_of(answer))
    await script.call("unknown selector", "GET", PODS, query={"fieldSelector": "spec.foo=x"}, loose=True)
    await script.call("delete", "DELETE", f"{PODS}/a", only="metadata")
    await script.call("gone", "GET", f"{PODS}/a")
    await script.call("delete with grace", "DELETE", f"{PODS}/b", only="metadata")
    await script.call("still there", "GET", f"{PODS}/b", only="metadata")
    await script.call("now", "DELETE", f"{PODS}/b", {"gracePeriodSeconds": 0}, only="metadata")
    await script.call("really gone", "GET", f"{PODS}/b")


@scenario
async def namespaces_end(script: Script) -> None:
    name = f"{script.namespace}-end"
    await script.call("create", "POST", "/api/v1/namespaces", {"metadata": {"name": name}}, only="spec")
    await script.call("labels", "GET", f"/api/v1/namespaces/{name}", only="metadata")
    await script.call("delete", "DELETE", f"/api/v1/namespaces/{name}")
    await script.call("create in it", "POST", f"/api/v1/namespaces/{name}/configmaps", configmap("a"))
    await script.call("bad name", "POST", "/api/v1/namespaces", {"metadata": {"name": "a.b"}})
    await script.call("default stays", "DELETE", "/api/v1/namespaces/default")
    finalized = {"metadata": {"name": name}, "spec": {"finalizers": []}}
    await script.call("finalize", "PUT", f"/api/v1/namespaces/{name}/finalize", finalized)
    await script.call("gone", "GET", f"/api/v1/namespaces/{name}")


def policy_rule(verbs: list[str], resources: list[str], **more: Any) -> Json:
    return {"apiGroups": [""], "verbs": verbs, "resources": resources, **more}


@scenario
async def rights_are_checked(script: Script) -> None:
    """As a ServiceAccount: its own token, and impersonated by the admin."""
    accounts = "/api/v1/namespaces/{ns}/serviceaccounts"
    await script.call("account", "POST", accounts, {"metadata": {"name": "bob"}})
    issued = await script.call(
        "token", "POST", f"{accounts}/bob/token", {"spec": {"expirationSeconds": 600}}, loose=True
    )
    token = issued["status"]["token"]
    own = {"Authorization": f"Bearer {token}"}
    username = f"system:serviceaccount:{script.namespace}:bob"
    as_bob = {"Impersonate-User": username}
    await script.call("list denied", "GET", CONFIGMAPS, headers=own)
    await script.call("cluster list denied", "GET", "/api/v1/configmaps", headers=as_bob)
    await script.call("get denied", "GET", f"{DEPLOYMENTS}/a/status", headers=as_bob)
    await script.call("path denied", "GET", "/metrics", headers=own)
    await script.call("bad token", "GET", CONFIGMAPS, headers={"Authorization": "Bearer nonsense"})
    await script.call(
        "review", "POST", "/apis/authentication.k8s.io/v1/tokenreviews", {"spec": {"token": token}}, loose=True
    )
    await script.call(
        "impersonation denied", "GET", CONFIGMAPS, headers={**own, "Impersonate-User": "alice"}, loose=True
    )
    await script.call(
        "group denied",
        "GET",
        CONFIGMAPS,
        headers={**own, "Impersonate-User": username, "Impersonate-Group": "g"},
        loose=True,
    )
    await script.call("group without user", "GET", CONFIGMAPS, headers={"Impersonate-Group": "g"}, loose=True)
    rules = [
        policy_rule(["get", "list"], ["configmaps"]),
        policy_rule(["get", "watch", "list"], ["secrets"], resourceNames=["s"]),
    ]
    await script.call("role", "POST", ROLES, {"metadata": {"name": "r"}, "rules": rules})
    subjects = [{"kind": "ServiceAccount", "name": "bob", "namespace": script.namespace}]
    binding = {
        "metadata": {"name": "r"},
        "subjects": subjects,
        "roleRef": {"kind": "Role", "name": "r", "apiGroup": "rbac.authorization.k8s.io"},
    }
    await script.call("binding", "POST", BINDINGS, binding)
    await _until_answered(script, CONFIGMAPS, own)
    await script.call("list allowed", "GET", CONFIGMAPS, headers=own)
    await script.call("create denied", "POST", CONFIGMAPS, configmap("a"), headers=own)
    await script.call("secret of another name", "GET", f"{SECRETS}/t", headers=own)
    await script.call("secret of that name", "GET", f"{SECRETS}/s", headers=own)
    await script.call("secrets by name", "GET", SECRETS, query={"fieldSelector": "metadata.name=s"}, headers=own)
    await script.call("all secrets", "GET", SECRETS, headers=own)
    with_group = {**as_bob, "Impersonate-Group": "nobody"}
    await script.call("user rule holds with other groups", "GET", CONFIGMAPS, headers=with_group)
    for verb, allowed in (("list", "yes"), ("create", "no")):
        attributes = {"verb": verb, "resource": "configmaps", "namespace": script.namespace}
        review = {"spec": {"user": username, "resourceAttributes": attributes}}
        answer = await script.call(
            f"review {verb}", "POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review, loose=True
        )
        script.note(f"{verb} is allowed: {allowed}", answer["status"]["allowed"])
        own_review = {"spec": {"resourceAttributes": attributes}}
        answer = await script.call(
            f"own review {verb}",
            "POST",
            "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
            own_review,
            headers=own,
            loose=True,
        )
        script.note(f"own {verb}", answer["status"]["allowed"])
    await script.call(
        "review of nobody", "POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": {}}, loose=True
    )


@scenario
async def nobody_grants_more_than_they_hold(script: Script) -> None:
    rules = [{"apiGroups": ["rbac.authorization.k8s.io"], "verbs": ["*"], "resources": ["roles", "rolebindings"]}]
    rules[0]["verbs"] = ["create", "get", "list", "update"]
    await script.call("role", "POST", ROLES, {"metadata": {"name": "r"}, "rules": rules})
    subjects = [{"kind": "User", "name": "alice", "apiGroup": "rbac.authorization.k8s.io"}]
    role_ref = {"kind": "Role", "name": "r", "apiGroup": "rbac.authorization.k8s.io"}
    await script.call(
        "binding", "POST", BINDINGS, {"metadata": {"name": "r"}, "subjects": subjects, "roleRef": role_ref}
    )
    alice = {"Impersonate-User": "alice"}
    await _until_answered(script, ROLES, alice)
    more = {"metadata": {"name": "more"}, "rules": [policy_rule(["get"], ["secrets"])]}
    await script.call("escalation", "POST", ROLES, more, headers=alice, loose=True)
    await script.call("held", "POST", ROLES, {"metadata": {"name": "held"}, "rules": rules}, headers=alice)
    cluster_admin = {"kind": "ClusterRole", "name": "cluster-admin", "apiGroup": "rbac.authorization.k8s.io"}
    await script.call(
        "binding denied",
        "POST",
        BINDINGS,
        {"metadata": {"name": "b"}, "subjects": subjects, "roleRef": cluster_admin},
        headers=alice,
        loose=True,
    )


@scenario
async def server_side_apply_of_built_in_types(script: Script) -> None:
    path = f"{DEPLOYMENTS}/a"

    async def apply(label: str, body: Json, manager: str, *, force: bool = False, **more: Any) -> Json:
        query = {"fieldManager": manager, "force": force}
        return await script.call(label, "PATCH", path, body, query=query, content_type=APPLY, **more)

    full = deployment("a", replicas=2)
    full["spec"]["template"]["spec"]["containers"].append({"name": "side", "image": "side:1"})
    answer = await apply("create", full, "one")
    script.note("owned", _owned(answer, "one"))
    before = answer["metadata"]["resourceVersion"]
    answer = await apply("again", full, "one")
    script.note("no write", answer["metadata"]["resourceVersion"] == before)
    other = {**deployment("a"), "spec": {"replicas": 3}}
    await apply("conflict", other, "two")
    answer = await apply("force", other, "two", force=True)
    script.note("two owns", _owned(answer, "two"))
    script.note("one owns", _owned(answer, "one"))
    less = deployment("a", replicas=3)
    await apply("a container goes", less, "one")
    unowned = deployment("a")
    await apply("what two owns stays", unowned, "one")
    await apply("nobody is left", {**deployment("a"), "spec": {}}, "two")
    await script.call("no manager", "PATCH", path, full, content_type=APPLY, loose=True)
    await script.call(
        "update takes over",
        "PATCH",
        path,
        {"spec": {"template": {"spec": {"containers": [{"name": "web", "image": "web:9"}]}}}},
        content_type=STRATEGIC,
        query={"fieldManager": "three"},
    )
    await apply("conflict with an update", unowned, "one")


def _owned(answer: Json, manager: str) -> Any:
    entries = answer["metadata"].get("managedFields", [])
    return [entry["fieldsV1"] for entry in entries if entry["manager"] == manager]


@scenario
async def server_side_apply_of_custom_resources(script: Script) -> None:
    await with_widgets(script)
    path = f"{WIDGETS}/a"

    async def apply(label: str, manager: str, *, force: bool = False, **spec: Any) -> Json:
        query = {"fieldManager": manager, "force": force}
        body = {**widget("a"), "spec": spec}
        answer = await script.call(label, "PATCH", path, body, query=query, content_type=APPLY)
        script.note(f"{label}: owned", _owned(answer, manager) if "metadata" in answer else None)
        return answer

    await apply("create", "one", size=1, tags=["a", "b"], plain=["x"], parts=[{"name": "p", "count": 1}])
    await apply("two", "two", tags=["c"], parts=[{"name": "q"}], map={"k": 1})
    await apply("atomic list", "two", plain=["y"])
    await apply("atomic list forced", "two", force=True, plain=["y"])
    await apply("one lets go", "one", size=1, parts=[{"name": "p", "count": 2}])
    status = {**widget("a"), "status": {"ready": True}}
    del status["spec"]
    answer = await script.call(
        "status", "PATCH", f"{path}/status", status, query={"fieldManager": "three"}, content_type=APPLY
    )
    script.note("status owned", _owned(answer, "three"))


@scenario
async def events_are_one_resource_in_two_groups(script: Script) -> None:
    involved = {"kind": "Pod", "namespace": script.namespace, "name": "p", "apiVersion": "v1"}
    event = {
        "metadata": {"name": "e1"},
        "involvedObject": involved,
        "reason": "Because",
        "message": "it is so",
        "type": "Normal",
        "source": {"component": "test"},
    }
    await script.call("create", "POST", "/api/v1/namespaces/{ns}/events", event)
    await script.call("new form", "GET", "/apis/events.k8s.io/v1/namespaces/{ns}/events/e1")
    for selector in ("involvedObject.name=p", "reason=Because", "type=Warning", "source=test"):
        answer = await script.call(
            selector, "GET", "/api/v1/namespaces/{ns}/events", query={"fieldSelector": selector}, loose=True
        )
        script.note(f"names {selector}", list_of(answer))
    new = {
        "metadata": {"name": "e2"},
        "regarding": involved,
        "reason": "Because",
        "note": "new",
        "type": "Normal",
        "action": "Test",
        "reportingController": "test.dev/c",
        "reportingInstance": "i",
        "eventTime": "2026-01-02T03:04:05.000000Z",
    }
    await script.call("create new", "POST", "/apis/events.k8s.io/v1/namespaces/{ns}/events", new)
    await script.call("old form", "GET", "/api/v1/namespaces/{ns}/events/e2")
    await script.call(
        "wrong namespace",
        "POST",
        "/api/v1/namespaces/{ns}/events",
        {**event, "metadata": {"name": "e3"}, "involvedObject": {**involved, "namespace": "other"}},
        loose=True,
    )


@scenario
async def discovery_documents(script: Script) -> None:
    await script.call("core versions", "GET", "/api", only="versions")
    answer = await script.call("core", "GET", "/api/v1", only="kind")
    ours = {
        "configmaps",
        "pods",
        "pods/status",
        "namespaces",
        "namespaces/finalize",
        "secrets",
        "serviceaccounts/token",
    }
    script.note(
        "core resources", sorted((r for r in answer["resources"] if r["name"] in ours), key=lambda r: r["name"])
    )
    answer = await script.call("apps", "GET", "/apis/apps/v1", only="groupVersion")
    ours = {"deployments", "deployments/status", "deployments/scale"}
    script.note(
        "apps resources", sorted((r for r in answer["resources"] if r["name"] in ours), key=lambda r: r["name"])
    )
    await script.call("group", "GET", "/apis/apps")
    await script.call("unknown group", "GET", "/apis/nothing.torpor.dev", only="code")
    await script.call("health", "GET", "/readyz", headers={"Accept": "*/*"})
