"""The slow part: CPython's library for wasm32-wasip1, and a native CPython of the same version to compile modules.

The result is one folder: `host/` (the native interpreter and the standard library's sources), `lib/*.a`, `include/`,
`zig/` (the compiled C library). It depends on the pinned sources, the compiler and this file, on nothing of the SDK.

CPython is built as its own makefiles do it, unpatched.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import sources, toolchain
from .steps import Steps

# Of CPython's source, what no step reads.
UNUSED_SOURCE = ("Doc/", "Lib/test/", "Mac/", "Android/", "iOS/", "PCbuild/")

ZLIB_SOURCES = (
    *("adler32", "compress", "crc32", "deflate", "infback", "inffast", "inflate", "inftrees", "trees", "uncompr"),
    "zutil",
)

NATIVE_CONFIGURE = ("--without-ensurepip", "--disable-test-modules", "--without-doc-strings")
# Run a minute, once: compiling the compiler's code well would take longer than it saves.
NATIVE_CFLAGS = "-O0 -g0"

WASM_CONFIGURE = (
    "--host=wasm32-unknown-wasi",
    *NATIVE_CONFIGURE,
    # Sockets and select: stubs in Python instead (`guest/`). No loading of libraries.
    *("py_cv_module__socket=n/a", "py_cv_module_select=n/a", "py_cv_module__ctypes=n/a"),
    # Never those of the machine that builds, should it have them.
    *("py_cv_module__hashlib=n/a", "py_cv_module__ssl=n/a", "py_cv_module__uuid=n/a"),
)
WASM_ANSWERS = Path(__file__).resolve().parent.parent / "wasm32-wasi.site"
WASM_WARNINGS = ("-Wno-int-conversion", "-Wno-date-time")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A finished folder."""

    folder: Path

    @property
    def host_python(self) -> Path:
        return self.folder / "host" / "bin" / "python3.13"

    @property
    def standard_library(self) -> Path:
        return self.folder / "host" / "lib" / "python3.13"

    @property
    def archives(self) -> list[Path]:
        return sorted((self.folder / "lib").glob("*.a"))

    @property
    def include(self) -> Path:
        return self.folder / "include"

    @property
    def zig_cache(self) -> Path:
        return self.folder / "zig"

    def is_whole(self) -> bool:
        return self.folder.is_dir()  # Renamed into place when all of it was there.


