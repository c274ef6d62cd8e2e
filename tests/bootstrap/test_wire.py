"""Frames, messages and proofs: what is right comes through, what is not is named."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagcx.bootstrap import wire
from flagcx.bootstrap.sockets import format_address, listen, parse_address
from flagcx.bootstrap.store_state import StoreRequest
from flagcx.errors import BootstrapError


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 9)))
def test_frames_come_out_whole_however_they_are_cut(payloads, cuts):
    stream = b"".join(map(wire.frame, payloads))
    reader, found, start = wire.FrameReader(limit=40), [], 0
    for cut in cuts:
        found += reader.feed(stream[start : start + cut])
        start += cut
    assert found + reader.feed(stream[start:]) == payloads


@pytest.mark.parametrize("data", [wire.frame(b"x" * 41), b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n"])
def test_a_frame_beyond_the_limit_is_refused_before_it_is_read(data):
    with pytest.raises(wire.MalformedError, match="expected 0 to 40"):
        wire.FrameReader(limit=40).feed(data[:4])


@given(st.dictionaries(st.text(), st.integers()), st.binary())
def test_messages_come_out_as_they_went_in(header, body):
    assert wire.unpack(wire.pack(header, body)) == (header, body)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0\0",
        b"\0\0\0\x09{}",
        b"\0\0\0\2[]",
        b"\0\0\0\2{x",
        b"\0\0\0\1\xff",
        b"\0\0\x07\xd0" + b"[" * 2000,
    ],
)
def test_what_is_no_message_is_refused(payload):
    with pytest.raises(wire.MalformedError):
        wire.unpack(payload)


@given(st.binary(max_size=200))
def test_random_bytes_never_do_more_than_be_refused(payload):
    try:
        header, body = wire.unpack(payload)
        wire.read_request(header, body, 0, 4)
    except wire.MalformedError:
        pass


GOOD = {"kind": "exchange", "key": "k", "number": 3, "amount": 0, "timeout_s": 1.5, "group": [0, 2]}


def test_a_good_request_is_read():
    assert wire.read_request(GOOD, b"v", 2, 4) == StoreRequest("exchange", "k", b"v", 0, 1.5, (0, 2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "eval"),
        ("kind", None),
        ("kind", []),
        ("kind", {}),
        ("key", ["k"]),
        ("number", 1 << 63),
        ("amount", 10**300),
        ("amount", None),
        ("timeout_s", True),
        ("group", [[0], 2]),
        ("group", {"0": 2}),
        ("key", 7),
        ("number", "1"),
        ("number", True),
        ("amount", 1.5),
        ("timeout_s", -1),
        ("timeout_s", float("nan")),
        ("timeout_s", 10**400),
        ("timeout_s", "1"),
        ("group", "02"),
        ("group", [0, 4]),
        ("group", [0, "2"]),
        ("group", [0, 1]),  # without the asking rank
        ("group", [0, 2, 2]),
        ("group", []),
    ],
)
def test_a_request_with_one_wrong_field_is_refused(field, value):
    with pytest.raises(wire.MalformedError):
        wire.read_request(GOOD | {field: value}, b"v", 2, 4)


@pytest.mark.parametrize("field", ["detail", "lives_on", "returns"])
@pytest.mark.parametrize("value", [[], 1, None, {"a": 1}])
def test_an_end_with_a_wrong_field_is_refused(field, value):
    with pytest.raises(wire.MalformedError):
        wire.read_end({"kind": "abort", field: value})


def test_an_end_is_read():
    assert wire.read_end({"kind": "abort", "detail": "x" * 20_000}) == ("x" * 10_000, False, False)
    assert wire.read_end({"kind": "abort", "lives_on": True}) == ("", True, False)
    assert wire.read_end({"kind": "abort", "returns": True}) == ("", False, True)


def test_a_header_beyond_the_limit_is_refused_before_it_is_read():
    with pytest.raises(wire.MalformedError, match="a header of"):
        wire.unpack(wire.pack({"key": "x" * (1 << 20)}))


def test_a_proof_is_good_for_its_key_side_nonces_and_claim_alone():
    words = (b"key", "client", b"s" * 32, b"c" * 32, b"claim")
    right = wire.proof(*words)
    assert wire.same_proof(right, wire.proof(*words))
    for index, other in enumerate((b"kez", "server", b"t" * 32, b"d" * 32, b"claims")):
        changed = [*words]
        changed[index] = other
        assert not wire.same_proof(right, wire.proof(*changed))


@pytest.mark.parametrize(
    ("text", "family", "place"),
    [
        ("unix:@name", socket.AF_UNIX, "\0name"),
        ("unix:/a/b", socket.AF_UNIX, "/a/b"),
        ("tcp:127.0.0.1:80", socket.AF_INET, ("127.0.0.1", 80)),
        ("tcp://127.0.0.1:80", socket.AF_INET, ("127.0.0.1", 80)),
        ("127.0.0.1:80", socket.AF_INET, ("127.0.0.1", 80)),
        ("tcp:[::1]:80", socket.AF_INET6, ("::1", 80)),
    ],
)
def test_addresses(text, family, place):
    assert parse_address(text) == (family, place)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:99999", "host:-1", "unix:", "tcp:80"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="is no address; expected host:port or unix:/path"):
        parse_address(text)


@pytest.mark.parametrize("address", [None, "127.0.0.1:0"])
def test_a_bound_address_is_written_as_it_is_read(address):
    with listen(address) as listener:
        family, place = parse_address(format_address(listener))
        with socket.socket(family) as other:
            other.connect(place)


def test_an_address_in_use_is_named():
    with listen("127.0.0.1:0") as listener:
        address = format_address(listener)
        with pytest.raises(BootstrapError, match=f"cannot listen on {address}: Address already in use"):
            listen(address)
