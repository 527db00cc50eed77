"""`python -m torpor_host`: a host, configured by environment variables. Prints its address as a line of log."""

from __future__ import annotations

import asyncio
import os
import sys

from torpor_services import logs, telemetry
from torpor_services.config import load
from torpor_services.errors import TorporError, one_line

from torpor_host.config import HostConfig
from torpor_host.service import running_host


async def _run(config: HostConfig) -> bool:
    """Says whether it ended as it should."""
    async with running_host(config, handle_signals=True) as host:
        await host.server.wait_stopped()
    return not host.failed


def main() -> int:
    """0 after a drain, 1 if it failed, 2 for a wrong setting or an address that is taken."""
    try:
        config = load(HostConfig, os.environ)
        logs.configure("host", config.log_level)
        telemetry.configure("host", config.name)
        return 0 if asyncio.run(_run(config)) else 1
    except TorporError as exc:
        print(f"torpor-host: {one_line(exc)}", file=sys.stderr)
        return 2
    except OSError as exc:
        print(f"torpor-host: {one_line(exc)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    sys.exit(main())
