"""What ranks of several hosts do in tests: ``python -m tests.transport.network_jobs JOB DIRECTORY [ENGINE]``.

The engine is that which the transport must have, "mpi" or "ucx"; by default "mpi".
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np

import flagcx as fc
from flagcx.errors import CommunicationError, FlagcxError, MismatchError, PeerTimeoutError
from flagcx.transport.network.message import Message, stamp_of
from flagcx.transport.network.wire import MESSAGE_TAG, TRANSFER_TAG
from tests.communicator import checks
from tests.communicator.messages import PROGRAMS, run_programs
from tests.communicator.oracle import assert_same, contribution, reduced
from tests.communicator.random_messages import run_random


def engine() -> str:
    """The transport between hosts."""
    return sys.argv[3] if len(sys.argv) > 3 else "mpi"


def everything() -> None:
    """All that a communicator does, against NumPy; on the way, each part says that it is done."""
    for part in (collectives, hierarchies, compressed, facade, messages):
        part()
        if fc.init().rank == 0:
            print("done", part.__name__)


def collectives() -> None:
    """All collectives, algorithms, dtypes and placements."""
    comm = fc.init()
    assert comm._host.transport.name == engine()
    for check in (
        lambda: checks.check_allreduce_dtypes((17, 1009)),  # short messages and long ones
        checks.check_allreduce_algorithms,
        checks.check_others,
        checks.check_uneven,
        lambda: checks.check_back_to_back(200),
    ):
        assert check() > 0


def facade() -> None:
    """Transfers, objects, groups, started work and parts of the communicator."""
    comm = fc.init()
    r, n = comm.rank, comm.size
    out = np.zeros(7)
    comm.sendrecv(np.full(7, r + 0.5), (r + 1) % n, out, (r - 1) % n)
    assert (out == (r - 1) % n + 0.5).all(), out
    if r == 1:
        time.sleep(1.5)  # The others wait in transfers that differ, which is no mistake.
    comm.sendrecv(np.full(7, r + 0.5), (r + 1) % n, out, (r - 1) % n)
    assert comm.allgather_object({"rank": r})[n - 1] == {"rank": n - 1}
    a, b = np.full(3, r), np.full(5, float(r))
    with comm.group():
        comm.allreduce(a)
        comm.allreduce(b)
    assert a.tolist() == [n * (n - 1) // 2] * 3 and b.tolist() == [n * (n - 1) / 2] * 5
    work = comm.allreduce(x := np.arange(100_000) + r, async_op=True)
    assert work.wait() is x
    assert (x == n * np.arange(100_000) + n * (n - 1) // 2).all()
    host = comm.split(color=comm.hosts.index(comm.hosts[r]))
    assert host._host.transport.name == "shared_memory", "ranks of one host need no MPI"
    across = comm.split(color=r % 2)
    total = across.allreduce(np.full(1, r))
    assert total[0] == sum(q for q in range(n) if q % 2 == r % 2)
    part = comm.split(
        color={0: 0, n - 1: 0, 1: None}.get(r, 1)
    )  # one over hosts, others not, and one rank left
    if part is not None:
        assert part.allreduce(np.full(1, r))[0] == (n - 1 if r in (0, n - 1) else sum(range(2, n - 1)))
    assert len(set(comm.hosts)) > 1 and (r % 2 or across._host.transport.name == engine())


def hierarchies() -> None:
    """All-reduces of one piece and of many, whose shared slots come again; results have the same bits."""
    comm = fc.init()
    reductions = ("f8", "max"), ("f2", "avg"), ("c16", "prod"), ("u1", "bxor"), ("f4", "sum"), ("i8", "avg")
    for count in (3, 8193, 700_001):
        for dtype, op in reductions if count < 10_000 else reductions[-2:]:
            x, want = contribution(comm.rank, count, dtype, op), reduced(comm.size, count, dtype, op)
            what = f"{dtype} {op} of {count}"
            out = comm.allreduce(x, op, out=np.empty_like(x), algorithm="hierarchical")
            assert_same(out, want, what)
            assert_same(comm.allreduce(x, op, algorithm="hierarchical"), want, f"{what} in place")
    zeros = np.where(np.arange(100_000) % comm.size == comm.rank, 0.0, -0.0)
    rows = np.random.default_rng(comm.rank).standard_normal((3, 400_000)).astype(np.float32)
    for x, op in ((zeros, "max"), (rows, np.hypot)):
        bits = comm.allgather_object(crc32(comm.allreduce(x, op, algorithm="hierarchical")))
        assert len(set(bits)) == 1, f"the ranks' results of {op} have not the same bits"


def compressed() -> None:
    """Compressed all-reduces, which hosts whose ranks share memory code between hosts alone."""
    comm = fc.init()
    for count, dtype in ((5, "f4"), (30_001, "f2"), (700_001, "f4"), (700_001, "f8")):
        given = [
            np.random.default_rng([q, count]).standard_normal(count).astype(dtype) for q in range(comm.size)
        ]
        exact = np.sum(given, axis=0, dtype=np.float64)
        for name, bound in (("int8", 0.03), ("bf16", 0.01), ("topk", 1.5)):
            feedback = fc.compression.Feedback(name)
            steps = [comm.allreduce(given[comm.rank].copy(), compression=feedback) for _ in range(2)]
            work = comm.allreduce(given[comm.rank].copy(), compression=name, async_op=True)
            assert len(set(comm.allgather_object(crc32(steps[1])))) == 1, f"{name}: ranks differ"
            for got in (steps[0], work.wait()):
                error = np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact)
                assert error < bound, f"{name} of {count} {dtype}: off by {error:.2g}"
            both = np.linalg.norm(np.sum(steps, axis=0, dtype=np.float64) - 2 * exact)
            assert both < bound * np.linalg.norm(2 * exact), f"{name} of {count} {dtype}: feedback is lost"


def wait_for_the_others(comm: fc.Communicator, count: int) -> None:
    """Returns when so many ranks have come here: MPI ends the job when the first has left."""
    place = Path(sys.argv[2])
    (place / str(comm.rank)).touch()
    while len(list(place.iterdir())) < count:
        time.sleep(0.01)


def messages() -> None:
    """Sends and receives under way together, beside collectives."""
    programs, sent = run_programs(), run_random(fc.init().size, 40)
    assert programs == len(PROGRAMS) and sent > 0


def absent() -> None:
    """One rank stays away; the others name it when the time-out has come."""
    comm = fc.init(timeout_s=2)
    comm.barrier()
    start = time.monotonic()
    if comm.rank == 2:
        wait_for_the_others(comm, comm.size)
        return
    try:
        comm.allreduce(np.ones(5))
    except FlagcxError as error:
        print(
            f"rank {comm.rank} {type(error).__name__} {time.monotonic() - start:.1f} s: {error}", flush=True
        )
    wait_for_the_others(comm, comm.size)


def ends_early() -> None:
    """Rank 2 ends in good order between two calls, and has closed nothing."""
    comm = fc.init(timeout_s=40)
    comm.allreduce(np.ones(5))
    if comm.rank == 2:
        sys.exit(0)
    start = time.monotonic()
    try:
        comm.broadcast(np.ones(5), root=2)  # in which nothing is sent to rank 2, which would object to it
    except FlagcxError as error:
        soon = time.monotonic() - start < 10
        print(f"rank {comm.rank} {type(error).__name__} soon={soon}: {error}", flush=True)
    wait_for_the_others(comm, comm.size - 1)


def losses() -> None:
    """Rank 3 is lost in a call, then rank 0, which serves the store, in another; the others go on without."""
    comm = fc.init(init_timeout_s=20)
    me = comm.rank
    aborts = comm.split(color=0)
    start = time.monotonic()
    if me == 1:
        time.sleep(1)
        aborts.abort("enough")
    else:
        threading.Timer(0.5, aborts.abort, ["by a thread"]).start() if me == 2 else None
        try:
            aborts.allreduce(np.ones(5))
        except CommunicationError as error:
            print(f"rank {me} aborted {type(error).__name__} {time.monotonic() - start:.1f} s", flush=True)
    for victim in (3, 0):
        if me == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                comm.allreduce(np.ones(100_000))
        except (fc.PeerDiedError, fc.AbortedError):
            comm = comm.shrink()
        n = comm.size
        total = comm.allreduce(np.full(200_000, comm.rank + 1))[7]
        assert total == n * (n + 1) // 2, total
        assert comm.allgather_object(me) == sorted(comm.allgather_object(me))
        print(f"rank {me} goes on as {comm.rank} of {n}, lost {comm.lost}", flush=True)


def mistakes_and_finalize() -> None:
    """Mistakes; then the program ends MPI itself, with a communicator open that needs it."""
    mistakes()
    comm = fc.init()
    comm.allreduce(np.ones(5))
    from mpi4py import MPI

    MPI.Finalize()
    assert comm.closed


def losses_beside_mpi4py() -> None:
    """The same, in a program in which mpi4py has started MPI, and ends it."""
    from mpi4py import MPI

    assert MPI.Is_initialized()
    losses()


def mistakes() -> None:
    """Calls that don't fit, each in a communicator of its own: every rank prints how soon it is told what."""
    world = fc.init(timeout_s=20)
    size, rank = world.size, world.rank
    uneven = [[3] * size for _ in range(size)]
    uneven[0][1] = 4  # rank 0 sends rank 1 more than that expects

    def message(x: np.ndarray, out: np.ndarray) -> Callable[[fc.Communicator], object]:
        return lambda c: c.send(x, 1) if rank == 0 else c.recv(out, 0) if rank == 1 else None

    cases: dict[str, Callable[[fc.Communicator], object]] = {
        "count of a message": message(np.ones(5, np.float32), np.ones(10, np.float32)),
        "count of a long message": message(np.ones(500_000), np.ones(600_000)),
        "dtype of a long message": message(np.ones(50_000), np.ones(50_000, np.int64)),
        "count of an allreduce": lambda c: c.allreduce(np.ones(5 if rank == 1 else 6)),
        "dtype of a message": message(np.ones(5, np.float32), np.ones(5, np.int32)),
        "message that nobody takes": lambda c: c.send(np.ones(5), 1) if rank == 0 else None,
        "counts of an alltoallv": lambda c: c.alltoallv(np.ones(sum(uneven[rank])), uneven[rank], [3] * size),
        "root of a large broadcast": lambda c: c.broadcast(np.full(100_000, rank), root=rank % 2),
        "codec": lambda c: c.allreduce(np.ones(50_000), compression="int4" if rank == 2 else "int8"),
        "root of a reduce": lambda c: c.reduce(np.ones(8), root=rank % 2),
        "barrier and allreduce": lambda c: c.barrier() if rank == 1 else c.allreduce(np.ones(3)),
        "order": lambda c: [c.broadcast(np.ones(3), root=root) for root in ((0, 1) if rank == 2 else (1, 0))],
    }
    for name, call in cases.items():
        comm = world.split(0)
        told, begin = list[str](), time.monotonic()
        for step in (partial(call, comm), comm.barrier, comm.close):
            try:
                step()
            except fc.CommunicatorError:
                continue  # the error before has said all
            except FlagcxError as error:
                told.append(f"{type(error).__name__}: {error}")
        soon = time.monotonic() - begin < 5
        print(f"{name} | {rank} | {soon=} | {' | '.join(told) or 'nothing'}", flush=True)
        world.barrier()
    if rank == 0:
        print("done")


