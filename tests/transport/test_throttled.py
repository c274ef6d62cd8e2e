"""The slow link: how long calls take on it, and what cannot be one."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

import flagcx as fc
from flagcx.errors import ArgumentError
from flagcx.transport.link_speed import LinkSpeed
from flagcx.transport.throttled import Throttled, throttled
from tests.communicator.messages import run_programs
from tests.ranks import run_ranks


def test_a_link_is_read_from_text():
    assert LinkSpeed.parse("0.0125") == LinkSpeed(0.0125, 0.0)
    assert LinkSpeed.parse("0.125, 50") == LinkSpeed(0.125, 50.0)
    assert LinkSpeed(0.5, 10).time_ns(1000, 3) == 2000 + 30_000


@pytest.mark.parametrize("text", ["fast", "1,2,3", ",", "1;2"])
def test_text_that_is_no_link(text):
    with pytest.raises(ArgumentError, match=r"throttle='.*' is no link; expected GB/s, or GB/s and us"):
        LinkSpeed.parse(text)


def test_numbers_that_are_no_link():
    with pytest.raises(ArgumentError, match="bandwidth above 0 GB/s, got 0"):
        LinkSpeed.parse("0")
    with pytest.raises(ArgumentError, match="latency is 0 us or more, got -1"):
        LinkSpeed(1, -1)


def test_without_the_setting_nothing_is_wrapped():
    transport = object()
    assert throttled(transport, "") is transport


def times(count: int) -> dict[str, float]:
    """Milliseconds of some calls, and whether their results are right."""
    comm = fc.init(throttle="0.1,500")
    assert isinstance(comm._host.transport, Throttled)
    found = {}
    x, y = np.full(count, comm.rank + 1, np.float32), np.empty(count, np.float32)

    def timed(name, call):
        """The least of three: a busy machine makes calls late, and none early."""
        for _ in range(3):
            comm.barrier()
            start = time.perf_counter()
            call()
            took_ms = (time.perf_counter() - start) * 1e3
            found[name] = min(found.get(name, math.inf), took_ms)

    timed("allreduce", lambda: comm.allreduce(x, out=y))
    found["right"] = float(np.all(y == sum(range(1, comm.size + 1))))
    timed(
        "sendrecv",
        lambda: comm.sendrecv(x, (comm.rank + 1) % comm.size, x.copy(), (comm.rank - 1) % comm.size),
    )
    timed("broadcast", lambda: comm.broadcast(x[:1000]))
    timed("started", lambda: comm.allreduce(x, async_op=True))
    comm.barrier()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_calls_take_the_time_of_the_link(size):
    count = 1 << 20
    for found in run_ranks(times, size, count):
        assert found["right"] == 1
        wire_ms = 4 * count / 0.1e6
        least = 2 * (size - 1) / size * wire_ms
        assert least <= found["allreduce"] < 1.5 * least + 60
        assert wire_ms + 0.5 <= found["sendrecv"] < 1.5 * wire_ms + 60
        assert found["broadcast"] >= 0.5 + 0.04
        assert found["started"] < least / 2


def late() -> float:
    comm = fc.init(throttle="0.1")
    x = np.ones(1 << 18, np.float32)
    comm.barrier()
    if comm.rank == 0:
        time.sleep(0.05)
    start = time.perf_counter()
    comm.allreduce(x)
    return (time.perf_counter() - start) * 1e3


def test_the_link_is_not_at_work_before_all_have_come():
    first, second = run_ranks(late, 2)
    assert first >= 10 and second >= first + 40


def _messages() -> float:
    """Two messages each way between two ranks, begun at once."""
    comm = fc.init(throttle="0.1,1000", timeout_s=30)
    begin, peer, count = time.perf_counter(), 1 - comm.rank, 250_000
    works = [comm.recv(np.empty(count), peer, async_op=True) for _ in range(2)]
    works += [comm.send(np.ones(count), peer, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    seconds = time.perf_counter() - begin
    comm.close()
    return seconds


def test_messages_share_the_link_and_move_together():
    for seconds in run_ranks(_messages, 2):
        assert 0.041 <= seconds < 5


def test_messages_under_way_move_together_on_a_slow_link(monkeypatch):
    monkeypatch.setenv("FLAGCX_THROTTLE", "10,10")
    run_ranks(run_programs, 3, ("receive_before_send", "receive_barrier_send", "to_oneself"))
