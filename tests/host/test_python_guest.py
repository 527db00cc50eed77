"""CPython as a guest: one base, operators of a few lines over it, woken from their images."""

import io
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor_host import abi
from torpor_host.artifacts import ArtifactStore
from torpor_host.engine import GuestEngine
from torpor_host.engine_config import EngineConfig
from torpor_host.failures import GuestFailed, InstallRefused
from torpor_host.hostcalls import CallResponse
from torpor_host.install import InstalledModule, ModuleSource, install, python_base
from torpor_host.limits import MIB, InstanceLimits
from torpor_host.testing import Guests

# The runtime may have to be built first: two minutes on two idle cores.
pytestmark = pytest.mark.timeout(1200)

BUILD = Path(__file__).parents[2] / "sdk" / "python" / "runtime" / "build.py"

OPERATOR = b"""
import json, os, random, time, uuid
from torpor_sdk import Operator, requeue_after

op = Operator(for_="example.com/v1/databases")
seen = 0
numbers = random.Random(7)

@op.reconcile
def reconcile(request, kube):
    global seen
    seen += 1
    match request.name:
        case "random":
            raise RuntimeError(f"{random.random()} {uuid.uuid4()}")
        case "clock":
            raise RuntimeError(f"{time.monotonic_ns()}")
        case "seen":
            raise RuntimeError(f"{seen}")
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(3600)
        case "bomb":
            data = []
            while True:
                data.append(bytearray(1 << 20))
        case "deep":
            json.loads("[" * 100_000)
        case "exit":
            raise SystemExit(3)
        case "hard exit":
            os._exit(4)
        case "print":
            print("hello from", request.name)
        case "get":
            if kube.get(request) is None:
                raise RuntimeError("nothing")
            return requeue_after(minutes=30)
"""


@pytest.fixture(scope="module")
def runtime() -> Path:
    """The module that `build.py` has built, or builds now."""
    done = subprocess.run([sys.executable, BUILD], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def python_engine(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuestEngine]:
    """One for all tests here: the runtime takes seconds to compile."""
    store = ArtifactStore(tmp_path_factory.mktemp("python") / "artifacts")
    engine = GuestEngine(EngineConfig(python_runtime=runtime), store)
    yield engine
    engine.close()


@pytest.fixture
def guests(python_engine: GuestEngine) -> Iterator[Guests]:
    guests = Guests(python_engine)
    yield guests
    guests.close()


def operator(guests: Guests, content: bytes, filename: str = "operator.py") -> InstalledModule:
    return install(guests.engine, ModuleSource("python", content, filename), limits=InstanceLimits())


@pytest.fixture
def module(guests: Guests) -> InstalledModule:
    return operator(guests, OPERATOR)


def said(guests: Guests, module: InstalledModule, name: str) -> str:
    """The last line of the traceback of a fresh instance."""
    instance = guests.wake(module)
    try:
        return guests.told(instance, name).strip().splitlines()[-1]
    finally:
        instance.close()


def test_base_and_operator_have_images_and_the_operators_is_small(guests: Guests, module: InstalledModule):
    assert python_base(guests.engine).image_refusal is None
    assert module.image_refusal is None
    assert b'"example.com/v1/databases"' in module.manifest
    assert 0 < module.image_bytes < 4 * MIB


def test_reconcile_asks_the_cluster_and_is_requeued(guests: Guests, module: InstalledModule):
    guests.calls.on_kube = lambda request, deadline: CallResponse(
        200, "application/json", b'{"metadata": {"name": "get", "namespace": "default"}}'
    )
    result = abi.decode_reconcile_result(guests.run(guests.wake(module), "get"))
    assert result == abi.RequeueAfter(30 * 60 * 1000)
    assert len(guests.calls.requests) == 1


def test_a_hundred_wakes_give_a_hundred_random_numbers(guests: Guests, module: InstalledModule):
    words = [word for _ in range(100) for word in said(guests, module, "random").split()[1:]]
    assert len(words) == 200
    assert len(set(words)) == 200


def test_monotonic_clock_never_goes_back(guests: Guests, module: InstalledModule):
    assert module.image is not None
    times = [module.image.monotonic_ns]
    for _ in range(10):
        times.append(int(said(guests, module, "clock").split()[-1]))
    assert times == sorted(set(times))


def test_state_lives_with_the_instance(guests: Guests, module: InstalledModule):
    instance = guests.wake(module)
    assert [guests.told(instance, "seen").split()[-1] for _ in range(2)] == ["1", "2"]
    assert said(guests, module, "seen").split()[-1] == "1"


def test_print_is_a_line_of_log_in_the_call_that_printed(guests: Guests, module: InstalledModule):
    instance = guests.wake(module)
    assert guests.calls.logged == []
    guests.run(instance, "print")
    assert guests.calls.logged == [(1, "hello from print")]


def test_deeply_nested_json_is_an_error_the_operator_can_handle(guests: Guests, module: InstalledModule):
    instance = guests.wake(module)
    assert "RecursionError" in guests.told(instance, "deep")
    assert guests.told(instance, "seen").split()[-1] == "2"


@pytest.mark.parametrize("name", ["spin", "sleep", "bomb", "hard exit"])
def test_guests_that_end_badly_end_alone(guests: Guests, module: InstalledModule, name: str):
    limits = InstanceLimits(cpu_budget_s=0.5, grace_s=0.1, memory_bytes=64 * MIB)
    other, bad = guests.wake(module), guests.wake(module, limits)
    try:
        result = abi.decode_reconcile_result(guests.run(bad, name, timeout_s=2))
    except GuestFailed:
        assert not bad.alive
    else:
        assert name in ("sleep", "bomb")  # a sleep that ended early, or a MemoryError it reported
        assert isinstance(result, abi.Done | abi.ReconcileFailed)
    assert guests.told(other, "seen").split()[-1] == "1"


def test_sys_exit_is_an_error_and_no_endless_loop(guests: Guests, module: InstalledModule):
    instance = guests.wake(module)
    try:
        assert "SystemExit" in guests.told(instance, "exit")
    except GuestFailed as exc:
        assert "proc_exit(3)" in exc.reason


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"def broken(:\n", "SyntaxError"),
        (b"import missing_module\n", "missing_module"),
        (b"x = 1\n", "Operator"),
        (b"raise SystemExit(1)\n", "SystemExit"),
        (b"\xff\xfe", "wrong.py"),
    ],
)
def test_operators_that_do_not_load_are_refused_with_the_reason(guests: Guests, content: bytes, word: str):
    with pytest.raises(InstallRefused) as caught:
        operator(guests, content, "wrong.py")
    assert word in caught.value.reason
    assert "wrong.py" in caught.value.reason


