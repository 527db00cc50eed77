"""Runs a small operator before the base image is taken, so that no real one has to be the first.

CPython rewrites a function's code while it runs for the first few times, fills caches, and imports what it imports
late. Done here, that is in the pages that all operators share, and not again in each instance after each wake. It
does what the SDK offers, found and not found: what is left out here each operator that does it pays for.

Some code never settles: counters in instructions that cannot be specialized, the history of branches. Such code is
found by running once more, and gathered in one place, so that its counters are on few pages.

The host is not called: answers are canned. Nothing of it stays but the warmth.
"""

import gc
import json
import linecache
import sys
from types import FunctionType

import _torpor
from torpor_sdk import _frames, _guest, _host

# How often it is loaded, and after each load how often it reconciles. After 100 runs of a function nothing in it
# changes any more that would ever stop changing.
LOADS = 6
RUNS = 16

FILENAME = "warm-up.py"
SOURCE = b"""
import json
from torpor_sdk import NotFound, Operator, config, env, log, requeue_after, set_condition

op = Operator(for_="warm-up.torpor.dev/v1/things", owns=["v1/configmaps"])


@op.reconcile
def reconcile(request, kube):
    settings = config()
    thing = kube.get(request)
    if thing is None:
        kube.delete("v1/configmaps", f"{request.name}-copy", request.namespace)
        return None
    data = {"size": settings.get("size", "1"), "env": env.get("NAME", ""), "labels": json.dumps(dict(thing.labels))}
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": thing.name, "namespace": thing.namespace}}
    kube.apply({**made, "data": data}, owner=thing)
    kube.get("warm-up.torpor.dev/v1/things", request.name, request.namespace)
    for found in kube.list("v1/configmaps", thing.namespace, labels={"app": thing.name}):
        log.debug("%s/%s", found.namespace, found.name)
    kube.create({**made, "data": data})
    kube.update(thing)
    kube.modify(request, lambda obj: obj.annotations.update(seen="yes"))
    kube.delete(thing)
    set_condition(thing, "Ready", True, reason="Made", message=f"{thing.name} is ready")
    kube.patch(thing, {"metadata": {"annotations": {"seen": "yes"}}})
    kube.patch_status(thing, {"ready": True, "conditions": thing.conditions})
    kube.add_finalizer(thing, "torpor.dev/warm-up")
    kube.event(thing, "Made", "it is there")
    return requeue_after(minutes=30)
"""

THING = {
    "apiVersion": "warm-up.torpor.dev/v1",
    "kind": "Thing",
    "metadata": {
        "name": "thing",
        "namespace": "default",
        "uid": "9fb5ee17-0ddb-4b72-b5c0-6b1ac0f9a1b5",
        "resourceVersion": "1",
        "generation": 1,
        "labels": {"app": "thing"},
        "annotations": {"a": "b"},
    },
    "spec": {"size": 1, "list": [1, 2.5, None, True, "text"]},
    "status": {},
}

NOT_FOUND = {
    "kind": "Status",
    "apiVersion": "v1",
    "status": "Failure",
    "reason": "NotFound",
    "message": "there is none",
    "details": {"name": "missing", "kind": "things"},
    "code": 404,
}


class _CannedHost:
    """The functions of `_torpor`, without a host."""

    def kube_request(self, message):
        method, path, _accept, _content_type, body, *_ = _frames.decode(message, fields_min=6)
        if b"missing" in path:
            return _frames.encode(404, "application/json", json.dumps(NOT_FOUND))
        return _frames.encode(200, "application/json", json.dumps(_answer(method, path.decode(), body)))

    def kube_tree(self, message):
        return _frames.encode("", "", "", "unimplemented", "there is no host yet")

    http_fetch = kube_tree

    def config(self):
        return b'{"config": {"size": "2"}, "env": {"NAME": "value"}}'

    def log(self, level, text):
        pass


def _answer(method, path, body):
    if method != b"GET":
        return THING | json.loads(body) | {"metadata": THING["metadata"]}
    if path.partition("?")[0].endswith("/configmaps"):
        return {"apiVersion": "v1", "kind": "ConfigMapList", "metadata": {"resourceVersion": "1"}, "items": [THING]}
    if path.endswith("/thing"):
        return THING
    return {
        "kind": "APIResourceList",
        "groupVersion": path.removeprefix("/apis/").removeprefix("/api/"),
        "resources": [
            {"name": "things", "singularName": "thing", "namespaced": True, "kind": "Thing", "verbs": ["get"]},
            {
                "name": "configmaps",
                "singularName": "configmap",
                "namespaced": True,
                "kind": "ConfigMap",
                "verbs": ["get"],
            },
        ],
    }


def run(boot) -> str:
    """The error of the first run that failed, empty if none did. Never raises: without it operators are only slower.

    `boot` has the functions that the embedding calls."""
    _host.calls()  # Found once for all.
    try:
        with _host.replaced(_CannedHost()):
            return _runs(boot)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        _guest._operator = None
        sys.modules.pop("main", None)
        linecache.cache.pop(FILENAME, None)


def _runs(boot):
    for _ in range(LOADS):
        error = _load(boot) or _reconcile(boot)
        if error:
            return error
    before = _adaptive_code()
    error = _reconcile(boot)
    running = _changed(before)
    error = error or _load(boot)
    loading = [code for code in _changed(before) if code not in set(running)]
    _torpor.gather(running)
    _torpor.gather(loading)
    return error


def _load(boot):
    boot.load(_frames.encode("source", FILENAME, SOURCE))
    boot.flush()
    return _frames.decode(boot.describe(), fields_min=1)[0].decode()


def _reconcile(boot):
    for name, expected in (("missing", b"done"), ("thing", b"requeue")):
        request = _frames.encode("default", name, "watch", 0, "")
        for _ in range(RUNS):
            boot.wake()
            boot.flush()
            outcome, _after, error = _frames.decode(boot.reconcile(request), fields_min=3)[:3]
            boot.flush()
            if outcome != expected:
                return error.decode() or outcome.decode()
    return ""


def _adaptive_code():
    """Every function's code with its instructions as they are now, the interpreter's counters among them."""
    found = {}
    for function in gc.get_objects():
        if isinstance(function, FunctionType):
            found[id(function.__code__)] = (function.__code__, function.__code__._co_code_adaptive)
    return found


def _changed(before):
    return [code for code, instructions in before.values() if code._co_code_adaptive != instructions]
