"""`python -m torpor_devcluster`: starts, says where, ends on a signal, and says why it cannot start."""

import asyncio
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from torpor_kubernetes_testing import KubeClient


async def start(*arguments: str | Path) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "torpor_devcluster", *arguments, stdout=PIPE, stderr=PIPE
    )


async def test_it_serves_until_it_is_told_to_end_and_leaves_nothing_but_the_kubeconfig(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    process = await start("--kubeconfig", path, "--no-tls")
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
        assert line.startswith("devcluster serves at http://127.0.0.1:") and str(path) in line
        assert path.stat().st_mode & 0o777 == 0o600
        config = json.loads(path.read_text())
        url, token = config["clusters"][0]["cluster"]["server"], config["users"][0]["user"]["token"]
        async with KubeClient(url, token=token) as client:
            assert len(await client.items("v1/namespaces")) == 4
            watch = client.watch("v1/namespaces")
            await anext(watch)
            # A live watch does not hold it up.
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 5) == 0
            await watch.aclose()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_port_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start("--kubeconfig", tmp_path / "kubeconfig", "--port", str(port))
        _, error = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert error.decode().startswith("devcluster: cannot start:") and str(port) in error.decode()
    assert error.decode().count("\n") == 1