def waits() -> None:
    """Waits for what never comes, each in a communicator of its own: every rank prints what it is told.

    In the last one it comes too late: the array stays as it is, and may be freed.
    """
    world = fc.init(timeout_s=1.5, explain_wait_s=0.3)
    rank = world.rank
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flagcx").addHandler(handler)
    cases: dict[str, Callable[[fc.Communicator], object]] = {
        "a receive": lambda c: c.recv(np.ones(3), 1) if rank == 0 else None,
        "two receives": lambda c: c.recv(np.ones(3), 1 - rank) if rank < 2 else None,
        "a lone barrier": lambda c: c.barrier() if rank == 1 else None,
        "a long send": lambda c: c.send(np.ones(1 << 20), 2) if rank == 0 else None,
    }
    for name, call in cases.items():
        warned.clear()
        told, comm = "nothing", world.split(0)
        try:
            call(comm)
        except FlagcxError as error:
            told = f"{type(error).__name__} ({getattr(error, 'peer', None)}): {error}"
        print(f"{name} | {rank} | {' | '.join(warned)} | {told}", flush=True)
        arrive(world, name)
    late(world)


def arrive(world: fc.Communicator, name: str) -> None:
    """Returns when all ranks have come here, however late: no call of theirs waits for that."""
    place = Path(sys.argv[2]) / name
    place.mkdir(exist_ok=True)
    (place / str(world.rank)).touch()
    while len(list(place.iterdir())) < world.size:
        time.sleep(0.01)


