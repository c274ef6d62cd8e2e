"""The wire format of a store's connections: frames, messages and the proof of the key.

A frame is what ``multiprocessing.connection.Connection.send_bytes`` writes: a length (4 bytes, big endian),
then the payload. The server reads frames itself, because ``recv_bytes`` would let a rank that stops in the
middle of a message stop all others. Nothing that arrives is ever unpickled: a message is a JSON object, then
raw bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any, NamedTuple

from flagcx.bootstrap.store_state import StoreAnswer, StoreRequest

MAGIC = b"flagcx store 1\n"
MAX_GREETING_NBYTES = 4096
MAX_MESSAGE_NBYTES = 64 << 20
NONCE_NBYTES = 32
PROOF_NBYTES = 32

_KINDS = frozenset(("set", "get", "add", "delete", "exchange", "agree", "expel"))
_MAX_TIMEOUT_S = 1e9
_MAX_HEADER_NBYTES = 1 << 20
_LONGEST_DETAIL = 10_000
_LENGTH = struct.Struct("!i")
_HEADER = struct.Struct("!I")


class MalformedError(ValueError):
    """Bytes that are no message. The connection that they came from is closed."""


def frame(payload: bytes) -> bytes:
    """Puts a payload in its frame."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes, which may come in any pieces, into frames.

    Args:
        limit: The longest payload that is taken, in bytes.

    Example:
        >>> reader = FrameReader(limit=16)
        >>> reader.feed(frame(b"ab")[:3]), reader.feed(frame(b"ab")[3:])
        ([], [b'ab'])
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Adds bytes and returns the payloads that are now complete.

        Raises:
            MalformedError: A frame's length is negative or above the limit.
        """
        self._pending += data
        payloads = []
        while len(self._pending) >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._pending)
            if not 0 <= nbytes <= self.limit:
                raise MalformedError(f"a frame of {nbytes} bytes; expected 0 to {self.limit}")
            stop = _LENGTH.size + nbytes
            if len(self._pending) < stop:
                break
            payloads.append(bytes(self._pending[_LENGTH.size : stop]))
            del self._pending[:stop]
        return payloads


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Makes a message of a header (what JSON can say) and raw bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((_HEADER.pack(len(text)), text, body))


def unpack(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Takes a message apart.

    Raises:
        MalformedError: The payload is no message.
    """
    if len(payload) < _HEADER.size:
        raise MalformedError(f"a message of {len(payload)} bytes; expected at least {_HEADER.size}")
    (nbytes,) = _HEADER.unpack_from(payload)
    stop = _HEADER.size + nbytes
    if stop > len(payload) or nbytes > _MAX_HEADER_NBYTES:
        raise MalformedError(f"a header of {nbytes} bytes in a message of {len(payload)}")
    try:
        header = json.loads(payload[_HEADER.size : stop])
    except (ValueError, RecursionError):
        raise MalformedError("a header that is no JSON") from None
    if not isinstance(header, dict):
        raise MalformedError("a header that is no JSON object")
    return header, payload[stop:]


def proof(authkey: bytes, side: str, server_nonce: bytes, client_nonce: bytes, claim: bytes) -> bytes:
    """Shows that ``side`` ("client" or "server") knows the key, for these two nonces and this claim alone."""
    text = b"\0".join(
        (b"flagcx store", side.encode(), server_nonce.hex().encode(), client_nonce.hex().encode())
    )
    return hmac.digest(authkey, text + b"\0" + claim, hashlib.sha256)


def same_proof(one: bytes, other: bytes) -> bool:
    """Compares two proofs in a time that does not depend on where they differ."""
    return hmac.compare_digest(one, other)


