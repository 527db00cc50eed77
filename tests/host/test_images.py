"""Images: what a wake restores, what it shares, and when a module runs without one."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torpor_host import abi, wasm_code
from torpor_host.artifacts import ArtifactStore
from torpor_host.engine import GuestEngine
from torpor_host.engine_config import EngineConfig
from torpor_host.failures import GuestOutOfMemory, InstallFailed, InstallRefused
from torpor_host.hostcalls import CallError, CallResponse, KubeRequest
from torpor_host.images import COPIED_MAX, arranged
from torpor_host.install import InstalledModule, ModuleSource, install, python_base
from torpor_host.instance import Instance
from torpor_host.limits import MIB, InstanceLimits
from torpor_host.replay import is_discovery
from torpor_host.testing import DONE, Guests, engine_in, wat_guest, wat_text

Woken = Callable[..., Instance]

PAGE = 4096
KUBE = '(import "torpor" "kube_request" (func $kube (param i32 i32) (result i32)))'

SAY = "(func $say (param i32) (call $log (i32.const 1) (local.get 0) (i32.const 1)))"
LETTERS = '(data (i32.const 4096) "SIDWR")'


def bytes_at(pointer: int, length: int) -> str:
    return f"(i64.const {pointer << 32 | length})"


# What is restored.


def test_wake_runs_nothing_but_torpor_wake(guests: Guests):
    wasm = wat_guest(
        "(call $say (i32.const 4100)) $done",
        describe=f"(call $say (i32.const 4098)) {bytes_at(128, 10)}",
        describe_result=abi.encode([b"", b"{}"]),
        fields=f"""{SAY} {LETTERS}
          (func $start (call $say (i32.const 4096))) (start $start)
          (func (export "_initialize") (call $say (i32.const 4097)))
          (func (export "torpor_wake") (call $say (i32.const 4099)))""",
    )
    module = guests.install(wasm)
    assert module.image is not None
    for _ in range(2):
        guests.run(guests.wake(module))
    assert "".join(guests.calls.lines()) == "WRWR"


INITIALISED = wat_guest(
    f"""(i64.store (i32.const 8192) (global.get $big))
      (i64.store (i32.const 8200) (i64.reinterpret_f64 (global.get $nan)))
      (i32.store (i32.const 8208) (i32.reinterpret_f32 (global.get $single)))
      (i32.store (i32.const 8212) (i32.load (i32.const 300000)))
      (global.set $big (i64.const 1)) (i32.store (i32.const 300000) (i32.const 1))
      {bytes_at(8192, 24)}""",
    fields="""(global $big (mut i64) (i64.const 0))
      (global $nan (mut f64) (f64.const 0))
      (global $single (mut f32) (f32.const 0))
      (func (export "_initialize")
        (global.set $big (i64.const -2))
        (global.set $nan (f64.const -nan:0x123456789abcd))
        (global.set $single (f32.const nan:0x12345))
        (drop (memory.grow (i32.const 8)))
        (i32.store (i32.const 300000) (i32.const 0x01020304)))""",
)


def test_memory_that_grew_and_all_globals_are_restored_each_time(guests: Guests):
    module = guests.install(INITIALISED)
    assert module.image is not None
    assert module.image.memory_bytes == 10 * 65536
    for _ in range(3):
        result = guests.run(guests.wake(module))
        assert int.from_bytes(result[:8], "little", signed=True) == -2
        assert int.from_bytes(result[8:16], "little") == 0xFFF123456789ABCD
        assert int.from_bytes(result[16:20], "little") == 0x7F812345
        assert result[20:24] == b"\x04\x03\x02\x01"


def test_wake_of_a_large_heap_shares_it(guests: Guests):
    """64 MiB, all of it written at initialisation: an awake instance owns the pages it touches."""
    wasm = wat_guest(
        "(i32.store (i32.const 5000000) (i32.const 1)) $done",
        fields="""(func (export "_initialize")
          (drop (memory.grow (i32.const 1022)))
          (memory.fill (i32.const 131072) (i32.const 7) (i32.const 66977792)))""",
    )
    module = guests.install(wasm)
    assert module.image_bytes == 64 * MIB
    instance = guests.wake(module)
    assert instance.private_bytes() == 0
    guests.run(instance)
    assert 0 < instance.private_bytes() <= 4 * PAGE


def test_zero_pages_of_an_image_take_no_disk(guests: Guests):
    module = guests.install(wat_guest(fields='(func (export "_initialize") (drop (memory.grow (i32.const 1000))))'))
    assert module.image is not None
    assert module.image_bytes > 60 * MIB
    assert module.image.base.path.stat().st_blocks * 512 < 64 * 1024


def test_what_one_instance_writes_no_other_sees(guests: Guests):
    module = guests.install(
        wat_guest("(i64.store (i32.const 8192) (i64.add (i64.load (i32.const 8192)) (i64.const 1))) "
                  + bytes_at(8192, 8))
    )  # fmt: skip
    one, two = guests.wake(module), guests.wake(module)
    assert [int.from_bytes(guests.run(one), "little") for _ in range(3)] == [1, 2, 3]
    assert int.from_bytes(guests.run(two), "little") == 1
    one.close()
    assert int.from_bytes(guests.run(guests.wake(module)), "little") == 1


def test_image_larger_than_the_limit_at_wake_is_out_of_memory(guests: Guests):
    module = guests.install(INITIALISED)
    with pytest.raises(GuestOutOfMemory, match=r"after initialisation it has 0\.6 MiB, the limit is 0\.5 MiB"):
        guests.wake(module, InstanceLimits(memory_bytes=MIB // 2))


# Without an image.


TABLE = wat_guest(
    "(call_indirect (result i64) (i32.const 0))",
    fields=f"""(table 1 funcref) (elem (i32.const 0) $first) (elem declare func $second)
      (func $first (result i64) (i64.const {0x40 << 32 | 1}))
      (func $second (result i64) {bytes_at(16, len(DONE))})
      (func (export "_initialize") (table.set (i32.const 0) (ref.func $second)))""",
)


def test_module_that_changes_its_table_runs_rightly_without_an_image(guests: Guests):
    module = guests.install(TABLE)
    assert module.image is None
    assert module.image_refusal is not None
    assert "has table.set: an image does not hold tables" in module.image_refusal
    instance = guests.wake(module)
    assert guests.run(instance) == DONE
    assert not instance.imaged


def test_install_check_finds_what_an_image_misses(guests: Guests, monkeypatch: pytest.MonkeyPatch):
    """Were the search for table writes blind, the check would still see that the woken guest is another one."""
    monkeypatch.setattr(wasm_code, "image_refusal", lambda wasm, layout: None)
    module = guests.install(TABLE)
    assert module.image is None
    assert module.image_refusal == "the check's call gave another result after a restore"
    assert guests.run(guests.wake(module)) == DONE


def test_install_check_compares_memory_even_where_results_agree(guests: Guests, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wasm_code, "image_refusal", lambda wasm, layout: None)
    wasm = wat_guest(
        "(i32.store (i32.const 8192) (call_indirect (result i32) (i32.const 0))) $done",
        fields="""(table 1 funcref) (elem (i32.const 0) $first) (elem declare func $second)
          (func $first (result i32) (i32.const 1)) (func $second (result i32) (i32.const 2))
          (func (export "_initialize") (table.set (i32.const 0) (ref.func $second)))""",
    )
    assert guests.install(wasm).image_refusal == "the check left another memory after a restore, first near 0x0"


def test_install_check_is_not_fooled_by_time_randomness_and_sleep(guests: Guests):
    wasm = wat_guest(
        """(drop (call $random (i32.const 8192) (i32.const 64)))
          (drop (call $clock (i32.const 1) (i64.const 0) (i32.const 8256))) $done""",
        imports="""(import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))
          (import "wasi_snapshot_preview1" "clock_time_get" (func $clock (param i32 i64 i32) (result i32)))""",
    )
    assert guests.install(wasm).image is not None


def test_guest_whose_probe_fails_in_the_same_way_twice_keeps_its_image(guests: Guests):
    assert guests.install(wat_guest("(unreachable)")).image is not None


# Files.


def test_damaged_image_is_never_woken_from_and_installing_again_repairs_it(tmp_path: Path):
    wasm = wat_guest()
    first = Guests(engine_in(ArtifactStore(tmp_path / "s")))
    module = first.install(wasm)
    assert module.image is not None
    path = module.image.base.path
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    second = Guests(engine_in(ArtifactStore(tmp_path / "s")))
    with pytest.raises(InstallFailed, match="missing or damaged: install again"):
        second.wake(module)
    repaired = second.install(wasm)
    assert second.run(second.wake(repaired)) == DONE
    for guests in (first, second):
        guests.close()
        guests.engine.close()


def test_removed_image_harms_no_awake_instance_and_is_made_again(guests: Guests):
    wasm = wat_guest()
    module = guests.install(wasm)
    assert module.image is not None
    awake = guests.wake(module)
    module.image.base.path.unlink()
    assert guests.run(awake) == DONE
    with pytest.raises(InstallFailed, match="install again"):
        guests.wake(module)
    assert guests.run(guests.wake(guests.install(wasm))) == DONE


def test_no_secret_of_the_environment_is_in_any_file(
    guests: Guests, monkeypatch: pytest.MonkeyPatch, artifact_store: ArtifactStore
):
    from torpor_host.testing import c_guest

    monkeypatch.setenv("TORPOR_TEST_SECRET", "hunter2-correct-horse")
    guests.calls.configuration = b'{"env": {"PASSWORD": "hunter2-correct-horse"}}'
    module = guests.install(
        c_guest("""extern char **environ; char *all[64];
          EXPORT(torpor_reconcile) uint64_t reconcile(const char *message, uint32_t len) {
            take(out, host_config()); return tell("read"); }
          EXPORT(_unused) void unused(void) { for (int i = 0; i < 64; i++) all[i] = strdup(environ[i]); }""")
    )
    guests.told(guests.wake(module))
    stored = [path for path in artifact_store.root.rglob("*") if path.is_file()]
    assert len(stored) >= 3
    assert not [path for path in stored if b"hunter2-correct-horse" in path.read_bytes()]


# Discovery.


def asks(path: bytes) -> bytes:
    """A guest that cannot describe itself before it has a 200 for the path."""
    message = abi.encode([b"GET", path, b"application/json"])
    return wat_guest(
        describe=f"""(drop (call $take (i32.const 16384) (call $kube (i32.const 4096) (i32.const {len(message)}))))
          (if (i32.ne (i32.load (i32.const 16384)) (i32.const 3)) (then (unreachable))) {bytes_at(128, 10)}""",
        describe_result=abi.encode([b"", b"{}"]),
        imports=KUBE,
        fields=f"(data (i32.const 4096) {wat_text(message)})",
    )


def test_discovery_is_answered_while_the_image_is_built_and_objects_are_not(engine: GuestEngine):
    asked: list[str] = []

    def discovery(request: KubeRequest) -> CallResponse | None:
        asked.append(request.path)
        return CallResponse(200, "application/json", b"{}")

    def source(path: bytes) -> ModuleSource:
        return ModuleSource("core", asks(path), "a.wasm")

    install(engine, source(b"/apis/apps/v1"), limits=InstanceLimits(), discovery=discovery)
    assert asked == ["/apis/apps/v1"]
    with pytest.raises(InstallRefused, match="describe: unreachable"):
        install(engine, source(b"/api/v1/secrets"), limits=InstanceLimits(), discovery=discovery)
    assert asked == ["/apis/apps/v1"]


def test_cluster_that_cannot_be_asked_is_no_fault_of_the_module(engine: GuestEngine):
    with pytest.raises(InstallFailed, match="could not be asked"):
        install(
            engine,
            ModuleSource("core", asks(b"/api"), "a.wasm"),
            limits=InstanceLimits(),
            discovery=lambda request: CallResponse.failed(CallError.UNAVAILABLE, "down"),
        )


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/api", True),
        ("GET", "/apis/apps/v1?timeout=32s", True),
        ("GET", "/openapi/v3/apis/apps/v1", True),
        ("GET", "/version", True),
        ("POST", "/api", False),
        ("GET", "/api/v1/pods", False),
        ("GET", "/apis/apps/v1/deployments", False),
        ("GET", "/metrics", False),
    ],
)
def test_discovery_is_what_names_no_object(method: str, path: str, allowed: bool):
    assert is_discovery(KubeRequest(method, path, "", "", b"")) is allowed


# A language runtime and its operators: base and overlays.

RUNTIME = wat_guest(
    # Tells the first bytes of the source, a counter over loads, and a page of the base.
    f"""(i64.store (i32.const 65000) (i64.load (i32.const 1048576)))
      (i64.store (i32.const 65008) (global.get $loads))
      (i64.store (i32.const 65016) (i64.load (i32.const 2097152)))
      (i64.store (i32.const 65024) (i64.load (i32.const 4194304))) {bytes_at(65000, 32)}""",
    fields="""(global $loads (mut i64) (i64.const 0))
      (func (export "_initialize")
        (drop (memory.grow (i32.const 62)))
        (i64.store (i32.const 2097152) (i64.const 0x5555))
        (memory.fill (i32.const 2200000) (i32.const 3) (i32.const 1000000)))
      (func (export "torpor_load") (param $p i32) (param $n i32) (result i64) (local $i i32)
        (global.set $loads (i64.add (global.get $loads) (i64.const 1)))
        (i64.store (i32.const 1048576) (i64.load (i32.sub (i32.add (local.get $p) (local.get $n)) (i32.const 8))))
        ;; 40 pages, five apart: too far for a gap to be filled
        (loop $l
          (i64.store (i32.add (i32.const 2228224) (i32.mul (local.get $i) (i32.const 24576))) (i64.const 9))
          (br_if $l (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 40))))
        (drop (memory.grow (i32.const 2)))
        (i64.store (i32.const 4194304) (i64.load (i32.const 1048576)))
        ;; and 8 new pages beside one another
        (memory.fill (i32.const 4210688) (i32.const 7) (i32.const 32768))
        (i64.const 0))""",
)


@pytest.fixture(params=["mapped", "copied", "no maps left"])
def python_guests(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guests]:
    runtime = tmp_path / "runtime.wasm"
    runtime.write_bytes(RUNTIME)
    config = EngineConfig(
        python_runtime=runtime,
        map_overlays=request.param != "copied",
        maps_max=6 if request.param == "no maps left" else 50_000,
    )
    guests = Guests(engine_in(ArtifactStore(tmp_path / "artifacts"), config))
    yield guests
    guests.close()
    guests.engine.close()


def operator(guests: Guests, content: bytes) -> InstalledModule:
    return install(guests.engine, ModuleSource("python", content, "operator.py"), limits=InstanceLimits())


def test_operators_share_the_base_and_differ_in_their_pages(python_guests: Guests):
    one, two = operator(python_guests, b"operator1"), operator(python_guests, b"operator2")
    assert one.image is not None
    assert two.image is not None
    assert one.image.base == two.image.base
    assert one.image.overlay is not None
    assert one.image.overlay.copied >= 40
    assert one.image.overlay.to_map() == [(4194304 // PAGE, 4 + 8)]  # a gap of three is filled
    assert one.image_bytes < 70 * PAGE
    for module, word in ((one, b"perator1"), (two, b"perator2"), (one, b"perator1")):
        result = python_guests.run(python_guests.wake(module))
        assert result[:8] == result[24:32] == word
        assert int.from_bytes(result[8:16], "little") == 1
        assert int.from_bytes(result[16:24], "little") == 0x5555


def test_pages_that_the_base_has_too_are_copied_and_new_ones_mapped_where_there_is_room(python_guests: Guests):
    module = operator(python_guests, b"operator1")
    assert module.image is not None
    assert module.image.overlay is not None
    copied = PAGE * sum(count for _first, count in module.image.overlay.to_copy())
    mapped = PAGE * sum(count for _first, count in module.image.overlay.to_map())
    instance = python_guests.wake(module)
    maps = python_guests.engine.config.map_overlays and python_guests.engine.maps.maximum > 6
    assert instance.private_bytes() == copied + (0 if maps else mapped)
    assert python_guests.engine.maps.held == (4 + 1 + 2 if maps else 4 + 1)
    instance.close()
    assert python_guests.engine.maps.held == 0


def test_runs_of_new_pages_are_mapped_and_the_rest_is_copied():
    new, old = True, False
    changed = [(2, old), (3, old), (10, new), (12, new), (13, new), (15, old), (16, new), (17, new), (40, new)]
    assert arranged(changed) == ([(2, 2), (15, 1), (40, 1)], [(10, 8)])


def test_an_operator_that_changed_much_of_the_base_has_all_of_it_mapped():
    changed = [(10 * page, False) for page in range(COPIED_MAX)]
    assert arranged(changed) == ([(10 * page, 1) for page in range(COPIED_MAX)], [])
    changed += [(10 * COPIED_MAX, False), (10 * COPIED_MAX + 5, False)]
    to_copy, to_map = arranged(changed)
    assert to_copy == []
    assert to_map[-1] == (10 * COPIED_MAX, 6)
    assert len(to_map) == COPIED_MAX + 1


def test_base_is_the_same_when_it_is_built_again(python_guests: Guests):
    """Else every operator's image would be lost with it."""
    before = python_base(python_guests.engine).image
    assert before is not None
    python_guests.engine.store.remove(before.base)
    after = python_base(python_guests.engine).image
    assert after is not None
    assert after.identity == before.identity
    assert operator(python_guests, b"operator1").image is not None


