"""Starts a command that ends with the process that started it: `python -m torpor_cli.launch PARENT COMMAND…`.

PR_SET_PDEATHSIG must be set between fork and exec. Running Python there is unsafe beside gRPC's threads, so this small
program sets it and then becomes the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before the line above
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