def key() -> str:
    digest = hashlib.sha256()
    for part in (
        *(sources.PYTHON.sha256[0], sources.ZLIB.sha256[0], toolchain.ZIG_VERSION),
        toolchain.file_digest(Path(__file__), Path(toolchain.__file__), WASM_ANSWERS),
        f"{sys.platform} {platform.machine()}",
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def build(steps: Steps, cache: Path, scratch: Path, target: Path, environment: Mapping[str, str], jobs: int) -> None:
    """Build in `scratch` and rename the result to `target`. Raises BuildError."""
    result = Interpreter(scratch / "result")
    for folder in ("host/bin", "host/lib/python3.13", "lib", "include", "zig"):
        (result.folder / folder).mkdir(parents=True)
    with steps.step("fetch and unpack the sources"):
        python = _source(sources.PYTHON, cache, scratch, environment)
        zlib = _source(sources.ZLIB, cache, scratch, environment)
    variables = toolchain.clean_environment(environment, result.zig_cache, scratch / "tmp")
    recipe = _Recipe(steps, scratch, python, zlib, result, variables, jobs)
    recipe.build_native()
    recipe.build_zlib()
    recipe.build_wasm()
    recipe.collect()
    result.folder.replace(target)


def _source(source: sources.Source, cache: Path, scratch: Path, environment: Mapping[str, str]) -> Path:
    tarball = sources.fetched(source, cache / "sources", environment)
    return sources.unpacked(source, tarball, scratch, wanted=lambda path: not path.startswith(UNUSED_SOURCE))


@dataclass(frozen=True, slots=True)
class _Recipe:
    steps: Steps
    scratch: Path
    python: Path
    zlib: Path
    result: Interpreter
    environment: Mapping[str, str]
    jobs: int

    @property
    def wasm(self) -> Path:
        return self.scratch / "wasm"

    @property
    def libz(self) -> Path:
        return self.result.folder / "lib" / "libz.a"

    def build_native(self) -> None:
        folder = self.scratch / "native"
        folder.mkdir()
        compiler = " ".join(toolchain.native_compiler(self.zig))
        environment = {
            **self.environment,
            **self.archivers,
            "CC": compiler,
            "CFLAGS": NATIVE_CFLAGS,
            "PKG_CONFIG": "false",
        }
        configure = self.python / "configure"
        self.steps.run("configure a native Python", [configure, *NATIVE_CONFIGURE], cwd=folder, environment=environment)
        self.steps.run(
            "make a native Python", ["make", f"-j{self.jobs}", "python"], cwd=folder, environment=environment
        )
        library = self.result.standard_library
        shutil.copytree(
            self.python / "Lib", library, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
        (library / "lib-dynload").mkdir()  # Python warns if it is not there.
        (folder / "python").replace(self.result.host_python)

    def build_zlib(self) -> None:
        compiler = [*self.zig.cc(wasm=True), *toolchain.CODE_FLAGS, "-DHAVE_UNISTD_H", *self.path_flags]
        objects = self.scratch / "zlib"
        objects.mkdir()
        self.steps.run(
            "compile zlib for wasm",
            # Positional parameters: $0 the archiver, then the compiler; the names are those above.
            [
                *("sh", "-ec", 'for name in $NAMES; do "$@" -c "$ZLIB/$name.c" -o "$name.o"; done; '),
                *("sh", *compiler),
            ],
            cwd=objects,
            environment={**self.environment, "NAMES": " ".join(ZLIB_SOURCES), "ZLIB": str(self.zlib)},
        )
        self.steps.run(
            "archive zlib",
            [self.zig.program, "ar", "rcs", self.libz, *(f"{name}.o" for name in ZLIB_SOURCES)],
            cwd=objects,
            environment=self.environment,
        )

    def build_wasm(self) -> None:
        self.wasm.mkdir()
        self.steps.run(
            "configure Python for wasm",
            [
                # Relative, since this path ends up in the library.
                Path("..") / self.python.name / "configure",
                *WASM_CONFIGURE,
                f"--build={platform.machine()}-pc-linux-gnu",
                f"--with-build-python={self.result.host_python}",
            ],
            cwd=self.wasm,
            environment=self.wasm_environment,
        )
        self.steps.run(
            "make Python for wasm",
            ["make", f"-j{self.jobs}", "libpython3.13.a"],
            cwd=self.wasm,
            environment=self.wasm_environment,
        )

    def collect(self) -> None:
        include = self.result.include
        shutil.copytree(self.python / "Include", include, dirs_exist_ok=True)
        shutil.copy2(self.wasm / "pyconfig.h", include)
        for archive in (self.wasm / "libpython3.13.a", *sorted((self.wasm / "Modules").rglob("*.a"))):
            shutil.copy2(archive, self.result.folder / "lib")

    @property
    def zig(self) -> toolchain.Zig:
        return toolchain.zig()

    @property
    def path_flags(self) -> tuple[str, ...]:
        """So that no assertion or traceback names a folder of this machine."""
        return (f"-ffile-prefix-map={self.scratch}=/build",)

    @property
    def archivers(self) -> dict[str, str]:
        """zig's: a machine without a compiler has no archiver either."""
        return {"AR": f"{self.zig.program} ar", "RANLIB": f"{self.zig.program} ranlib", "READELF": "true"}

    @property
    def wasm_environment(self) -> dict[str, str]:
        return {
            **self.environment,
            **self.archivers,
            "CONFIG_SITE": f"{self.python / 'Tools/wasm/config.site-wasm32-wasi'} {WASM_ANSWERS}",
            "CC": " ".join((*self.zig.cc(wasm=True), *WASM_WARNINGS)),
            "PKG_CONFIG": "false",
            "CFLAGS": " ".join((*toolchain.CODE_FLAGS, *self.path_flags)),
            "LDFLAGS": " ".join(toolchain.LIBRARIES),
            "ZLIB_CFLAGS": f"-I{self.zlib}",
            "ZLIB_LIBS": f"-L{self.libz.parent} -lz",
        }
