"""What the engine of a process is set to, and the wasmtime configuration made of it.

Everything that changes compiled code is in `CodeSettings`: its text is part of the key of a compiled module, and the
compile worker builds the very same engine from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from wasmtime import Config, Engine

from torpor_host.limits import MIB


@dataclass(frozen=True, slots=True)
class CodeSettings:
    """Settings that compiled code depends on. Changing one compiles every module anew."""

    wasm_stack_bytes: int = 2 * MIB
    """Stack of wasm code. 512 KiB ends a JSON document nested 1,500 deep; 4 MiB aborts the process."""

    memory_reservation_bytes: int = 4096 * MIB
    """Address space an instance reserves. Under a small `ulimit -v` take 64 MiB: memories then move as they grow."""

    optimise: str = "speed"
    """Cranelift's level: none, speed, speed_and_size."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CodeSettings:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One a process. The defaults are meant for production."""

    code: CodeSettings = field(default_factory=CodeSettings)

    python_runtime: Path | None = None
    """`torpor-python.wasm`; without it Python operators are refused."""

    tick_s: float = 0.010
    """How often a running guest is looked at: budgets and deadlines are exact to this."""

    thread_stack_bytes: int = 8 * MIB
    """`threading.stack_size` of later threads: up to 512 KiB a guest's stack overflow ends the process."""

    map_overlays: bool = True
    """Lay an operator's pages over its base by mapping (400 kB private an instance, 150 maps) instead of copying them
    (1,250 kB, 3 maps). Wakes are copied anyway while the process has no maps left for it."""

    maps_max: int = 50_000
    """Memory maps this process may hold for guests, of the kernel's 65,530 (vm.max_map_count)."""

    artifacts_bytes_max: int = 8192 * MIB
    """Disk for compiled modules and images; above it, what was unused for a week goes when a host starts."""

    modules_idle_max: int = 16
    """Compiled modules without an instance that stay loaded: 1 descriptor and 3 maps each."""

    module_bytes_max: int = 128 * MIB
    """Longest wasm file accepted."""

    compile_timeout_s: float = 300.0
    """A module that takes longer to compile is refused. A 60 MB Go guest takes 33 s alone on a core."""

    compile_memory_bytes: int = 4096 * MIB
    """Address space of the compiler's process; a 60 MB Go guest peaks at 700 MiB resident."""

    compiles_at_once: int = 1
    """Compilers at a time in this process."""

    initialise_timeout_s: float = 60.0
    """For initialisation, load and describe, each, at install; `InstanceLimits.cpu_budget_s` does not apply there."""

    wake_timeout_s: float = 5.0
    """For `torpor_wake`."""


def wasmtime_engine(code: CodeSettings) -> Engine:
    """A new engine. Features that an image cannot carry, or that no guest needs, are off."""
    config = Config()
    config.epoch_interruption = True
    config.max_wasm_stack = code.wasm_stack_bytes
    config.memory_reservation = code.memory_reservation_bytes
    config.cranelift_opt_level = code.optimise
    config.native_unwind_info = False
    config.wasm_threads = False
    config.wasm_memory64 = False
    config.wasm_multi_memory = False
    config.wasm_gc = False
    config.wasm_function_references = False
    config.wasm_exceptions = False
    config.wasm_custom_page_sizes = False
    config.wasm_stack_switching = False
    config.wasm_tail_call = True
    return Engine(config)
