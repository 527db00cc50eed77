"""What goes on, on standard error, with the seconds since the start."""

from __future__ import annotations

import sys
import time

_STARTED_S = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - _STARTED_S:6.1f} s  {text}", file=sys.stderr, flush=True)
