"""A clock that stands still while its process does."""

import pytest

from flagcx.bootstrap.clock import TICK_S, ActiveClock


def test_between_two_readings_two_ticks_count_at_most():
    times = iter([10.0, 10.5, 11.5, 13.5, 100.0, 100.0, 101.0, 5000.0, 5001.0])
    clock = ActiveClock(lambda: next(times))
    assert [clock.now() for _ in range(8)] == [0.5, 1.5, 2.5, 3.5, 3.5, 4.5, 5.5, 6.5]


@pytest.mark.parametrize("late_s", [0.0, 0.4 * TICK_S, TICK_S])
def test_a_thread_that_reads_it_late_loses_no_time(late_s):
    times = iter([step * (TICK_S + late_s) for step in range(101)])
    clock = ActiveClock(lambda: next(times))
    assert [clock.now() for _ in range(100)][-1] == pytest.approx(100 * (TICK_S + late_s))
