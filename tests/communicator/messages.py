"""Programs of sends and receives that no order of MPI's rules lets hang, for the ranks of a test to run."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import flagcx as fc

SMALL, LARGE = 3, 200_000
"""Elements of float64: what goes through slots, and what is read where it lies."""


def filled(rank: int, number: int, count: int, dtype: Any = np.float64) -> np.ndarray:
    """What rank ``rank`` sends as its message ``number``: other data in every element."""
    return (np.arange(count) + 7 * rank + 31 * number).astype(dtype)


def receive_before_send(comm: fc.Communicator, count: int) -> None:
    """An asynchronous receive, then a send."""
    peer, got = comm.rank ^ 1, np.zeros(count)
    if peer < comm.size:
        work = comm.recv(got, peer, async_op=True)
        comm.send(filled(comm.rank, 0, count), peer)
        assert work.wait() is got
        assert (got == filled(peer, 0, count)).all()


def both_started(comm: fc.Communicator, count: int) -> None:
    """Many sends and receives with every rank, itself too, waited for in another order than they began."""
    draw, works = random.Random(comm.rank), []
    sent = {(q, i): filled(comm.rank, i, count) for q in range(comm.size) for i in range(5)}
    got = {(q, i): np.zeros(count) for q in range(comm.size) for i in range(5)}
    for i in range(5):
        ways = [(q, sends) for q in range(comm.size) for sends in (False, True)]
        for q, sends in draw.sample(ways, len(ways)):
            call = (
                comm.send(sent[q, i], q, async_op=True) if sends else comm.recv(got[q, i], q, async_op=True)
            )
            works.append(call)
    for work in draw.sample(works, len(works)):
        work.wait()
        assert work.done()
    for (q, i), array in got.items():
        assert (array == filled(q, i, count)).all()


def receive_barrier_send(comm: fc.Communicator, count: int) -> None:
    """Collectives of all kinds between the begin of a receive and the send that it waits for."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    got, shared = np.zeros(count), np.zeros(100_000, np.float32)
    work = comm.recv(got, left, async_op=True)
    comm.barrier()
    assert comm.allreduce(np.ones(4))[0] == comm.size
    comm.broadcast(shared, comm.size - 1, algorithm="chain")
    started = comm.allreduce(np.ones(50_000), async_op=True)
    comm.send(filled(comm.rank, 1, count), right)
    assert started.wait()[0] == comm.size
    work.wait()
    assert (got == filled(left, 1, count)).all()


def send_broadcast_wait(comm: fc.Communicator, count: int) -> None:
    """A send that ends beside the broadcast to which its receiver comes later."""
    root, last = 0, comm.size - 1
    got, shared = np.zeros(count), np.full(1000, float(comm.rank))
    data = filled(root, 2, count)  # which stays as it is until the send has ended
    work = comm.send(data, last, async_op=True) if comm.rank == root else None
    if comm.rank == last:
        comm.recv(got, root)
        assert (got == filled(root, 2, count)).all()
    comm.broadcast(shared, root)
    assert (shared == 0).all()
    if work is not None:
        work.wait()


