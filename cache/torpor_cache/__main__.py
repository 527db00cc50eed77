"""`python -m torpor_cache`: the cache service, settings from TORPOR_CACHE_… variables."""

from __future__ import annotations

import asyncio
import os
import sys

from torpor_services import logs, telemetry
from torpor_services.config import load
from torpor_services.errors import TorporError, one_line

from torpor_cache.config import CacheConfig
from torpor_cache.service import run


def main() -> int:
    try:
        config = load(CacheConfig, os.environ)
        logs.configure("cache", config.log_level)
        telemetry.configure("cache")
        asyncio.run(run(config))
    except TorporError as exc:
        print(f"torpor-cache: {one_line(exc)}", file=sys.stderr)
        return 1
    finally:
        telemetry.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
