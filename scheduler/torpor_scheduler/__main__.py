"""`python -m torpor_scheduler`: the service, with settings from the environment."""

from __future__ import annotations

import asyncio
import os
import sys

from torpor_services import logs, telemetry
from torpor_services.config import load
from torpor_services.errors import TorporError

from torpor_scheduler.config import SchedulerConfig
from torpor_scheduler.service import running


def main() -> int:
    """Runs until SIGTERM; 2 for settings that are wrong."""
    try:
        config = load(SchedulerConfig, os.environ)
        logs.configure("scheduler", config.log_level)
        telemetry.configure("scheduler", config.name)
        asyncio.run(_serve(config))
    except TorporError as exc:
        print(f"torpor-scheduler: {exc}", file=sys.stderr)
        return 2
    finally:
        telemetry.shutdown()
    return 0


async def _serve(config: SchedulerConfig) -> None:
    async with running(config) as server:
        await server.wait_stopped()


if __name__ == "__main__":
    sys.exit(main())
