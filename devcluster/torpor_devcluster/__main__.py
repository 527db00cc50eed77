"""`python -m torpor_devcluster`: a dev cluster until it is interrupted."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

from torpor_devcluster import Config, DevCluster


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torpor devcluster",
        description="An in-memory Kubernetes API server on this machine. Everything is gone when it ends.",
        epilog="Example: torpor devcluster --kubeconfig dev.kubeconfig & kubectl --kubeconfig dev.kubeconfig get ns",
    )
    parser.add_argument("--kubeconfig", required=True, metavar="PATH", help="where to write the kubeconfig")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--no-tls", action="store_true", help="plain HTTP; kubectl sends no token then")
    parser.add_argument("--no-controllers", action="store_true", help="no garbage collection, no namespace deletion")
    return parser


async def _serve(config: Config, kubeconfig: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with DevCluster(config) as cluster:
        cluster.write_kubeconfig(kubeconfig)
        print(f"devcluster serves at {cluster.url}; kubeconfig: {kubeconfig}", flush=True)
        await stop.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after SIGINT or SIGTERM, 1 when the port or the file cannot be had."""
    arguments = _parser().parse_args(argv)
    config = Config(port=arguments.port, tls=not arguments.no_tls, controllers=not arguments.no_controllers)
    try:
        asyncio.run(_serve(config, arguments.kubeconfig))
    except OSError as error:
        print(f"devcluster: cannot start: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
