"""`select` for a guest: it can wait for time, not for files or sockets, of which there are none."""

import errno
import time

error = OSError


def select(rlist, wlist, xlist, timeout=None, /):
    """Sleep for `timeout` seconds where nothing is waited for; OSError otherwise."""
    if [*rlist, *wlist, *xlist]:
        raise OSError(errno.ENOTSUP, "a Torpor guest has no sockets or pipes to wait for")
    if timeout is None:
        raise OSError(errno.ENOTSUP, "select() for nothing and without a timeout would never return")
    time.sleep(max(0, timeout))
    return [], [], []
