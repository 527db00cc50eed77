"""A service's own log: a file in the mesh's folder that the service writes, read and followed from here."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import IO, Any

import msgspec

from torpor_cli.errors import CommandFailed
from torpor_cli.output import Format, print_json
from torpor_cli.rundir import RunDir

SERVICES = ("cache", "host", "scheduler", "devcluster")
# A file tells nobody that it has grown; a person does not see a quarter of a second.
_LOOK_EVERY_S = 0.25
_CHUNK_BYTES = 1 << 16


async def service_log(mesh: str, service: str, *, follow: bool, tail: int, output: Format) -> None:
    """Its last `tail` lines (0: all), then new ones where it is followed. Raises CommandFailed."""
    if service not in SERVICES:
        raise CommandFailed(f"--service {service!r} is none of {', '.join(SERVICES)}")
    path = RunDir.named(mesh).logs / f"{service}.log"
    try:
        with path.open("rb") as file:
            lines = file.readlines()
            for line in lines[-tail:] if tail else lines:
                _print(service, line, output)
            if follow:
                async for line in _following(file):
                    _print(service, line, output)
    except OSError as exc:
        raise CommandFailed(f"no log of {service}: {exc.strerror} ({path})") from exc


async def _following(file: IO[bytes]) -> AsyncIterator[bytes]:
    """Whole lines as they come; from the beginning again where the file was written anew."""
    begun = b""
    while True:
        while part := file.readline(_CHUNK_BYTES):
            begun += part
            if begun.endswith(b"\n"):
                yield begun
                begun = b""
        if os.fstat(file.fileno()).st_size < file.tell():
            file.seek(0)
            begun = b""
        else:
            await asyncio.sleep(_LOOK_EVERY_S)


def _print(service: str, line: bytes, output: Format) -> None:
    """As it was written; as JSON with the service's name, what is no JSON as its `text`."""
    text = line.decode("utf-8", "replace").rstrip("\n")
    if output == "json":
        print_json({"service": service, **_fields(text)})
        sys.stdout.flush()
    else:
        print(text, flush=True)


def _fields(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"text": text}
