"""Runs the device programs of all ranks with NumPy, in place of NCCL and the kernels."""

from __future__ import annotations

from collections import deque

import numpy as np

from flagcx.kernels.fuse import Finish
from flagcx.schedule.model import Buffer
from flagcx.transport.base import Call
from flagcx.transport.nccl.steps import RECVBUF, SCALED, SCRATCH, SENDBUF, DeviceProgram, device_program


def run_all(calls: list[Call], given: list, results: list) -> None:
    """Runs one call on all ranks; each writes its result.

    Args:
        calls: One a rank.
        given: INPUT arrays, or None where a rank has none.
        results: OUTPUT arrays likewise; those of a call in place are views of ``given`` or the reverse.
    """
    programs = [device_program(c) for c in calls]
    memories = [_memories(*each) for each in zip(calls, programs, given, results, strict=True)]
    mail: dict[tuple[int, int], deque] = {}
    at = [0] * len(calls)
    sent = [False] * len(calls)
    while any(a < len(p.steps) for a, p in zip(at, programs, strict=True)):
        before = list(at)
        for rank, program in enumerate(programs):
            if at[rank] < len(program.steps):
                _advance(rank, program, memories[rank], calls[rank], mail, at, sent)
        assert before != at or any(sent), f"no rank can go on; they stand at steps {at}"
        if before == at:
            raise AssertionError(f"the ranks wait for each other at steps {at}")
    assert not any(mail.values()), "messages were sent that nobody received"


def _memories(call: Call, program: DeviceProgram, given, result) -> dict:
    dtype = call.dtype.numpy
    poison = np.frombuffer(b"\x5b" * dtype.itemsize, dtype)[0]
    return {
        SENDBUF: given,
        RECVBUF: result,
        SCRATCH: np.full(program.scratch_count, poison, dtype),
        SCALED: np.full(program.scaled_count, poison, dtype),
    }


def _advance(rank, program, memories, call, mail, at, sent) -> None:
    step = program.steps[at[rank]]
    if not sent[rank]:
        for m in step.messages:
            if m.sends:
                data = memories[m.at[0]][m.at[1] : m.at[1] + m.count].copy()
                assert len(data) == m.count, f"rank {rank} sends beyond its memory: {m}"
                mail.setdefault((rank, m.peer), deque()).append(data)
        sent[rank] = True
    receives = [m for m in step.messages if not m.sends]
    for peer in {m.peer for m in receives}:
        if len(mail.get((peer, rank), ())) < sum(m.peer == peer for m in receives):
            return
    for m in receives:
        data = mail[m.peer, rank].popleft()
        assert len(data) == m.count, f"rank {rank} expects {m.count} elements, gets {len(data)}"
        memories[m.at[0]][m.at[1] : m.at[1] + m.count] = data
    for phase in step.phases:
        _launch(phase, memories, call, program.factor)
    at[rank] += 1
    sent[rank] = False


def _launch(phase, memories, call: Call, factor: float) -> None:
    before = {k: None if m is None else m.copy() for k, m in memories.items()}
    for chain in phase:
        sources = [before[m][a : a + chain.count] for m, a in chain.sources]
        assert all(len(s) == chain.count for s in sources), f"a source ends too early: {chain}"
        memory, start = chain.to
        memories[memory][start : start + chain.count] = _chain(sources, chain.finish, call, factor)


def _chain(sources, finish: Finish, call: Call, factor: float):
    if len(sources) == 1 and finish is Finish.NONE:
        return sources[0]
    wide = call.dtype.accumulate or call.dtype.numpy
    total = sources[0].astype(wide)
    for source in sources[1:]:
        total = call.op.ufunc(total, source.astype(wide)).astype(wide)
    if finish is Finish.SCALE:
        total = total * wide.type(factor)
    if finish is Finish.DIVIDE:
        total = (np.fix(total / factor) if wide.kind in "iu" else total / wide.type(factor)).astype(wide)
    return total.astype(call.dtype.numpy)


def counts_of(call: Call) -> tuple[int, int]:
    """Elements of the INPUT and the OUTPUT of a call's rank."""
    layout = call.layout(call.program())
    return layout.count(Buffer.INPUT), layout.count(Buffer.OUTPUT)
