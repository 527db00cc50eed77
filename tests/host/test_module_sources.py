"""A module's bytes: from the folder, a ConfigMap or a URL."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from torpor_host.module_sources import ModuleUnavailable, fetch
from torpor_host.operator_spec import ModuleRef

CONTENT = b"operator"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def no_config_map(namespace, name):
    raise AssertionError("no ConfigMap is asked for")


def fetched(ref, folder=None, read=no_config_map):
    return fetch(ref, namespace="ns", folder=folder, read_config_map=read)


def refused(ref, **kwargs):
    with pytest.raises(ModuleUnavailable) as raised:
        fetched(ref, **kwargs)
    return raised.value


def test_a_file_is_read_from_the_module_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "operator.py").write_bytes(CONTENT)
    found = fetched(ModuleRef(file="a/operator.py", sha256=SHA256), folder=tmp_path)
    assert (found.content, found.sha256, found.filename) == (CONTENT, SHA256, "a/operator.py")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "link"])
def test_nothing_outside_the_module_folder_is_read(tmp_path, name):
    folder = tmp_path / "modules"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "link").symlink_to(tmp_path / "secret")
    assert "outside the host's module folder" in str(refused(ModuleRef(file=name), folder=folder))


def test_what_is_missing_may_come_and_what_is_wrong_stays_wrong(tmp_path):
    assert not refused(ModuleRef(file="a"), folder=tmp_path).final
    assert refused(ModuleRef(file="a")).final
    (tmp_path / "a").write_text("other")
    wrong = refused(ModuleRef(file="a", sha256=SHA256), folder=tmp_path)
    assert wrong.final and f"not {SHA256}" in str(wrong)
    (tmp_path / "folder").mkdir()
    assert "cannot be read" in str(refused(ModuleRef(file="folder"), folder=tmp_path))


@pytest.mark.parametrize(
    "data", [{"data": {"k": CONTENT.decode()}}, {"binaryData": {"k": base64.b64encode(CONTENT).decode()}}]
)
def test_a_config_map_is_read_as_the_operator_may(data):
    def read(namespace, name):
        assert (namespace, name) == ("ns", "m")
        return 200, json.dumps(data).encode()

    assert fetched(ModuleRef(config_map=("m", "k")), read=read).content == CONTENT


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((403, b'{"message": "forbidden"}'), "403 forbidden"),
        ((404, b"no json"), "ConfigMap ns/m: 404"),
        ((200, b'{"data": {}}'), "has no key k"),
        ((200, b"[]"), "is not readable"),
        ((200, b"{"), "is not readable"),
        ((200, b'{"binaryData": {"k": "!"}}'), "is no base64"),
    ],
)
def test_a_config_map_that_does_not_have_it_is_said(answer, says):
    assert says in str(refused(ModuleRef(config_map=("m", "k")), read=lambda namespace, name: answer))


@contextmanager
def web_server(status):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(CONTENT)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/modules/operator.wasm"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_url_is_fetched_and_its_last_part_is_the_name():
    with web_server(200) as url:
        found = fetched(ModuleRef(url=url, sha256=SHA256))
    assert (found.content, found.filename) == (CONTENT, "operator.wasm")


def test_a_url_that_does_not_answer_is_tried_again_and_other_schemes_are_not():
    with web_server(503) as url:
        assert not refused(ModuleRef(url=url, sha256=SHA256)).final
    assert not refused(ModuleRef(url=url, sha256=SHA256)).final
    assert refused(ModuleRef(url="file:///etc/passwd", sha256=SHA256)).final
