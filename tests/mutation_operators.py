"""Small changes to schedules, one function a kind, for ``tests/mutants.py``.

An operator gets the schedule, its steps as ``steps[rank][step]`` to change, and a source of random numbers;
it says what it did, or returns None where it found no place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from flagcx.schedule.messages import wire
from flagcx.schedule.model import Buffer, Copy, Recv, RecvReduce, Reduce, Send, Span, Step

Steps = list[list[Step]]


def _pick(steps: Steps, rng: random.Random, wanted: Callable[[Step], bool]) -> tuple[int, int] | None:
    places = [(r, s) for r, program in enumerate(steps) for s, step in enumerate(program) if wanted(step)]
    return rng.choice(places) if places else None


def _pick_transfer(steps: Steps, rng, kind=(Send, Recv, RecvReduce)) -> tuple[int, int, int] | None:
    places = [
        (r, s, i)
        for r, program in enumerate(steps)
        for s, step in enumerate(program)
        for i, t in enumerate(step.transfers)
        if isinstance(t, kind)
    ]
    return rng.choice(places) if places else None


def _pick_local(steps: Steps, rng, kind=(Copy, Reduce)) -> tuple[int, int, int] | None:
    places = [
        (r, s, i)
        for r, program in enumerate(steps)
        for s, step in enumerate(program)
        for i, w in enumerate(step.local)
        if isinstance(w, kind)
    ]
    return rng.choice(places) if places else None


def _set_transfers(steps: Steps, r: int, s: int, transfers: list) -> None:
    steps[r][s] = Step(tuple(transfers), steps[r][s].local)


def _set_local(steps: Steps, r: int, s: int, local: list) -> None:
    steps[r][s] = Step(steps[r][s].transfers, tuple(local))


def _drop_transfer(schedule, steps, rng):
    if (place := _pick_transfer(steps, rng)) is None:
        return None
    r, s, i = place
    transfers = list(steps[r][s].transfers)
    gone = transfers.pop(i)
    _set_transfers(steps, r, s, transfers)
    return f"rank {r} step {s}: dropped {gone}"


def _duplicate_transfer(schedule, steps, rng):
    if (place := _pick_transfer(steps, rng)) is None:
        return None
    r, s, i = place
    transfers = list(steps[r][s].transfers)
    transfers.insert(rng.randrange(len(transfers) + 1), transfers[i])
    _set_transfers(steps, r, s, transfers)
    return f"rank {r} step {s}: doubled {steps[r][s].transfers[i]}"


def _other_peer(schedule, steps, rng):
    if (place := _pick_transfer(steps, rng)) is None:
        return None
    r, s, i = place
    transfers = list(steps[r][s].transfers)
    peer = rng.randrange(-1, schedule.size + 1)
    before, transfers[i] = transfers[i], replace(transfers[i], peer=peer)
    _set_transfers(steps, r, s, transfers)
    return f"rank {r} step {s}: {before} has peer {peer}"


def _swap_peers(schedule, steps, rng):
    if (place := _pick(steps, rng, lambda step: len({t.peer for t in step.transfers}) > 1)) is None:
        return None
    r, s = place
    transfers = list(steps[r][s].transfers)
    pairs = [(i, j) for i, a in enumerate(transfers) for j, b in enumerate(transfers) if a.peer < b.peer]
    i, j = rng.choice(pairs)
    a, b = transfers[i], transfers[j]
    transfers[i], transfers[j] = replace(a, peer=b.peer), replace(b, peer=a.peer)
    _set_transfers(steps, r, s, transfers)
    return f"rank {r} step {s}: swapped the peers of {a} and {b}"


def _changed(span: Span, rng) -> Span:
    what = rng.randrange(5)
    if what < 2:
        by = 1 if what else -1
        return Span(span.buffer, span.start + by, span.stop + by)
    if what == 2:
        return Span(span.buffer, span.start, span.stop + rng.choice((-1, 1)))
    if what == 3:
        return Span(span.buffer, span.start + rng.choice((-1, 1)), span.stop)
    return Span(rng.choice([b for b in Buffer if b != span.buffer]), span.start, span.stop)


def _change_span(schedule, steps, rng):
    if (place := _pick_transfer(steps, rng)) is None:
        return None
    r, s, i = place
    transfers = list(steps[r][s].transfers)
    t = transfers[i]
    name = "src" if isinstance(t, Send) else "dst"
    span = _changed(getattr(t, name), rng)
    transfers[i] = replace(t, **{name: span})
    _set_transfers(steps, r, s, transfers)
    return f"rank {r} step {s}: {t} has span {span}"


def _change_local_span(schedule, steps, rng):
    if (place := _pick_local(steps, rng)) is None:
        return None
    r, s, i = place
    local = list(steps[r][s].local)
    name = rng.choice(("src", "dst"))
    before = local[i]
    local[i] = replace(before, **{name: _changed(getattr(before, name), rng)})
    _set_local(steps, r, s, local)
    return f"rank {r} step {s}: {before} became {local[i]}"


def _toggle_reduce(schedule, steps, rng):
    if (place := _pick_transfer(steps, rng, (Recv, RecvReduce))) is None:
        return None
    r, s, i = place
    transfers = list(steps[r][s].transfers)
    t = transfers[i]
    transfers[i] = (Recv if isinstance(t, RecvReduce) else RecvReduce)(t.dst, t.peer)
    _set_transfers(steps, r, s, transfers)
    return f"rank {r} step {s}: {t} became {transfers[i]}"


def _toggle_local(schedule, steps, rng):
    if (place := _pick_local(steps, rng)) is None:
        return None
    r, s, i = place
    local = list(steps[r][s].local)
    w = local[i]
    local[i] = (Reduce if isinstance(w, Copy) else Copy)(w.src, w.dst)
    _set_local(steps, r, s, local)
    return f"rank {r} step {s}: {w} became {local[i]}"


def _drop_local(schedule, steps, rng):
    if (place := _pick_local(steps, rng)) is None:
        return None
    r, s, i = place
    local = list(steps[r][s].local)
    gone = local.pop(i)
    _set_local(steps, r, s, local)
    return f"rank {r} step {s}: dropped {gone}"


def _duplicate_local(schedule, steps, rng):
    if (place := _pick_local(steps, rng, Reduce) or _pick_local(steps, rng)) is None:
        return None
    r, s, i = place
    local = list(steps[r][s].local)
    local.insert(i, local[i])
    _set_local(steps, r, s, local)
    return f"rank {r} step {s}: doubled {local[i]}"


def _swap_local(schedule, steps, rng):
    if (place := _pick(steps, rng, lambda step: len(step.local) > 1)) is None:
        return None
    r, s = place
    local = list(steps[r][s].local)
    i, j = rng.sample(range(len(local)), 2)
    local[i], local[j] = local[j], local[i]
    _set_local(steps, r, s, local)
    return f"rank {r} step {s}: swapped {local[j]} and {local[i]}"


def _swap_transfers(schedule, steps, rng):
    if (place := _pick(steps, rng, lambda step: len(step.transfers) > 1)) is None:
        return None
    r, s = place
    transfers = list(steps[r][s].transfers)
    i, j = rng.sample(range(len(transfers)), 2)
    transfers[i], transfers[j] = transfers[j], transfers[i]
    _set_transfers(steps, r, s, transfers)
    return f"rank {r} step {s}: swapped {transfers[j]} and {transfers[i]}"


def _swap_steps(schedule, steps, rng):
    long = [r for r, program in enumerate(steps) if len(program) > 1]
    if not long:
        return None
    r = rng.choice(long)
    i, j = sorted(rng.sample(range(len(steps[r])), 2))
    steps[r][i], steps[r][j] = steps[r][j], steps[r][i]
    return f"rank {r}: swapped steps {i} and {j}"


def _swap_steps_everywhere(schedule, steps, rng):
    shortest = min(len(program) for program in steps)
    if shortest < 2:
        return None
    i, j = sorted(rng.sample(range(shortest), 2))
    for program in steps:
        program[i], program[j] = program[j], program[i]
    return f"every rank: swapped steps {i} and {j}"


def _rotate_steps(schedule, steps, rng):
    r = rng.randrange(len(steps))
    if len(steps[r]) < 2:
        return None
    steps[r] = steps[r][1:] + steps[r][:1]
    return f"rank {r}: put step 0 last"


def _drop_step(schedule, steps, rng):
    if (place := _pick(steps, rng, lambda step: bool(step.transfers or step.local))) is None:
        return None
    r, s = place
    del steps[r][s]
    return f"rank {r}: dropped step {s}"


def _merge_steps(schedule, steps, rng):
    r = rng.randrange(len(steps))
    if len(steps[r]) < 2:
        return None
    s = rng.randrange(len(steps[r]) - 1)
    a, b = steps[r][s : s + 2]
    steps[r][s : s + 2] = [Step(a.transfers + b.transfers, a.local + b.local)]
    return f"rank {r}: made one step of {s} and {s + 1}"


def _split_step(schedule, steps, rng):
    if (place := _pick(steps, rng, lambda step: len(step.transfers) > 1)) is None:
        return None
    r, s = place
    step = steps[r][s]
    at = rng.randrange(1, len(step.transfers))
    steps[r][s : s + 1] = [Step(step.transfers[:at]), Step(step.transfers[at:], step.local)]
    return f"rank {r}: split step {s} before its transfer {at}"


def _sends_first(schedule, steps, rng):
    """All ranks send before they receive: a ring in which nobody takes anything."""
    number = rng.randrange(max(len(program) for program in steps) or 1)
    for program in steps:
        if number < len(program):
            step = program[number]
            sends = tuple(t for t in step.transfers if isinstance(t, Send))
            others = tuple(t for t in step.transfers if not isinstance(t, Send))
            program[number : number + 1] = [Step(sends), Step(others, step.local)]
    return f"every rank: sends before it receives in step {number}"


def _move_local(schedule, steps, rng):
    if (place := _pick_local(steps, rng)) is None:
        return None
    r, s, i = place
    if len(steps[r]) < 2:
        return None
    local = list(steps[r][s].local)
    moved = local.pop(i)
    _set_local(steps, r, s, local)
    to = rng.choice([t for t in range(len(steps[r])) if t != s])
    _set_local(steps, r, to, [*steps[r][to].local, moved])
    return f"rank {r}: moved {moved} from step {s} to step {to}"


def _message(schedule, rng):
    messages = wire(schedule).messages
    return rng.choice(messages) if messages else None


def _drop_message(schedule, steps, rng):
    if (m := _message(schedule, rng)) is None:
        return None
    for r, s, i in ((m.source, m.send_step, m.send_index), (m.target, m.recv_step, m.recv_index)):
        transfers = list(steps[r][s].transfers)
        del transfers[i]
        _set_transfers(steps, r, s, transfers)
    return f"dropped the message {m.src} of rank {m.source} step {m.send_step} to rank {m.target}"


def _duplicate_message(schedule, steps, rng):
    if (m := _message(schedule, rng)) is None:
        return None
    for r, s, i in ((m.source, m.send_step, m.send_index), (m.target, m.recv_step, m.recv_index)):
        transfers = list(steps[r][s].transfers)
        transfers.insert(i, transfers[i])
        _set_transfers(steps, r, s, transfers)
    return f"doubled the message {m.src} of rank {m.source} step {m.send_step} to rank {m.target}"


def _shift_message(schedule, steps, rng):
    """Another chunk at both ends, so that lengths and sizes still fit."""
    if (m := _message(schedule, rng)) is None or schedule.chunks < 2:
        return None
    by = rng.choice((1, -1, schedule.chunks // 2))
    at_source, at_target = rng.choice(((0, by), (by, 0), (by, by)))

    def moved(span: Span, by: int) -> Span:
        length = len(span)
        start = (span.start + by) % max(schedule.chunks - length + 1, 1)
        return Span(span.buffer, start, start + length)

    transfers = list(steps[m.source][m.send_step].transfers)
    transfers[m.send_index] = Send(moved(m.src, at_source), m.target)
    _set_transfers(steps, m.source, m.send_step, transfers)
    transfers = list(steps[m.target][m.recv_step].transfers)
    kind = RecvReduce if m.reduces else Recv
    transfers[m.recv_index] = kind(moved(m.dst, at_target), m.source)
    _set_transfers(steps, m.target, m.recv_step, transfers)
    return (
        f"moved the message {m.src} of rank {m.source} step {m.send_step} to rank {m.target} by {by} chunks"
    )


def _moved_scratch(step: Step, move: Callable[[Span], Span]) -> Step:
    def at(span: Span) -> Span:
        return move(span) if span.buffer is Buffer.SCRATCH else span

    transfers = [
        replace(t, src=at(t.src)) if isinstance(t, Send) else replace(t, dst=at(t.dst))
        for t in step.transfers
    ]
    return Step(tuple(transfers), tuple(replace(w, src=at(w.src), dst=at(w.dst)) for w in step.local))


def _shift_scratch(schedule, steps, rng):
    """All of a rank's SCRATCH one chunk on: right, but for sizes."""
    r = rng.randrange(len(steps))

    def move(span: Span) -> Span:
        return Span(span.buffer, span.start + 1, span.stop + 1)

    steps[r][:] = [_moved_scratch(step, move) for step in steps[r]]
    return f"rank {r}: all of SCRATCH one chunk further on"


