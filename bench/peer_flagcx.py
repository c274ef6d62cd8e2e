"""One rank of flagcx: ``flagcx run -n SIZE peer_flagcx.py ADDRESS ordinary|symmetric``."""

from __future__ import annotations

import sys

import harness
import numpy as np

import flagcx as fc


def main(address: str, memory: str) -> None:
    """Serves the controller at ``address``.

    Args:
        address: The controller's Unix socket.
        memory: ``ordinary`` for NumPy's own arrays, ``symmetric`` for those of ``comm.empty``.
    """
    with fc.init() as comm:

        def allocate(count: int) -> tuple[np.ndarray, np.ndarray]:
            symmetric = memory == "symmetric"
            array = comm.empty(count, np.float32) if symmetric else np.zeros(count, np.float32)
            return array, array

        subject = harness.Subject(
            rank=comm.rank,
            size=comm.size,
            allreduce=comm.allreduce,
            barrier=comm.barrier,
            allocate=allocate,
            calls={
                "broadcast": lambda x, out: comm.broadcast(x, 0),
                "allgather": lambda x, out: comm.allgather(x, out=out),
                "reduce_scatter": lambda x, out: comm.reduce_scatter(x, out=out),
                "alltoall": lambda x, out: comm.alltoall(x, out=out),
            },
            versions=harness.versions(flagcx=harness.version_of("flagcx")),
        )
        harness.serve(address, subject)


if __name__ == "__main__":
    main(*sys.argv[1:])
