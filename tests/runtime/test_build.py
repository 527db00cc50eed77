"""The build itself: what its keys depend on, that it gives the same bytes again, and how it fails."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
from torpor_runtime import guest_module, interpreter, sources, stdlib
from torpor_runtime.interpreter import Interpreter
from torpor_runtime.steps import BuildError, Steps
from torpor_runtime.testing import RUNTIME


@pytest.fixture
def built(build_script: ModuleType, runtime_wasm: Path) -> Interpreter:
    return Interpreter(build_script.cache_root(os.environ) / f"interpreter-{interpreter.key()}")


def linked(built: Interpreter, folder: Path) -> bytes:
    """Freeze the standard library and link, all anew, in a folder of their own."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    with Steps(folder / "logs", expected_s=10) as steps:
        guest_module.freeze_standard_library(steps, built, scratch, folder / "stdlib", os.environ)
        guest_module.link(steps, built, folder / "stdlib", scratch, folder / "module", os.environ)
    return (folder / "module" / guest_module.MODULE_NAME).read_bytes()


def test_the_quick_part_gives_the_same_bytes_anywhere(built: Interpreter, runtime_wasm: Path, tmp_path: Path) -> None:
    assert linked(built, tmp_path / "a-folder" / "with a space") == runtime_wasm.read_bytes()


def test_a_change_of_the_sdk_does_not_rebuild_the_interpreter(tmp_path: Path) -> None:
    sdk = tmp_path / "torpor_sdk"
    shutil.copytree(guest_module.SDK, sdk)
    before = guest_module.key(sdk), guest_module.stdlib_key(), interpreter.key()
    assert before[0] == guest_module.key()
    with (sdk / "__init__.py").open("a") as file:
        file.write("# changed\n")
    assert guest_module.key(sdk) != before[0]
    assert (guest_module.stdlib_key(), interpreter.key()) == before[1:]


def test_moving_a_module_of_the_sdk_changes_the_key(tmp_path: Path) -> None:
    sdk = tmp_path / "torpor_sdk"
    shutil.copytree(guest_module.SDK, sdk)
    before = guest_module.key(sdk)
    (sdk / "errors.py").rename(sdk / "mistakes.py")
    assert guest_module.key(sdk) != before


def test_every_module_of_the_sdk_is_frozen_in() -> None:
    names = {name for name, _, _ in guest_module.own_modules(guest_module.SDK)}
    assert {"torpor_sdk", "torpor_sdk._guest", "_torpor_boot", "_socket", "select"} <= names
    assert "_sysconfigdata__wasi_wasm32-wasi" in names
    assert not any(name.startswith("torpor_sdk.testing") for name in names)


def test_what_is_left_out_takes_its_submodules_along() -> None:
    assert stdlib.is_left_out("tkinter.ttk")
    assert stdlib.is_left_out("concurrent.futures.process")
    assert not stdlib.is_left_out("concurrent.futures.thread")
    assert stdlib.is_left_out("unittest.test.support")


def test_a_given_source_with_another_content_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "Python-3.13.5.tar.xz"
    wrong.write_bytes(b"not python")
    with pytest.raises(BuildError, match=r"TORPOR_PYTHON_SOURCE=.* has sha256 .*, which is not Python-3\.13\.5"):
        sources.fetched(sources.PYTHON, tmp_path, {"TORPOR_PYTHON_SOURCE": str(wrong)})


def test_a_given_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"TORPOR_ZLIB_SOURCE=/none is not a file"):
        sources.fetched(sources.ZLIB, tmp_path, {"TORPOR_ZLIB_SOURCE": "/none"})


def test_a_damaged_download_in_the_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / sources.ZLIB.name).write_bytes(b"half of it")

    def unreachable(*_: object) -> Path:
        raise BuildError("unreachable")

    monkeypatch.setattr(sources, "_download", unreachable)
    monkeypatch.setattr(sources, "_from_debian", unreachable)
    with pytest.raises(BuildError, match=r"cannot be fetched \(unreachable; unreachable\).*set TORPOR_ZLIB_SOURCE"):
        sources.fetched(sources.ZLIB, tmp_path, {})


def test_a_failing_step_tells_its_error_and_its_log(tmp_path: Path) -> None:
    script = "echo fine; echo 'x.c:1: error: no such thing' >&2; echo later; exit 3"
    with (
        Steps(tmp_path / "logs", expected_s=1) as steps,
        pytest.raises(BuildError, match=r"compile failed: x\.c:1: error: no such thing \(all of it: .*compile\.log\)"),
    ):
        steps.run("compile", ["sh", "-c", script], cwd=tmp_path, environment=os.environ)


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with Steps(tmp_path / "logs", expected_s=1) as steps, pytest.raises(BuildError, match="cannot run no-such-make"):
        steps.run("make", ["no-such-make"], cwd=tmp_path, environment=os.environ)


def test_stopping_ends_what_a_step_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    failures: list[BuildError] = []

    def run(steps: Steps) -> None:
        try:
            script = f"sleep 600 & echo $! > {started}.part; mv {started}.part {started}; wait"
            steps.run("wait", ["sh", "-c", script], cwd=tmp_path, environment=os.environ)
        except BuildError as error:
            failures.append(error)

    with Steps(tmp_path / "logs", expected_s=1) as steps:
        thread = threading.Thread(target=run, args=(steps,))
        thread.start()
        until = time.monotonic() + 10
        while not started.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        grandchild = os.pidfd_open(int(started.read_text()))
        steps.stop()
        thread.join(10)
    assert "stopped" in str(failures[0])
    ended, _, _ = select.select([grandchild], [], [], 10)
    os.close(grandchild)
    assert ended


def test_a_second_run_waits_for_the_first(build_script: ModuleType, tmp_path: Path) -> None:
    entered = threading.Event()

    def second() -> None:
        with build_script.exclusive_lock(tmp_path / "lock"):
            entered.set()

    with build_script.exclusive_lock(tmp_path / "lock"):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    thread.join()


def test_print_path_builds_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(RUNTIME / "build.py"), "--print-path"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_module_is_copied_whole_or_not_at_all(build_script: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"module")
    build_script.copy_whole(source, tmp_path / "new" / "target")
    assert (tmp_path / "new" / "target").read_bytes() == b"module"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["target"]
    with pytest.raises(BuildError, match="cannot write"):
        build_script.copy_whole(source, tmp_path / "source" / "target")


def test_a_cache_folder_with_a_space_is_refused_at_once(build_script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"has a space in it.*set XDG_CACHE_HOME"):
        build_script.runtime_module({**os.environ, "XDG_CACHE_HOME": str(tmp_path / "my cache")})
    assert list(tmp_path.iterdir()) == []


def test_old_modules_are_removed_and_recent_ones_kept(build_script: ModuleType, tmp_path: Path) -> None:
    for age in range(build_script.MODULES_KEPT + 3):
        folder = tmp_path / f"{age:016x}"
        folder.mkdir()
        os.utime(folder, (1_000_000 - age, 1_000_000 - age))
    (tmp_path / "sources").mkdir()
    build_script.remove_old(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [*(f"{age:016x}" for age in range(build_script.MODULES_KEPT)), "sources"]
