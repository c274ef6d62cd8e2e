"""What a rank sends to itself on a GPU, on fakes of CuPy's memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from flagcx.errors import ArgumentError
from flagcx.transport.device_messages import Message, ToSelf, Transfer

RANK = 2


class Memory:
    """Bytes with an address."""

    def __init__(self, content: bytes | int) -> None:
        self.buffer = ctypes.create_string_buffer(
            content, len(content) if isinstance(content, bytes) else content
        )
        self.ptr = ctypes.addressof(self.buffer)


@pytest.fixture
def to_self() -> ToSelf:
    def copy(to: int, start: int, nbytes: int, kind: int, stream: int) -> None:
        ctypes.memmove(to, start, nbytes)

    runtime = SimpleNamespace(memcpyAsync=copy, memcpyDeviceToDevice=3)
    cupy = SimpleNamespace(cuda=SimpleNamespace(alloc=Memory, runtime=runtime))
    order = SimpleNamespace(rank=RANK, keep=lambda *_: None, chain=lambda *_: None)
    return ToSelf(cupy, order)  # type: ignore[arg-type]


def call(to_self: ToSelf, *messages: Message) -> list[Message]:
    to_self.check([m for m in messages if m.peer == RANK])
    return list(to_self.settle(messages, SimpleNamespace(ptr=0)))


def test_what_was_sent_is_received_in_order_whatever_happens_to_it_meanwhile(to_self):
    given, out = [Memory(b"one"), Memory(b"three")], [Memory(3), Memory(5)]
    other = Message(True, 7, 3, 0)
    assert call(to_self, Message(True, given[0].ptr, 3, RANK), other) == [other]
    call(to_self, Message(True, given[1].ptr, 5, RANK))
    given[0].buffer.raw = b"two"
    call(to_self, Message(False, out[0].ptr, 3, RANK))
    call(to_self, Message(False, out[1].ptr, 5, RANK))
    assert [memory.buffer.raw for memory in out] == [b"one", b"three"]


def test_both_in_one_call_in_any_order(to_self):
    given, out = Memory(b"one"), Memory(3)
    call(to_self, Message(False, out.ptr, 3, RANK), Message(True, given.ptr, 3, RANK))
    assert out.buffer.raw == b"one"


def test_what_was_not_sent_is_refused_at_once(to_self):
    given, out = Memory(b"one"), Memory(5)
    with pytest.raises(ArgumentError, match="receives 3 bytes from itself and has sent nothing"):
        call(to_self, Message(False, out.ptr, 3, RANK))
    call(to_self, Message(True, given.ptr, 3, RANK))
    with pytest.raises(ArgumentError, match="receives 5 bytes from itself, where it has sent 3"):
        call(to_self, Message(False, out.ptr, 5, RANK))
    call(to_self, Message(False, out.ptr, 3, RANK))
    assert out.buffer.raw[:3] == b"one"


def test_a_call_describes_itself():
    assert (
        str(Transfer((Message(True, 0, 3, 1), Message(False, 0, 4, 1)), ())) == "send and receive of 7 bytes"
    )
