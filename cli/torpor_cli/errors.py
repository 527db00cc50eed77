"""Errors that end a command: one line for a person, and the exit code."""

from __future__ import annotations

from torpor_services.errors import TorporError


class CommandFailed(TorporError):
    """The command cannot go on; the message says what is wrong and what to do."""


class MeshNotRunning(CommandFailed):
    """No mesh of this user is found."""

    def __init__(self, folder: object) -> None:
        super().__init__(f"no mesh is running here ({folder} is empty or left over); start one with `torpor up`")
