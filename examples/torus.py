"""An all-reduce of your own, from scratch: over the links of a square torus.

flagcx run -n 4 examples/torus.py
flagcx explain allreduce --nbytes 64MiB --topology dgx-a100 --ranks 16 --load examples/torus.py
flagcx draw allreduce torus -n 9 --load examples/torus.py -o torus.svg
"""

from math import isqrt

import numpy as np

import flagcx as fc
from flagcx.schedule.compose import recv_reduce, reverse, schedule_of, send, then


def torus_reduce_scatter(size):
    side = isqrt(size)
    if side * side != size:
        raise fc.ArgumentError(f"a square torus has 1, 4, 9, 16, ... ranks, not {size}")

    def transfers(rank):
        row, column = divmod(rank, side)
        for step in range(side - 1):  # the rows' blocks round the column, then the row's own round the row
            down, up = (row + 1) % side * side + column, (row - 1) % side * side + column
            right, left = row * side + (column + 1) % side, row * side + (column - 1) % side
            block, arriving = (row - 1 - step) % side * side, (row - 2 - step) % side * side
            yield send(step, down, block, block + side)
            yield recv_reduce(step, up, arriving, arriving + side)
            yield send(side - 1 + step, right, row * side + (column - 1 - step) % side)
            yield recv_reduce(side - 1 + step, left, row * side + (column - 2 - step) % side)

    return schedule_of("reduce_scatter", "torus", size, size, 2 * (side - 1), transfers)


def torus(size):
    return then(torus_reduce_scatter(size), reverse(torus_reduce_scatter(size)))


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
