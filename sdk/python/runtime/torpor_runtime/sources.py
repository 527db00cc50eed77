"""The sources of CPython and zlib: from a given file, their home on the web, or Debian's source packages.

A download is taken only if its sha256 is one of those written here, so it does not matter who served it. Tarballs
are kept in the cache folder. Debian's archive is asked through `apt-get`, with lists of its own in a temporary
folder: nothing of the machine's apt is changed, and the mirror is the one the machine is set up to use.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from .steps import BuildError, say

CONNECT_TIMEOUT_S = 5.0  # Where the address cannot be reached at all, the next source is tried soon.
DOWNLOAD_TIMEOUT_S = 120.0
APT_TIMEOUT_S = 180.0
CHUNK_BYTES = 1 << 20
DEBIAN_SUITE = "trixie"  # Has 3.13.5, and as a stable release keeps it.


@dataclass(frozen=True, slots=True)
class Source:
    """One tarball; `sha256` lists every packing of the same release."""

    name: str
    folder: str  # What the tarball unpacks to.
    url: str
    debian_package: str
    given_by: str  # The environment variable that names a file to use instead.
    sha256: tuple[str, ...]


PYTHON = Source(
    name="Python-3.13.5.tar.xz",
    folder="Python-3.13.5",
    url="https://www.python.org/ftp/python/3.13.5/Python-3.13.5.tar.xz",
    debian_package="python3.13",
    given_by="TORPOR_PYTHON_SOURCE",
    sha256=("93e583f243454e6e9e4588ca2c2662206ad961659863277afcdb96801647d640",),
)
ZLIB = Source(
    name="zlib-1.3.1.tar.gz",
    folder="zlib-1.3.1",
    url="https://zlib.net/fossils/zlib-1.3.1.tar.gz",
    debian_package="zlib",
    given_by="TORPOR_ZLIB_SOURCE",
    sha256=(
        "9a93b2b7dfdac77ceba5a558a580e74667dd6fede4585b91eefb60f03b72df23",
        # Debian's packing: the same, less documents and contributed code that it may not distribute.
        "60dd315c07f616887caa029408308a018ace66e3d142726a97db164b3b8f69fb",
    ),
)


def fetched(source: Source, folder: Path, environment: Mapping[str, str]) -> Path:
    """The verified tarball. Raises BuildError if it is to be had nowhere."""
    given = environment.get(source.given_by)
    if given:
        return _checked_given(source, Path(given))
    kept = folder / source.name
    if kept.is_file() and _digest(kept) in source.sha256:
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    complaints = []
    for way in (_download, _from_debian):
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            try:
                found = way(source, Path(scratch))
                found.replace(kept)
                return kept
            except BuildError as error:
                complaints.append(str(error))
                say(f"{source.name}: {error}; trying elsewhere")
    raise BuildError(
        f"{source.name} cannot be fetched ({'; '.join(complaints)}); "
        f"fetch it elsewhere and set {source.given_by} to the file"
    )


def unpacked(source: Source, tarball: Path, folder: Path, *, wanted: Callable[[str], bool] = lambda path: True) -> Path:
    """Unpack the files whose path below the source's folder is `wanted`; that folder."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        plain = _without_xz(tarball, Path(scratch))
        with tarfile.open(plain) as archive:
            prefix = f"{source.folder}/"
            members = [m for m in archive if m.name.startswith(prefix) and wanted(m.name.removeprefix(prefix))]
            _extract(archive, members, folder)
    return folder / source.folder


def _extract(archive: tarfile.TarFile, members: Iterable[tarfile.TarInfo], folder: Path) -> None:
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, members=members, filter="data")
    else:  # Python 3.11.3 and older; the hash says whose tarball it is.
        archive.extractall(folder, members=members)


def _checked_given(source: Source, path: Path) -> Path:
    if not path.is_file():
        raise BuildError(f"{source.given_by}={path} is not a file; unset it or correct it")
    digest = _digest(path)
    if digest not in source.sha256:
        raise BuildError(f"{source.given_by}={path} has sha256 {digest}, which is not {source.name}; unset it")
    return path.resolve()


