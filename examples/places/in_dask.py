"""python examples/places/in_dask.py: one rank on each worker of a client."""

from dask.distributed import Client
from fit import fit

from flagcx.interop import dask

if __name__ == "__main__":
    with Client(n_workers=4, threads_per_worker=1, dashboard_address=None) as client:
        for size, weights in dask.run(client, fit):
            print(size, weights)
