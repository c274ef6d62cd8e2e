"""Messages that are started, on fakes of CuPy's streams: what each waits for, and when it is launched."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from flagcx.errors import ArgumentError, PeerDiedError
from flagcx.transport.device_messages import Message, ToSelf
from flagcx.transport.pair_streams import PairStreams, Started
from flagcx.transport.peer_memory.posted import PostedCounts
from flagcx.transport.stream_order import StreamOrder
from tests.bootstrap.processes import wait_until
from tests.transport.test_stream_order import FakeCuda, FakeStream, operation

RANK = 3


class Setting:
    """One rank's streams, with notes of what was enqueued on which; no peer is ready at first."""

    def __init__(self) -> None:
        self.fake = fake = FakeCuda()
        self.made: list[tuple[str, FakeStream]] = []
        self.ready: set[tuple[bool, int]] = set()
        cuda, runtime = fake.cuda, fake.cuda.runtime
        cuda.Stream, cuda.Device = (lambda **_: self._stream()), lambda device: nullcontext()
        cuda.alloc, runtime.memcpyDeviceToDevice = (lambda nbytes: SimpleNamespace(ptr=5000)), 3
        runtime.memcpyAsync = lambda to, start, nbytes, kind, ptr: self.note(
            f"copy {start} to {to}", fake.streams[ptr]
        )
        self.order = StreamOrder(fake, 0, RANK)
        self.to_self = ToSelf(fake, self.order)
        self.pairs = PairStreams(fake, self.order, self.to_self, self)

    def _stream(self) -> FakeStream:
        made = FakeStream(1000 + len(self.fake.streams))
        self.fake.streams[made.ptr] = made
        return made

    def note(self, what: str, stream: FakeStream) -> None:
        self.made.append((what, stream))

    # What the streams ask of peer memory:

    def prepare_messages(self, stream: FakeStream) -> None:
        pass

    def post(self, message: Message, stream: FakeStream) -> None:
        self.note(f"post {_words(message)}", stream)

    def start(self, message: Message, stream: FakeStream) -> None:
        self.note(_words(message), stream)

    def posted(self, stream: FakeStream) -> SimpleNamespace:
        return SimpleNamespace(matched=lambda message: (message.sends, message.peer) in self.ready)

    # What tests do:

    def begin(self, sends: bool, peer: int, at: int = 7, nbytes: int = 16):
        ready = self.fake.stream.record(self.order.event())
        message = Message(sends, at, nbytes, peer)
        self.to_self.check([message] if peer == RANK else [], started=True)
        return self.pairs.start(message, "array", ready)

    @property
    def notes(self) -> list[str]:
        return [what for what, _ in self.made]


def _words(message: Message) -> str:
    return f"{'to' if message.sends else 'from'} {message.peer}"


def waits(stream: FakeStream) -> list[int]:
    return [event.stream.ptr for event in stream.waited]


@pytest.fixture
def setting():
    made = Setting()
    yield made
    made.pairs.close()


def test_a_message_waits_for_the_callers_stream_and_for_no_other_pair_or_collective(setting):
    setting.begin(False, 0)
    setting.begin(True, 0)
    setting.begin(False, 1)
    operation(setting.order)
    assert setting.notes == ["post from 0", "post to 0", "post from 1"]
    streams = [stream for _, stream in setting.made]
    assert len({stream.ptr for stream in streams}) == 3
    assert [waits(stream) for stream in streams] == [[100]] * 3
    assert setting.fake.streams[100].waited == [], "a collective waits for no message"


def test_a_message_is_launched_when_both_ranks_are_ready_and_the_next_is_posted_then(setting):
    first, second = setting.begin(False, 0), setting.begin(False, 0)
    setting.ready = {(False, 0)}
    assert setting.notes == ["post from 0"] and first.event is None, "its own post has not been reached"
    first.posted.done = True
    wait_until(lambda: first.event is not None)
    assert setting.notes == ["post from 0", "from 0", "post from 0"] and second.event is None
    assert not first.done
    first.event.done = True
    assert first.done


def test_a_wait_launches_what_it_needs_and_no_more(setting):
    first, second, third = (setting.begin(True, 1) for _ in range(3))
    other = setting.begin(False, 2)
    assert second.ptr is second.event
    assert setting.notes == ["post to 1", "post from 2", "to 1", "to 1", "post to 1"]
    assert first.event is not None and third.event is other.event is None
    setting.pairs.finish()
    assert third.event is not None and other.event is not None


def test_a_message_on_a_stream_of_the_callers_follows_those_of_its_pair_and_the_next_follows_it(setting):
    started = setting.begin(False, 0)
    own, other = setting.made[0][1], setting.fake.streams[200]
    setting.pairs.meet([Message(True, 0, 1, 0), Message(False, 0, 1, 1)], other)
    assert waits(other) == [] and started.event is None
    setting.pairs.meet([Message(False, 0, 1, 0)], other)
    assert waits(other) == [own.ptr] and started.event is not None
    setting.begin(False, 0)
    assert waits(own) == [100, 100, 200]
    setting.begin(False, 1)
    assert waits(setting.made[-1][1]) == [100, 200], "though none of that pair was started before"


def test_a_captured_message_is_launched_at_once(setting):
    setting.fake.streams[100].capturing = True
    started = setting.begin(True, 0)
    assert setting.notes == ["to 0"] and isinstance(started, Started)


def test_after_a_failure_nothing_is_launched(setting):
    started = setting.begin(True, 0)
    setting.order.failure = PeerDiedError("rank 0 died", peer=0)
    with pytest.raises(PeerDiedError, match="rank 0 died"):
        _ = started.ptr
    assert setting.notes == ["post to 0"]


def test_counts_match_across_their_wrap_around():
    counts = PostedCounts()
    send, receive = Message(True, 0, 1, 5), Message(False, 0, 1, 5)
    assert not counts.matched(send) and not counts.matched(receive)
    counts.posted[1][5] = 1
    assert counts.matched(send) and not counts.matched(receive)
    counts.pairs[5][1] = 1
    assert not counts.matched(send)
    counts.pairs[5][3], counts.posted[0][5] = 2**32 - 1, 0
    assert counts.matched(receive)


def test_a_receive_from_itself_may_start_before_the_send(setting):
    received = setting.begin(False, RANK, at=70)
    assert not received.done
    with pytest.raises(ArgumentError, match="rank 3 waits for 16 bytes from itself that it has not sent"):
        _ = received.ptr
    with pytest.raises(ArgumentError, match="receives 16 bytes from itself, where it has sent 17"):
        setting.begin(True, RANK, at=80, nbytes=17)
    sent = setting.begin(True, RANK, at=80)
    assert setting.notes == ["copy 80 to 70"], "straight to where it is wanted"
    received.event.done = sent.done = True
    assert received.done and received.ptr is received.event


def test_a_send_to_itself_may_start_before_the_receive(setting):
    setting.begin(True, RANK, at=80)
    received = setting.begin(False, RANK, at=70)
    assert setting.notes == ["copy 80 to 5000", "copy 5000 to 70"]
    received.done = True
