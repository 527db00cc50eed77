"""`examples/mirror` in each language, with a build id in it that it writes into what it makes.

Two build ids make two modules with hashes of their own: different operators, as far as anybody can see.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torpor_guests_testing import toolchains
from torpor_guests_testing.cache import BuildFailed, built, cache_root, key_of, run

ROOT = toolchains.ROOT
MIRROR = ROOT / "examples" / "mirror"


@dataclass(frozen=True, slots=True)
class Guest:
    """A module: where it was built, and the name that a host wants it under."""

    language: str
    build_id: str
    path: Path
    suffix: str

    @property
    def filename(self) -> str:
        return f"mirror-{self.language}-{self.build_id}{self.suffix}"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def place(self, folder: Path) -> str:
        """Puts it into a host's module folder; returns `spec.module.file`."""
        shutil.copyfile(self.path, folder / self.filename)
        return self.filename


def mirror(language: str, build_id: str) -> Guest:
    """Raises BuildFailed."""
    return LANGUAGES[language](build_id)


def zig(build_id: str) -> Guest:
    sdk, source = ROOT / "sdk" / "zig" / "torpor.zig", MIRROR / "zig" / "mirror.zig"
    return Guest("zig", build_id, zig_module(source, f'pub const id = "{_checked(build_id)}";\n', sdk), ".wasm")


def zig_module(root: Path, build: str, sdk: Path = ROOT / "sdk" / "zig" / "torpor.zig") -> Path:
    """A Zig operator on the SDK; `build` is the text of its module `build`."""

    def compile_to(output: Path) -> None:
        options = output.with_name("build.zig")
        options.write_text(build)
        run(
            [
                *toolchains.zig(),
                *("build-exe", "-target", "wasm32-wasi", "-mexec-model=reactor", "-O", "ReleaseSmall"),
                *("-fstrip", "-rdynamic", "-fno-entry", "--dep", "torpor", "--dep", "build"),
                *(f"-Mroot={root}", f"-Mtorpor={sdk}", f"-Mbuild={options}", f"-femit-bin={output}"),
                *(
                    "--cache-dir",
                    str(cache_root() / "zig-cache"),
                    "--global-cache-dir",
                    str(cache_root() / "zig-cache"),
                ),
            ],
            cwd=output.parent,
        )

    return built("zig", key_of("zig", toolchains.zig_version(), root, sdk, build), compile_to)


def rust(build_id: str) -> Guest:
    return Guest(
        "rust", build_id, rust_module(MIRROR / "rust", "mirror", {"MIRROR_BUILD": _checked(build_id)}), ".wasm"
    )


def rust_module(crate: Path, name: str, environment: dict[str, str]) -> Path:
    """A crate that makes `name.wasm`; `environment` is what its source reads when it is compiled."""
    settings = "\n".join(f"{key}={value}" for key, value in sorted(environment.items()))

    def compile_to(output: Path) -> None:
        target = cache_root() / "rust-target"
        run(
            ["cargo", "build", "--quiet", "--release", "--target", toolchains.RUST_TARGET, "--target-dir", str(target)],
            cwd=crate,
            environment={**toolchains.cargo_environment(), **environment},
        )
        shutil.copyfile(target / toolchains.RUST_TARGET / "release" / f"{name}.wasm", output)

    key = key_of("rust", toolchains.rust_version(), crate, ROOT / "sdk" / "rust", settings)
    return built("rust", key, compile_to)


def go(build_id: str) -> Guest:
    return Guest("go", build_id, go_module(MIRROR / "go", f"-X main.build={_checked(build_id)}"), ".wasm")


def go_module(package: Path, linker_flags: str) -> Path:
    """A Go package main as a reactor."""

    def compile_to(output: Path) -> None:
        run(
            [
                *(toolchains.go(), "build", "-buildmode=c-shared", "-trimpath", "-buildvcs=false"),
                *(f"-ldflags=-s -w {linker_flags}", f"-o={output}", "."),
            ],
            cwd=package,
            environment={"GOOS": "wasip1", "GOARCH": "wasm", "GOFLAGS": "", "GOWORK": "off", "GOTOOLCHAIN": "local"},
        )

    key = key_of("go", toolchains.go_version(), package, ROOT / "sdk" / "go", linker_flags)
    return built("go", key, compile_to)


def python(build_id: str) -> Guest:
    source = (MIRROR / "python" / "operator.py").read_text()
    stamped = source.replace('BUILD = "python"', f'BUILD = "{_checked(build_id)}"')
    if stamped == source:
        raise BuildFailed(f"{MIRROR}/python/operator.py has no line BUILD = …")
    path = built("python", key_of("python", stamped), lambda output: _write(output, stamped))
    return Guest("python", build_id, path, ".py")


def _write(output: Path, text: str) -> None:
    output.write_text(text)


def _checked(build_id: str) -> str:
    if not toolchains.is_build_id(build_id):
        raise ValueError(f"{build_id!r}: a build id has small letters, digits and dashes only")
    return build_id


# The fleet of the tests of the mesh: sixty operators, none like another.
SIXTY = {"python": 24, "zig": 16, "rust": 16, "go": 4}


def fleet(counts: Mapping[str, int]) -> Iterator[Guest]:
    """So many of each language; the build id of the third in Zig is `zig-02`."""
    for language, count in counts.items():
        for number in range(count):
            yield mirror(language, f"{language}-{number:02d}")


LANGUAGES: dict[str, Callable[[str], Guest]] = {"python": python, "zig": zig, "rust": rust, "go": go}
