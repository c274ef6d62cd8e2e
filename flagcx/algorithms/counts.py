"""What a schedule costs, counted from its programs: the measure of the closed forms in the catalogue."""

from __future__ import annotations

from fractions import Fraction

from flagcx.schedule.messages import completion_order, wire
from flagcx.schedule.model import Schedule, Send


def count_steps(schedule: Schedule) -> int:
    """The steps on the longest path of transfers that wait for each other.

    A step takes one unit of time from when it and all steps that it meets have begun; local work
    takes none.

    Args:
        schedule: A schedule that ends.

    Raises:
        ScheduleError: Sends and receives do not match, or ranks wait for each other for ever.
    """
    wiring = wire(schedule)
    ended = [[0] * (len(program.steps) + 1) for program in wiring.programs]
    messages = wiring.messages
    for rank, step in completion_order(wiring):
        met = [(messages[i].target, messages[i].recv_step) for i in wiring.sent[rank][step]]
        met += [(messages[i].source, messages[i].send_step) for i in wiring.received[rank][step]]
        begun = max((ended[peer][there] for peer, there in met), default=0)
        ended[rank][step + 1] = max(ended[rank][step], begun) + (1 if met else 0)
    return max(times[-1] for times in ended)


def count_sent(schedule: Schedule) -> Fraction:
    """What the busiest rank sends, as a share of the message (of all blocks, where there are blocks).

    Args:
        schedule: Any schedule; all chunks count alike.
    """
    busiest = 0
    for program in schedule.programs():
        transfers = (t for step in program.steps for t in step.transfers if isinstance(t, Send))
        busiest = max(busiest, sum(len(t.src) for t in transfers))
    return Fraction(busiest, schedule.chunks)
