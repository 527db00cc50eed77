"""`python -m torpor_cache` as a process: settings, start, end."""

import asyncio
import contextlib
import os
import signal
import sys

from torpor.cache.v1 import cache_pb2
from torpor_cache.apiserver import ApiServer, Credentials
from torpor_cache.kubeconfig import FixedCredentials
from torpor_cache.testing_client import CacheClient
from torpor_cache.testing_cluster import Admin
from torpor_devcluster import Config, DevCluster
from torpor_services.security import Identity


async def start(**settings):
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TORPOR_", "KUBE", "OTEL_"))} | settings
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "torpor_cache", env=environ, stderr=asyncio.subprocess.PIPE
    )


@contextlib.asynccontextmanager
async def started(address, **settings):
    """The process, once it listens; ended at the end."""
    process = await start(**settings)
    try:
        async with asyncio.timeout(30):
            while b'"listening"' not in await process.stderr.readline():
                pass
        drained = asyncio.create_task(process.stderr.read())
        yield process
        drained.cancel()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_it_serves_from_a_kubeconfig_and_ends_on_sigterm_with_a_stream_open(tmp_path):
    async with DevCluster(Config(tls=True)) as cluster:
        kubeconfig = cluster.write_kubeconfig(tmp_path / "kubeconfig")
        ca_pem = await asyncio.to_thread(cluster.ca_file.read_text)
        credentials = FixedCredentials(Credentials(cluster.url, token=cluster.admin_token, ca_pem=ca_pem))
        async with ApiServer(credentials, user_agent="test") as api:
            admin = Admin(api)
            await admin.install_crds()
            await admin.namespace("torpor-system")
            await admin.account("torpor-system", "torpor-host")
            await admin.allow("torpor-system", "torpor-host", ["configmaps"])
        address = f"unix:{tmp_path}/c.sock"
        process = await start(
            TORPOR_CACHE_LISTEN=address,
            TORPOR_CACHE_KUBECONFIG=str(kubeconfig),
            TORPOR_CACHE_STATE=str(tmp_path / "state"),
        )
        try:
            async with asyncio.timeout(30):
                while b'"listening"' not in await process.stderr.readline():
                    pass
            async with CacheClient(address, Identity("host", "a")) as client:
                await client.subscribe(1, "v1/configmaps", namespace="torpor-system")
                await client.until_synced(1, timeout_s=30)
                process.send_signal(signal.SIGTERM)
                await asyncio.wait_for(process.wait(), 10)
                assert process.returncode == 0
                assert client.ended is not None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_wrong_setting_stops_it_with_the_variables_name():
    process = await start(TORPOR_CACHE_BATCH_EVENTS="many")
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"TORPOR_CACHE_BATCH_EVENTS" in errors


async def test_killed_at_any_time_it_knows_afterwards_what_was_deleted_meanwhile(tmp_path):
    """Watched at first by one who keeps no positions, so that nobody counts on memory when the watch begins."""
    takeover = cache_pb2.Resume(from_acknowledged=True)
    path = tmp_path / "kubeconfig"
    async with DevCluster(Config(tls=True)) as cluster:
        cluster.write_kubeconfig(path)
        ca_pem = await asyncio.to_thread(cluster.ca_file.read_text)
        credentials = FixedCredentials(Credentials(cluster.url, token=cluster.admin_token, ca_pem=ca_pem))
        address = f"unix:{tmp_path}/c.sock"
        settings = {
            "TORPOR_CACHE_LISTEN": address,
            "TORPOR_CACHE_KUBECONFIG": str(path),
            "TORPOR_CACHE_STATE": str(tmp_path / "state"),
        }
        async with ApiServer(credentials, user_agent="test") as api:
            admin = Admin(api)
            await admin.install_crds()
            await admin.namespace("torpor-system")
            await admin.account("torpor-system", "torpor-host")
            await admin.allow("torpor-system", "torpor-host", ["configmaps"])
            for number in range(5):
                await admin.config_map("torpor-system", f"n{number}")
            fields = {"namespace": "torpor-system"}
            async with started(address, **settings) as process, CacheClient(address, Identity("host", "a")) as client:
                await client.subscribe(1, "v1/configmaps", **fields)
                await client.until_synced(1, timeout_s=30)
                await client.subscribe(2, "v1/configmaps", name="for", **fields)
                await client.until_synced(2)
                await admin.delete_config_map("torpor-system", "n0")
                await client.until(2, lambda got: got[-1].type == "DELETED")
                await asyncio.sleep(0.3)  # of real time: the batch of writes that is under way
                process.kill()
                await process.wait()
            for number in range(1, 4):
                await admin.delete_config_map("torpor-system", f"n{number}")
            async with started(address, **settings), CacheClient(address, Identity("host", "a")) as client:
                await client.subscribe(1, "v1/configmaps", name="for", resume=takeover, **fields)
                got = await client.until_synced(1, timeout_s=30)
                assert {r.key[1] for r in got if r.type == "DELETED"} == {"n0", "n1", "n2", "n3"}
