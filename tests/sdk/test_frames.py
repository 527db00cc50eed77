"""The wire format of the ABI: what is encoded is decoded, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor_sdk import _frames

FIELDS = st.lists(st.binary(max_size=300), max_size=20)


@given(FIELDS)
def test_what_is_encoded_is_decoded(fields: list[bytes]) -> None:
    assert _frames.decode(_frames.encode(*fields)) == fields


@given(FIELDS, st.integers(min_value=0, max_value=30))
def test_missing_fields_at_the_end_are_empty(fields: list[bytes], fields_min: int) -> None:
    decoded = _frames.decode(_frames.encode(*fields), fields_min=fields_min)
    assert decoded == fields + [b""] * (fields_min - len(fields))


@given(FIELDS, FIELDS)
def test_messages_that_follow_each_other_are_one_message(first: list[bytes], second: list[bytes]) -> None:
    assert _frames.decode(_frames.encode(*first) + _frames.encode(*second)) == first + second


@given(FIELDS.filter(bool), st.data())
def test_a_message_cut_short_is_refused_unless_it_is_cut_between_fields(
    fields: list[bytes], data: st.DataObject
) -> None:
    message = _frames.encode(*fields)
    length = data.draw(st.integers(min_value=0, max_value=len(message) - 1))
    ends = [len(_frames.encode(*fields[:count])) for count in range(len(fields) + 1)]
    if length in ends:
        assert _frames.decode(message[:length]) == fields[: ends.index(length)]
    else:
        with pytest.raises(_frames.FrameError):
            _frames.decode(message[:length])


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_to_what_encodes_to_them_or_refused(message: bytes) -> None:
    try:
        fields = _frames.decode(message)
    except _frames.FrameError:
        return
    assert _frames.encode(*fields) == message


@given(st.text())
def test_text_comes_back_as_it_was(text: str) -> None:
    encodable = text.encode("utf-8", "replace").decode()
    assert _frames.text(_frames.decode(_frames.encode(encodable))[0]) == encodable


@given(st.integers(min_value=0, max_value=2**63))
def test_numbers_are_decimal_text(number: int) -> None:
    (field,) = _frames.decode(_frames.encode(number))
    assert field == str(number).encode()
    assert _frames.number(field) == number


def test_the_layout_is_the_one_of_the_abi() -> None:
    assert _frames.encode("ab", 7, None) == b"\x02\0\0\0ab\x01\0\0\x007\0\0\0\0"


def test_none_and_an_empty_number_are_the_empty_field() -> None:
    assert _frames.number(b"", default=3) == 3
    assert _frames.decode(_frames.encode(None)) == [b""]


@pytest.mark.parametrize("field", [b"-1", b"+1", b" 1", b"1_0", b"0x1", "١".encode(), b"1" * 21])
def test_what_is_no_decimal_number_is_refused(field: bytes) -> None:
    with pytest.raises(_frames.FrameError, match="not a decimal number"):
        _frames.number(field)


def test_a_lone_surrogate_is_shown_instead_of_failing() -> None:
    assert _frames.decode(_frames.encode("a\udcffb")) == [b"a\\udcffb"]


def test_a_length_beyond_the_message_does_not_allocate_it() -> None:
    with pytest.raises(_frames.FrameError, match="says 4294967295 bytes, the message has 3 left"):
        _frames.decode(b"\xff\xff\xff\xffabc")
