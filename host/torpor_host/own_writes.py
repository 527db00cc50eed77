"""Whether an operator wakes itself: reconciles that its own writes led to, counted, and how many came in a row.

A reconcile that changed an object of the operator's own primary kind will see that change as an event. If the next
reconcile of the same key is brought by a watch within `PAUSE_S`, it counts as led to by that write. An operator that
writes its status once and then finds nothing to do makes runs of one; one that writes each time (a counter, the time)
never ends its run. Versions tell a write that changed nothing: its answer is not newer than what the watch had shown
when the reconcile began. An event from outside in the same moment counts as its own: this warns, it decides nothing.

Changed by workers; each step is one operation on a dictionary.
"""

from __future__ import annotations

from torpor_host.work_queue import Cause, Key

# Nothing to do for this long between two reconciles ends a run.
PAUSE_S = 1.0
# Reconciles in a row beyond which people are told. An operator that goes through phases makes some ten.
RUN_MAX = 100
_KEYS_MAX = 512


class OwnWrites:
    """One operator's."""

    __slots__ = ("_ended_s", "_wrote", "run", "shown_version", "total")

    def __init__(self) -> None:
        self.total = 0  # reconciles that own writes led to
        self.run = 0  # of these, the ones in a row until now
        self.shown_version = 0  # of the primary's kind, by the watch
        self._ended_s = float("-inf")
        self._wrote: dict[Key, None] | None = None  # keys whose last reconcile wrote

    @property
    def endless(self) -> bool:
        return self.run >= RUN_MAX

    def shown(self, resource_version: str) -> None:
        """The watch of the primaries is there."""
        if resource_version.isdecimal():
            self.shown_version = max(self.shown_version, int(resource_version))

    def began(self, key: Key, cause: Cause, now_s: float) -> None:
        led_to = cause is Cause.WATCH and self._wrote is not None and key in self._wrote
        if led_to and now_s - self._ended_s < PAUSE_S:
            self.total += 1
            self.run += 1
        else:
            self.run = 0

    def ended(self, key: Key, now_s: float, *, wrote: bool) -> None:
        self._ended_s = now_s
        if wrote:
            if self._wrote is None:
                self._wrote = {}
            self._wrote[key] = None
            while len(self._wrote) > _KEYS_MAX:
                del self._wrote[next(iter(self._wrote))]
        elif self._wrote is not None:
            self._wrote.pop(key, None)
            if not self._wrote:
                self._wrote = None
