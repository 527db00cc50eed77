"""The time, in one place, so that a test can hold it still (`torpor_sdk.testing`)."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime

_frozen: datetime | None = None


def now() -> datetime:
    """The time in UTC."""
    return _frozen or datetime.now(UTC)


def timestamp(moment: datetime | None = None) -> str:
    """As Kubernetes writes it, to the second: `2026-03-01T12:00:00Z`."""
    return (moment or now()).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> datetime:
    """RFC 3339, as Kubernetes has it; without an offset it is UTC. Raises `ValueError`."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@contextlib.contextmanager
def frozen(moment: datetime) -> Iterator[None]:
    """The time stands still (tests)."""
    global _frozen
    before, _frozen = _frozen, moment.astimezone(UTC)
    try:
        yield
    finally:
        _frozen = before
