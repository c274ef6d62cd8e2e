"""mpirun -n 4 python examples/places/from_mpi.py: an all-reduce over any communicator of mpi4py."""

import numpy as np
from mpi4py import MPI

import flagcx as fc

half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
with fc.from_mpi(half) as comm:
    ranks = np.array([MPI.COMM_WORLD.rank])
    print(f"rank {comm.rank} of {comm.size}: {comm.allreduce(ranks)[0]}")
