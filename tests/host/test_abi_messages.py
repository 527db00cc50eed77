"""Framing of the operator ABI's messages, hostile ones included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor_host import abi
from torpor_host.hostcalls import CallError, CallResponse, FetchResponse


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_fields_come_back_as_they_were(fields: list[bytes]):
    assert abi.decode(abi.encode(fields)) == fields


DECODERS = [
    abi.decode_reconcile_result,
    abi.decode_describe_result,
    abi.decode_map_result,
    abi.decode_load_result,
    abi.decode_kube_request,
    abi.decode_tree_request,
    abi.decode_fetch_request,
]


@given(st.binary(max_size=200) | st.lists(st.binary(max_size=30), max_size=8).map(abi.encode))
def test_random_bytes_raise_message_invalid_or_nothing(message: bytes):
    for decode in DECODERS:
        try:
            decode(message)
        except abi.MessageInvalid as exc:
            assert str(exc)


def test_length_beyond_the_message_is_refused_before_anything_is_allocated():
    with pytest.raises(abi.MessageInvalid, match="field 0 says 4294967295 bytes, 1 are left"):
        abi.decode(b"\xff\xff\xff\xffx")


def test_outcomes_of_a_reconcile():
    assert abi.decode_reconcile_result(abi.encode([b"done"])) == abi.Done()
    assert abi.decode_reconcile_result(abi.encode([b"requeue", b"1500"])) == abi.RequeueAfter(1500)
    assert abi.decode_reconcile_result(abi.encode([b"error", b"", b"why"])) == abi.ReconcileFailed("why")
    for fields in ([b"maybe"], [], [b"requeue"], [b"requeue", b"-1"], [b"requeue", b"9" * 30], [b"\xff"]):
        with pytest.raises(abi.MessageInvalid):
            abi.decode_reconcile_result(abi.encode(fields))


def test_fields_beyond_those_known_are_ignored():
    assert abi.decode_reconcile_result(abi.encode([b"done", b"", b"", b"later", b"minor"])) == abi.Done()


def test_kube_request_with_and_without_its_own_timeout():
    fields = [b"GET", b"/api/v1", b"application/json", b"", b""]
    request, timeout_s = abi.decode_kube_request(abi.encode(fields))
    assert (request.method, request.path, timeout_s) == ("GET", "/api/v1", None)
    assert abi.decode_kube_request(abi.encode([*fields, b"0"]))[1] is None
    assert abi.decode_kube_request(abi.encode([*fields, b"250"]))[1] == 0.25


def test_fetch_headers_are_split_and_checked():
    request, _ = abi.decode_fetch_request(abi.encode([b"GET", b"http://x", b"A: b\nC:d: e\n"]))
    assert request.headers == (("A", "b"), ("C", "d: e"))
    for bad in (b"no colon\n", b": empty\n", b"A: b\r\n", b"A: \0\n"):
        with pytest.raises(abi.MessageInvalid, match="header"):
            abi.decode_fetch_request(abi.encode([b"GET", b"http://x", bad]))


def test_map_result_keys():
    keys = abi.decode_map_result(abi.encode([b"", b"ns/a", b"/cluster-wide"]))
    assert keys == ("", [("ns", "a"), ("", "cluster-wide")])
    for bad in (b"name", b"a/b/c", b"a/"):
        with pytest.raises(abi.MessageInvalid, match="namespace/name"):
            abi.decode_map_result(abi.encode([b"", bad]))


def test_responses_carry_error_and_message():
    assert abi.decode(abi.encode_call_response(CallResponse(200, "a/b", b"x"))) == [b"200", b"a/b", b"x", b"", b""]
    failed = abi.encode_call_response(CallResponse.failed(CallError.TOO_LARGE, "why"))
    assert abi.decode(failed) == [b"", b"", b"", b"too-large", b"why"]
    fetched = abi.encode_fetch_response(FetchResponse(204, (("A", "b"), ("C", "d"))))
    assert abi.decode(fetched) == [b"204", b"A: b\nC: d\n", b"", b"", b""]
