"""Checking a WasmOperator against its definition."""

import copy

import pytest
from torpor_services import crd

GOOD = {
    "apiVersion": "torpor.dev/v1alpha1",
    "kind": "WasmOperator",
    "metadata": {"name": "a", "namespace": "b"},
    "spec": {
        "module": {"file": "a.py"},
        "serviceAccountName": "a",
        "for": {"resource": "v1/configmaps"},
        "owns": [{"resource": "v1/secrets", "predicates": ["generation"]}],
        "config": {"anything": [{"goes": None}]},
    },
}


def test_a_good_object_has_nothing_wrong():
    assert crd.violations(GOOD) == []


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("spec.modul", {}, "spec.modul: unknown field; known are concurrency, config"),
        ("spec.owns", [{"resource": "v1/secrets", "selector": "a"}], "spec.owns[0].selector: unknown field"),
        ("spec.concurrency", 0, "spec.concurrency: 0 is below 1"),
        ("spec.concurrency", True, "spec.concurrency: is a boolean, not integer"),
        ("spec.concurrency", "1", "spec.concurrency: is a string, not integer"),
        ("spec.serviceAccountName", "", "spec.serviceAccountName: is empty"),
        ("spec.unload", {"policy": "sometimes"}, "not one of predictive, never, idle"),
        ("spec.module", {"file": "a", "sha256": "x"}, "does not match"),
        ("spec.owns", [{"resource": "v1/secrets"}] * 65, "spec.owns: has 65 items, more than 64"),
        ("spec", None, "spec: is null, not object"),
        ("kind", "Other", "kind"),
    ],
)
def test_a_wrong_field_is_named(path, value, says):
    bad = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    target = bad
    for parent in parents:
        target = target[parent]
    target[last] = value
    assert any(says in problem for problem in crd.violations(bad)), crd.violations(bad)


def test_a_missing_field_is_named():
    bad = copy.deepcopy(GOOD)
    del bad["spec"]["serviceAccountName"]
    assert crd.violations(bad) == ["spec.serviceAccountName: is missing"]


def test_a_manifest_need_not_say_everything():
    assert crd.spec_violations({"for": {"resource": "v1/secrets"}}, required=False) == []


def test_kubectl_shows_whether_an_operator_is_ready_and_on_demand_why_not():
    from torpor_devcluster.table import find

    columns = {column["name"]: column for column in crd.definition()["spec"]["versions"][0]["additionalPrinterColumns"]}
    conditions = [
        {"type": "Degraded", "status": "True", "reason": "ReconcilesFail"},
        {"type": "Ready", "status": "False", "reason": "Degraded"},
    ]
    obj = {"status": {"conditions": conditions}}
    assert find(obj, columns["Ready"]["jsonPath"]) == ["False"]
    assert find(obj, columns["Reason"]["jsonPath"]) == ["Degraded"] and columns["Reason"]["priority"] == 1
