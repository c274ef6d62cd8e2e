"""A store lives on, whatever thousands of strangers and of ranks that have gone mad send to it."""

import contextlib
import json
import math
import random
import socket
import struct

import pytest

from flagcx.bootstrap import wire
from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.sockets import parse_address
from flagcx.bootstrap.store import StoreServer
from tests.ranges import exhaustive

STRANGERS, RANKS = 1000, 1500
DEEP = "[" * 100_000
VALUES = (
    *(None, True, False, 0, -1, 1, 2, 1 << 63, 1 << 70, -(10**400), 0.5, -0.0, 1e308, math.nan, math.inf),
    *("", "x", "set", "leave", "abort", "x" * 5000, "\ud800", "\0"),
    *([], {}, [0], [0, 0], [2, 1], [[0]], {"kind": "set"}, [1e9], list(range(2000)), ["0"]),
)
FIELDS = ("kind", "key", "number", "amount", "timeout_s", "group", "detail", "lives_on", "x")
KINDS = ("set", "get", "add", "delete", "exchange", "agree", "leave", "abort")


def header(chance):
    """A request that is nearly right, or not at all."""
    made = {
        "kind": chance.choice(KINDS),
        "key": "k",
        "number": 1,
        "amount": 1,
        "timeout_s": 0.01,
        "group": None,
    }
    for _ in range(chance.choice((0, 1, 1, 2, 6))):
        made[chance.choice(FIELDS)] = chance.choice(VALUES)
    for _ in range(chance.choice((0, 0, 1))):
        made.pop(chance.choice(list(made)))
    return made


def message(chance):
    """A message whose parts, lengths or text may be wrong."""
    text = json.dumps(header(chance)).encode()
    text = chance.choice((text, text, text, text[: chance.randrange(len(text))], DEEP.encode(), b"", b"[1]"))
    nbytes = chance.choice((len(text),) * 8 + (0, 1 << 31, 4096, max(0, len(text) - 1)))
    return struct.pack("!I", nbytes) + text + chance.randbytes(chance.choice((0, 0, 3, 3000)))


def framed(chance, payload):
    """A frame that may have another length, or end early."""
    nbytes = chance.choice((len(payload),) * 10 + (-1, -(1 << 31), (1 << 31) - 1, len(payload) + 1, 0))
    frame = struct.pack("!i", nbytes) + payload
    return frame[: chance.choice((len(frame),) * 6 + (chance.randrange(len(frame)),))]


def stranger(chance, address):
    """Connects, sends what no rank would, and goes or stays."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    sent = chance.choice((b"", chance.randbytes(chance.randrange(200)), framed(chance, message(chance))))
    with contextlib.suppress(OSError):  # it may be cut off while it still sends
        link.sendall(sent)
    return link


@pytest.mark.parametrize("seed", [1, *exhaustive([2])])
def test_a_store_outlives_whatever_is_sent_to_it(seed, caplog):
    chance = random.Random(seed)
    with StoreServer(RANKS + 2) as server:
        _, address = parse_address(server.address)
        sane = [RemoteStore(server.address, server.authkey, rank, RANKS + 2) for rank in range(2)]
        views = [store.scoped("sane/", [0, 1]) for store in sane]
        kept = []
        for turn in range(max(STRANGERS, RANKS)):
            if turn < STRANGERS:
                kept.append(stranger(chance, address))
                if len(kept) > 100:
                    kept.pop(chance.randrange(len(kept))).close()
            if turn < RANKS:
                mad = RemoteStore(server.address, server.authkey, turn + 2, RANKS + 2)
                for _ in range(chance.choice((1, 2, 5))):
                    try:
                        mad._connection._send(framed(chance, message(chance)))
                    except OSError:
                        break
                mad._connection.close()
            if turn % 100 == 0:
                views[0].set(f"k{turn}", b"%d" % turn)
                assert views[1].get(f"k{turn}", 10) == b"%d" % turn
        for link in kept:
            link.close()
        assert views[0].add("n", 1) == 1
        assert server._thread.is_alive()
        assert caplog.records == []  # nothing got past the checks
        for store in sane:
            store.close()


def test_a_frame_of_one_byte_at_a_time_holds_nobody_up():
    with StoreServer(1, handshake_s=0.5) as server:
        slow = socket.socket(socket.AF_UNIX)
        slow.connect(parse_address(server.address)[1])
        with RemoteStore(server.address, server.authkey, 0, 1) as store:
            for byte in wire.frame(bytes(40)):
                slow.sendall(bytes([byte]))
                store.set("k", bytes([byte]))
                assert store.get("k", 1) == bytes([byte])
        slow.settimeout(10)
        while slow.recv(4096):  # its greeting, then the end: it has been cut off
            pass
        slow.close()
