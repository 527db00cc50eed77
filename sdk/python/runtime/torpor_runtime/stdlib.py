"""Which modules of the standard library a guest has, and why it lacks the others.

The rule: whatever is pure Python and could work without files, sockets, threads and processes is there. This list
is the exceptions; `MISSING.md` is made from it, and a test compares it with what a guest can really import.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Reason → modules, top-level names or dotted ones. A package's name takes its submodules along.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "No TLS and no OpenSSL: the host speaks TLS for the guest, and `hashlib` has its own digests.": (
        *("_hashlib", "_ssl", "ssl"),
    ),
    "No processes, no shared memory, no second interpreter.": (
        *("_interpchannels", "_interpqueues", "_interpreters"),
        *("_multiprocessing", "_posixshmem", "_posixsubprocess", "concurrent.futures.process", "multiprocessing"),
    ),
    "No terminals, system users or loadable libraries.": (
        *("_ctypes", "_curses", "_curses_panel", "_pyrepl", "_tkinter", "ctypes", "curses", "fcntl", "grp", "mmap"),
        *("pty", "pwd", "readline", "resource", "syslog", "termios", "tty"),
    ),
    "Databases in files: state belongs into the cluster.": ("_dbm", "_gdbm", "_sqlite3", "dbm", "sqlite3"),
    "Compression that would need more C libraries; `zlib`, `gzip` and `zipfile` are there.": (
        *("_bz2", "_lzma", "bz2", "encodings.bz2_codec", "lzma"),
    ),
    "For people at a terminal or desktop, and for installing Python.": (
        *(
            "antigravity",
            "ensurepip",
            "idlelib",
            "pydoc",
            "pydoc_data",
            "this",
            "tkinter",
            "turtle",
            "turtledemo",
            "venv",
        ),
        *("webbrowser", "xmlrpc.server", "zipapp"),
    ),
    "A library's generator: `uuid` works without it.": ("_uuid",),
    "Pure Python twins of modules that are there in C.": ("_pydatetime", "_pydecimal", "_pyio"),
    "Other operating systems.": (
        *("_aix_support", "_android_support", "_apple_support", "_ios_support", "_osx_support", "_overlapped"),
        *("asyncio.windows_events", "asyncio.windows_utils", "encodings.mbcs", "encodings.oem"),
        *("_scproxy", "_winapi", "_wmi", "msvcrt", "nt", "winreg", "winsound"),
    ),
}

# Present, but not able to do what their names promise: module → what a user of it meets.
LIMITED: dict[str, str] = {
    "_socket, socket": "imports; every use of a socket raises OSError. Reach other hosts by the SDK's HTTP call",
    "asyncio": "imports; `asyncio.run` works for code that only waits for time and for other tasks",
    "http.client, urllib.request": "import; opening a connection raises OSError",
    "subprocess": "imports; starting a program raises OSError",
    "os, pathlib, tempfile, shutil": "import; there are no files, every path is absent",
    "select, selectors": "wait for time only",
    "threading, concurrent.futures": "import; starting a thread raises RuntimeError",
    "time.sleep": "sleeps on the host, at most until the reconcile's deadline",
    "zoneinfo": "has no time zone data of its own: put the package `tzdata` into the operator's zip",
    "weakref": "what was made at import lives until the unload: its weak references and `__del__` never hear of an end",
    "inspect, traceback": "show the operator's source lines, not those of the standard library",
}


def left_out_names() -> frozenset[str]:
    return frozenset(name for names in LEFT_OUT.values() for name in names)


def is_left_out(module: str) -> bool:
    """Whether the module, or a package it is in, is on the list, or is one of CPython's own tests."""
    parts = module.split(".")
    if any(part in ("test", "tests", "idle_test") for part in parts):
        return True
    return any(".".join(parts[:count]) in left_out_names() for count in range(1, len(parts) + 1))


def modules_below(folder: Path, *, prefix: str = "") -> Iterator[tuple[str, Path, bool]]:
    """Every module below `folder` as (full name, source, is a package), sorted by name."""
    found: list[tuple[str, Path, bool]] = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        if not all(part.replace("-", "_").isidentifier() for part in parts):
            continue
        is_package = parts[-1] == "__init__"
        name = prefix + ".".join(parts[:-1] if is_package else parts)
        if name and not (is_package and len(parts) == 1):
            found.append((name, path, is_package))
    yield from sorted(found)


def guest_modules(lib: Path) -> Iterator[tuple[str, Path, bool]]:
    """What of CPython's `Lib` is frozen into the guest."""
    for name, path, is_package in modules_below(lib):
        if "site-packages" not in path.parts and not is_left_out(name):
            yield name, path, is_package


def missing_document() -> str:
    """The text of `MISSING.md`."""
    lines = [
        "# What Python in a guest lacks",
        "",
        "<!-- Made from torpor_runtime/stdlib.py: python sdk/python/runtime/build.py --write-missing -->",
        "",
        "An operator in Python runs on CPython 3.13.5, built as one WebAssembly module. It can use packages of pure",
        "Python; native extensions, threads, processes, files and sockets do not exist there.",
        "",
        "## There, with limits",
        "",
        "| module | what to expect |",
        "|---|---|",
        *(f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {text} |" for names, text in LIMITED.items()),
        "",
        "## Missing",
        "",
        "Importing one of these raises `ModuleNotFoundError`.",
        "",
        "| why | modules |",
        "|---|---|",
        *(f"| {why} | {', '.join(f'`{name}`' for name in sorted(names))} |" for why, names in LEFT_OUT.items()),
        "",
    ]
    return "\n".join(lines)
