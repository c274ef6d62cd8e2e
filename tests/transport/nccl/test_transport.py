"""How the transport over NCCL ends, and what it does inside a caller's graph, on fakes of all below it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flagcx.errors import AbortedError, CommunicationError, MismatchError, PeerDiedError
from flagcx.transport.nccl.transport import NcclTransport
from flagcx.transport.stream_order import StreamOrder
from tests.transport.test_stream_order import FakeCuda, FakeEvent, operation


class Below:
    """The communicator, the peers' memory, the watchdog and the scratch memory: notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error: CommunicationError | None = None

    def __getattr__(self, name: str):
        return lambda *args, **options: self.asked.append(name)

    def fault(self):
        return self.error


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def transport(fake) -> NcclTransport:
    made = object.__new__(NcclTransport)
    made.rank, made.size, made.device, made._cupy = 1, 2, 0, fake
    made._closed = made._aborted = False
    made._order = StreamOrder(fake, 0, rank=1)
    made._side = fake.streams[200]
    made._plans = set()
    made.below = Below()
    made._communicator = made.peers = made._watchdog = made._scratch = made.below
    made.messages = SimpleNamespace(finish=lambda: None, close=lambda: None)
    return made


def enqueue(transport: NcclTransport) -> FakeEvent:
    operation(transport._order)
    return transport._order._marker[0]


def test_after_a_fault_of_its_own_what_waits_for_peers_is_ended_before_memory_goes(transport):
    enqueue(transport).done = True
    transport.abort("out of memory", None)
    transport._order._last = None
    transport.close()  # the caller has got the error already
    assert transport.below.asked == ["publish", "close", "stop", "abort", "close", "close"]


def test_what_the_watchdog_has_ended_is_not_ended_again(transport):
    transport._order._last = None
    transport.fail(PeerDiedError("rank 0 died", peer=0))
    transport.abort_enqueued()
    transport.close()
    assert transport.below.asked.count("abort") == 1


def test_close_tells_of_a_failure_that_nobody_has_heard_of(transport):
    enqueue(transport)
    transport.fail(PeerDiedError("rank 0 died", peer=0))
    transport._order._last = None
    with pytest.raises(PeerDiedError, match="rank 0 died"):
        transport.close()
    assert transport.below.asked == ["close", "stop", "abort", "close", "close"]
    transport.close()


def test_close_keeps_quiet_where_the_failure_is_known_or_no_harm(transport):
    enqueue(transport)
    transport.fail(PeerDiedError("rank 0 died", peer=0))
    with pytest.raises(PeerDiedError):
        enqueue(transport)
    transport._order._last = None
    transport.close()


def test_a_peer_that_dies_when_all_is_done_does_no_harm(transport):
    enqueue(transport).done = True
    transport.fail(PeerDiedError("rank 0 died", peer=0))
    transport._order._last = None
    transport.close()


def test_a_wait_that_the_gpu_gave_up_is_no_end(transport):
    enqueue(transport).done = True
    transport.below.error = CommunicationError("rank 0 did not come")
    transport.fail(transport.below.error)
    transport._order._last = None
    with pytest.raises(CommunicationError, match="rank 0 did not come"):
        transport.close()


def test_started_work_in_a_graph_keeps_nothing(fake, transport):
    plan = SimpleNamespace(run=lambda given, result: None)
    fake.streams[100].capturing = fake.streams[200].capturing = True
    event = transport.submit(plan, "x", "x")
    assert event.stream is fake.streams[200] and not transport._order._kept
    fake.streams[100].capturing = fake.streams[200].capturing = False
    event = transport.submit(plan, "x", "x")
    assert [kept for kept, _ in transport._order._kept[200]] == [event]


def test_a_stream_waits_for_another_unless_one_is_captured_alone(fake, transport):
    first, second = fake.streams[100], fake.streams[200]
    transport.order(first, second)
    assert [e.stream for e in second.waited] == [first]
    first.capturing = True
    transport.order(first, second)
    transport.order(second, first)
    assert len(second.waited) == 1 and not first.waited
    second.capturing = True
    transport.order(first, second)
    assert len(second.waited) == 2


def test_calls_are_compared_at_the_end_unless_the_communicator_failed(transport):
    transport.check_end()
    assert transport.below.asked == ["check_end"]
    transport.fail(PeerDiedError("rank 0 died", peer=0))
    transport.check_end()
    assert transport.below.asked == ["check_end"]


@pytest.mark.parametrize(
    ("error", "told"), [(MismatchError("other calls"), True), (AbortedError("a rank gave up"), False)]
)
def test_a_close_tells_of_other_calls_though_all_is_done(transport, error, told):
    transport.fail(error)
    try:
        transport.close()
    except MismatchError:
        assert told
    else:
        assert not told
