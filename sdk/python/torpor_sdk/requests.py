"""What a reconcile gets and what it may give back."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from . import clock

Cause = Literal["start", "watch", "timer", "resync", "retry", "wake"]


@dataclass(frozen=True, slots=True)
class Request:
    """A key to reconcile: bring the world in line with the primary of this name, whatever has changed.

    `cause` and `attempt` are for logs; a reconcile that depends on them is wrong, as changes are merged.
    """

    namespace: str
    name: str
    cause: str = "watch"
    attempt: int = 0
    traceparent: str = ""

    @property
    def key(self) -> str:
        """`namespace/name`, or the name of a cluster-scoped primary."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True, slots=True)
class Requeue:
    """Reconcile this key again after that many milliseconds, if nothing wakes it before."""

    after_ms: int


def requeue_after(
    delay: timedelta | None = None, *, hours: float = 0, minutes: float = 0, seconds: float = 0
) -> Requeue:
    """Return it from `reconcile` to look at the key again later. The operator sleeps meanwhile.

    >>> requeue_after(minutes=30)
    Requeue(after_ms=1800000)
    """
    total = timedelta(hours=hours, minutes=minutes, seconds=seconds) + (delay or timedelta())
    # Rounded up: a wake-up just before the moment would find nothing to do and ask for one more.
    return Requeue(max(0, -(-total // timedelta(milliseconds=1))))


def requeue_at(moment: datetime) -> Requeue:
    """Reconcile the key again at this time (at once if it has passed). Without a time zone it is taken as UTC."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return requeue_after(aware - clock.now())
