"""A user's script, which type checkers read in their strictest mode: see ``test_typing``. It is never run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import flagcx as fc
from flagcx.schedule.model import Schedule

Vector = NDArray[np.float32]


def train(comm: fc.Communicator, gradients: dict[str, Vector]) -> float:
    with fc.GradientSynchronizer(comm, gradients) as sync:
        for name in gradients:
            sync.ready(name)
        sync.wait()
    loss = np.array([0.5])
    comm.allreduce(loss, op="avg")
    return float(loss[0])


def collectives(comm: fc.Communicator, x: Vector, y: NDArray[np.float64]) -> None:
    assert_type(comm.rank, int)
    assert_type(comm.allreduce(x), Vector)
    assert_type(comm.allreduce(x, op="max", out=y), NDArray[np.float64])
    assert_type(comm.allreduce([x, x], algorithm=fc.Algorithm.RING), list[Vector])
    assert_type(comm.allreduce(x, "avg", compression="int8"), Vector)
    assert_type(comm.allreduce(x, np.maximum, async_op=True), fc.Work[Vector])
    assert_type(comm.allreduce(x, async_op=True).wait(), Vector)
    assert_type(comm.reduce(x, root=1), Vector | None)
    assert_type(comm.broadcast(x, root=1), Vector)
    assert_type(comm.allgather(x), Vector)
    assert_type(comm.gather(x), Vector | None)
    assert_type(comm.reduce_scatter(x, op=fc.scaled_sum(0.5)), Vector)
    assert_type(comm.alltoall(x), Vector)
    assert_type(comm.allgatherv(x, [1, 2]), Vector)
    assert_type(comm.recv(x, source=0), Vector)
    assert_type(comm.sendrecv(x, to=1, out=y, source=1, async_op=True), fc.Work[NDArray[np.float64]])
    assert_type(comm.allgather_object("name"), list[str])
    assert_type(comm.empty(3), Vector)
    assert_type(comm.empty((2, 3), np.int64), NDArray[np.int64])
    assert_type(comm.split(color=comm.rank % 2), fc.Communicator | None)
    comm.send(x, to=1)
    comm.barrier()


def own_algorithm(size: int) -> Schedule:
    from flagcx.algorithms import build
    from flagcx.schedule.compose import then

    return then(build("reduce", "binomial", size, root=0), build("broadcast", "binomial", size, root=0))


def main() -> None:
    fc.register("up_and_down", "allreduce", own_algorithm)
    print(fc.simulate(own_algorithm(8), "dgx-a100").time_us, fc.get_topology()["nvlink_peers"])
    with fc.init(timeout_s=60) as comm, comm.group():
        collectives(comm, np.ones(4, np.float32), np.ones(4))
    losses: list[float] = fc.launch(lambda: train(fc.init(), {}), ranks=4)
    explained: dict[str, Any] = comm.explain("allreduce", nbytes=1 << 20).to_dict()
    print(losses, explained)
