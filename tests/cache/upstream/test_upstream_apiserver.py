"""The one way to the API server: who asks, how, and what is told when nobody answers."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import sys
from dataclasses import replace

import pytest
from torpor_cache.apiserver import (
    ApiServer,
    ApiUnavailable,
    Credentials,
    Impersonation,
    ReplyTooLarge,
    StatusError,
    _keepalive_socket,
    _make_tls_context,
    status_of,
)
from torpor_cache.kubeconfig import FixedCredentials


class Source:
    """Credentials that the test changes."""

    def __init__(self, url: str, token: str) -> None:
        self.credentials = Credentials(url, token=token, rereads=True)
        self.loads = 0

    async def load(self) -> Credentials:
        self.loads += 1
        return self.credentials


async def _asked(kit, work):
    task = asyncio.ensure_future(work)
    return task, await kit.api.next()


async def test_headers_of_the_caller_do_not_decide_who_asks(kit):
    headers = {"Authorization": "Bearer stolen", "impersonate-user": "admin", "X-Kept": "1", "User-Agent": "operator/7"}
    impersonation = Impersonation.service_account("ns", "op")
    source = FixedCredentials(Credentials(kit.api.url, token="mine"))
    async with ApiServer(source, user_agent="torpor") as api:
        task, exchange = await _asked(kit, api.request("GET", "/api", headers=headers, impersonate=impersonation))
        exchange.reply(200, {})
        await task
    assert exchange.headers["authorization"] == "Bearer mine"
    assert exchange.headers["impersonate-user"] == "system:serviceaccount:ns:op"
    assert (exchange.headers["x-kept"], exchange.headers["user-agent"]) == ("1", "operator/7")
    assert exchange.headers["accept-encoding"] == "identity"


async def test_path_and_query_are_sent_as_they_are(kit):
    task, exchange = await _asked(kit, kit.server.request("GET", "/api/v1/x%2Fy?a=1%2C2", query={"b": "c d"}))
    exchange.reply(404, b"404 page not found")
    reply = await task
    assert exchange.path == "/api/v1/x%2Fy" and exchange.query == {"a": "1,2", "b": "c d"}
    assert reply.kubernetes_status()["message"] == "404 page not found"
    with pytest.raises(StatusError, match="404 NotFound"):
        reply.raise_for_status("reading x")


async def test_a_refused_token_is_read_again_and_the_request_repeated_once(kit):
    source = Source(kit.api.url, "old")
    async with ApiServer(source, user_agent="t") as api:
        task, first = await _asked(kit, api.request("POST", "/x", body=b"{}"))
        source.credentials = replace(source.credentials, token="new")
        first.reply(401, kit.status(401, "Unauthorized"))
        second = await kit.api.next()
        assert (second.headers["authorization"], second.body) == ("Bearer new", b"{}")
        second.reply(401, kit.status(401, "Unauthorized"))
        assert (await task).status == 401
        assert kit.api.requests.empty()


async def test_a_token_file_is_read_again_after_a_minute(kit):
    source = Source(kit.api.url, "one")
    async with ApiServer(source, user_agent="t", clock=kit.clock) as api:
        for advance_s, loads in ((0, 1), (59, 1), (2, 2)):
            await kit.clock.advance(advance_s)
            task, exchange = await _asked(kit, api.request("GET", "/x"))
            exchange.reply(200, {})
            await task
            assert source.loads == loads


async def test_a_post_that_was_sent_is_never_sent_again(kit):
    task, warm = await _asked(kit, kit.server.request("GET", "/x"))
    warm.reply(200, {})
    await task
    task, exchange = await _asked(kit, kit.server.request("POST", "/x", body=b"{}"))
    exchange.cut()
    with pytest.raises(ApiUnavailable) as caught:
        await task
    assert caught.value.sent and caught.value.retryable
    await kit.api.settle()
    assert kit.api.requests.empty()


async def test_a_refused_connection_is_told_as_not_sent(kit):
    await kit.api.stop_listening()
    with pytest.raises(ApiUnavailable, match="cannot be reached") as caught:
        await kit.server.request("POST", "/x", body=b"{}")
    assert not caught.value.sent


async def test_an_answer_that_does_not_come_ends_in_time(kit):
    task, _ = await _asked(kit, kit.server.request("GET", "/x", timeout_s=0.05))
    with pytest.raises(ApiUnavailable, match=r"no answer within 0\.05 s"):
        await task


async def test_an_answer_that_is_too_large_is_not_read(kit):
    task, exchange = await _asked(kit, kit.server.request("GET", "/x", reply_bytes_max=100))
    exchange.reply(200, b"x" * 101)
    with pytest.raises(ReplyTooLarge, match="longer than 100 bytes"):
        await task


async def test_retry_after_is_seconds_and_nothing_else(kit):
    for text, expected in (("7", 7.0), ("Wed, 21 Oct 2015 07:28:00 GMT", None), ("99999", 3600.0)):
        task, exchange = await _asked(kit, kit.server.request("GET", "/x"))
        exchange.reply(429, kit.status(429), {"Retry-After": text})
        assert (await task).retry_after_s == expected


async def test_a_plain_server_spoken_to_with_tls_is_told_as_that(kit):
    source = FixedCredentials(Credentials(kit.api.url.replace("http", "https")))
    async with ApiServer(source, user_agent="t", connect_timeout_s=0.2) as api:
        with pytest.raises(ApiUnavailable, match=r"TLS|broke|reached"):
            await api.request("GET", "/x")


@pytest.mark.parametrize(
    ("credentials", "problem"),
    [
        (Credentials("ftp://x"), "no http or https address"),
        (Credentials("https://x", client_certificate_pem="c"), "needs its key"),
        (Credentials("https://x", ca_pem="no certificate"), "cannot be used"),
    ],
)
async def test_credentials_that_cannot_be_used_say_why(credentials, problem):
    async with ApiServer(FixedCredentials(credentials), user_agent="t") as api:
        with pytest.raises(ApiUnavailable, match=problem) as caught:
            await api.request("GET", "/x")
    assert not caught.value.retryable


def test_a_peer_that_is_gone_is_found_within_75_s():
    made = _keepalive_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ()))
    try:
        get = made.getsockopt
        assert get(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, probes = (
            get(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * probes <= 75
        assert get(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 75_000
    finally:
        made.close()


def test_a_status_is_made_of_whatever_came():
    assert status_of(502, b"<html>bad gateway</html>")["message"] == "<html>bad gateway</html>"
    assert status_of(500, b"")["message"] == "the server answered 500 without a body"
    assert status_of(403, b'{"kind":"Status","code":"x"}')["code"] == 403
    assert status_of(500, os.urandom(3000))["code"] == 500


def test_impersonation_spells_out_only_what_is_given():
    whole = Impersonation("u", ("g1", "g2"), "id", (("scopes/x", "v"),))
    assert whole.headers() == [
        ("Impersonate-User", "u"),
        ("Impersonate-Group", "g1"),
        ("Impersonate-Group", "g2"),
        ("Impersonate-Uid", "id"),
        ("Impersonate-Extra-scopes%2Fx", "v"),
    ]
    assert Impersonation("u").headers() == [("Impersonate-User", "u")]


def test_the_certificates_of_public_authorities_are_not_in_memory():
    """Of a service of its own: here somebody may have imported aiohttp before."""
    program = (
        "import os; before = dict(os.environ); import torpor_cache.service, aiohttp.connector as c;"
        "assert dict(os.environ) == before; print(c._SSL_CONTEXT_VERIFIED.cert_store_stats()['x509_ca'])"
    )
    for environ in ({}, {"SSL_CERT_FILE": "/nowhere.pem"}):
        told = subprocess.run([sys.executable, "-c", program], env=os.environ | environ, capture_output=True, text=True)
        assert told.stdout.strip() == "0", told.stderr


def test_a_server_without_a_named_authority_is_checked_against_the_machines():
    context = _make_tls_context(Credentials("https://kubernetes.example"))
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.cert_store_stats() == ssl.create_default_context().cert_store_stats()
