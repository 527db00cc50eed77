"""The compiler: zig, as the PyPI package `ziglang` carries it. It brings clang, a linker and the C library for WASI.

The version is pinned, since another one gives other machine code, and with it another module and other images.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .steps import BuildError

ZIG_VERSION = "0.17.1"

# The C library imitates these for programs that expect them; without them CPython does not compile.
EMULATED = ("SIGNAL", "GETPID", "PROCESS_CLOCKS", "MMAN")
DEFINES = tuple(f"-D_WASI_EMULATED_{name}" for name in EMULATED)
LIBRARIES = tuple(f"-lwasi-emulated-{name.lower().replace('_', '-')}" for name in EMULATED)

# zig checks for undefined behaviour by default, by trapping; CPython's own practice is not to.
CODE_FLAGS = ("-Os", "-g0", "-fno-sanitize=undefined", *DEFINES)


@dataclass(frozen=True, slots=True)
class Zig:
    program: Path

    def cc(self, *, wasm: bool) -> tuple[str, ...]:
        return (str(self.program), "cc", *(("-target", "wasm32-wasi") if wasm else ()))


def zig() -> Zig:
    """Raises BuildError if the pinned version is not installed beside the Python that runs this."""
    try:
        version = importlib.metadata.version("ziglang")
        spec = importlib.util.find_spec("ziglang")
    except importlib.metadata.PackageNotFoundError:
        version, spec = "none", None
    if version != ZIG_VERSION or spec is None or spec.origin is None:
        raise BuildError(
            f"ziglang {version} is installed, {ZIG_VERSION} is needed: run this with the Python that "
            f"requirements.lock was installed into, or: pip install ziglang=={ZIG_VERSION}"
        )
    return Zig(Path(spec.origin).parent / "zig")


def native_compiler(found: Zig) -> tuple[str, ...]:
    """`cc` where the machine has one: three times as fast here as zig's."""
    cc = shutil.which("cc")
    return (cc,) if cc else found.cc(wasm=False)


def clean_environment(environment: Mapping[str, str], zig_cache: Path, scratch: Path) -> dict[str, str]:
    """What commands see: nothing of the caller's that could change what is built (CFLAGS, PYTHONPATH, LANG, …)."""
    scratch.mkdir(parents=True, exist_ok=True)
    return {
        "PATH": environment.get("PATH", os.defpath),
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "LC_ALL": "C",
        "SOURCE_DATE_EPOCH": "0",  # What __DATE__ and __TIME__ say.
        "PYTHONHASHSEED": "0",  # Sets are marshalled in the order of their hashes.
        "ZIG_GLOBAL_CACHE_DIR": str(zig_cache),  # The compiled C library: kept, since each link needs it.
        "ZIG_LOCAL_CACHE_DIR": str(scratch / "zig"),  # Everything else that is compiled.
    }


def file_digest(*paths: Path) -> str:
    """Of the contents in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
