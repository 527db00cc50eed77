"""Compiles one module in a process of its own, because a compiler's hundreds of MiB and its hours belong in no host.

    python -m torpor_host.compile_worker INPUT OUTPUT SETTINGS_JSON MEMORY_BYTES

Exits 0 with the compiled module in OUTPUT; 3 with the reason on stderr if the module is at fault; anything else is the
host's trouble. INPUT and OUTPUT are trusted paths, INPUT's content is not.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import sys
from pathlib import Path

EXIT_REFUSED = 3
_PR_SET_PDEATHSIG = 1
_OOM_SCORE = "900"


def main(arguments: list[str]) -> int:
    source, target, settings, memory_bytes = arguments
    # The parent waits in the thread that started this process, so its end is the host's end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    limit = int(memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    except OSError:
        pass  # a sandbox without /proc: the kernel chooses by size then

    from wasmtime import Module, WasmtimeError

    from torpor_host.engine_config import CodeSettings, wasmtime_engine

    engine = wasmtime_engine(CodeSettings.from_json(settings))
    try:
        module = Module(engine, Path(source).read_bytes())
    except WasmtimeError as exc:
        print(str(exc)[:2000], file=sys.stderr)
        return EXIT_REFUSED
    Path(target).write_bytes(module.serialize())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