def read_greeting(authkey: bytes, nonce: bytes, payload: bytes) -> tuple[bytes, dict[str, Any] | None]:
    """Takes a client's greeting apart.

    Returns:
        The client's nonce, and what it claims to be; None if it does not know the key.

    Raises:
        MalformedError: One that knows the key claims nothing that can be read.
    """
    client_nonce, rest = payload[:NONCE_NBYTES], payload[NONCE_NBYTES:]
    shown, claim = rest[:PROOF_NBYTES], rest[PROOF_NBYTES:]
    knows = same_proof(shown, proof(authkey, "client", nonce, client_nonce, claim))
    return client_nonce, unpack(claim)[0] if knows else None


def is_integer(value: object) -> bool:
    """Whether a value of a header is an integer, of at most 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def write_request(number: int, request: StoreRequest) -> bytes:
    """Makes a message of a request."""
    header = {
        "number": number,
        "kind": request.kind,
        "key": request.key,
        "amount": request.amount,
        "timeout_s": request.timeout_s,
        "group": request.group,
    }
    return pack(header, request.value)


def read_request(header: dict[str, Any], body: bytes, rank: int, size: int) -> StoreRequest:
    """Makes a request of a message, field by field: a client is never trusted to send valid data.

    Args:
        header: The message's header.
        body: The rest of it.
        rank: The rank that sent it.
        size: How many ranks there are.

    Raises:
        MalformedError: It is no request.
    """
    kind, key = header.get("kind"), header.get("key")
    amount, timeout_s = header.get("amount", 0), header.get("timeout_s", 0.0)
    if not isinstance(kind, str) or not isinstance(key, str) or not is_integer(header.get("number")):
        raise MalformedError("a request without kind, key and number")
    if kind not in _KINDS:
        raise MalformedError(f"a request of the unknown kind {kind[:20]!r}")
    is_time = is_integer(timeout_s) or isinstance(timeout_s, float)
    if not is_integer(amount) or not is_time or not 0 <= timeout_s <= _MAX_TIMEOUT_S:
        raise MalformedError("a request whose amount or time-out is no number")
    group = _read_group(header.get("group"), rank, size)
    return StoreRequest(kind, key, body, amount, float(timeout_s), group)


def _read_group(group: object, rank: int, size: int) -> tuple[int, ...] | None:
    if group is None:
        return None
    if not isinstance(group, list) or not all(is_integer(one) and 0 <= one < size for one in group):
        raise MalformedError("a request whose group is no list of ranks")
    if rank not in group or len(set(group)) < len(group):
        raise MalformedError("a request whose group lacks the asking rank or has one twice")
    return tuple(group)


class End(NamedTuple):
    """What a rank says as it leaves or aborts.

    Attributes:
        detail: Why it aborts; of a rank that leaves, the failure of a peer because of which it does, if any.
        lives_on: Whether its process lives on after the exception that ended its main thread.
        returns: Whether it only could not join, and may try again.
    """

    detail: str
    lives_on: bool
    returns: bool


def read_end(header: dict[str, Any]) -> End:
    """Reads the message by which a rank leaves or aborts.

    Raises:
        MalformedError: It is no such message.
    """
    end = End(header.get("detail", ""), header.get("lives_on", False), header.get("returns", False))
    if [*map(type, end)] != [str, bool, bool]:
        raise MalformedError("an end whose reason is no text")
    return end._replace(detail=end.detail[:_LONGEST_DETAIL])


def write_answer(number: int, answer: StoreAnswer) -> bytes:
    """Makes a message of an answer to the request of this number."""
    header = {
        "number": number,
        "result": answer.number,
        "fault": answer.fault,
        "ranks": answer.ranks,
        "detail": answer.detail,
        "lengths": [len(value) for value in answer.values],
    }
    return pack(header, b"".join(answer.values))


def read_answer(header: dict[str, Any], body: bytes) -> StoreAnswer:
    """Makes an answer of a message of ``write_answer``."""
    values, start = [], 0
    for nbytes in header["lengths"]:
        values.append(body[start : start + nbytes])
        start += nbytes
    return StoreAnswer(
        tuple(values), header["result"], header["fault"], tuple(header["ranks"]), header["detail"]
    )
