"""What memory is worth where it is free: one value for the scheduler's floor and for a host that decides alone.

See docs/decisions/0009-the-price-of-memory-has-a-floor.md.
"""

from __future__ import annotations

# Seconds of work that a byte must save a second to stay in memory. A megabyte-second is worth a millisecond of work:
# an idle Python guest of 0.5 MB that unloads and wakes in 1.5 ms breaks even after 3 s.
FLOOR_S_PER_BYTE_S = 1e-9
