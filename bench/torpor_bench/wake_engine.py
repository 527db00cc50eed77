"""From an event in the host to the guest's first instruction, on the host's own engine and worker threads.

Each wake starts unloaded: the event is stamped where a turn is given to the workers; the worker makes an instance from
the image and calls `reconcile`; the first thing that the guest does there is a host call (`config`), which stamps the
end. Decoding the request in the guest's SDK is therefore part of it. Kinds of guests take turns, and of each kind that
is cheap to build there are many different ones, so that no wake finds the last one's pages in a cache for itself.
"""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from torpor_guests_testing import mirror, toolchains
from torpor_guests_testing.guests import zig_module
from torpor_host import abi
from torpor_host.artifacts import ArtifactStore
from torpor_host.engine import GuestEngine
from torpor_host.engine_config import EngineConfig
from torpor_host.hostcalls import CallResponse, FetchRequest, FetchResponse, KubeRequest, TreeRequest
from torpor_host.install import InstalledModule, ModuleSource, install
from torpor_host.limits import MIB, Deadline, InstanceLimits
from torpor_host.workers import Workers

from torpor_bench.figures import SAMPLES_MIN, Figures
from torpor_bench.guests import python_mirror
from torpor_bench.machine import ROOT
from torpor_bench.progress import say

_GUESTS = ROOT / "bench" / "guests"
_WARM_UP_ROUNDS = 20
_ROUNDS = SAMPLES_MIN[99]
_ROUNDS_QUICK = 1000
_EVERY_SLOW = 5  # guests that only need a p50 take part in one round of this many
_DEADLINE_S = 30.0
_NOT_FOUND = b"""{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound",
 "message": "not found", "details": {"name": "object", "kind": "objects"}}"""


@dataclass(slots=True)
class Kind:
    """Guests that are measured together. `percents`: what is wanted of them."""

    name: str
    sources: list[ModuleSource]
    percents: tuple[int, ...]
    installed: list[InstalledModule] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class StampingCalls:
    """Answers a guest as a cluster without objects would, and remembers when it first called."""

    def __init__(self) -> None:
        self.first_call_ns = 0

    def config(self) -> bytes:
        if not self.first_call_ns:
            self.first_call_ns = time.perf_counter_ns()
        return b'{"config": {}, "env": {}}'

    def kube_request(self, request: KubeRequest, deadline: Deadline) -> CallResponse:
        return CallResponse(404, "application/json", _NOT_FOUND)

    def kube_tree(self, request: TreeRequest, deadline: Deadline) -> CallResponse:
        return CallResponse(200, "application/json", b"[]")

    def http_fetch(self, request: FetchRequest, deadline: Deadline) -> FetchResponse:
        return FetchResponse(204)

    def log(self, level: int, text: str) -> None:
        pass

    def blocking(self) -> AbstractContextManager[object]:
        return nullcontext()


def measure(figures: Figures, *, quick: bool) -> None:
    """Adds the figures of every kind of guest. Blocking."""
    kinds = _kinds()
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as folder:
        engine = GuestEngine(EngineConfig(python_runtime=toolchains.python_runtime()), ArtifactStore(Path(folder)))
        workers = Workers("guest", threads_max=4)
        try:
            for kind in kinds:
                kind.installed = [install(engine, source, limits=InstanceLimits()) for source in kind.sources]
                _require_images(kind)
            say("waking guests from their images")
            _run(engine, workers, kinds, _ROUNDS_QUICK if quick else _ROUNDS)
        finally:
            workers.close(10.0)
            engine.close()
    for kind in kinds:
        figures.add_percentiles(kind.name, kind.seconds, kind.percents)
        mapped = sum(module.image.memory_bytes for module in kind.installed if module.image) / len(kind.installed)
        figures.note(f"{kind.name}: {len(kind.installed)} different, {mapped / MIB:.1f} MiB of memory each")


def _kinds() -> list[Kind]:
    say("building guests")
    python = [ModuleSource("python", python_mirror(f"wake-{n:02}").encode(), "operator.py") for n in range(30)]
    core = [_core(mirror("zig", f"wake-{n}").path) for n in range(5)]
    heap_text = f"pub const heap_bytes: usize = {64 * MIB};\n"
    return [
        Kind("python", python, (50, 99)),
        Kind("core", core, (50, 99)),
        Kind("core_64mib", [_core(zig_module(_GUESTS / "heap.zig", heap_text))], (50,)),
        Kind("go", [_core(mirror("go", f"wake-{n}").path) for n in range(2)], (50,)),
    ]


def _core(path: Path) -> ModuleSource:
    return ModuleSource("core", path.read_bytes(), "operator.wasm")


def _require_images(kind: Kind) -> None:
    for module in kind.installed:
        if module.image is None:
            raise RuntimeError(f"{kind.name}: {module.filename} runs without an image: {module.image_refusal}")


def _run(engine: GuestEngine, workers: Workers, kinds: list[Kind], rounds: int) -> None:
    gc.collect()
    gc.freeze()  # what was built so far is no garbage; a host does not hold it either
    for number in range(-_WARM_UP_ROUNDS, rounds):
        for kind in kinds:
            if 99 not in kind.percents and number % _EVERY_SLOW:
                continue
            seconds = _wake(engine, workers, kind.installed[number % len(kind.installed)], number)
            if number >= 0:
                kind.seconds.append(seconds)


def _wake(engine: GuestEngine, workers: Workers, installed: InstalledModule, number: int) -> float:
    """Seconds from the event to the guest's first call; the instance is closed when it returns."""
    calls = StampingCalls()
    ended = threading.Event()
    failures: list[BaseException] = []

    def turn() -> None:
        try:
            instance = engine.load(installed, InstanceLimits(), calls)
            try:
                message = abi.ReconcileRequest("default", f"object-{number}", "watch").encode()
                result = abi.decode_reconcile_result(instance.reconcile(message, deadline=Deadline.after(_DEADLINE_S)))
                if not isinstance(result, abi.Done):
                    raise RuntimeError(f"the guest answered {result}")
            finally:
                instance.close()
        except BaseException as exc:
            failures.append(exc)
        finally:
            ended.set()

    event_ns = time.perf_counter_ns()
    workers.submit(turn)
    ended.wait()
    if failures:
        raise failures[0]
    return (calls.first_call_ns - event_ns) / 1e9
