"""``flagcx.interop.dask`` on a real cluster: collectives inside tasks, workers used again, workers lost."""

import os
import signal

import numpy as np
import pytest

import flagcx as fc

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
distributed = pytest.importorskip("distributed", reason="these tests need Dask: pip install 'flagcx[dask]'")
dask = pytest.importorskip("flagcx.interop.dask")


@pytest.fixture(scope="module")
def client():
    cluster = distributed.LocalCluster(
        n_workers=3, threads_per_worker=1, processes=True, dashboard_address=None, scheduler_port=0
    )
    with cluster, distributed.Client(cluster) as client:
        yield client


def total(x):
    comm = fc.init()
    return float(comm.allreduce(np.full(1, x + comm.rank))[0]), os.getpid()


def test_a_collective_inside_tasks_and_workers_used_again(client):
    first = dask.run(client, total, args=(10,))
    assert [value for value, _ in first] == [33.0] * 3
    assert client.submit(sum, [1, 2]).result() == 3, "Dask's own tasks go on"
    again = dask.run(client, total, kwargs={"x": 0})
    assert [value for value, _ in again] == [3.0] * 3
    assert {pid for _, pid in again} == {pid for _, pid in first}, "the same processes"


def test_a_part_of_the_workers_in_an_order_of_ones_own(client):
    last, first, _ = sorted(client.nthreads(), reverse=True)

    def address():
        return fc.init().allgather_object(distributed.get_worker().address)

    assert dask.run(client, address, workers=[last, first]) == [[last, first]] * 2
    with pytest.raises(fc.ArgumentError, match=r"are not different workers of this client; they are tcp://"):
        dask.run(client, address, workers=[first, first])


def test_the_rank_that_raised_is_blamed(client):
    def fails():
        comm = fc.init()
        if comm.rank == 1:
            raise KeyError("no such batch")
        comm.barrier()

    with pytest.raises(fc.LaunchError, match=r"rank 1 raised KeyError: 'no such batch'") as caught:
        dask.run(client, fails)
    assert caught.value.rank == 1 and "in fails" in caught.value.traceback
    assert dask.run(client, total, args=(0,))[0][0] == 3.0, "the workers serve further runs"


def test_a_lost_worker_is_named(client):
    def dies():
        comm = fc.init()
        comm.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.allreduce(np.ones(10))

    place = sorted(client.nthreads())[2]
    with pytest.raises(fc.LaunchError, match=rf"rank 2 was lost: its worker {place} has left the cluster"):
        dask.run(client, dies)
    client.wait_for_workers(3, timeout=60)  # its nanny starts another
    assert dask.run(client, total, args=(0,))[0][0] == 3.0
