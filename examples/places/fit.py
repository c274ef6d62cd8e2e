"""The small job that every file of this folder starts: a regression, whose data is spread over the ranks.

flagcx run -n 4 examples/places/fit.py
mpirun -n 4 python examples/places/fit.py
torchrun --nproc-per-node 4 examples/places/fit.py
"""

import numpy as np

import flagcx as fc


def fit(steps=60):
    comm = fc.init()
    data = np.random.default_rng(comm.rank).standard_normal((1000, 3))
    target, weights = data @ [1.0, -2.0, 0.5], np.zeros(3)
    for _ in range(steps):
        slope = data.T @ (data @ weights - target) / len(data)
        weights -= 0.2 * comm.allreduce(slope, "avg")
    return comm.size, weights.round(3).tolist()


if __name__ == "__main__":
    print(*fit())
