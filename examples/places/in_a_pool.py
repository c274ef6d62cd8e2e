"""Ranks in a pool of processes, which are told their place: a new port for each job.

python examples/places/in_a_pool.py multiprocessing
python examples/places/in_a_pool.py joblib
"""

import multiprocessing
import socket
import sys

from fit import fit

import flagcx as fc

SIZE = 4


def be_rank(rank, address):
    with fc.init(rank=rank, size=SIZE, address=address):
        return fit()


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def main(kind):
    address = free_address()
    places = [(rank, address) for rank in range(SIZE)]
    if kind == "joblib":
        from joblib import Parallel, delayed

        tasks = Parallel(n_jobs=SIZE, batch_size=1, pre_dispatch="all")
        return tasks(delayed(be_rank)(*place) for place in places)
    with multiprocessing.get_context("spawn").Pool(SIZE) as pool:
        return pool.starmap(be_rank, places, chunksize=1)


if __name__ == "__main__":
    for size, weights in main(*sys.argv[1:]):
        print(size, weights)
