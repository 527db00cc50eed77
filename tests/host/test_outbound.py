"""Outbound HTTP: only where the WasmOperator allows, with limits, against a real local server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from torpor_host import outbound
from torpor_host.hostcalls import CallError, FetchRequest, FetchResponse
from torpor_host.in_flight import InFlight
from torpor_host.limits import Deadline
from torpor_host.outbound import Outbound, allows


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/secret")
            self.end_headers()
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            for _ in range(12):
                self.wfile.write(bytes(1 << 20))
        elif self.path == "/half":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"half")
            self.wfile.flush()
            self.server.asked.set()  # type: ignore[attr-defined]
            self.server.release.wait(10)  # type: ignore[attr-defined]
        elif self.path == "/slow":
            self.server.release.wait(10)  # type: ignore[attr-defined]
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write("\n".join(f"{k}: {v}" for k, v in self.headers.items()).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # clients hang up on purpose
    server.release = threading.Event()  # type: ignore[attr-defined]
    server.asked = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.release.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def fetch(url: str, *allowed: str, seconds: float = 5.0, **request: object) -> FetchResponse:
    values = {"method": "GET", "headers": (), "body": b"", **request}
    return Outbound().fetch(
        FetchRequest(url=url, **values),  # type: ignore[arg-type]
        allowed,
        (("Torpor-Operator", "a/op"), ("Torpor-Epoch", "7")),
        Deadline.after(seconds),
    )


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("api.example.com", "api.example.com", 443, True),
        ("api.example.com", "api.example.com", 8080, True),
        ("API.example.com.", "api.example.com", 443, True),
        ("api.example.com:8443", "api.example.com", 8443, True),
        ("api.example.com:8443", "api.example.com", 443, False),
        ("*.example.com", "api.example.com", 443, True),
        ("*.example.com", "example.com", 443, False),
        ("*.example.com", "badexample.com", 443, False),
        ("example.com", "example.com.evil.org", 443, False),
        ("10.0.0.1:80", "10.0.0.1", 80, True),
        ("[::1]:80", "::1", 80, True),
        ("::1", "::1", 9, True),
        ("*", "example.com", 80, False),
        ("", "", 80, False),
    ],
)
def test_the_list_is_taken_literally(entry: str, host: str, port: int, allowed: bool) -> None:
    assert allows([entry], host, port) is allowed


def test_a_listed_host_is_reached_and_told_who_asks(server: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_port}/"
    got = fetch(url, f"127.0.0.1:{server.server_port}", headers=(("Torpor-Epoch", "99"), ("X-Mine", "yes")))
    assert got.status == 200
    assert b"Torpor-Operator: a/op" in got.body and b"Torpor-Epoch: 7" in got.body and b"X-Mine: yes" in got.body
    assert b"Torpor-Epoch: 99" not in got.body, "a guest cannot speak as another epoch"


def test_a_body_is_sent(server: ThreadingHTTPServer) -> None:
    got = fetch(f"http://127.0.0.1:{server.server_port}/", "127.0.0.1", method="POST", body=b"hello")
    assert (got.status, got.body) == (201, b"hello")


def test_what_is_not_listed_is_denied_before_anything_is_resolved() -> None:
    got = fetch("http://nowhere.invalid/", "example.com")
    assert got.error is CallError.DENIED and "outboundHosts" in got.message


def test_a_name_that_points_at_this_machine_is_denied_unless_listed_itself(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = server.server_port
    answers = [(2, 1, 6, "", ("127.0.0.1", port))]
    monkeypatch.setattr(outbound.socket, "getaddrinfo", lambda *args, **kwargs: answers)
    denied = fetch(f"http://rebound.example.com:{port}/", "rebound.example.com", "127.0.0.1")
    assert denied.error is CallError.DENIED
    assert fetch(f"http://localhost:{port}/", "localhost").status == 200


@pytest.mark.parametrize("address", ["169.254.169.254", "::ffff:127.0.0.1", "0.0.0.0", "::1"])
def test_special_addresses_behind_a_name_are_denied(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(2, 1, 6, "", (address, 80))]
    monkeypatch.setattr(outbound.socket, "getaddrinfo", lambda *args, **kwargs: answers)
    assert fetch("http://name.example.com/", "*.example.com").error is CallError.DENIED


def test_a_redirect_is_handed_to_the_guest_and_not_followed(server: ThreadingHTTPServer) -> None:
    got = fetch(f"http://127.0.0.1:{server.server_port}/redirect", "127.0.0.1")
    assert got.status == 302 and ("Location", "http://169.254.169.254/secret") in got.headers


def test_a_large_answer_is_refused(server: ThreadingHTTPServer) -> None:
    assert fetch(f"http://127.0.0.1:{server.server_port}/large", "127.0.0.1").error is CallError.TOO_LARGE


def test_an_answer_that_does_not_come_ends_at_the_deadline(server: ThreadingHTTPServer) -> None:
    got = fetch(f"http://127.0.0.1:{server.server_port}/slow", "127.0.0.1", seconds=0.2)
    assert got.error is CallError.DEADLINE


@pytest.mark.parametrize(
    "url", ["ftp://example.com/", "file:///etc/passwd", "http://user:pw@example.com/", "http://example.com/a b", "x"]
)
def test_what_is_no_clean_url_is_refused(url: str) -> None:
    assert fetch(url, "example.com").error is CallError.INVALID


def test_a_header_cannot_smuggle_another_request(server: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_port}/"
    assert fetch(url, "127.0.0.1", headers=(("X", "a\r\nHost: evil"),)).error is CallError.INVALID


def test_a_refused_connection_is_unavailable(server: ThreadingHTTPServer) -> None:
    assert fetch("http://127.0.0.1:1/", "127.0.0.1").error is CallError.UNAVAILABLE


def test_who_stops_the_guest_ends_a_request_that_waits_and_half_an_answer_is_none(server: ThreadingHTTPServer) -> None:
    in_flight = InFlight()

    def stop() -> None:
        server.asked.wait(10)  # type: ignore[attr-defined]
        in_flight.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    url = f"http://127.0.0.1:{server.server_port}/half"
    got = Outbound().fetch(FetchRequest("GET", url, (), b""), ("127.0.0.1",), (), Deadline.after(30), in_flight)
    stopper.join()
    assert got.error is CallError.FENCED and not server.release.is_set()  # type: ignore[attr-defined]


def test_half_an_answer_at_the_deadline_is_none(server: ThreadingHTTPServer) -> None:
    got = fetch(f"http://127.0.0.1:{server.server_port}/half", "127.0.0.1", seconds=0.2)
    assert got.error is CallError.DEADLINE
