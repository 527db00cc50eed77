"""Faults on demand, for tests of clients: refusals, hangs, closed and silent watches, compacted history.

Each rule is used up by the requests it matches, in the order in which the rules were made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torpor_devcluster.errors import ApiError
from torpor_devcluster.requestinfo import RequestInfo

_REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class WatchHandle(Protocol):
    """What faults do to a live watch."""

    def close(self) -> None: ...

    def mute(self) -> None: ...


@dataclass(slots=True)
class Rule:
    """`remaining` requests of this verb and resource (empty: any) are answered with `code`, or hang without one."""

    remaining: int
    verb: str = ""
    resource: str = ""
    code: int = 0
    retry_after_s: int | None = None
    message: str = ""
    after_write: bool = False
    """The request is carried out first; only its answer is replaced (a lost reply)."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    hits: int = 0

    def matches(self, info: RequestInfo) -> bool:
        return (
            self.remaining > 0
            and self.verb in ("", info.verb)
            and self.resource in ("", info.plural, f"{info.plural}.{info.group}")
        )

    def use(self) -> None:
        self.remaining -= 1
        self.hits += 1

    def error(self) -> ApiError:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        details = {} if self.retry_after_s is None else {"retryAfterSeconds": self.retry_after_s}
        message = self.message or f"the devcluster was told to answer {self.code}"
        return ApiError(self.code, _REASONS.get(self.code, ""), message, details=details, headers=headers)


class Faults:
    def __init__(
        self, watches: Callable[[], Sequence[tuple[RequestInfo, WatchHandle]]], compact: Callable[[], None]
    ) -> None:
        self._watches = watches
        self._compact = compact
        self._rules: list[Rule] = []

    def answer(
        self,
        count: int,
        code: int,
        *,
        verb: str = "",
        resource: str = "",
        retry_after_s: int | None = None,
        message: str = "",
        after_write: bool = False,
    ) -> Rule:
        """The next `count` matching requests end in `code`; `resource` is `pods` or `deployments.apps`.

        A watch can so be refused with 410 as an HTTP status, which other servers do than the one that is copied.
        """
        rule = Rule(count, verb, resource, code, retry_after_s, message, after_write)
        self._rules.append(rule)
        return rule

    def hang(self, count: int, *, verb: str = "", resource: str = "") -> Rule:
        """The next `count` matching requests get no answer until `rule.released.set()`; then they are served."""
        rule = Rule(count, verb, resource)
        self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget all rules and release what hangs."""
        for rule in self._rules:
            rule.released.set()
        self._rules.clear()

    def close_watches(self, resource: str = "") -> int:
        """End live watches (of one resource, or all) as if the server had closed them; returns how many."""
        watches = self._of(resource)
        for watch in watches:
            watch.close()
        return len(watches)

    def mute_watches(self, resource: str = "") -> int:
        """Live watches fall silent but stay connected, without bookmarks: a half-open connection."""
        watches = self._of(resource)
        for watch in watches:
            watch.mute()
        return len(watches)

    def compact(self) -> None:
        """Forget all history: watches that are behind get 410, older versions and continue tokens expire."""
        self._compact()

    def _of(self, resource: str) -> list[WatchHandle]:
        return [
            watch for info, watch in self._watches() if resource in ("", info.plural, f"{info.plural}.{info.group}")
        ]

    def take(self, info: RequestInfo) -> Rule | None:
        """The rule that this request uses up, if any."""
        for rule in self._rules:
            if rule.matches(info):
                rule.use()
                return rule
        return None
