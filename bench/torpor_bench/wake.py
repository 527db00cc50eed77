"""wake: how long an event waits for a sleeping operator, in the host alone and through the whole mesh."""

from __future__ import annotations

import asyncio

from torpor_bench import wake_engine, wake_path
from torpor_bench.figures import Figures

HAS_QUICK = True


async def run(*, quick: bool) -> Figures:
    figures = Figures()
    await asyncio.to_thread(wake_engine.measure, figures, quick=quick)
    await wake_path.measure(figures, quick=quick)
    figures.note("component_p50_ms is absent: components do not run yet")
    return figures
