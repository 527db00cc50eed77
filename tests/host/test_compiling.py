"""Compilation in a subprocess, and the cache of what it made."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import wasmtime
from torpor_host.artifacts import ArtifactStore
from torpor_host.compiler import KIND, Compiler, fingerprint
from torpor_host.engine import GuestEngine
from torpor_host.engine_config import CodeSettings, EngineConfig, wasmtime_engine
from torpor_host.failures import InstallFailed, InstallRefused
from torpor_host.install import ModuleSource, install
from torpor_host.limits import MIB, InstanceLimits
from torpor_host.testing import wat_guest

WASM = wat_guest()


@pytest.fixture
def engine(artifact_store: ArtifactStore) -> Iterator[GuestEngine]:
    """With the compiler that a host has."""
    engine = GuestEngine(EngineConfig(), artifact_store)
    yield engine
    engine.close()


@pytest.fixture
def compiler(engine: GuestEngine) -> Compiler:
    return engine.compiler


def test_module_is_compiled_once_and_then_found(compiler: Compiler, monkeypatch: pytest.MonkeyPatch):
    first = compiler.compile(WASM)
    monkeypatch.setattr(subprocess, "run", None)
    assert compiler.compile(WASM) == first


def test_flipped_byte_in_a_compiled_file_is_never_run(engine: GuestEngine, artifact_store: ArtifactStore):
    """It is native code: wasmtime itself accepts it."""
    compiled = engine.compiler.compile(WASM)
    content = bytearray(compiled.path.read_bytes())
    content[len(content) // 2] ^= 0x40
    compiled.path.write_bytes(content)
    with pytest.raises(InstallFailed, match="missing or damaged: install again"):
        engine.modules.acquire(compiled)
    again = engine.compiler.compile(WASM)
    assert again == compiled
    engine.modules.acquire(again)
    engine.modules.release(again)


def test_other_settings_and_other_modules_have_other_keys(artifact_store: ArtifactStore):
    config = EngineConfig()
    other = replace(config, code=replace(config.code, optimise="none"))
    compilers = [
        Compiler(one, artifact_store, fingerprint(wasmtime_engine(one.code), one.code)) for one in (config, other)
    ]
    assert compilers[0].key(WASM) != compilers[1].key(WASM)
    assert compilers[0].key(WASM) != compilers[0].key(wat_guest(pages=3))


def test_fingerprint_is_of_the_engine_and_the_same_each_time():
    code = CodeSettings()
    one = fingerprint(wasmtime_engine(code), code)
    assert one == fingerprint(wasmtime_engine(code), code)
    assert one != fingerprint(wasmtime.Engine(), code)


def test_invalid_module_is_refused_with_the_validators_words(compiler: Compiler):
    wrong = wasmtime.wat2wasm("(module (func (result i32) (i32.const 0)))").replace(b"\x41\x00", b"\x42\x00")
    with pytest.raises(InstallRefused, match=r"not a valid module: .*type mismatch"):
        compiler.compile(bytes(wrong))


def test_compiler_that_takes_too_long_is_ended(artifact_store: ArtifactStore):
    config = EngineConfig(compile_timeout_s=0.01)
    compiler = Compiler(config, artifact_store, fingerprint(wasmtime_engine(config.code), config.code))
    with pytest.raises(InstallRefused, match="compiling took longer than"):
        compiler.compile(WASM)
    assert list((artifact_store.root / "tmp").iterdir()) == []


def test_compiler_that_needs_too_much_memory_is_ended(artifact_store: ArtifactStore):
    config = EngineConfig(compile_memory_bytes=80 * MIB)
    compiler = Compiler(config, artifact_store, fingerprint(wasmtime_engine(config.code), config.code))
    body = "(i32.add " * 2000 + "(local.get 0)" + "(local.get 0))" * 2000
    big = bytes(wasmtime.wat2wasm("(module" + f"(func (param i32) (result i32) {body})" * 300 + ")"))
    with pytest.raises(InstallRefused, match="compiling needs more than 80 MiB"):
        compiler.compile(big)
    assert artifact_store.find(KIND, compiler.key(big)) is None


def test_full_disk_in_the_compiler_is_the_hosts_trouble_and_says_so(compiler: Compiler, tmp_path: Path):
    source = tmp_path / "module.wasm"
    source.write_bytes(WASM)
    command = [sys.executable, "-m", "torpor_host.compile_worker", str(source), "/dev/full"]
    done = subprocess.run(
        [*command, CodeSettings().to_json(), str(4096 * MIB)], capture_output=True, text=True, check=False
    )
    with pytest.raises(InstallFailed, match=r"no space left in .*: free some, or set another folder"):
        compiler._judge(done.returncode, done.stderr)


def test_full_disk_while_installing_is_the_hosts_trouble(engine: GuestEngine, monkeypatch: pytest.MonkeyPatch):
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(InstallFailed, match="No space left on device"):
            install(engine, ModuleSource("core", WASM, "a.wasm"), limits=InstanceLimits())
    assert install(engine, ModuleSource("core", WASM, "a.wasm"), limits=InstanceLimits()).image is not None


def test_no_secret_of_the_environment_reaches_the_compiler(compiler: Compiler, monkeypatch: pytest.MonkeyPatch):
    seen: list[dict[str, str]] = []
    run = subprocess.run

    def spy(*args: object, **kwargs: object) -> object:
        seen.append(kwargs["env"])
        return run(*args, **kwargs)

    monkeypatch.setenv("TORPOR_TEST_SECRET", "hunter2")
    monkeypatch.setattr(subprocess, "run", spy)
    compiler.compile(WASM)
    assert seen
    assert "hunter2" not in str(seen)


def test_second_install_of_the_same_bytes_runs_nothing(engine: GuestEngine, monkeypatch: pytest.MonkeyPatch):
    source = ModuleSource("core", WASM, "a.wasm")
    first = install(engine, source, limits=InstanceLimits())
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr("torpor_host.install._new_instance", None)
    assert install(engine, source, limits=InstanceLimits()) == first