def test_operator_whose_code_does_not_load_is_refused_with_its_error(tmp_path: Path, artifact_store: ArtifactStore):
    runtime = tmp_path / "runtime.wasm"
    error = abi.encode([b"SyntaxError: line 3"])
    runtime.write_bytes(
        wat_guest(
            fields=f"""(data (i32.const 512) {wat_text(error)})
          (func (export "torpor_load") (param i32 i32) (result i64) {bytes_at(512, len(error))})"""
        )
    )
    engine = engine_in(artifact_store, EngineConfig(python_runtime=runtime))
    with pytest.raises(InstallRefused, match=r"bad\.py: SyntaxError: line 3"):
        install(engine, ModuleSource("python", b"x", "bad.py"), limits=InstanceLimits())
    engine.close()


def test_runtime_without_an_image_starts_operators_the_long_way(tmp_path: Path, artifact_store: ArtifactStore):
    runtime = tmp_path / "runtime.wasm"
    runtime.write_bytes(
        wat_guest(
            "(i64.store (i32.const 65008) (global.get $loads)) " + bytes_at(65008, 8),
            fields="""(global $loads (mut i64) (i64.const 0)) (global $r (mut funcref) (ref.null func))
              (func (export "torpor_load") (param i32 i32) (result i64)
                (global.set $loads (i64.add (global.get $loads) (i64.const 1))) (i64.const 0))""",
        )
    )
    guests = Guests(engine_in(artifact_store, EngineConfig(python_runtime=runtime)))
    module = operator(guests, b"x")
    assert module.image_refusal == "global 2 is mutable and of type reference: an image holds numbers only"
    assert int.from_bytes(guests.run(guests.wake(module)), "little") == 1
    guests.close()
    guests.engine.close()


