"""The order of what is enqueued, on fakes of CuPy's streams and events."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from flagcx.errors import CommunicationError, CommunicatorError, PeerDiedError, PeerTimeoutError
from flagcx.transport.stream_order import StreamOrder


class FakeEvent:
    """Its handle is itself."""

    def __init__(self, **_: object) -> None:
        self.done, self.fault = False, 0
        self.stream: FakeStream | None = None
        self.ptr = self

    @property
    def status(self) -> int:
        return self.fault or (0 if self.done else 600)


class FakeStream(nullcontext):
    def __init__(self, ptr: int) -> None:
        super().__init__()
        self.ptr, self.capturing = ptr, False
        self.waited: list[FakeEvent] = []

    def record(self, event: FakeEvent) -> FakeEvent:
        event.stream = self
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event)


class FakeCuda:
    """Stands for CuPy: one current stream, one current device."""

    def __init__(self) -> None:
        self.streams = {ptr: FakeStream(ptr) for ptr in (0, 2, 100, 200, 300)}
        self.stream, self.device = self.streams[100], 0
        runtime = SimpleNamespace(
            getDevice=lambda: self.device,
            setDevice=lambda device: None,
            streamIsCapturing=lambda ptr: int(self.streams[ptr].capturing),
            eventQuery=lambda event: event.status,
            CUDARuntimeError=RuntimeError,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime, get_current_stream=lambda: self.stream, Event=lambda **k: FakeEvent(**k)
        )


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def order(fake) -> StreamOrder:
    return StreamOrder(fake, 0, rank=3)


def operation(order: StreamOrder) -> None:
    order.leave(order.enter("allreduce"))


def pending(order: StreamOrder) -> float | None:
    order.look()
    return order.pending_since()


def test_one_stream_waits_for_nothing(fake, order):
    operation(order)
    operation(order)
    assert fake.streams[100].waited == []


def test_a_second_stream_waits_for_the_first_and_back(fake, order):
    operation(order)
    fake.stream = fake.streams[200]
    operation(order)
    assert [e.stream.ptr for e in fake.streams[200].waited] == [100]
    fake.stream = fake.streams[100]
    operation(order)
    assert [e.stream.ptr for e in fake.streams[100].waited] == [200]


def test_a_stream_that_is_captured_waits_for_nothing_outside_its_graph(fake, order):
    operation(order)
    fake.stream = fake.streams[200]
    fake.streams[200].capturing = True
    operation(order)
    assert fake.streams[200].waited == []


def captured(fake, *numbers: int) -> None:
    for number in numbers:
        fake.streams[number].capturing = True


def test_streams_of_one_graph_wait_for_each_other(fake, order):
    operation(order)
    captured(fake, 100, 200, 300)
    operation(order)  # on the stream that was used before
    for number in (200, 300, 100, 100):
        fake.stream = fake.streams[number]
        operation(order)
    waited = {n: [e.stream.ptr for e in fake.streams[n].waited] for n in (100, 200, 300)}
    assert waited == {100: [300], 200: [100], 300: [200]}
    for number in (100, 200, 300):
        fake.streams[number].capturing = False
    fake.stream = fake.streams[200]
    operation(order)
    assert [e.stream.ptr for e in fake.streams[200].waited] == [100, 100]


def test_default_streams_of_threads_have_one_handle_and_wait_for_each_other(fake, order):
    first, second = fake.streams[2], FakeStream(2)
    for stream in (first, second, first, fake.streams[100], first):
        fake.stream = stream
        operation(order)
    assert [e.stream is first for e in second.waited] == [True]
    assert [e.stream is second for e in first.waited[:1]] == [True]
    assert [e.stream is first for e in fake.streams[100].waited] == [True]
    assert [e.stream.ptr for e in first.waited] == [2, 100]


def test_who_watches_records_nothing_on_a_stream_of_another_thread(fake, order):
    fake.stream = fake.streams[2]
    operation(order)
    operation(order)
    last = order._latest[0]
    order._marker[0].done = True
    assert pending(order) is not None
    assert order._marker == (last, 2, order._marker[2])
    order.enter("one that is being enqueued")
    last.done = True
    assert pending(order) is None
    assert order._marker is None


def test_the_end_of_all_is_the_end_of_the_thread_that_was_last(fake, order):
    fake.stream = fake.streams[2]
    order.leave(order.enter("allreduce"))
    last = order._latest[0]
    last.done = True  # an event that were recorded now, by this thread, would not be
    order.drain(0.05)
    order.settle(0.05)


def test_another_device_is_refused(fake, order):
    fake.device = 1
    with pytest.raises(CommunicatorError, match=r"current device is 1, but rank 3 uses device 0"):
        order.enter("allreduce")


def test_a_failure_is_raised_anew_by_every_call(order):
    order.failure = PeerDiedError("rank 1 died", peer=1)
    raised = []
    for _ in range(2):
        with pytest.raises(PeerDiedError, match="rank 1 died") as caught:
            order.enter("allreduce")
        assert caught.value.peer == 1
        raised.append(caught.value)
    assert raised[0] is not raised[1]


def test_what_is_unfinished_shows_and_ends(fake, order):
    assert pending(order) is None
    operation(order)
    assert pending(order) is not None
    order._marker[0].done = True
    assert pending(order) is None


def test_an_operation_behind_the_marker_gets_one_of_its_own(fake, order):
    operation(order)
    operation(order)
    order._marker[0].done = True
    assert pending(order) is not None
    assert order._marker[1] == 2
    order._marker[0].done = True
    assert pending(order) is None


def test_arrays_are_kept_until_their_event(fake, order):
    first = order.keep(fake.stream, "x", "y")
    assert kept(order) == {("x", "y")}
    order.keep(fake.streams[200], "of a stream that waits")
    first.done = True
    order.keep(fake.stream, "z")
    assert kept(order) == {("of a stream that waits",), ("z",)}


def kept(order: StreamOrder) -> set[tuple]:
    return {arrays for of_stream in order._kept.values() for _, arrays in of_stream}


def test_the_end_waits_for_operations_outside_the_order_too(fake, order):
    apart = order.keep_apart(fake.streams[200], "x")
    assert pending(order) is None
    with pytest.raises(PeerTimeoutError):
        order.drain(0.01)
    assert not order.all_done()
    apart.done = True
    order.drain(1.0)
    assert order.all_done()


def test_waiting_ends_with_the_event_the_time_or_the_failure(order):
    event = FakeEvent()
    with pytest.raises(PeerTimeoutError, match=r"rank 3: nothing yet is not done after 0.01 s"):
        order.wait(event, 0.01)
    order.failure = PeerDiedError("rank 1 died", peer=1)
    with pytest.raises(PeerDiedError, match="rank 1 died"):
        order.wait(event, 10.0)
    assert order.reported
    order.failure, event.done = None, True
    order.wait(event, 10.0)


def test_a_fault_of_the_gpu_is_raised_at_once(order):
    event = FakeEvent()
    event.fault = 700
    with pytest.raises(CommunicationError, match="rank 3: the GPU failed in or before nothing yet: 700"):
        order.wait(event, 10.0)


def test_what_was_enqueued_is_settled_well_or_not_but_not_for_long(fake, order):
    order.settle(10.0)  # nothing is under way
    operation(order)
    begin = time.monotonic()
    order.settle(0.05)
    assert 0.05 <= time.monotonic() - begin < 5


def test_a_closed_lane_keeps_no_stream_alive(fake, order):
    operation(order)
    stream = weakref.ref(fake.streams.pop(100))
    order.keep(stream(), "an array")
    fake.stream = fake.streams[0]
    assert stream() is not None
    order.close()
    gc.collect()
    assert stream() is None


def test_the_last_calls_of_all_ranks_have_numbers_and_words(order):
    def call(number: int) -> SimpleNamespace:
        return SimpleNamespace(describe=lambda: f"call {number}")

    assert order.last_calls() == []
    for number in range(70):
        order.leave(order.enter(call(number), number + 1))
        order.leave(order.enter("send of 3 bytes"))
    assert (order.calls, order.issued) == (70, 140)
    assert order.last_calls() == [(number, f"call {number}") for number in range(6, 70)]


def test_a_mark_stands_for_all_calls_and_their_order(order):
    def after(*signatures: int) -> tuple[int, int]:
        order.mark = 0, 0
        for signature in signatures:
            order.leave(order.enter("a call", signature))
        return order.mark

    assert after(5, 6, 7) == after(5, 6, 7) != after(6, 5, 7)
    assert after(5, 6)[1] != after(5, 6, 6)[1] and after() == (0, 0)
    order.marks.clear()
    last = after(*range(1, 2500))
    assert [number for number, _ in order.marks] == [1024, 2048]
    assert after(*range(2, 2501)) != last and order.marks[0] != order.marks[2]


def test_a_capture_is_remembered(fake, order):
    operation(order)
    assert not order.captured
    fake.streams[200].capturing, fake.stream = True, fake.streams[200]
    operation(order)
    assert order.captured


def test_a_look_while_a_call_is_enqueued_does_not_take_it_for_done(order):
    operation(order)
    order._marker[0].done = True
    stream = order.enter("allreduce")
    assert pending(order) is None, "the first is done, the second not yet enqueued"
    order.leave(stream)
    assert pending(order) is not None


def test_a_thread_inside_nccl_is_pending(order):
    begin = time.monotonic()
    order.enter("scatter")
    order.inside = True
    since = pending(order)
    assert since is not None and since >= begin
    assert pending(order) == since
    order.inside = False
    assert pending(order) is None


def test_a_look_that_cuda_keeps_is_pending_if_an_operation_may_be(order, monkeypatch):
    monkeypatch.setattr("flagcx.transport.stream_order._KEPT_S", 0.05)
    operation(order)
    order._marker[0].done = True
    assert order.all_done()
    free, looking = threading.Event(), threading.Thread(target=order.look)
    monkeypatch.setattr(order._runtime, "setDevice", lambda device: free.wait(10))
    operation(order)
    order._marker = None
    looking.start()
    assert not order.all_done(), "the look does not return"
    order._enqueued = order._done
    assert order.all_done(), "nothing was enqueued"
    free.set()
    looking.join(10)
