"""``flagcx.interop.ray`` in real actors: the calls of ``ray.util.collective``, groups again, actors lost."""

import os

import numpy as np
import pytest

import flagcx as fc

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
ray = pytest.importorskip("ray", reason="these tests need Ray: pip install 'flagcx[ray]'")
collective = pytest.importorskip("flagcx.interop.ray")
ReduceOp = pytest.importorskip("ray.util.collective.types").ReduceOp


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def actors(cluster):
    """Three actors, in no group. They start so slowly that all tests share them."""
    return [Worker.remote() for _ in range(3)]


@ray.remote(num_cpus=0)
class Worker:
    def join(self, size, rank, **options):
        collective.init_collective_group(size, rank, **options)

    def leave(self):
        collective.destroy_collective_group()
        return collective.get_rank(), collective.is_group_initialized()

    def calls(self):
        """All calls of the module; what each gave."""
        rank, size = collective.get_rank(), collective.get_collective_group_size()
        summed, largest, at_one = (np.full(4, 10.0**rank) for _ in range(3))
        collective.allreduce(summed)
        collective.allreduce(largest, op=ReduceOp.MAX)
        collective.reduce(at_one, dst_rank=1, op=ReduceOp.PRODUCT)
        told = np.array([rank])
        collective.broadcast(told, src_rank=2)
        gathered = [np.zeros(2) for _ in range(size)]
        collective.allgather(gathered, np.array([rank, rank + 0.5]))
        mine = np.zeros(2)
        collective.reducescatter(mine, [np.full(2, float(rank + block)) for block in range(size)])
        moved = np.full(3, rank)
        if rank == 0:
            collective.send(moved, 2)
        if rank == 2:
            collective.recv(moved, 0)
        collective.barrier()
        at_one = at_one[0] if rank == 1 else None
        return [summed[0], largest[0], at_one, told[0], np.ravel(gathered).tolist(), mine[0], moved[0]]

    def mean(self):
        return float(collective.communicator().allreduce(np.ones(1) * collective.get_rank(), op="avg")[0])

    def without_peer(self):
        collective.allreduce(np.ones(10))

    def die(self):
        os._exit(1)


def test_all_calls(actors):
    ray.get([actor.join.remote(3, rank) for rank, actor in enumerate(actors)])
    gathered = [0, 0.5, 1, 1.5, 2, 2.5]
    assert ray.get([actor.calls.remote() for actor in actors]) == [
        [111, 100, None, 2, gathered, 3, 0],
        [111, 100, 1000, 2, gathered, 6, 1],
        [111, 100, None, 2, gathered, 9, 0],
    ]
    assert ray.get([actor.mean.remote() for actor in actors]) == [1.0] * 3
    with pytest.raises(fc.ArgumentError, match=r"this actor is in group 'default' already"):
        ray.get(actors[0].join.remote(3, 0))
    assert ray.get([actor.leave.remote() for actor in actors]) == [(-1, False)] * 3


def test_a_group_that_the_driver_makes_again_and_in_another_order(actors):
    for order in ([0, 1, 2], [2, 0, 1]):
        collective.create_collective_group(actors, 3, order, backend="nccl")
        found = ray.get([actor.calls.remote() for actor in actors])
        assert [row[5] for row in found] == [3 * (rank + 1) for rank in order]
        ray.get([actor.leave.remote() for actor in actors])
    with pytest.raises(fc.ArgumentError, match=r"ranks=\[0, 0, 1\] of 3 actors are not the ranks 0 to 2"):
        collective.create_collective_group(actors, 3, [0, 0, 1])
    with pytest.raises(fc.ArgumentError, match=r"this actor is in no group 'default'; call init_collective"):
        ray.get(actors[0].mean.remote())


def test_ranks_that_do_not_come_are_named(actors):
    with pytest.raises(fc.BootstrapError, match=r"rank 1 of 3 waited 2 s for ranks \[0, 2\] to join group"):
        ray.get(actors[1].join.remote(3, 1, init_timeout_s=2.0))


def test_a_lost_actor_is_named(actors):
    *others, lost = [*actors[:2], Worker.remote()]
    collective.create_collective_group([*others, lost], 3, [0, 1, 2])
    waiting = [actor.without_peer.remote() for actor in others]
    lost.die.remote()
    for task in waiting:
        with pytest.raises(fc.PeerDiedError, match=r"rank 2 (died|has ended)"):
            ray.get(task)
    ray.get([actor.leave.remote() for actor in others])
