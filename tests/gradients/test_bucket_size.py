"""How large buckets are: by times that show the speed of a link, not only what a call costs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flagcx.gradients import bucket_size
from flagcx.gradients.overlap import DEVICE_CALL_US


def test_times_go_along_the_nearest_lines():
    time_us = bucket_size.through([(100, 10), (200, 12), (400, 52)])
    assert time_us(100) == 10 and time_us(150) == 11 and time_us(200) == 12 and time_us(300) == 32
    assert time_us(1000) == 12 + 800 * 0.2, "beyond the last point along the last line"
    assert time_us(50) == 9, "below the first along the first"


def test_times_never_fall_below_half_of_the_least_and_never_shrink_with_size():
    assert bucket_size.through([(100, 10), (200, 30)])(0) == 5
    falling = bucket_size.through([(100, 10), (200, 8)])
    assert falling(10_000) > falling(1000) >= 10


def _gpus(monkeypatch, latency_us: float, gb_per_s: float):
    """A communicator with GPUs on a link, and the sizes that are measured on it."""
    asked = []

    def measure(comm, executor, count):
        asked.append(4 * count)
        return latency_us + 4 * count / gb_per_s / 1e3

    monkeypatch.setattr(bucket_size, "_measure_on_device", measure)
    executor = SimpleNamespace(transport=SimpleNamespace(link=None), selector=SimpleNamespace(table=None))
    return SimpleNamespace(size=2, _host=object()), executor, asked


@pytest.mark.parametrize("gb_per_s", [30.0, 330.0])
def test_on_a_gpu_the_speed_of_the_link_decides(monkeypatch, gb_per_s):
    comm, executor, asked = _gpus(monkeypatch, 20.0, gb_per_s)
    total = 1536 << 20
    chosen, reason = bucket_size.choose_bucket_nbytes(comm, executor, total, None)
    all_us = 20 + total / gb_per_s / 1e3 + DEVICE_CALL_US
    assert f"all gradients {all_us / 1e3:.3g} ms" in reason and reason.startswith("measured now: ")
    assert chosen < total / 4, "most of it would be left at the end of the computation"
    assert max(asked) >= 16 << 20, "smaller messages tell little of the link"


def test_a_slower_link_wants_smaller_buckets(monkeypatch):
    chosen = []
    for gb_per_s in (3.0, 3000.0):
        comm, executor, _ = _gpus(monkeypatch, 20.0, gb_per_s)
        chosen.append(bucket_size.choose_bucket_nbytes(comm, executor, 1 << 30, None)[0])
    assert chosen[0] < chosen[1]


def test_one_rank_has_one_bucket():
    assert bucket_size.choose_bucket_nbytes(SimpleNamespace(size=1), None, 12345, None)[0] == 12345
