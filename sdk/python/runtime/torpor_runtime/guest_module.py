"""The quick part: freeze the modules and link the embedding into `torpor-python.wasm`.

Everything that Python imports in a guest is one array of marshalled code, embedded by the compiler: a guest has no
files. The standard library's is kept in a folder of its own, since it changes with `stdlib.py` only and takes longer
than all the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import freeze, interpreter, stdlib, toolchain
from .interpreter import Interpreter
from .steps import BuildError, Steps

RUNTIME = Path(__file__).resolve().parent.parent
SOURCES = (RUNTIME / "embedding.c", RUNTIME / "heap.c", RUNTIME / "settle.c")
HEADERS = (RUNTIME / "heap.h", RUNTIME / "settle.h")
GUEST = RUNTIME / "guest"
SDK = RUNTIME.parent / "torpor_sdk"
FREEZER = Path(freeze.__file__)

MODULE_NAME = "torpor-python.wasm"

# Besides what recursion in C needs, room for the parser and `re`. Fixed: the stack is at the start of memory.
STACK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Frozen:
    """Marshalled modules: one file of code and an index of `name`, `is a package`, `offset`, `length`."""

    code: Path
    index: Path

    def entries(self) -> list[tuple[str, bool, int, int]]:
        lines = (line.split("\t") for line in self.index.read_text().splitlines())
        return [(name, package == "1", int(offset), int(length)) for name, package, offset, length in lines]


def stdlib_key() -> str:
    digest = toolchain.file_digest(Path(stdlib.__file__), FREEZER)
    return hashlib.sha256(f"{interpreter.key()} {digest}".encode()).hexdigest()[:16]


def key(sdk: Path = SDK) -> str:
    """Of everything that the module is made from."""
    own = [(name, toolchain.file_digest(path)) for name, path, _ in own_modules(sdk)]
    digest = toolchain.file_digest(Path(__file__), *SOURCES, *HEADERS)
    return hashlib.sha256(f"{stdlib_key()} {digest} {own}".encode()).hexdigest()[:16]


def own_modules(sdk: Path) -> list[tuple[str, Path, bool]]:
    """The runtime's Python half and the SDK, less what it has for unit tests outside of a guest."""
    package = sdk / "__init__.py"
    if not package.is_file():
        raise BuildError(f"{sdk} is no Python package; restore it from git")
    modules = [*stdlib.modules_below(GUEST), ("torpor_sdk", package, True)]
    modules += stdlib.modules_below(sdk, prefix="torpor_sdk.")
    return [module for module in modules if not (module[0] + ".").startswith("torpor_sdk.testing.")]


def freeze_standard_library(
    steps: Steps, built: Interpreter, scratch: Path, target: Path, environment: Mapping[str, str]
) -> None:
    """Compile the guest's standard library in `scratch`, then rename it to `target`."""
    result = scratch / "stdlib"
    result.mkdir()
    _freeze(
        steps,
        "compile the standard library",
        stdlib.guest_modules(built.standard_library),
        _frozen_in(result),
        built,
        environment,
        scratch,
    )
    result.replace(target)


def link(
    steps: Steps,
    built: Interpreter,
    library: Path,
    scratch: Path,
    target: Path,
    environment: Mapping[str, str],
    sdk: Path = SDK,
) -> None:
    """Link the module in `scratch`, then rename its folder to `target`. Raises BuildError."""
    result = scratch / "module"
    result.mkdir()
    made_from = key(sdk)
    own = Frozen(scratch / "own.bin", scratch / "own.index")
    _freeze(steps, "compile the SDK", own_modules(sdk), own, built, environment, scratch)
    (scratch / "frozen_modules.h").write_text(_header(own, _frozen_in(library)))
    variables = toolchain.clean_environment(environment, built.zig_cache, scratch / "tmp")
    compiler = toolchain.zig().cc(wasm=True)
    objects = [scratch / f"{source.stem}.o" for source in SOURCES]
    for source, compiled in zip(SOURCES, objects, strict=True):
        steps.run(
            f"compile {source.name}",
            [
                *(*compiler, *toolchain.CODE_FLAGS, "-std=c23", "-Wall", "-Wno-c23-extensions"),
                *(f"-ffile-prefix-map={scratch}=/build", f"-ffile-prefix-map={RUNTIME}=/runtime"),
                *(f"-I{scratch}", f"-I{built.include}", "-c", str(source), "-o", str(compiled)),
            ],
            cwd=scratch,
            environment=variables,
        )
    steps.run(
        f"link {MODULE_NAME}",
        [
            # The same flags again: they say how the C library is compiled too.
            *(*compiler, *toolchain.CODE_FLAGS, "-mexec-model=reactor", "-o", str(result / MODULE_NAME)),
            *(*map(str, objects), *map(str, built.archives)),
            *(*toolchain.LIBRARIES, "-Wl,--strip-all", f"-Wl,-z,stack-size={STACK_BYTES}"),
        ],
        cwd=scratch,
        environment=variables,
    )
    (result / MODULE_NAME).chmod(0o644)
    if key(sdk) != made_from:
        raise BuildError(f"{sdk} was edited while it was built; run this again")
    result.replace(target)


def _frozen_in(folder: Path) -> Frozen:
    return Frozen(folder / "stdlib.bin", folder / "stdlib.index")


def _freeze(
    steps: Steps,
    what: str,
    modules: Iterable[tuple[str, Path, bool]],
    into: Frozen,
    built: Interpreter,
    environment: Mapping[str, str],
    scratch: Path,
) -> None:
    lines = "".join(f"{name}\t{int(package)}\t{path}\n" for name, path, package in modules)
    steps.run(
        what,
        [built.host_python, "-S", "-s", "-B", FREEZER, into.code, into.index],
        cwd=scratch,
        environment=toolchain.clean_environment(environment, built.zig_cache, scratch / "tmp"),
        standard_input=lines,
    )


def _header(own: Frozen, library: Frozen) -> str:
    """`frozen_modules.h`: the table that `PyImport_FrozenModules` points at. Own modules come before CPython's."""
    lines = []
    rows: dict[str, str] = {}
    for array, frozen in (("own_code", own), ("library_code", library)):
        lines += [f"static const unsigned char {array}[] = {{", f'#embed "{frozen.code}"', "};"]
        for name, package, offset, length in frozen.entries():
            rows.setdefault(name, f'    {{"{name}", {array} + {offset}, {length}, {int(package)}}},')
    lines += ["static const struct _frozen frozen_modules[] = {", *rows.values(), "    {0}};", ""]
    return "\n".join(lines)
