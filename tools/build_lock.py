"""One build at a time, also between processes: who comes second waits, and says so. Standard library only.

For scripts that build something into a cache before anything is installed: the Python runtime, the Kubernetes of tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SAY_EVERY_S = 10.0  # Half a minute of silence looks like a hang, to people and to CI.
POLL_S = 0.5


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def exclusive_lock(path: Path, say: Callable[[str], None] = _to_stderr) -> Iterator[None]:
    """Hold `path` locked; the kernel releases it however this process ends."""
    with path.open("a") as file:
        started = time.monotonic()
        spoken = 0.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
                if spoken == 0.0 or waited - spoken >= SAY_EVERY_S:
                    say(f"another run is building; waiting ({waited:.0f} s)")
                    spoken = max(waited, POLL_S)
                time.sleep(POLL_S)
        yield
