"""The messages of one call."""

from __future__ import annotations

from flagcx.executor.transfer import Transfer


def test_what_is_left_to_do_is_done_before_the_end_shows():
    seen: list[int] = []
    transfer = Transfer(lambda: seen.append(transfer.left), None)
    transfer.left += 1
    transfer.count_down(None)
    assert transfer.left == 1 and not seen
    transfer.count_down(None)
    assert transfer.left == 0 and seen == [1]
