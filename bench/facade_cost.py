"""What the facade adds to a call: comm.allreduce beside the run of its plan, medians of several batches.

flagcx run -n 2 bench/facade_cost.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

import flagcx as fc

BATCHES, CALLS = 15, 3000


def time_us(comm: fc.Communicator, call: Callable[[], object]) -> float:
    """Microseconds a call, over one batch that all ranks begin together."""
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


def main() -> None:
    """Prints a row for each size on rank 0."""
    comm = fc.init()
    for nbytes in (1 << 10, 16 << 10):
        x = np.zeros(nbytes // 4, np.float32)
        comm.allreduce(x)
        plan = comm._host.quick[x.shape, x.dtype, "sum"]
        facade, bare = [], []
        for _ in range(BATCHES):  # in turns, so that drift of the machine hits both
            facade.append(time_us(comm, lambda x=x: comm.allreduce(x)))
            bare.append(time_us(comm, lambda x=x, plan=plan: plan.run(x, x)))
        if comm.rank == 0:
            with_facade, without = statistics.median(facade), statistics.median(bare)
            print(
                f"{comm.size} ranks, {nbytes:6} bytes: comm.allreduce {with_facade:6.2f} us, its plan alone "
                f"{without:6.2f} us, facade {with_facade - without:5.2f} us"
            )


if __name__ == "__main__":
    main()
