"""Which modules a guest has, that the list of the missing is right, and how what cannot work refuses."""

from __future__ import annotations

import ast

import pytest
from torpor_runtime import stdlib
from torpor_runtime.testing import RUNTIME, Guest

NOTHING_TO_IMPORT = ("__main__", "__phello__", "__phello__.ham", "__phello__.ham.eggs", "__phello__.spam", "__hello__")


@pytest.mark.parametrize(
    "name",
    [
        *("asyncio", "http.client", "urllib.request", "socket", "select", "selectors", "zoneinfo", "zlib", "gzip"),
        *(
            "decimal",
            "_decimal",
            "uuid",
            "secrets",
            "hashlib",
            "sysconfig",
            "threading",
            "subprocess",
            "logging.config",
        ),
        *("concurrent.futures", "email.mime.text", "xml.etree.ElementTree", "unittest.mock", "http.server", "tomllib"),
    ],
)
def test_common_modules_can_be_imported(guest: Guest, name: str) -> None:
    assert guest.run(f"import {name}\nprint('there')") == "there\n"


def test_every_frozen_module_can_be_imported(guest: Guest) -> None:
    """A module that is there and fails at import would be worse than one that is missing."""
    told = guest.run(
        f"""
import _imp, importlib, warnings
warnings.simplefilter("ignore")
failed = []
for name in sorted(_imp._frozen_module_names()):
    if name in {NOTHING_TO_IMPORT!r} or name.endswith("__main__"):
        continue
    try:
        importlib.import_module(name)
    except BaseException as exc:
        failed.append(f"{{name}}: {{exc!r}}")
print(failed)
"""
    )
    assert ast.literal_eval(told.splitlines()[-1]) == []


def test_the_list_of_what_is_missing_is_complete(guest: Guest) -> None:
    told = guest.run(
        """
import sys
from importlib.util import find_spec
print(sorted(name for name in sys.stdlib_module_names if name != "__main__" and find_spec(name) is None))
"""
    )
    top_level = {name for name in stdlib.left_out_names() if "." not in name}
    assert set(ast.literal_eval(told)) == top_level


def test_the_published_list_is_the_one_the_build_uses() -> None:
    assert (RUNTIME / "MISSING.md").read_text() == stdlib.missing_document(), "run build.py --write-missing"


@pytest.mark.parametrize(
    "statement",
    [
        "socket.socket()",
        "socket.create_connection(('127.0.0.1', 80))",
        "socket.getaddrinfo('example.com', 443)",
        "socket.socketpair()",
        "urllib.request.urlopen('http://example.com')",
        "http.client.HTTPConnection('example.com').request('GET', '/')",
        "select.select([1], [], [], 0)",
    ],
)
def test_using_a_socket_raises_an_os_error_that_says_why(guest: Guest, statement: str) -> None:
    printed = guest.run(
        f"""
import http.client, select, socket, urllib.request
try:
    {statement}
except OSError as error:
    print(error)
"""
    )
    assert "a Torpor guest has no sockets" in printed


def test_functions_of_socket_that_need_no_network_work(guest: Guest) -> None:
    printed = guest.run(
        """
import socket
print(socket.htons(1), socket.ntohl(1), socket.inet_ntoa(bytes([127, 0, 0, 1])), socket.inet_aton("10.0.0.1"))
print(socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, "fe80::1")), socket.gethostname())
"""
    )
    assert printed == "256 16777216 127.0.0.1 b'\\n\\x00\\x00\\x01'\nfe80::1 operator\n"


def test_asyncio_runs_tasks_and_timers(guest: Guest) -> None:
    printed = guest.run(
        """
import asyncio
async def slow(n):
    await asyncio.sleep(n / 100)
    print(n)
    return n
async def main():
    try:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)
    except TimeoutError:
        print("timeout")
    return await asyncio.gather(slow(2), slow(1))
print(asyncio.run(main()))
"""
    )
    assert printed == "timeout\n1\n2\n[2, 1]\n"


def test_asyncio_says_when_nothing_can_happen_any_more(guest: Guest) -> None:
    printed = guest.run(
        """
import asyncio
async def main():
    await asyncio.Event().wait()
try:
    asyncio.run(main())
except RuntimeError as error:
    print(error)
"""
    )
    assert "every task waits" in printed


def test_threads_and_processes_refuse(guest: Guest) -> None:
    printed = guest.run(
        """
import subprocess, threading
try:
    threading.Thread(target=print).start()
except RuntimeError as error:
    print(error)
try:
    subprocess.run(["true"])
except OSError as error:
    print(type(error).__name__)
"""
    )
    assert printed.startswith("can't start new thread\n")
    assert printed.endswith("OSError\n")


def test_there_are_no_files_and_no_environment(guest: Guest) -> None:
    printed = guest.run(
        """
import os, sys
print(dict(os.environ), sys.path, sys.argv, os.path.exists("/"))
for path in ("/etc/passwd", "x"):
    for mode in ("r", "w"):
        try:
            open(path, mode)
        except OSError as error:
            print(type(error).__name__)
"""
    )
    lines = printed.splitlines()
    assert lines[0] == "{} [] ['operator'] False"
    assert len(lines) == 5


def test_zlib_and_hashes_give_the_known_results(guest: Guest) -> None:
    printed = guest.run(
        """
import decimal, gzip, hashlib, zlib
print(zlib.crc32(b"torpor"), zlib.decompress(zlib.compress(b"a" * 100_000)) == b"a" * 100_000)
print(gzip.decompress(gzip.compress(b"b")), hashlib.sha256(b"").hexdigest()[:16], hashlib.blake2b(b"").hexdigest()[:8])
print(decimal.Decimal(1) / 3)
"""
    )
    import zlib

    assert printed.splitlines() == [
        f"{zlib.crc32(b'torpor')} True",
        "b'b' e3b0c44298fc1c14 786a02f7",
        "0.3333333333333333333333333333",
    ]


def test_sleeping_takes_its_time(guest: Guest) -> None:
    printed = guest.run("import time\nt = time.monotonic()\ntime.sleep(0.02)\nprint(time.monotonic() - t >= 0.02)")
    assert printed == "True\n"
