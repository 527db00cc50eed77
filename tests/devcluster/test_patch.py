"""The three patches as pure functions."""

from typing import Any

import pytest
from torpor_devcluster.errors import ApiError
from torpor_devcluster.patch import json_patch, merge_patch, strategic_merge_patch
from torpor_devcluster.shapes import built_in


@pytest.mark.parametrize(
    ("target", "patch", "expected"),
    [  # the examples of RFC 7386
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_a_merge_patch_is_that_of_the_rfc(target: Any, patch: Any, expected: Any) -> None:
    assert merge_patch(target, patch) == expected


@pytest.mark.parametrize(
    ("document", "operation", "expected"),
    [
        ({"a": 1}, {"op": "add", "path": "/b", "value": 2}, {"a": 1, "b": 2}),
        ({"a": [1, 3]}, {"op": "add", "path": "/a/1", "value": 2}, {"a": [1, 2, 3]}),
        ({"a": [1]}, {"op": "add", "path": "/a/-", "value": 2}, {"a": [1, 2]}),
        ({"a": 1, "b": 2}, {"op": "remove", "path": "/a"}, {"b": 2}),
        ({"a": [1, 2]}, {"op": "remove", "path": "/a/0"}, {"a": [2]}),
        ({"a": 1}, {"op": "replace", "path": "/a", "value": None}, {"a": None}),
        ({"a": {"b": 1}}, {"op": "move", "from": "/a/b", "path": "/c"}, {"a": {}, "c": 1}),
        ({"a": {"b": 1}}, {"op": "copy", "from": "/a", "path": "/c"}, {"a": {"b": 1}, "c": {"b": 1}}),
        ({"a/b": {"~": 1}}, {"op": "test", "path": "/a~1b/~0", "value": 1}, {"a/b": {"~": 1}}),
        ({"a": 1}, {"op": "replace", "path": "", "value": {"b": 2}}, {"b": 2}),
    ],
)
def test_a_json_patch_operation_does(document: Any, operation: Any, expected: Any) -> None:
    assert json_patch(document, [operation]) == expected


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        ({"op": "remove", "path": "/nothing"}, 422),
        ({"op": "replace", "path": "/a/5", "value": 1}, 422),
        ({"op": "add", "path": "/a/01", "value": 1}, 422),
        ({"op": "add", "path": "a", "value": 1}, 422),
        ({"op": "add", "path": "/s/x", "value": 1}, 422),
        ({"op": "test", "path": "/a/0", "value": 2}, 422),
        ({"op": "test", "path": "/t", "value": 1}, 422),
        ({"op": "jump", "path": "/a"}, 400),
        ({"op": "add", "path": "/a"}, 400),
        ({"op": "move", "path": "/a"}, 400),
        ("x", 400),
    ],
)
def test_a_json_patch_that_cannot_be_done_is_refused(operation: Any, code: int) -> None:
    with pytest.raises(ApiError) as error:
        json_patch({"a": [1], "s": "text", "t": True}, [operation])
    assert error.value.code == code


POD_SPEC = built_in("core/v1.PodSpec")


def names(spec: Any) -> list[str]:
    return [container["name"] for container in spec["containers"]]


def test_a_strategic_patch_merges_containers_by_name_and_keeps_the_order_it_is_told() -> None:
    spec = {"containers": [{"name": "a", "image": "1"}, {"name": "b", "image": "1"}]}
    patch = {
        "$setElementOrder/containers": [{"name": "b"}, {"name": "c"}, {"name": "a"}],
        "containers": [{"name": "c", "image": "1"}, {"name": "a", "image": "2"}],
    }
    merged = strategic_merge_patch(spec, patch, POD_SPEC)
    assert names(merged) == ["b", "c", "a"]
    assert merged["containers"][2]["image"] == "2"


def test_a_strategic_patch_deletes_replaces_and_retains() -> None:
    spec = {"containers": [{"name": "a"}, {"name": "b"}], "volumes": [{"name": "v", "emptyDir": {}}]}
    merged = strategic_merge_patch(spec, {"containers": [{"name": "a", "$patch": "delete"}]}, POD_SPEC)
    assert names(merged) == ["b"]
    merged = strategic_merge_patch(merged, {"containers": [{"$patch": "replace"}, {"name": "x"}]}, POD_SPEC)
    assert names(merged) == ["x"]
    volume = {"name": "v", "hostPath": {"path": "/"}, "$retainKeys": ["name", "hostPath"]}
    merged = strategic_merge_patch(merged, {"volumes": [volume]}, POD_SPEC)
    assert merged["volumes"] == [{"name": "v", "hostPath": {"path": "/"}}]


def test_a_strategic_patch_of_a_plain_list_takes_values_out() -> None:
    metadata = {"finalizers": ["a", "b"]}
    patch = {"$deleteFromPrimitiveList/finalizers": ["a"]}
    merged = strategic_merge_patch(metadata, patch, built_in("meta/v1.ObjectMeta"))
    assert merged == {"finalizers": ["b"]}
