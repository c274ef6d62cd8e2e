"""Messages that are started, on fakes of CuPy's streams: what each waits for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flagcx.errors import ArgumentError
from flagcx.transport.device_messages import Message, ToSelf
from flagcx.transport.pair_streams import PairStreams
from flagcx.transport.stream_order import StreamOrder
from tests.transport.test_stream_order import FakeCuda, FakeStream, operation

RANK = 3


class Setting:
    """One rank's streams, with notes of what was enqueued on which."""

    def __init__(self) -> None:
        self.fake = fake = FakeCuda()
        self.made: list[tuple[str, FakeStream]] = []

        fake.cuda.Stream = lambda **_: self._stream()
        fake.cuda.alloc = lambda nbytes: SimpleNamespace(ptr=5000)
        fake.cuda.runtime.memcpyDeviceToDevice = 3
        fake.cuda.runtime.memcpyAsync = lambda to, start, nbytes, kind, ptr: self.made.append(
            (f"copy {start} to {to}", fake.streams[ptr])
        )
        self.order = StreamOrder(fake, 0, RANK)
        self.to_self = ToSelf(fake, self.order)
        self.pairs = PairStreams(fake, self.order, self.to_self, self._enqueue)

    def _stream(self) -> FakeStream:
        made = FakeStream(1000 + len(self.fake.streams))
        self.fake.streams[made.ptr] = made
        return made

    def _enqueue(self, message: Message, stream: FakeStream) -> None:
        self.made.append((f"{'to' if message.sends else 'from'} {message.peer}", stream))

    def start(self, sends: bool, peer: int, at: int = 7, nbytes: int = 16):
        ready = self.fake.stream.record(self.order.event())
        message = Message(sends, at, nbytes, peer)
        self.to_self.check([message] if peer == RANK else [], started=True)
        return self.pairs.start(message, "array", ready)

    def waits(self, stream: FakeStream) -> list[int]:
        return [event.stream.ptr for event in stream.waited]


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_a_message_waits_for_the_callers_stream_and_for_no_other_pair_or_collective(setting):
    setting.start(False, 0)
    setting.start(True, 0)
    setting.start(False, 1)
    operation(setting.order)
    setting.start(False, 0)
    (a, b, c, d) = [stream for _, stream in setting.made]
    assert [what for what, _ in setting.made] == ["from 0", "to 0", "from 1", "from 0"]
    assert len({a.ptr, b.ptr, c.ptr}) == 3 and d is a
    assert [setting.waits(stream) for stream in (a, b, c)] == [[100, 100], [100], [100]]
    assert setting.fake.streams[100].waited == [], "a collective waits for no message"


def test_a_message_on_a_stream_of_the_callers_follows_those_of_its_pair_and_the_next_follows_it(setting):
    setting.start(False, 0)
    (own,) = [stream for _, stream in setting.made]
    other = setting.fake.streams[200]
    setting.pairs.meet([Message(True, 0, 1, 0), Message(False, 0, 1, 1)], other)
    assert setting.waits(other) == []
    setting.pairs.meet([Message(False, 0, 1, 0)], other)
    assert setting.waits(other) == [own.ptr]
    setting.start(False, 0)
    assert setting.waits(own) == [100, 100, 200]
    setting.start(False, 0)
    assert setting.waits(own) == [100, 100, 200, 100]


def test_a_receive_from_itself_may_start_before_the_send(setting):
    received = setting.start(False, RANK, at=70)
    assert not received.done
    with pytest.raises(ArgumentError, match="rank 3 waits for 16 bytes from itself that it has not sent"):
        _ = received.ptr
    with pytest.raises(ArgumentError, match="receives 16 bytes from itself, where it has sent 17"):
        setting.start(True, RANK, at=80, nbytes=17)
    sent = setting.start(True, RANK, at=80)
    assert [what for what, _ in setting.made] == ["copy 80 to 70"], "straight to where it is wanted"
    received.event.done = sent.done = True
    assert received.done and received.ptr is received.event


def test_a_send_to_itself_may_start_before_the_receive(setting):
    setting.start(True, RANK, at=80)
    received = setting.start(False, RANK, at=70)
    assert [what for what, _ in setting.made] == ["copy 80 to 5000", "copy 5000 to 70"]
    received.done = True
