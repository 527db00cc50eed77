"""Outbound HTTP."""

import json
from typing import Any

import pytest
from torpor_sdk import Denied, HTTPError, Operator, _frames, http
from torpor_sdk.testing import FakeKube, reconcile


def test_a_fetch_is_one_message_with_its_headers_as_lines(host: Any) -> None:
    host.fetch_answer = _frames.encode(201, "Content-Type: text/plain\nX-A: 1\nx-a: 2\n", b"made")
    response = http.fetch("https://example.com/x", method="post", json={"a": 1}, headers={"X-Id": "7"}, timeout_s=0.25)
    assert host.fetched == [
        [b"POST", b"https://example.com/x", b"X-Id: 7\nContent-Type: application/json\n", b'{"a": 1}', b"250"]
    ]
    assert (response.status, response.text, response.ok) == (201, "made", True)
    assert response.headers == {"content-type": "text/plain", "x-a": "1, 2"}


def test_a_status_of_an_error_is_an_answer_until_it_is_asked_about(host: Any) -> None:
    host.fetch_answer = _frames.encode(503, "", b"busy")
    response = http.fetch("https://example.com")
    with pytest.raises(HTTPError, match=r"GET https://example.com: 503: busy"):
        response.raise_for_status()


def test_a_host_that_is_not_on_the_list_is_denied(host: Any) -> None:
    host.fetch_answer = _frames.encode("", "", "", "denied", "example.com is not in limits.outboundHosts")
    with pytest.raises(Denied, match="outboundHosts"):
        http.fetch("https://example.com")


@pytest.mark.parametrize("headers", [{"a": "b\nc"}, {"a\r": "b"}, {"a: b": "c"}, {"": "c"}])
def test_headers_that_would_become_others_are_refused(host: Any, headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        http.fetch("https://example.com", headers=headers)
    assert host.fetched == []


def test_an_operator_under_test_gets_its_answers_from_the_test() -> None:
    op = Operator(for_="v1/pods")
    seen: list[Any] = []

    @op.reconcile
    def _(request: Any, kube: Any) -> None:
        seen.append(http.fetch("https://example.com/", headers={"A": "1"}, body="x").json())

    def answer(method: str, url: str, headers: Any, body: bytes) -> Any:
        return 200, {}, json.dumps([method, url, headers, body.decode()]).encode()

    reconcile(op, "a/b", FakeKube(), http=answer)
    assert seen == [["GET", "https://example.com/", {"A": "1"}, "x"]]
    with pytest.raises(Denied, match="pass http="):
        reconcile(op, "a/b", FakeKube())
