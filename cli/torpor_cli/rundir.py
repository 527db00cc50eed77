"""The folder of a running mesh: sockets, logs, state, and `mesh.json`, which says where everything is.

One mesh a name and user, below $XDG_RUNTIME_DIR or /tmp, mode 0700: Unix sockets in it are the services' only doors,
so that who can use them is the same user. Paths of sockets may not be longer than 107 bytes.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from torpor_cli.errors import CommandFailed, MeshNotRunning

_SOCKET_PATH_MAX = 107
_NAME = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,62})")


class MeshFile(msgspec.Struct, frozen=True):
    """What `mesh.json` holds."""

    pid: int
    cache: str
    host: str
    scheduler: str
    kubeconfig: str
    host_name: str


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one mesh."""

    root: Path

    @classmethod
    def named(cls, name: str) -> RunDir:
        """The folder for this user and mesh name; nothing is made yet. Raises CommandFailed for a name with a path."""
        if not _NAME.fullmatch(name):
            raise CommandFailed(f"--mesh {name!r} is not a name of letters, digits, dashes, dots and underscores")
        base = os.environ.get("XDG_RUNTIME_DIR")
        parent = Path(base) if base and Path(base).is_dir() else Path("/tmp")
        return cls(parent / f"torpor-{os.getuid()}" / name)

    def create(self) -> None:
        """Makes the folders; refuses ones that somebody else could read or owns."""
        for folder in (self.root.parent, self.root, self.logs):
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.stat()
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise CommandFailed(f"{folder} is not a folder of mode 0700 that belongs to you; remove it")
        if len(str(self.root / "scheduler.sock")) > _SOCKET_PATH_MAX:
            raise CommandFailed(f"{self.root} is too long a path for sockets; set XDG_RUNTIME_DIR to a shorter one")

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def mesh_file(self) -> Path:
        return self.root / "mesh.json"

    def socket(self, service: str) -> str:
        return f"unix:{self.root / service}.sock"

    def lock(self) -> IO[str]:
        """Holds the folder for this process; raises CommandFailed if another mesh of this name runs."""
        file = (self.root / "lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            file.close()
            raise CommandFailed(f"a mesh already runs in {self.root}; stop it or give another --mesh") from exc
        return file

    def write(self, mesh: MeshFile) -> None:
        temporary = self.mesh_file.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(mesh))
        temporary.replace(self.mesh_file)

    def read(self) -> MeshFile:
        """Of the running mesh; raises MeshNotRunning."""
        try:
            mesh = msgspec.json.decode(self.mesh_file.read_bytes(), type=MeshFile)
            os.kill(mesh.pid, 0)
        except (OSError, msgspec.DecodeError) as exc:
            raise MeshNotRunning(self.root) from exc
        return mesh