def _download(source: Source, scratch: Path) -> Path:
    host = urlsplit(source.url).hostname
    target = scratch / source.name
    until = time.monotonic() + DOWNLOAD_TIMEOUT_S
    try:
        with urllib.request.urlopen(source.url, timeout=CONNECT_TIMEOUT_S) as answer, target.open("wb") as file:
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
                if time.monotonic() > until:
                    raise BuildError(f"{host} took more than {DOWNLOAD_TIMEOUT_S:.0f} s")
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise BuildError(f"{host}: {reason}") from error
    return _verified(source, target, str(host))


def _from_debian(source: Source, scratch: Path) -> Path:
    if shutil.which("apt-get") is None:
        raise BuildError("no apt-get to ask Debian's archive with")
    mirrors = _debian_mirrors()
    if not mirrors:
        raise BuildError("apt is not set up with an archive of Debian's")
    complaint = ""
    for mirror, signed_by in mirrors:
        try:
            return _apt_source(source, scratch, mirror, signed_by)
        except BuildError as error:
            complaint = str(error)
    raise BuildError(complaint)


def _debian_mirrors() -> list[tuple[str, str]]:
    """Base addresses of the Debian archives in the machine's apt configuration, with their keyrings."""
    told = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)\t$(SIGNED_BY)\t$(ORIGIN)"],
        capture_output=True,
        text=True,
        timeout=APT_TIMEOUT_S,
        check=False,
    ).stdout
    found: dict[str, str] = {}
    for line in told.splitlines():
        uri, signed_by, origin = line.split("\t")
        # Without lists of its own (a fresh container) apt knows no origin; then the path has to tell.
        is_debian = origin == "Debian" if not origin.startswith("$(") else True
        if is_debian and urlsplit(uri).path.rstrip("/").endswith("/debian"):
            found.setdefault(uri, "" if signed_by.startswith("$(") else signed_by)
    return sorted(found.items())


def _apt_source(source: Source, scratch: Path, mirror: str, signed_by: str) -> Path:
    keyring = signed_by or "/usr/share/keyrings/debian-archive-keyring.gpg"
    option = f" [signed-by={keyring}]" if Path(keyring).is_file() else ""
    for folder in ("parts", "lists/partial", "archives/partial"):
        (scratch / folder).mkdir(parents=True, exist_ok=True)
    (scratch / "sources.list").write_text(f"deb-src{option} {mirror} {DEBIAN_SUITE} main\n")
    settings = {
        "Dir::Etc::SourceList": str(scratch / "sources.list"),
        "Dir::Etc::SourceParts": str(scratch / "parts"),
        "Dir::State::Lists": str(scratch / "lists"),
        "Dir::Cache": str(scratch),
        "Acquire::Languages": "none",
        "Acquire::http::Timeout": "20",
        # The unprivileged user that apt downloads as cannot write into a cache folder of root's.
        **({"APT::Sandbox::User": "root"} if os.geteuid() == 0 else {}),
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    for action in (
        ["update"],
        ["source", "--download-only", "--tar-only", source.debian_package],
    ):
        _apt([*options, "-qq", *action], scratch)
    tarballs = sorted(scratch.glob(f"{source.debian_package}_*.orig.tar.*"))
    if not tarballs:
        raise BuildError(f"Debian's archive gave no source of {source.debian_package}")
    return _verified(source, tarballs[0], "Debian's archive")


def _apt(arguments: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            ["apt-get", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=APT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"apt-get took more than {APT_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("E:")] or [f"exit {done.returncode}"]
        raise BuildError(f"apt-get: {lines[0].removeprefix('E: ')}")


def _verified(source: Source, path: Path, origin: str) -> Path:
    digest = _digest(path)
    if digest not in source.sha256:
        raise BuildError(f"{origin} gave a file with sha256 {digest}, which is not {source.name}")
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _without_xz(tarball: Path, scratch: Path) -> Path:
    """The tarball itself, or unpacked by `xz` where this Python was built without lzma."""
    if tarball.suffix != ".xz":
        return tarball
    try:
        import lzma  # noqa: F401
    except ImportError:
        plain = scratch / "source.tar"
        try:
            with plain.open("wb") as output:
                subprocess.run(["xz", "-dc", str(tarball)], stdout=output, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BuildError(f"this Python has no lzma, and xz does not work either: {error}") from error
        return plain
    return tarball
