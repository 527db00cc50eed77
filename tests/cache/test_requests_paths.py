"""What a path is about, and which are refused."""

import pytest
from torpor_cache.paths import PATH_LENGTH_MAX, RefusedRequest, parse_path
from torpor_cache.requests import accepts_json
from torpor_cache.resources import Resource

PODS = Resource("", "v1", "pods")
NAMESPACES = Resource("", "v1", "namespaces")
DEPLOYMENTS = Resource("apps", "v1", "deployments")


@pytest.mark.parametrize(
    ("path", "resource", "namespace", "name", "subresource"),
    [
        ("/api/v1/pods", PODS, "", "", ""),
        ("/api/v1/namespaces/ns/pods", PODS, "ns", "", ""),
        ("/api/v1/namespaces/ns/pods/", PODS, "ns", "", ""),
        ("/api/v1/namespaces/ns/pods/a", PODS, "ns", "a", ""),
        ("/api/v1/namespaces/ns/pods/a/log", PODS, "ns", "a", "log"),
        ("/apis/apps/v1/namespaces/ns/deployments/a/scale", DEPLOYMENTS, "ns", "a", "scale"),
        ("/api/v1/namespaces", NAMESPACES, "", "", ""),
        ("/api/v1/namespaces/ns", NAMESPACES, "", "ns", ""),
        ("/api/v1/namespaces/ns/status", NAMESPACES, "", "ns", "status"),
        ("/api/v1/namespaces/ns/finalize", NAMESPACES, "", "ns", "finalize"),
    ],
)
def test_paths_of_resources(path, resource, namespace, name, subresource):
    found = parse_path(path)
    assert (found.resource, found.namespace, found.name, found.subresource) == (resource, namespace, name, subresource)


@pytest.mark.parametrize("path", ["/api", "/apis", "/api/v1", "/apis/apps", "/apis/apps/v1", "/version", "/openapi/v3"])
def test_discovery_names_no_resource(path):
    assert parse_path(path).resource is None


def test_queries_are_kept_and_written_anew():
    found = parse_path("/api/v1/pods?labelSelector=a%3Db%2Cc&limit=5&empty=&labelSelector=z")
    assert found.parameter("labelSelector") == "a=b,c"
    assert found.target == "/api/v1/pods?labelSelector=a%3Db%2Cc&limit=5&empty=&labelSelector=z"


def test_names_with_colons_stay_as_they_are():
    path = "/apis/rbac.authorization.k8s.io/v1/clusterroles/system:node"
    assert parse_path(path).path == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "api/v1/pods",
        "/",
        "/metrics",
        "/healthz",
        "/logs",
        "/api/v1//pods",
        "/api/v1/./pods",
        "/api/v1/namespaces/a/../b/pods",
        "/api/v1/namespaces/%2E%2e/pods",
        "/api/v1/namespaces/a%2Fb/pods",
        "/api/v1/namespaces/a%5cb/pods",
        "/api/v1/namespaces/a%252fb/pods",
        "/api/v1/pods%00",
        "/api/v1/pods\n",
        "/api/v1/pods#x",
        "/api/v1/pods ",
        "/api/v1/pödß",
        "/api/V1/pods",
        "/api/v1/watch/pods",
        "/api/v1/proxy/nodes/x",
        "/api/v1/pods?watch=1",
        "/api/v1/pods?watch=True&watch=false",
        "/api/v1/pods?watch=false&watch=true",
        "/api/v1/namespaces/ns/pods/a/exec",
        "/api/v1/namespaces/ns/pods/a/attach",
        "/api/v1/namespaces/ns/pods/a/portforward",
        "/api/v1/namespaces/ns/pods/a/proxy/x",
        "/api/v1/nodes/n/proxy/metrics",
        "/api/v1/namespaces/ns/pods/a/log?follow=true",
        "/api/v1/pods?" + "a=b&" * 200,
        "/api/v1/" + "a" * PATH_LENGTH_MAX,
    ],
)
def test_paths_that_are_refused(path):
    with pytest.raises(RefusedRequest):
        parse_path(path)


@pytest.mark.parametrize(
    ("accept", "plain"),
    [
        ("", True),
        ("*/*", True),
        ("application/json", True),
        ("application/json; charset=utf-8", True),
        ("application/vnd.kubernetes.protobuf, application/json", True),
        ("application/vnd.kubernetes.protobuf", False),
        ("application/json;as=Table;v=v1;g=meta.k8s.io,application/json", False),
        ("application/json; as=PartialObjectMetadata;g=meta.k8s.io;v=v1", False),
        ("application/yaml", False),
    ],
)
def test_which_answers_memory_can_give(accept, plain):
    assert accepts_json(accept) is plain
