"""A WasmOperator laid over the manifest of its module."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor_host.operator_spec import (
    InvalidSpec,
    MappingKind,
    ResourceRef,
    UnloadPolicy,
    Unsupported,
    declared,
    duration_s,
    quantity_bytes,
    resolve,
)

OBJECT = {
    "apiVersion": "torpor.dev/v1alpha1",
    "kind": "WasmOperator",
    "metadata": {"name": "a", "namespace": "ns", "uid": "u", "generation": 3},
    "spec": {"module": {"file": "a.py"}, "serviceAccountName": "account"},
}
MANIFEST = {
    "for": {"resource": "example.com/v1/databases", "predicates": ["generation"]},
    "owns": [{"resource": "v1/secrets"}],
    "watches": [{"resource": "v1/configmaps", "mapping": {"label": "example.com/database"}}],
    "resync": "10h",
    "sdk": "python/0.1.0",
}


def wasm_operator(**spec):
    obj = copy.deepcopy(OBJECT)
    obj["spec"].update(spec)
    return obj


def resolved(manifest=MANIFEST, **spec):
    return resolve(declared(wasm_operator(**spec)), json.dumps(manifest).encode())


def test_the_manifest_gives_what_the_object_does_not_say():
    spec = resolved()
    assert spec.primary.resource == ResourceRef("example.com", "v1", "databases")
    assert [(w.name, w.mapping) for w in spec.subscriptions] == [
        ("for", MappingKind.SELF),
        ("owns/0", MappingKind.OWNER_CONTROLLER),
        ("watches/0", MappingKind.LABEL),
    ]
    assert (spec.resync_s, spec.concurrency, spec.unload.policy) == (36_000, 1, UnloadPolicy.PREDICTIVE)


def test_the_object_wins_field_by_field():
    spec = resolved(owns=[], resync="0", **{"for": {"resource": "v1/pods", "labelSelector": "a=b"}})
    assert str(spec.primary.resource) == "v1/pods" and spec.primary.label_selector == "a=b"
    assert spec.primary.predicates == ()
    assert [w.name for w in spec.subscriptions] == ["for", "watches/0"] and spec.resync_s == 0


def test_the_guest_is_told_who_it_is_and_how_it_is_configured():
    spec = resolved(config={"a": [1, None]}, env=[{"name": "LEVEL", "value": "1"}])
    assert json.loads(spec.settings) == {
        "operator": {"namespace": "ns", "name": "a", "for": "example.com/v1/databases"},
        "config": {"a": [1, None]},
        "env": {"LEVEL": "1"},
    }


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"module": {}}, "exactly one of file, configMap, url, oci"),
        ({"module": {"file": "a", "url": "http://x"}}, "exactly one of"),
        ({"module": {"url": "http://x/a.wasm"}}, "sha256: is needed with url"),
        ({"serviceAccountName": "Not A Name"}, "is not a name"),
        ({"limits": {"memory": "lots"}}, "limits.memory: 'lots' is not a quantity"),
        ({"limits": {"memory": "1Ki"}}, "between 1Mi and 4Gi"),
        ({"limits": {"deadline": "2h"}}, "between 10ms and 1h"),
        ({"limits": {"cpu": "10"}}, "is not a duration"),
        ({"unknown": 1}, "spec.unknown: unknown field"),
    ],
)
def test_a_wrong_object_is_refused_with_the_field(spec, says):
    with pytest.raises(InvalidSpec, match=says):
        declared(wasm_operator(**spec))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"for": {"resource": "databases"}}, "for.resource: 'databases' is not group/version/plural"),
        ({"for": {"resource": "a/b/c/d"}}, "is not group/version/plural"),
        ({"watches": [{"resource": "v1/pods"}]}, r"watches/0\.mapping: exactly one of"),
        ({"watches": [{"resource": "v1/pods", "mapping": {"label": "a", "self": True}}]}, "exactly one of"),
        ({"resync": "-1s"}, "resync: '-1s' is not a duration"),
    ],
)
def test_a_wrong_watch_is_refused_with_the_field(spec, says):
    with pytest.raises(InvalidSpec, match=says):
        resolved(**spec)


@pytest.mark.parametrize(
    "manifest", [b"", b"[]", b"\xff", b'{"fr": {}}', b'{"for": {"resource": 5}}', b'{"sdk": "x"}', b"[" * 100_000]
)
def test_a_wrong_manifest_is_refused(manifest):
    with pytest.raises(InvalidSpec):
        resolve(declared(OBJECT), manifest)


def test_what_is_not_built_yet_is_refused_by_name():
    with pytest.raises(Unsupported, match="oci"):
        declared(wasm_operator(module={"oci": "x"}))
    with pytest.raises(Unsupported, match="notOwnWrite"):
        resolved(owns=[{"resource": "v1/secrets", "predicates": ["notOwnWrite"]}])


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("250ms", 0.25), ("30s", 30), ("1h30m", 5400), ("1.5h", 5400), ("2m3s", 123)]
)
def test_durations_are_gos(text, seconds):
    assert duration_s(text, "x") == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "size"), [("1024", 1024), ("64Mi", 64 << 20), ("1Gi", 1 << 30), ("5M", 5_000_000)])
def test_quantities_are_kubernetes(text, size):
    assert quantity_bytes(text, "x") == size


@given(st.text(max_size=12))
def test_any_other_text_is_refused_and_never_crashes(text):
    for convert in (duration_s, quantity_bytes):
        try:
            assert convert(text, "x") >= 0
        except InvalidSpec as refused:
            assert "x: " in str(refused)


def test_operators_that_ask_for_the_same_share_it():
    first, second = (
        resolve(declared(wasm_operator(limits={"memory": "64Mi"})), json.dumps(MANIFEST).encode()) for _ in "ab"
    )
    assert first.limits is second.limits and first.unload is second.unload
    assert first.primary is second.primary and first.watches[0].resource is second.watches[0].resource
