"""How an installation or a call into a guest fails. Raised by `install` and `Instance`, caught by the runtime.

After any `GuestFailed` the instance is dead: its memory may be half-changed, it is never saved, only closed.
"""

from __future__ import annotations


class InstallRefused(Exception):
    """This module cannot run here; trying again with the same bytes gives the same answer. `reason` is for a person."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class InstallFailed(Exception):
    """The host could not install now: disk full, compiler out of time or memory. May be tried again."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GuestFailed(Exception):
    """A call into a guest did not return. `reason` is one line for a person."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GuestTrapped(GuestFailed):
    """The guest trapped: unreachable, out-of-bounds access, stack exhausted, division by zero."""


class GuestTimedOut(GuestFailed):
    """The guest used up its CPU budget, or did not return in the grace after its deadline."""


class GuestStopped(GuestFailed):
    """`Instance.stop` was called while it ran: the lease was lost, or the operator deleted."""


class GuestExited(GuestFailed):
    """The guest called `proc_exit`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the guest ended itself with proc_exit({code})")
        self.code = code


class GuestOutOfMemory(GuestFailed):
    """`torpor_alloc` answered 0, or the guest trapped with its memory at the limit."""


class GuestProtocolError(GuestFailed):
    """The guest broke the ABI: a result outside its memory, a message that cannot be read."""


class InstanceClosed(Exception):
    """A call on an instance that is closed or dead: a bug of the caller."""
