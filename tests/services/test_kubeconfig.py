"""Kubeconfigs that need nothing but the file."""

import base64
import copy

import pytest
import yaml
from torpor_services.kubeconfig import StaticContext, static

CA, CERTIFICATE, KEY = "ca pem", "certificate pem", "key pem"
GOOD = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "a",
    "contexts": [
        {"name": "a", "context": {"cluster": "c", "user": "u"}},
        {"name": "b", "context": {"cluster": "c", "user": "certified", "namespace": "n"}},
    ],
    "clusters": [
        {
            "name": "c",
            "cluster": {
                "server": "https://127.0.0.1:6443/",
                "certificate-authority-data": base64.b64encode(CA.encode()).decode(),
            },
        }
    ],
    "users": [
        {"name": "u", "user": {"token": "t"}},
        {"name": "certified", "user": {"client-certificate": "u.crt", "client-key": "u.key"}},
    ],
}


def written(folder, document):
    path = folder / "config"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def test_the_current_context_is_read(tmp_path):
    found = static(written(tmp_path, GOOD))
    assert found == StaticContext("https://127.0.0.1:6443", ca_pem=CA, token="t")


def test_files_are_looked_for_beside_the_kubeconfig(tmp_path):
    (tmp_path / "u.crt").write_text(CERTIFICATE)
    (tmp_path / "u.key").write_text(KEY)
    found = static(written(tmp_path, GOOD), "b")
    assert (found.client_certificate_pem, found.client_key_pem, found.token) == (CERTIFICATE, KEY, "")


@pytest.mark.parametrize(
    "user",
    [
        {"exec": {"command": "x"}},
        {"auth-provider": {"name": "x"}},
        {"tokenFile": "x"},
        {"username": "a", "password": "b"},
        {"token": 5},
        {"client-certificate": "missing.crt"},
        {"client-certificate-data": "no base64!"},
    ],
)
def test_what_the_file_alone_does_not_say_is_left_to_the_library(tmp_path, user):
    document = copy.deepcopy(GOOD)
    document["users"][0]["user"] = user
    assert static(written(tmp_path, document)) is None


@pytest.mark.parametrize("document", ["", "a: [", "- 1", "contexts: 5", "\x00", "[" * 3000])
def test_a_broken_file_is_left_to_the_library(tmp_path, document):
    assert static(written(tmp_path, document)) is None


def test_a_context_or_file_that_is_missing_is_left_to_the_library(tmp_path):
    assert static(written(tmp_path, GOOD), "z") is None
    assert static(tmp_path / "none") is None
