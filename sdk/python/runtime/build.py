#!/usr/bin/env python3
"""Build CPython as one core Wasm module that runs Torpor operators, once, and print the path of the module.

    python sdk/python/runtime/build.py                    build what is missing, print the path
    python sdk/python/runtime/build.py --output FILE      the same, and copy the module to FILE
    python sdk/python/runtime/build.py --print-path       print the path; exit status 1 if it is not built yet

What is built goes to a cache folder outside the checkout, `${XDG_CACHE_HOME:-~/.cache}/torpor/python-runtime`:
`interpreter-<key>` (two minutes; depends on pinned sources and compiler only), `stdlib-<key>`, and
`<key>/torpor-python.wasm` (seconds; depends on the embedding and the SDK too). Each is built under another name
and renamed, so a folder with its own name is whole. A lock lets a second run wait for the first.

Needs make, a POSIX shell, and the PyPI package ziglang beside the Python that runs this; uses `cc` where there is
one. Sources come from the web or from Debian's archive; TORPOR_PYTHON_SOURCE and TORPOR_ZLIB_SOURCE name files to
use instead. Progress goes to standard error, the path alone to standard output. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

RUNTIME = Path(__file__).resolve().parent
sys.path.insert(0, str(RUNTIME))
sys.path.append(str(RUNTIME.parents[2] / "tools"))

from build_lock import exclusive_lock  # noqa: E402  (a script: the path is set above)
from torpor_runtime import guest_module, interpreter, stdlib  # noqa: E402
from torpor_runtime.interpreter import Interpreter  # noqa: E402
from torpor_runtime.steps import BuildError, Steps, say  # noqa: E402

# The CPU time measured (222 and 256 s) on two cores, and a little; only to tell who waits what to expect.
INTERPRETER_S_WITH_CC, INTERPRETER_S_WITHOUT_CC, MODULE_S = 120.0, 140.0, 7.0
# Each is 13 MB, and every change of the SDK makes one.
MODULES_KEPT = 8
INTERPRETERS_KEPT = 2


def main() -> int:
    # SIGTERM must end a running compiler too: turned into the exception that unwinds to it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = parsed_arguments()
    try:
        if arguments.write_missing:
            (RUNTIME / "MISSING.md").write_text(stdlib.missing_document())
            return 0
        if arguments.print_path:
            path = module_path(os.environ)
            print(path)
            return 0 if path.is_file() else 1
        path = runtime_module(os.environ)
        if arguments.output is not None:
            copy_whole(path, arguments.output)
        print(path)
    except BuildError as error:
        print(f"python runtime: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("python runtime: interrupted; nothing half-built is left", file=sys.stderr)
        return 130
    return 0


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build CPython as a Wasm module that runs Torpor operators.")
    parser.add_argument(
        "--print-path", action="store_true", help="print where the module is or would be; build nothing"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="copy the module to FILE as well")
    parser.add_argument("--write-missing", action="store_true", help="write MISSING.md anew; build nothing")
    return parser.parse_args()


def runtime_module(environment: Mapping[str, str]) -> Path:
    """The module, built first where it is missing. Raises BuildError."""
    path = module_path(environment)
    if path.is_file():
        os.utime(path.parent)  # Recently used: kept.
        return path
    cache = cache_root(environment)
    try:
        return build_missing(cache, environment)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT):
            raise
        raise BuildError(f"cannot write to {cache}: {error.strerror}; make room there or set XDG_CACHE_HOME") from error


def module_path(environment: Mapping[str, str]) -> Path:
    return cache_root(environment) / guest_module.key() / guest_module.MODULE_NAME


def cache_root(environment: Mapping[str, str]) -> Path:
    # The XDG specification tells to ignore relative paths.
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "torpor" / "python-runtime"


def build_missing(cache: Path, environment: Mapping[str, str]) -> Path:
    for folder, way_out in ((cache, "set XDG_CACHE_HOME to a folder without"), (RUNTIME, "move the checkout")):
        if any(character.isspace() for character in str(folder)):
            raise BuildError(f"{folder} has a space in it, which CPython's makefiles cannot cope with: {way_out}")
    cache.mkdir(parents=True, exist_ok=True)
    built = Interpreter(cache / f"interpreter-{interpreter.key()}")
    library = cache / f"stdlib-{guest_module.stdlib_key()}"
    with exclusive_lock(cache / "build.lock", say):
        path = module_path(environment)
        if path.is_file():
            return path  # The run that held the lock has built it.
        remove_leftovers(cache)
        expected_s = MODULE_S + (0.0 if built.is_whole() else interpreter_s())
        say(f"building {guest_module.MODULE_NAME}, about {expected_s:.0f} s on 2 cores, into {path.parent}")
        with scratch_folder(cache) as scratch, Steps(cache / "logs", expected_s=expected_s) as steps:
            if not built.is_whole():
                interpreter.build(steps, cache, scratch, built.folder, environment, jobs())
            if not library.is_dir():
                guest_module.freeze_standard_library(steps, built, scratch, library, environment)
            path = module_path(environment)  # Minutes later the SDK may be another one.
            guest_module.link(steps, built, library, scratch, path.parent, environment)
            say(f"built in {steps.elapsed_s():.0f} s: {path}")
        os.utime(built.folder)
        os.utime(library)
        remove_old(cache)
    return path


def interpreter_s() -> float:
    return INTERPRETER_S_WITH_CC if shutil.which("cc") else INTERPRETER_S_WITHOUT_CC


def jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def scratch_folder(cache: Path) -> Iterator[Path]:
    """In the cache: the result is renamed, which needs the same file system; `/tmp` may be small."""
    folder = Path(tempfile.mkdtemp(prefix=".build-", dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(cache: Path) -> None:
    """Delete what a killed run left; safe under the lock only."""
    for folder in cache.glob(".build-*"):
        shutil.rmtree(folder, ignore_errors=True)


def remove_old(cache: Path) -> None:
    """Keep the folders that were used last."""
    for pattern, kept in (
        ("[0-9a-f]" * 16, MODULES_KEPT),
        ("interpreter-*", INTERPRETERS_KEPT),
        ("stdlib-*", INTERPRETERS_KEPT),
    ):
        folders = sorted(cache.glob(pattern), key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in folders[kept:]:
            shutil.rmtree(folder, ignore_errors=True)


def copy_whole(source: Path, target: Path) -> None:
    """Under another name first, so that whoever sees `target` sees all of it."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, partial)
        partial.replace(target)
    except OSError as error:
        raise BuildError(f"cannot write {target}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
