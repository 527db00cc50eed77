"""Listening, health, identity, draining: through real gRPC."""

import asyncio
import datetime
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torpor_services.channels import open_channel
from torpor_services.errors import AddressInUse, InvalidSetting
from torpor_services.health import Readiness
from torpor_services.security import Identity, TlsFiles, is_local, peer_identity
from torpor_services.server import ServerConfig, serving

HOST = Identity("host", "edge-1")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class WhoAmI(grpc.GenericRpcHandler):
    """Answers every call with the identity of its peer, after `delay_s`."""

    def __init__(self, delay_s=0.0):
        self.delay_s = delay_s

    def service(self, handler_call_details):
        if handler_call_details.method != "/test/WhoAmI":
            return None
        return grpc.unary_unary_rpc_method_handler(self.answer)

    async def answer(self, request, context):
        await asyncio.sleep(self.delay_s)
        return str(peer_identity(context)).encode()


@asynccontextmanager
async def running(listen="127.0.0.1:0", tls=None, readiness=None, delay_s=0.0, **kwargs):
    config = ServerConfig(listen=listen, drain_s=5, tls=tls or TlsFiles())
    handlers = (WhoAmI(delay_s),)
    async with serving(
        config,
        add=lambda server: server.add_generic_rpc_handlers(handlers),
        names=["test"],
        readiness=readiness or Readiness(),
        **kwargs,
    ) as server:
        yield server


async def who_am_i(channel):
    return (await channel.unary_unary("/test/WhoAmI")(b"")).decode()


async def test_health_follows_readiness():
    readiness = Readiness()
    readiness.require("watches")
    async with running(readiness=readiness) as server, open_channel(server.address, HOST, TlsFiles()) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        readiness.met("watches")
        assert (await watch.read()).status == SERVING
        readiness.lost("watches", "connection lost")
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


async def test_a_local_peer_is_who_it_says_it_is(tmp_path):
    async with running(f"unix:{tmp_path}/s") as server, open_channel(server.address, HOST, TlsFiles()) as channel:
        assert await who_am_i(channel) == "host/edge-1"


async def test_a_port_in_use_is_said_with_its_address():
    async with running() as server:
        with pytest.raises(AddressInUse, match=server.address):
            async with running(server.address):
                pass


async def test_a_socket_left_by_a_killed_process_is_taken_over_and_a_live_one_is_not(tmp_path):
    import socket

    path = tmp_path / "s"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    async with running(f"unix:{path}"):
        with pytest.raises(AddressInUse):
            async with running(f"unix:{path}"):
                pass


async def test_an_address_that_others_reach_needs_tls():
    with pytest.raises(InvalidSetting, match="TORPOR_TLS_CA"):
        async with running("0.0.0.0:0"):
            pass
    assert is_local("[::1]:80") and is_local("localhost:1") and not is_local("10.0.0.1:1")


async def test_running_calls_end_when_the_process_is_asked_to_stop():
    async with AsyncExitStack() as client_side:
        async with running(delay_s=0.3) as server:
            channel = await client_side.enter_async_context(open_channel(server.address, HOST, TlsFiles()))
            call = asyncio.create_task(who_am_i(channel))
            await asyncio.sleep(0.1)  # the call is under way
            os.kill(os.getpid(), signal.SIGTERM)
            await server.wait_stopped()
            assert not call.done()
        assert await call == "host/edge-1"


async def test_reflection_tells_the_services_and_their_contracts():
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    Request = reflection_pb2.ServerReflectionRequest
    asked = [Request(list_services=""), Request(file_containing_symbol="grpc.health.v1.Health"), Request()]
    async with running() as server, open_channel(server.address, HOST, TlsFiles()) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, contract, nothing = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
    names = [service.name for service in listed.list_services_response.service]
    assert names == ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "test"]
    assert b"HealthCheckRequest" in contract.file_descriptor_response.file_descriptor_proto[0]
    assert nothing.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_a_server_that_nobody_asks_has_no_reflection_in_memory():
    code = (
        "import sys, torpor_services.server; print([m for m in sys.modules if 'v1alpha' in m or 'descriptor_pb' in m])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


class Authority:
    """A CA that signs one certificate a peer."""

    def __init__(self, folder, name):
        self.folder = folder
        folder.mkdir()
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(self.name, self.key, ca=True)
        (folder / "ca.pem").write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, identity):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)])
        certificate = self._sign(subject, key, uri=f"torpor://{identity}")
        stem = self.folder / identity.name
        stem.with_suffix(".crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        stem.with_suffix(".key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return TlsFiles(self.folder / "ca.pem", stem.with_suffix(".crt"), stem.with_suffix(".key"))

    def _sign(self, subject, key, ca=False, uri=None):
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost")] + ([x509.UniformResourceIdentifier(uri)] if uri else [])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        return builder.sign(self.key, hashes.SHA256())


async def test_with_tls_the_certificate_says_who_a_peer_is(tmp_path):
    authority = Authority(tmp_path / "ca", "torpor")
    server_files, host_files = authority.issue(Identity("cache", "cache")), authority.issue(HOST)
    async with running("localhost:0", server_files) as server:
        claims_other = Identity("host", "somebody-else")
        async with open_channel(server.address, claims_other, host_files) as channel:
            assert await who_am_i(channel) == "host/edge-1"


async def test_a_certificate_of_another_authority_is_refused(tmp_path):
    server_files = Authority(tmp_path / "ca", "torpor").issue(Identity("cache", "cache"))
    stranger = Authority(tmp_path / "other", "torpor").issue(HOST)
    mixed = TlsFiles(server_files.ca, stranger.certificate, stranger.key)
    async with running("localhost:0", server_files) as server:
        async with open_channel(server.address, HOST, mixed) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await who_am_i(channel)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_remote_target_without_tls_is_refused():
    with pytest.raises(InvalidSetting, match="TORPOR_TLS_CA"):
        open_channel("cache.example.com:7601", HOST, TlsFiles())