def test_operator_in_a_zip(guests: Guests):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("names.py", "RESOURCE = 'example.com/v1/caches'\n")
        file.writestr(
            "main.py",
            "import names\nfrom torpor_sdk import Operator\nop = Operator(for_=names.RESOURCE)\n"
            "@op.reconcile\ndef reconcile(request, kube):\n    raise RuntimeError('from ' + __name__)\n",
        )
    module = operator(guests, packed.getvalue(), "operator.zip")
    assert b"example.com/v1/caches" in module.manifest
    assert "from" in said(guests, module, "x")


def test_operators_are_kept_apart(guests: Guests):
    modules = [
        operator(guests, OPERATOR.replace(b"databases", f"kind{number}s".encode()), f"op{number}.py")
        for number in range(5)
    ]
    instances = [guests.wake(module) for module in modules]
    for _ in range(2):
        for instance in instances:
            guests.told(instance, "seen")
    assert [guests.told(instance, "seen").split()[-1] for instance in instances] == ["3"] * 5
    assert {f"kind{n}s".encode() in module.manifest for n, module in enumerate(modules)} == {True}


def test_awake_operator_costs_less_than_a_megabyte(guests: Guests, module: InstalledModule):
    instance = guests.wake(module)
    guests.calls.on_kube = lambda request, deadline: CallResponse(
        200, "application/json", b'{"metadata": {"name": "get", "namespace": "default"}}'
    )
    guests.run(instance, "get")
    assert instance.private_bytes() < MIB


def test_runtime_started_without_images_gives_the_same(runtime: Path, python_engine: GuestEngine, tmp_path: Path):
    """The long way: what a wake saves."""
    import dataclasses

    fast = Guests(python_engine)
    module = operator(fast, OPERATOR)
    plain = dataclasses.replace(module, image=None, image_refusal="for this test")
    instance = fast.wake(plain)
    assert not instance.imaged
    assert fast.told(instance, "seen").split()[-1] == "1"
    fast.close()
