"""The price of memory: what a byte-second costs, so that what is resident fits the budget.

A PI controller in the log of the price, which is dual ascent on the memory constraint (scheduling.md, "The price"):

    e = (used − budget) / budget        ln λ += Kp·(e − e_prev) + Ki·e·Δt

Above the budget the price rises until operators unload; below it, it falls to its floor: memory that is free today is
still worth something to the machine's other work. At its limits the integrator stands still. Pressure of the kernel
raises the price at once and never lowers it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torpor_services.price import FLOOR_S_PER_BYTE_S

# Ki: an error of the whole budget doubles the price in about 3.5 s. Kp damps it: a step of the whole budget moves the
# price by e² at once. Seconds between updates are 1 to 5, far below both.
KP = 2.0
KI = 0.2
# Percent of time that some task waited for memory, over 10 s; 1 % is what TMO (ASPLOS'22) steers container memory to.
PRESSURE_PERCENT = 1.0


@dataclass(slots=True)
class Price:
    """`per_byte_s`: seconds of work that a byte in memory must save a second."""

    per_byte_s: float = FLOOR_S_PER_BYTE_S
    minimum: float = FLOOR_S_PER_BYTE_S
    maximum: float = 1e-6
    _error: float = 0.0

    def update(self, used_bytes: int, budget_bytes: int, elapsed_s: float, pressure_percent: float = 0.0) -> float:
        """Moves the price by what memory was used since the last update; returns it. Elapsed is bounded to 5 s."""
        if budget_bytes <= 0:
            return self.per_byte_s
        error = (used_bytes - budget_bytes) / budget_bytes
        change = KP * (error - self._error) + KI * error * min(max(elapsed_s, 0.0), 5.0)
        self._error = error
        if pressure_percent > PRESSURE_PERCENT:
            change = max(change, math.log(2))
        self.per_byte_s = min(self.maximum, max(self.minimum, self.per_byte_s * math.exp(max(-5.0, min(5.0, change)))))
        return self.per_byte_s
