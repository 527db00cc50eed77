"""Errors that end a service's start-up, and how a foreign one is told in a line."""

from __future__ import annotations


class TorporError(Exception):
    """Base of what Torpor raises on purpose. The message names the thing and the way out."""


class InvalidSetting(TorporError):
    """A setting is missing or wrong; `variable` is the environment variable to mend."""

    def __init__(self, variable: str, problem: str) -> None:
        super().__init__(f"{variable}: {problem}")
        self.variable = variable


class AddressInUse(TorporError):
    """Another process listens there already."""

    def __init__(self, address: str) -> None:
        super().__init__(f"cannot listen on {address}: it is in use; stop the other process or choose another address")


def one_line(error: BaseException, limit: int = 500) -> str:
    """The error as one line for a log or a status, never empty, at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters, the middle left out: a traceback says where at its start and what at its end."""
    if len(text) <= limit:
        return text
    head = limit // 3
    return f"{text[:head]} … {text[len(text) - (limit - head - 3) :]}"
