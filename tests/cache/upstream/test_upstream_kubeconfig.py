"""Credentials from a kubeconfig (in a process of its own), a pod's files, and given fields."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torpor_cache.apiserver import Credentials, CredentialsUnavailable
from torpor_cache.kubeconfig import FixedCredentials, InClusterCredentials, KubeconfigCredentials, source_for


def _kubeconfig(folder: Path, user: dict, cluster: dict | None = None) -> Path:
    path = folder / "config"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:6443/", **(cluster or {})}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [
            {"name": "main", "context": {"cluster": "c", "user": "u"}},
            {"name": "anonymous", "context": {"cluster": "c"}},
        ],
        "current-context": "main",
    }
    path.write_text(json.dumps(config))
    return path


def _plugin(folder: Path, code: str) -> dict:
    script = folder / "plugin.py"
    script.write_text(code)
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(script)],
            "interactiveMode": "Never",
        }
    }


async def test_server_token_and_tls_come_from_the_current_context(tmp_path):
    cluster = {"insecure-skip-tls-verify": True, "tls-server-name": "api.internal"}
    loaded = await KubeconfigCredentials(_kubeconfig(tmp_path, {"token": "t"}, cluster)).load()
    assert (loaded.server, loaded.token) == ("https://127.0.0.1:6443", "t")
    assert (loaded.insecure_skip_tls_verify, loaded.tls_server_name, loaded.rereads) == (True, "api.internal", False)


async def test_certificates_are_handed_over_as_text_with_paths_relative_to_the_file(tmp_path):
    for name in ("ca.pem", "client.pem", "client.key"):
        (tmp_path / name).write_text(f"text of {name}")
    user = {"client-certificate": "client.pem", "client-key": "client.key"}
    loaded = await KubeconfigCredentials(_kubeconfig(tmp_path, user, {"certificate-authority": "ca.pem"})).load()
    assert (loaded.ca_pem, loaded.client_certificate_pem) == ("text of ca.pem", "text of client.pem")
    assert loaded.client_key_pem == "text of client.key"
    assert "text of client.key" not in repr(loaded)


async def test_a_plugin_is_run_and_its_expiry_handed_over(tmp_path):
    status = {"token": "from-plugin", "expirationTimestamp": "2030-01-01T00:00:00Z"}
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    loaded = await KubeconfigCredentials(
        _kubeconfig(tmp_path, _plugin(tmp_path, f"print({json.dumps(answer)!r})"))
    ).load()
    assert loaded.token == "from-plugin"
    assert loaded.expires_unix_s == 1893456000


async def test_a_plugin_that_fails_is_told_with_its_words(tmp_path):
    user = _plugin(tmp_path, "import sys; sys.exit('log in first')")
    with pytest.raises(CredentialsUnavailable, match="log in first"):
        await KubeconfigCredentials(_kubeconfig(tmp_path, user)).load()


async def test_a_plugin_that_hangs_is_given_up(tmp_path):
    user = _plugin(tmp_path, "import time; time.sleep(600)")
    began_s = time.monotonic()
    with pytest.raises(CredentialsUnavailable, match=r"no answer within 0\.2 s"):
        await KubeconfigCredentials(_kubeconfig(tmp_path, user), timeout_s=0.2).load()
    assert time.monotonic() - began_s < 30


async def test_a_plugin_does_not_outlive_who_asked(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    loading = asyncio.ensure_future(KubeconfigCredentials(_kubeconfig(tmp_path, _plugin(tmp_path, code))).load())
    while not (pid_file.exists() and pid_file.read_text()):  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.01)
    pid = int(pid_file.read_text())
    os.kill(pid, 0)
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    async with asyncio.timeout(5):
        while _lives(pid):  # noqa: ASYNC110 - no child of ours
            await asyncio.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_token_file_is_read_again_without_another_process(tmp_path):
    (tmp_path / "token").write_text("one\n")
    source = KubeconfigCredentials(_kubeconfig(tmp_path, {"tokenFile": "token"}))
    assert (await source.load()).token == "one"
    (tmp_path / "token").write_text("two\n")
    (tmp_path / "config").unlink()
    loaded = await source.load()
    assert (loaded.token, loaded.rereads) == ("two", True)


async def test_user_and_password_and_no_user_at_all(tmp_path):
    path = _kubeconfig(tmp_path, {"username": "a", "password": "b:c"})
    loaded = await KubeconfigCredentials(path).load()
    assert (loaded.username, loaded.password, loaded.token) == ("a", "b:c", "")
    assert (await KubeconfigCredentials(path, "anonymous").load()).username == ""


@pytest.mark.parametrize("context", ["nowhere", ""])
async def test_what_is_missing_is_named(tmp_path, context):
    path = _kubeconfig(tmp_path, {}) if context else tmp_path / "absent"
    with pytest.raises(CredentialsUnavailable, match=context or "absent"):
        await KubeconfigCredentials(path, context).load()


async def test_a_pod_reads_its_own_files(tmp_path):
    (tmp_path / "token").write_text("t\n")
    (tmp_path / "ca.crt").write_text("ca")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    loaded = await InClusterCredentials(environ, tmp_path).load()
    assert loaded == Credentials("https://[fd00::1]:443", ca_pem="ca", token="t", rereads=True)
    (tmp_path / "token").unlink()
    with pytest.raises(CredentialsUnavailable, match="token cannot be read"):
        await InClusterCredentials(environ, tmp_path).load()
    with pytest.raises(CredentialsUnavailable, match="name a kubeconfig"):
        await InClusterCredentials({}, tmp_path).load()


async def test_a_pod_without_a_kubeconfig_uses_its_own_account(tmp_path):
    environ = {"KUBERNETES_SERVICE_HOST": "x"}
    assert isinstance(source_for(None, "", environ), InClusterCredentials)
    assert isinstance(source_for(tmp_path, "", environ), KubeconfigCredentials)
    assert isinstance(source_for(None, "", {}), KubeconfigCredentials)


async def test_given_fields_take_tokens_and_authorities_from_files(tmp_path):
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca").write_text("authority")
    source = FixedCredentials(Credentials("https://x"), token_file=tmp_path / "token", ca_file=tmp_path / "ca")
    loaded = await source.load()
    assert (loaded.token, loaded.ca_pem, loaded.rereads) == ("t", "authority", True)


def test_the_service_never_imports_the_library_that_costs_55_mb():
    code = "import sys, torpor_cache.informers, torpor_cache.kubeconfig; print('kubernetes_asyncio' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
