"""Objects from bytes: nothing but managedFields is left out, kind and apiVersion are always there."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor_cache.objects import ChangeType, MalformedObject, allow_deep_json, parse_object
from torpor_cache.payloads import Bookmark, ErrorEvent, ObjectEvent, parse_event, parse_items, parse_page
from torpor_cache.resources import (
    InvalidResource,
    InvalidResourceVersion,
    ObjectKey,
    Resource,
    parse_resource_version,
)

MANAGED = [{"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:data": {"f:x": {}}}}]


def _object(**metadata) -> dict:
    base = {"name": "a", "namespace": "ns", "uid": "u", "resourceVersion": "7"}
    return {"kind": "ConfigMap", "apiVersion": "v1", "metadata": base | metadata, "data": {"x": "y"}}


def _bytes(body, **options) -> bytes:
    return json.dumps(body, separators=options.get("separators", (",", ":"))).encode()


def _without(body: dict) -> dict:
    return body | {"metadata": {k: v for k, v in body["metadata"].items() if k != "managedFields"}}


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("place", ["first", "middle", "last", "only copy of itself"])
def test_managed_fields_are_left_out_wherever_they_stand(place, separators):
    body = _object()
    metadata = body["metadata"]
    if place == "first":
        body["metadata"] = {"managedFields": MANAGED, **metadata}
    elif place == "middle":
        body["metadata"] = {"name": "a", "managedFields": MANAGED, **metadata}
    else:
        metadata["managedFields"] = MANAGED
    if place == "only copy of itself":
        body = {"aaa": {"metadata": {"managedFields": MANAGED}}, **body}
    stored = parse_object(_bytes(body, separators=separators))
    assert json.loads(stored.json) == _without(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.just("managedFields"), inner),
    max_leaves=8,
)


@given(json_values, json_values, st.booleans())
def test_everything_else_is_kept_as_it_was(before, after, managed):
    body = {"before": before, **_object(annotations={"n": '"managedFields":[]'}), "after": after}
    if managed:
        body["metadata"]["managedFields"] = MANAGED
    line = b'{"type":"ADDED","object":' + _bytes(body) + b"}"
    event = parse_event(b"xx" + line + b"yy", 2, 2 + len(line))
    assert isinstance(event, ObjectEvent)
    assert json.loads(event.item.json) == _without(body)


def test_kind_and_api_version_are_added_where_a_list_leaves_them_out():
    body = {k: v for k, v in _object().items() if k not in ("kind", "apiVersion")}
    page = parse_page(
        _bytes({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "9"}, "items": [body]})
    )
    (item,) = parse_items(page, 0, 1)
    assert json.loads(item.json) == {"kind": "Pod", "apiVersion": "v1", **body}


def test_items_that_name_their_kind_keep_it():
    page = parse_page(_bytes({"kind": "List", "metadata": {"resourceVersion": "9"}, "items": [_object()]}))
    assert json.loads(parse_items(page, 0, 1)[0].json)["kind"] == "ConfigMap"


def test_a_list_of_nothing_may_be_null():
    assert parse_page(b'{"kind":"XList","metadata":{"resourceVersion":"1"},"items":null}').raw_items == []


def test_objects_with_equal_labels_share_them():
    one, two = (parse_object(_bytes(_object(labels={"app": "x"}))) for _ in range(2))
    assert one.labels is two.labels and one.labels == {"app": "x"}


def test_metadata_is_parsed_partially_and_absence_is_empty():
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "o", "controller": True}
    stored = parse_object(_bytes(_object(ownerReferences=[owner], finalizers=["f"], generation=3)))
    stored.drop_parsed()
    metadata = stored.metadata
    assert metadata.owner_references[0].controller and metadata.owner_references[0].kind == "ReplicaSet"
    assert (metadata.finalizers, metadata.generation) == (["f"], 3)
    assert (metadata.labels, metadata.annotations, metadata.deletion_timestamp) == ({}, {}, "")


def test_nulls_stand_for_absence():
    stored = parse_object(_bytes(_object(labels=None, deletionTimestamp=None, managedFields=MANAGED)))
    stored.drop_parsed()
    assert stored.labels == {} and stored.metadata.deletion_timestamp == ""
    assert "managedFields" not in json.loads(stored.json)["metadata"]


def test_fields_are_what_the_server_compares():
    body = _object() | {"spec": {"hostNetwork": True}, "status": {"phase": "Running"}}
    stored = parse_object(_bytes(body))
    paths = frozenset({"metadata.name", "status.phase", "spec.hostNetwork", "spec.nodeName"})
    assert stored.fields(paths) == {
        "metadata.name": "a",
        "status.phase": "Running",
        "spec.hostNetwork": "true",
        "spec.nodeName": "",
    }


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"metadata":{}}',
        b'{"metadata":{"name":"a","uid":"u","resourceVersion":"x"}}',
        b'{"metadata":{"name":"a","uid":"u","resourceVersion":"0"}}',
        b'{"metadata":{"name":7}}',
        b'{"metadata":null}',
        b'{"metadata":{"name":"a","uid":"u","resourceVersion":"1"}} trailing',
        b'{"metadata":{"name":"\xff\xfe","uid":"u","resourceVersion":"1"}}',
        b'{"a":' * 100_000,
    ],
)
def test_what_is_no_object_is_refused(raw):
    with pytest.raises(MalformedObject):
        parse_object(raw)


@pytest.mark.parametrize(
    "line",
    [
        b"x",
        b'{"type":"NEW","object":{}}',
        b'{"type":"ERROR","object":3}',
        b'{"object":{}}',
        b'{"type":"ADDED","object":1}',
    ],
)
def test_what_is_no_event_is_refused(line):
    with pytest.raises(MalformedObject):
        parse_event(line, 0, len(line))


def test_a_bookmark_may_carry_nothing_but_a_version():
    line = b'{"type":"BOOKMARK","object":{"kind":"Pod","metadata":{"resourceVersion":"12","creationTimestamp":null}}}'
    assert parse_event(line, 0, len(line)) == Bookmark(12, False, "Pod")


def test_events_written_otherwise_than_by_go_are_understood():
    line = b' { "object" : ' + _bytes(_object(managedFields=MANAGED)) + b' , "type" : "MODIFIED" } '
    event = parse_event(line, 0, len(line))
    assert isinstance(event, ObjectEvent) and event.type is ChangeType.MODIFIED
    assert json.loads(event.item.json) == _object()


def test_an_error_event_without_a_code_counts_as_a_server_error():
    line = b'{"type":"ERROR","object":{"kind":"Status","message":"m"}}'
    assert parse_event(line, 0, len(line)) == ErrorEvent(500, {"kind": "Status", "message": "m"})


def test_stored_bytes_do_not_hold_the_buffer_they_came_from():
    body = _object(managedFields=MANAGED)
    buffer = b'{"type":"ADDED","object":' + _bytes(body) + b"}"
    event = parse_event(buffer, 0, len(buffer))
    assert isinstance(event, ObjectEvent)
    event.item.drop_parsed()
    assert isinstance(event.item.json, bytes) and event.item.json is not buffer


@pytest.mark.parametrize("text", ["v1/configmaps", "apps/v1/deployments", "example.com/v1alpha1/dbs"])
def test_resources_are_read_and_written_alike(text):
    assert str(Resource.parse(text)) == text


@pytest.mark.parametrize("text", ["", "configmaps", "a/b/c/d", "v1/../secrets", "apps/v1/", "V1/x", "v1/a b"])
def test_texts_that_could_not_stand_in_a_path_are_no_resources(text):
    with pytest.raises(InvalidResource):
        Resource.parse(text)


def test_paths_escape_what_is_a_name():
    assert Resource.parse("v1/pods").path("n s", "a/b", "log") == "/api/v1/namespaces/n%20s/pods/a%2Fb/log"
    assert Resource.parse("apps/v1/deployments").path() == "/apis/apps/v1/deployments"


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "abc", "01", "９", "1" * 30])
def test_versions_that_are_no_positive_numbers_are_refused(text):
    with pytest.raises(InvalidResourceVersion):
        parse_resource_version(text)


def test_keys_sort_by_namespace_then_name():
    assert sorted([ObjectKey("b", "a"), ObjectKey("a", "z")]) == [ObjectKey("a", "z"), ObjectKey("b", "a")]


def test_an_object_nested_as_deep_as_the_api_server_takes_it_is_read():
    nested = b"[" * 9_900 + b"]" * 9_900
    raw = b'{"kind":"T","apiVersion":"x/v1","metadata":{"name":"a","uid":"u","resourceVersion":"5"},"spec":%s}' % nested
    before = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(1_000)
        with pytest.raises(MalformedObject):
            parse_object(raw)
        allow_deep_json()
        assert parse_object(raw).json == raw
    finally:
        sys.setrecursionlimit(before)
