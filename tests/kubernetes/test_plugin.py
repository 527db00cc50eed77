"""The fixtures, as another test suite meets them."""

import os
import subprocess
import sys

TESTS = """
def test_needs_kubernetes(kubernetes_assets):
    pass

def test_needs_nothing():
    pass
"""


def run_pytest(folder, **environment):
    (folder / "conftest.py").write_text('pytest_plugins = ["torpor_kubernetes_testing.plugin"]\n')
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=60)


def test_missing_binaries_fail_only_the_tests_that_need_them(tmp_path):
    empty = tmp_path / "assets"
    empty.mkdir()
    run = run_pytest(tmp_path, KUBEBUILDER_ASSETS=str(empty))
    assert run.returncode == 1
    assert "1 passed, 1 error" in run.stdout
    assert f"KUBEBUILDER_ASSETS={empty} has no etcd, kube-apiserver, kubectl" in run.stdout
    assert "Traceback" not in run.stdout


def test_given_binaries_are_not_built(tmp_path):
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in ("etcd", "kube-apiserver", "kubectl"):
        (assets / name).touch(mode=0o755)
    run = run_pytest(tmp_path, KUBEBUILDER_ASSETS=str(assets), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "2 passed" in run.stdout
    assert not (tmp_path / "cache").exists()
