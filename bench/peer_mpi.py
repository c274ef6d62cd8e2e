"""One rank of MPI (Open MPI or MPICH), through mpi4py: ``mpirun -n SIZE python peer_mpi.py ADDRESS``."""

from __future__ import annotations

import sys
from functools import partial

import harness
import mpi4py
import numpy as np
from mpi4py import MPI


def allocate(count: int) -> tuple[np.ndarray, np.ndarray]:
    """An array, twice: mpi4py takes NumPy arrays as they are."""
    array = np.zeros(count, np.float32)
    return array, array


def main(address: str) -> None:
    """Serves the controller at ``address``."""
    comm = MPI.COMM_WORLD
    library = MPI.Get_library_version().splitlines()[0].split(",")[0].rstrip("\x00")
    subject = harness.Subject(
        rank=comm.rank,
        size=comm.size,
        allreduce=partial(comm.Allreduce, MPI.IN_PLACE),
        barrier=comm.Barrier,
        allocate=allocate,
        calls={
            "broadcast": lambda x, out: comm.Bcast(x, 0),
            "allgather": comm.Allgather,
            "reduce_scatter": comm.Reduce_scatter_block,
            "alltoall": comm.Alltoall,
        },
        versions=harness.versions(mpi4py=mpi4py.__version__, mpi=" ".join(library.split())),
    )
    harness.serve(address, subject)


if __name__ == "__main__":
    main(*sys.argv[1:])