def _fold_scratch(schedule, steps, rng):
    """All layers of SCRATCH in one: what was received lands on what is being sent."""

    def move(span: Span) -> Span:
        start = span.start % schedule.chunks
        return Span(span.buffer, start, start + len(span))

    for program in steps:
        program[:] = [_moved_scratch(step, move) for step in program]
    return "every rank: all layers of SCRATCH in one"


def _merge_steps_everywhere(schedule, steps, rng):
    shortest = min(len(program) for program in steps)
    if shortest < 2:
        return None
    s = rng.randrange(shortest - 1)
    for program in steps:
        a, b = program[s : s + 2]
        program[s : s + 2] = [Step(a.transfers + b.transfers, a.local + b.local)]
    return f"every rank: made one step of {s} and {s + 1}"


OPERATORS = (
    _shift_scratch,
    _fold_scratch,
    _merge_steps_everywhere,
    _drop_transfer,
    _duplicate_transfer,
    _other_peer,
    _swap_peers,
    _change_span,
    _change_local_span,
    _toggle_reduce,
    _toggle_local,
    _drop_local,
    _duplicate_local,
    _swap_local,
    _swap_transfers,
    _swap_steps,
    _swap_steps_everywhere,
    _rotate_steps,
    _drop_step,
    _merge_steps,
    _split_step,
    _sends_first,
    _move_local,
    _drop_message,
    _duplicate_message,
    _shift_message,
)
