"""The last lines of every operator, and who follows them.

Bounded three ways: lines an operator, bytes of all operators together (the oldest lines go first, whoever's they are),
and a rate an operator, beyond which lines are counted and dropped. A follower has a queue of its own; one that does not
read loses the oldest lines and is told how many. Written by workers, read on the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torpor_services.clock import Clock

from torpor_host.operator_spec import OperatorId

LEVELS = ("debug", "info", "warning", "error")
LINES_MAX = 200
BYTES_MAX = 4 << 20
LINE_CHARACTERS_MAX = 4000
_RATE_PER_S, _BURST = 100.0, 400.0
_FOLLOWER_LINES_MAX = 1000
_OVERHEAD_BYTES = 200  # of the objects around a line


@dataclass(frozen=True, slots=True)
class Line:
    operator: OperatorId
    unix_ns: int
    level: str
    text: str
    trace_id: str

    @property
    def size(self) -> int:
        return len(self.text) + _OVERHEAD_BYTES


@dataclass(slots=True)
class _Budget:
    """Token bucket."""

    tokens: float
    at_s: float
    dropped: int = 0


@dataclass(slots=True, eq=False)
class Follower:
    """Lines as they come; `operator` None: of all."""

    operator: OperatorId | None
    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=_FOLLOWER_LINES_MAX))
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    lost: int = 0


class GuestLogs:
    """`post` brings a call to the loop from any thread."""

    def __init__(self, clock: Clock, post: Callable[[Callable[[], None]], None]) -> None:
        self._clock = clock
        self._post = post
        self._lock = threading.Lock()
        self._lines: dict[OperatorId, deque[Line]] = {}
        self._order: deque[OperatorId] = deque()
        self._bytes = 0
        self._budgets: dict[OperatorId, _Budget] = {}
        self._followers: list[Follower] = []

    def write(self, operator: OperatorId, level: int, text: str, traceparent: str = "") -> None:
        """A line of the operator's; any thread."""
        name = LEVELS[level] if 0 <= level < len(LEVELS) else "info"
        trace_id = traceparent.split("-")[1] if traceparent.count("-") == 3 else ""
        text = text.rstrip("\n")
        if len(text) > LINE_CHARACTERS_MAX:
            text = f"{text[:LINE_CHARACTERS_MAX]}… ({len(text)} characters)"
        with self._lock:
            dropped = self._spend(operator)
            if dropped is None:
                return
            if dropped:
                self._keep(Line(operator, self._clock.unix_ns(), "warning", f"{dropped} lines were dropped here", ""))
            line = Line(operator, self._clock.unix_ns(), name, text, trace_id)
            self._keep(line)
            following = bool(self._followers)
        if following:
            self._post(lambda: self._tell(line))

    def tail(self, operator: OperatorId | None, lines: int = 0) -> list[Line]:
        """The last `lines` that are kept, 0 for all, oldest first; of all operators if none is named."""
        with self._lock:
            if operator is not None:
                kept = list(self._lines.get(operator, ()))
            else:
                kept = sorted((line for all_ in self._lines.values() for line in all_), key=lambda line: line.unix_ns)
        return kept[-lines:] if lines else kept

    def follow(self, operator: OperatorId | None) -> Follower:
        """Lines from now on, until `unfollow`. Loop only."""
        follower = Follower(operator)
        self._followers.append(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        if follower in self._followers:
            self._followers.remove(follower)

    def forget(self, operator: OperatorId) -> None:
        """The operator is gone."""
        with self._lock:
            lines = self._lines.pop(operator, None)
            self._budgets.pop(operator, None)
            if lines:
                self._bytes -= sum(line.size for line in lines)

    @property
    def bytes(self) -> int:
        return self._bytes

    def _tell(self, line: Line) -> None:
        for follower in self._followers:
            if follower.operator in {None, line.operator}:
                if len(follower.lines) == _FOLLOWER_LINES_MAX:
                    follower.lost += 1
                follower.lines.append(line)
                follower.ready.set()

    def _spend(self, operator: OperatorId) -> int | None:
        """How many lines were dropped before this one, None if this one is to be dropped."""
        now_s = self._clock.monotonic_s()
        budget = self._budgets.get(operator)
        if budget is None:
            budget = self._budgets[operator] = _Budget(_BURST, now_s)
        budget.tokens = min(_BURST, budget.tokens + (now_s - budget.at_s) * _RATE_PER_S)
        budget.at_s = now_s
        if budget.tokens < 1:
            budget.dropped += 1
            return None
        budget.tokens -= 1
        dropped, budget.dropped = budget.dropped, 0
        return dropped

    def _keep(self, line: Line) -> None:
        lines = self._lines.get(line.operator)
        if lines is None:
            lines = self._lines[line.operator] = deque()
        lines.append(line)
        self._order.append(line.operator)
        self._bytes += line.size
        if len(lines) > LINES_MAX:
            self._bytes -= lines.popleft().size
        while self._bytes > BYTES_MAX or len(self._order) > 2 * BYTES_MAX // _OVERHEAD_BYTES:
            oldest = self._lines.get(self._order.popleft())
            if oldest and self._bytes > BYTES_MAX:
                self._bytes -= oldest.popleft().size
