"""Python's `logging`, with the host as its end: every logger of the operator and of its libraries reaches it."""

import logging

from . import _host

log = logging.getLogger("operator")
_HOST_LEVELS = ((logging.ERROR, 3), (logging.WARNING, 2), (logging.INFO, 1))


class HostHandler(logging.Handler):
    """Sends records to the operator's log; never raises because of one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record).encode("utf-8", "backslashreplace").decode()
            _host.calls().log(host_level(record.levelno), text)
        except Exception:
            self.handleError(record)


def host_level(level: int) -> int:
    """The ABI's level: 0 debug, 1 info, 2 warning, 3 error."""
    return next((number for at_least, number in _HOST_LEVELS if level >= at_least), 0)


def install() -> None:
    """Makes the host the one handler of the root logger, at INFO. Again does nothing."""
    root = logging.getLogger()
    if not any(isinstance(handler, HostHandler) for handler in root.handlers):
        root.handlers[:] = [HostHandler()]
        root.setLevel(logging.INFO)
