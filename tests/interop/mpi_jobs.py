"""What a rank of mpirun does in the tests of ``fc.from_mpi``: ``python -m tests.interop.mpi_jobs NAME``."""

import sys

import numpy as np
from mpi4py import MPI

import flagcx as fc


def total(comm):
    return comm.allreduce(np.array([10.0**comm.rank]))[0]


def parts():
    """The world, both halves of it, and all at once; each closed in its own way."""
    world = MPI.COMM_WORLD
    half = world.Split(world.rank % 2, key=-world.rank)  # ranks the other way round
    with fc.from_mpi(world) as comm:
        assert (comm.rank, comm.size) == (world.rank, world.size)
        assert total(comm) == 1111
        part = fc.from_mpi(half, timeout_s=60)
        assert (part.rank, part.size, part.config.timeout_s) == (half.rank, 2, 60)
        assert total(part) == 11 and total(comm) == 1111
        ours = fc.init()  # mpirun started this job too
        assert total(ours) == 1111 and ours is not comm
    assert total(part) == 11, "closing the world closes no other"
    for _ in range(3):
        with fc.from_mpi(half) as again:
            assert total(again) == 11
    print("done", flush=True)


def refused():
    world = MPI.COMM_WORLD
    none = world.Split(0 if world.rank == 0 else MPI.UNDEFINED)
    for comm in [none] if world.rank else ["world"]:
        try:
            fc.from_mpi(comm)
        except fc.ArgumentError as error:
            print(error, flush=True)


def lost():
    """Rank 1 ends without a word; the others hear of it, and MPI's end is theirs."""
    comm = fc.from_mpi(MPI.COMM_WORLD)
    if comm.rank == 1:
        raise SystemExit("rank 1 has had enough")
    try:
        total(comm)
    except fc.PeerDiedError as error:
        print(type(error).__name__, error, flush=True)


if __name__ == "__main__":
    {"parts": parts, "refused": refused, "lost": lost}[sys.argv[1]]()