def test_host_without_a_python_runtime_says_so(engine: GuestEngine):
    with pytest.raises(InstallRefused, match="this host has no Python runtime"):
        install(engine, ModuleSource("python", b"x", "a.py"), limits=InstanceLimits())


def test_runtime_that_is_no_language_runtime_is_refused(tmp_path: Path, artifact_store: ArtifactStore):
    runtime = tmp_path / "runtime.wasm"
    runtime.write_bytes(wat_guest())
    engine = engine_in(artifact_store, EngineConfig(python_runtime=runtime))
    with pytest.raises(InstallRefused, match="does not export torpor_load"):
        install(engine, ModuleSource("python", b"x", "a.py"), limits=InstanceLimits())
    runtime.unlink()
    with pytest.raises(InstallFailed, match=r"the Python runtime .*runtime\.wasm: No such file"):
        install(engine, ModuleSource("python", b"x", "a.py"), limits=InstanceLimits())
    engine.close()


def test_operator_that_never_returns_is_installed_in_bounded_time(guests: Guests):
    """The check gives up after its own deadline; what the guest does at its first reconcile is for the runtime."""
    module = guests.install(wat_guest("(loop $l (br $l)) (unreachable)"), InstanceLimits(cpu_budget_s=0.2))
    assert module.image is not None


def test_two_processes_that_install_the_same_keep_one_image(tmp_path: Path):
    """Two engines on one store stand for two host processes; the second waits for the first and takes its image."""
    wasm = wat_guest()
    pair = [Guests(engine_in(ArtifactStore(tmp_path / "s"))) for _ in range(2)]
    modules: list[InstalledModule] = []
    threads = [threading.Thread(target=lambda g=guests: modules.append(g.install(wasm))) for guests in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert modules[0] == modules[1]
    for guests, module in zip(pair, modules, strict=True):
        assert guests.run(guests.wake(module)) == DONE
        guests.close()
        guests.engine.close()