def late(world: fc.Communicator) -> None:
    """A receive times out, then its message comes: the array stays as it is, and may be freed."""
    rank, count = world.rank, 4 << 20
    comm, told = world.split(0), "nothing"
    out = np.zeros(count)
    if rank == 1:
        time.sleep(2.0)
    try:
        if rank == 0:
            comm.recv(out, 1)
        elif rank == 1:
            comm.send(np.ones(count), 0)
    except FlagcxError as error:
        told = type(error).__name__
    arrive(world, "late")
    for _ in range(50):
        world.barrier()  # while the engine works on all that is under way
    print(f"rank {rank} {told} untouched={not out.any()}", flush=True)
    del out


def to_self() -> None:
    """What a rank alone sends to itself."""
    pieces()
    fc.init().close()
    taken_back()


def pieces() -> None:
    """A rank alone sends itself messages of one piece and of many, two at once, and some that do not fit."""
    comm = fc.init(transport=engine(), timeout_s=10)
    carry = comm._host.transport.transfer
    for count in (0, 1, 768, 769, 16_385, 1_000_003, 3 << 20):
        for dtype in (np.uint8, np.float32, np.complex128):
            x = (np.arange(count) % 251).astype(dtype)
            y, z = np.zeros(count, dtype), np.zeros(count, dtype)
            carry([(x, 0), (x[::-1].copy(), 0)], [(y, 0), (z, 0)])
            assert (y == x).all() and (z == x[::-1]).all(), (count, dtype)
    for sent, count, dtype in ((3, 4, "f4"), (300_000, 400_000, "f4"), (300_000, 300_000, "i4")):
        out = np.full(count, 7, dtype)
        try:
            comm.split(0)._host.transport.transfer([(np.ones(sent, "f4"), 0)], [(out, 0)])
        except MismatchError as error:
            assert f"sent {4 * sent:,} bytes of send and receive of float32" in str(error), error
        else:
            raise AssertionError((sent, count, dtype))
        assert (out == 7).all(), "data of another message was used"


def taken_back() -> None:
    """The head of a long message comes, its data only after the error: the array stays as it is."""
    comm = fc.init(transport=engine(), timeout_s=0.5)
    transport = comm._host.transport
    wire, messenger = transport._wire, transport.messenger
    x, out = np.ones(100_000), np.zeros(100_000)
    head = Message(0, transport._message(out, 0).kind, 0, out.dtype)
    for tag in (TRANSFER_TAG, MESSAGE_TAG):
        requests: list = []
        wire.send(head, stamp_of(0), x[:0], tag, requests)
        if tag == MESSAGE_TAG:
            received = messenger.begin(False, out, 0)
            assert not received.advance() and received.ready() and not received.advance()
            messenger.abandon([received])
        else:
            try:
                transport.transfer([], [(out, 0)])
            except PeerTimeoutError:
                pass
            else:
                raise AssertionError("a receive without data has ended")
        requests.append(wire._send(wire._engine.memory(x), 0, tag + 1))
        for _ in range(1000):
            wire.is_done(requests[0])  # lets the engine work
        assert not out.any(), tag


if __name__ == "__main__":
    globals()[sys.argv[1]]()
