"""Channels to other services: keepalive, message size, identity.

Three services keep a stream open for their whole life; a peer that vanished without a FIN is found by keepalive pings
within 20 s + 10 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from torpor_services.errors import InvalidSetting
from torpor_services.security import PEER_METADATA, Identity, TlsFiles, is_local

# Above the API server's own limit for a request body (3 MiB) and for a large LIST answered in chunks of 1 MiB.
MESSAGE_BYTES_MAX = 16 * 1024 * 1024

COMMON_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_CHANNEL_OPTIONS: Sequence[tuple[str, Any]] = (
    *COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),  # retries are ours: a POST that was sent is never sent again
)


def open_channel(target: str, identity: Identity, tls: TlsFiles) -> grpc.aio.Channel:
    """A channel for asyncio. Local targets may go without TLS; any other needs the files."""
    if tls.enabled:
        return open_bare_channel(target, tls)
    _refuse_remote(target)
    interceptors: list[Any] = [kind(identity) for kind in (_UnaryUnary, _UnaryStream, _StreamStream)]
    return grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS, interceptors=interceptors)


def open_bare_channel(target: str, tls: TlsFiles) -> grpc.aio.Channel:
    """A channel whose calls say themselves who they are, by `peer_metadata` where there is no TLS: an interceptor puts
    a queue and two tasks between a stream and whoever writes to it."""
    if tls.enabled:
        return grpc.aio.secure_channel(target, tls.channel_credentials(), options=_CHANNEL_OPTIONS)
    _refuse_remote(target)
    return grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)


def peer_metadata(identity: Identity) -> tuple[tuple[str, str], ...]:
    """What a call over a local channel without TLS carries to say who it is."""
    return ((PEER_METADATA, str(identity)),)


def _refuse_remote(target: str) -> None:
    if not is_local(target):
        raise InvalidSetting("TORPOR_TLS_CA", f"is needed to reach {target}, which is not on this machine")


class _PeerMetadata:
    """The identity, added to every call. grpc.aio registers an interceptor for one kind of call only, so one each."""

    def __init__(self, identity: Identity) -> None:
        self._metadata = peer_metadata(identity)

    def _with_peer(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._metadata)
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )


class _UnaryUnary(_PeerMetadata, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._with_peer(client_call_details), request)


class _UnaryStream(_PeerMetadata, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._with_peer(client_call_details), request)


class _StreamStream(_PeerMetadata, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_stream_stream(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request_iterator: Any,
    ) -> Any:
        return await continuation(self._with_peer(client_call_details), request_iterator)
