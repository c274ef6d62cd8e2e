"""The messages of a schedule: each send with its matching receive, and an order in which all steps end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flagcx.errors import ScheduleError
from flagcx.schedule.model import Program, RecvReduce, Schedule, Send, Span


class Message(NamedTuple):
    """A send and the receive that it is matched by.

    ``send_index`` and ``recv_index`` are places in the lists of transfers of the two steps.
    """

    source: int
    send_step: int
    send_index: int
    src: Span
    target: int
    recv_step: int
    recv_index: int
    dst: Span
    reduces: bool


@dataclass(frozen=True, slots=True)
class Matching:
    """All programs of a schedule, with each send matched to its receive.

    Attributes:
        programs: By rank.
        messages: All messages.
        sent: ``sent[rank][step]`` are the numbers of the messages sent there, in the order listed.
        received: Likewise.
    """

    programs: tuple[Program, ...]
    messages: list[Message]
    sent: list[list[list[int]]]
    received: list[list[list[int]]]


def fault(
    text: str, rank: int | None = None, step: int | None = None, span: Span | None = None
) -> ScheduleError:
    """A ScheduleError whose message begins with rank, step and span."""
    place = [] if rank is None else [f"rank {rank}"]
    if step is not None:
        place.append(f"step {step}")
    if span is not None:
        place.append(str(span))
    message = f"{', '.join(place)}: {text}" if place else text
    return ScheduleError(message, rank=rank, step=step, chunk=None if span is None else span.start)


def match_messages(schedule: Schedule, programs: Sequence[Program] | None = None) -> Matching:
    """Matches the k-th send from a to b with the k-th receive of b from a, for all a and b.

    Args:
        schedule: Any schedule whose peers are ranks of it.
        programs: Its programs, if the caller has made them.

    Raises:
        ScheduleError: A send or a receive has no match, or their spans have different lengths.
    """
    programs = tuple(schedule.programs()) if programs is None else tuple(programs)
    sends: dict[tuple[int, int], list] = {}
    receives: dict[tuple[int, int], list] = {}
    for program in programs:
        rank = program.rank
        for number, step in enumerate(program.steps):
            for index, transfer in enumerate(step.transfers):
                if isinstance(transfer, Send):
                    sends.setdefault((rank, transfer.peer), []).append((number, index, transfer.src))
                else:
                    reduces = isinstance(transfer, RecvReduce)
                    record = (number, index, transfer.dst, reduces)
                    receives.setdefault((transfer.peer, rank), []).append(record)
    messages: list[Message] = []
    for pair in sorted(sends.keys() | receives.keys()):
        messages.extend(_match(pair, sends.get(pair, ()), receives.get(pair, ())))
    return _index(programs, messages)


def _match(pair: tuple[int, int], sends: Sequence, receives: Sequence) -> list[Message]:
    source, target = pair
    matched = []
    for (step, index, src), (recv_step, recv_index, dst, reduces) in zip(sends, receives, strict=False):
        if src.stop - src.start != dst.stop - dst.start:
            raise fault(
                f"sends {len(src)} chunks to rank {target}, whose matching receive in its step {recv_step} "
                f"takes {len(dst)} chunks into {dst}; both must have the same length",
                source,
                step,
                src,
            )
        matched.append(Message(source, step, index, src, target, recv_step, recv_index, dst, reduces))
    if len(sends) > len(receives):
        step, _, span = sends[len(receives)]
        raise fault(_unmatched("send to", "receives", target, len(sends), len(receives)), source, step, span)
    if len(receives) > len(sends):
        step, _, span, _ = receives[len(sends)]
        text = _unmatched("receive from", "sends", source, len(receives), len(sends))
        raise fault(text, target, step, span)
    return matched


def _unmatched(transfer: str, wanted: str, peer: int, number: int, there: int) -> str:
    return (
        f"a {transfer} rank {peer} without its match: there are {number} of them, and rank {peer} has "
        f"{there} matching {wanted}"
    )


def _index(programs: tuple[Program, ...], messages: list[Message]) -> Matching:
    sent: list[list[list[int]]] = [[[] for _ in p.steps] for p in programs]
    received: list[list[list[int]]] = [[[] for _ in p.steps] for p in programs]
    for number, m in enumerate(messages):
        sent[m.source][m.send_step].append(number)
        received[m.target][m.recv_step].append(number)
    for steps in sent:
        for numbers in steps:
            numbers.sort(key=lambda n: messages[n].send_index)
    for steps in received:
        for numbers in steps:
            numbers.sort(key=lambda n: messages[n].recv_index)
    return Matching(programs, messages, sent, received)


def completion_order(matching: Matching) -> list[tuple[int, int]]:
    """An order in which all (rank, step) end, if sends wait for their receives (rendezvous).

    A step ends when the other side of each of its transfers has begun. Any order that this allows gives
    the same result, where no step has a hazard.

    Raises:
        ScheduleError: A deadlock: some ranks wait for each other in a ring. The message names them.
    """
    programs, messages = matching.programs, matching.messages
    begun = bytearray(len(messages))
    current = [0] * len(programs)
    pending = [0] * len(programs)
    ready: deque[int] = deque()

    def begin(rank: int) -> None:
        """Begins the current step: transfers whose other side has begun are over, others are pending."""
        step = current[rank]
        sent, received = matching.sent[rank][step], matching.received[rank][step]
        for number in (*sent, *received):
            if not begun[number]:
                begun[number] = 1
                pending[rank] += 1
                continue
            message = messages[number]
            peer = message.source if message.target == rank else message.target
            pending[peer] -= 1
            if not pending[peer]:
                ready.append(peer)
        if not pending[rank]:
            ready.append(rank)

    for program in programs:
        if program.steps:
            begin(program.rank)
    order = []
    while ready:
        rank = ready.popleft()
        order.append((rank, current[rank]))
        current[rank] += 1
        if current[rank] < len(programs[rank].steps):
            begin(rank)
    if len(order) < sum(len(p.steps) for p in programs):
        raise _deadlock(matching, current)
    return order


def _deadlock(matching: Matching, current: list[int]) -> ScheduleError:
    """Follows the ranks from one to the first that it waits for, until a rank comes again."""
    waits: dict[int, tuple[Message, bool]] = {}
    rank = next(p.rank for p in matching.programs if current[p.rank] < len(p.steps))
    while rank not in waits:
        step = current[rank]
        sent = [matching.messages[n] for n in matching.sent[rank][step]]
        received = [matching.messages[n] for n in matching.received[rank][step]]
        pending = [(m, True) for m in sent if current[m.target] < m.recv_step]
        pending += [(m, False) for m in received if current[m.source] < m.send_step]
        waits[rank] = message, sends = pending[0]
        rank = message.target if sends else message.source
    ring = list(waits)[list(waits).index(rank) :]
    texts = []
    for rank in ring:
        m, sends = waits[rank]
        peer = m.target if sends else m.source
        does = f"sends {m.src} to" if sends else f"receives {m.dst} from"
        there = f"receives it in its step {m.recv_step}" if sends else f"sends it in its step {m.send_step}"
        texts.append(f"rank {rank} in step {current[rank]} {does} rank {peer}, which {there}")
        texts[-1] += f" and is in step {current[peer]}"
    message, sends = waits[ring[0]]
    span = message.src if sends else message.dst
    return fault("deadlock: " + "; ".join(texts), ring[0], current[ring[0]], span)
