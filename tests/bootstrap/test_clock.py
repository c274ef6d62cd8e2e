"""A clock that stands still while its process does."""

from flagcx.bootstrap.clock import ActiveClock


def test_pauses_beyond_a_few_ticks_count_for_nothing():
    times = iter([10.0, 10.5, 11.5, 13.5, 100.0, 100.0, 101.0, 5000.0, 5001.0])
    clock = ActiveClock(lambda: next(times))
    start = clock.now()
    assert [clock.now() - start for _ in range(7)] == [1.0, 3.0, 3.0, 3.0, 4.0, 4.0, 5.0]