def send_of_an_array_that_nobody_keeps(comm: fc.Communicator, count: int) -> None:
    """A started send keeps the array that its caller drops: its memory is not given to another one."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    work = comm.send(filled(comm.rank, 3, count), right, async_op=True)
    others = [np.full(count, -1.0) for _ in range(3)]  # which would take the place of one that was freed
    del others
    got = np.zeros(count)
    comm.barrier()
    comm.recv(got, left)
    assert (got == filled(left, 3, count)).all()
    work.wait()


def send_beside_started_collective(comm: fc.Communicator, count: int) -> None:
    """A collective that was started waits for a rank that first wants a message."""
    got, x = np.zeros(count), np.ones(1000)
    if comm.size == 1:
        return
    if comm.rank == comm.size - 1:
        comm.recv(got, 0)
        assert (got == filled(0, 3, count)).all()
        comm.allreduce(x)
    else:
        work = comm.allreduce(x, async_op=True)
        if comm.rank == 0:
            comm.send(filled(0, 3, count), comm.size - 1)
        work.wait()
    assert (x == comm.size).all()


def to_oneself(comm: fc.Communicator, count: int) -> None:
    """Messages to oneself in every order, blocking ones too."""
    me, got = comm.rank, [np.zeros(count) for _ in range(4)]
    data = filled(me, 0, count)
    comm.send(data, me)
    data[...] = -1  # a blocking send has let go of it
    comm.recv(got[0], me)
    work = comm.recv(got[1], me, async_op=True)
    comm.send(filled(me, 1, count), me)
    work.wait()
    comm.sendrecv(filled(me, 2, count), me, got[2], me)
    with comm.group():
        comm.recv(got[3], me)
        comm.send(filled(me, 3, count), me)
    for i, array in enumerate(got):
        assert (array == filled(me, i, count)).all(), i


def task_farm(comm: fc.Communicator, count: int) -> None:
    """Rank 0 gives the next task to whichever rank has answered; others square what they get."""
    tasks = 20
    if comm.rank:
        while True:
            task = comm.recv(np.zeros(count + 1), 0)
            if task[0] < 0:
                return
            comm.send(task * task, 0)
    answers, given = {}, 0
    waiting: dict[int, tuple[int, np.ndarray, fc.Work]] = {}
    free = list(range(1, comm.size))
    while comm.size > 1 and len(answers) < tasks:
        while free and given < tasks:
            worker, got = free.pop(), np.zeros(count + 1)
            work = comm.recv(got, worker, async_op=True)
            comm.send(np.full(count + 1, float(given)), worker)
            waiting[worker] = given, got, work
            given += 1
        for worker in [q for q, (_, _, work) in waiting.items() if work.done()]:
            task, got, work = waiting.pop(worker)
            answers[task] = work.wait()
            free.append(worker)
    for worker in range(1, comm.size):
        comm.send(np.full(count + 1, -1.0), worker)
    assert comm.size == 1 or all((answers[i] == float(i) ** 2).all() for i in range(tasks))


def in_groups(comm: fc.Communicator, count: int) -> None:
    """Groups whose sends come first on all ranks, beside messages that were started before."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = [*(np.zeros(count) for _ in range(3)), np.zeros(5)]
    first = comm.recv(got[0], left, async_op=True)
    with comm.group():
        for i in range(3):
            comm.send(filled(comm.rank, i, count), right)
        for i in (1, 2):
            comm.recv(got[i], left)
    comm.send(filled(comm.rank, 3, 5), right, async_op=True).wait()
    first.wait()
    comm.recv(got[3], left)
    assert (got[3] == filled(left, 3, 5)).all()
    for i in range(3):
        assert (got[i] == filled(left, i, count)).all(), i


def odd_arrays(comm: fc.Communicator, count: int) -> None:
    """Arrays with strides are packed when a send begins, and filled when a receive has ended."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    given, got = np.zeros((count, 2)), np.zeros((2, count)).T[:, ::-1]
    given[...] = filled(comm.rank, 4, 2 * count).reshape(count, 2)
    received = comm.recv(got, left, async_op=True)
    sent = comm.send(given[:, ::-1], right, async_op=True)
    sent.wait()
    assert received.wait() is got
    assert (got == filled(left, 4, 2 * count).reshape(count, 2)[:, ::-1]).all()


PROGRAMS = (
    receive_before_send,
    both_started,
    receive_barrier_send,
    send_broadcast_wait,
    send_of_an_array_that_nobody_keeps,
    send_beside_started_collective,
    to_oneself,
    task_farm,
    in_groups,
    odd_arrays,
)


def run_programs(names: tuple[str, ...] = ()) -> int:
    """Runs all of the programs, or those that are named, with small and large messages."""
    comm = fc.init(timeout_s=20)
    programs = [program for program in PROGRAMS if not names or program.__name__ in names]
    for program in programs:
        for count in (0, SMALL, 20_000, LARGE):
            program(comm, count)
    comm.barrier()
    return len(programs)
