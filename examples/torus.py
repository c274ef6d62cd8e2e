"""An all-reduce of your own, from scratch: over the links of a square torus.

flagcx run -n 4 examples/torus.py
flagcx explain allreduce --nbytes 64MiB --topology dgx-a100 --ranks 16 --load examples/torus.py
flagcx draw allreduce torus -n 9 --load examples/torus.py -o torus.svg
"""

from math import isqrt

import numpy as np

import flagcx as fc
from flagcx.schedule.compose import recv_reduce, reverse, schedule_of, send, then


def ring(first, ranks, place, width):
    """One rank's part in a reduce-scatter round some ranks, each of which stands for ``width`` chunks."""
    for step in range(len(ranks) - 1):
        leaving, arriving = (ranks[place - back - step] // width * width for back in (1, 2))
        yield send(first + step, ranks[(place + 1) % len(ranks)], leaving, leaving + width)
        yield recv_reduce(first + step, ranks[place - 1], arriving, arriving + width)


def half(size):
    """Rings down the columns, in which a rank stands for its row; then along the rows."""
    side = isqrt(size)
    if side**2 != size:
        raise fc.ArgumentError(f"a square torus has 1, 4, 9, 16, ... ranks, not {size}")

    def transfers(rank):
        row, column = divmod(rank, side)
        yield from ring(0, range(column, size, side), row, side)
        yield from ring(side - 1, range(row * side, (row + 1) * side), column, 1)

    return schedule_of("reduce_scatter", "torus", size, size, 2 * (side - 1), transfers)


def torus(size):
    return then(half(size), reverse(half(size)))


fc.register("torus", "allreduce", torus)  # verified here, for 1, 4 and 9 ranks

if __name__ == "__main__":
    comm = fc.init()
    if comm.rank == 0:
        print(fc.simulate(torus(16), "dgx-a100", 64 << 20))
    x = np.full(1000, comm.rank + 1.0)
    comm.allreduce(x, algorithm="torus")
    expected = comm.size * (comm.size + 1) / 2
    print(f"rank {comm.rank}: every element is {x[0]:g}, expected {expected:g}")
    assert (x == expected).all()
