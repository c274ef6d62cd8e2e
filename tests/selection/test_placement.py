"""Schedules along the planned order: still right, and over the links that the plan chose."""

from __future__ import annotations

import numpy as np
import pytest

import flagcx as fc
from flagcx.algorithms.candidate import FOLLOWS_ORDER, Candidate
from flagcx.schedule.model import Send
from flagcx.schedule.verify import verify
from flagcx.selection.placement import gpus_of, plan_order
from flagcx.topology import preset
from tests.ranks import run_ranks

ORDER = (0, 3, 2, 1, 5, 6, 7, 4)


def _links(schedule) -> set[tuple[int, int]]:
    return {
        (program.rank, t.peer)
        for program in schedule.programs()
        for step in program.steps
        for t in step.transfers
        if isinstance(t, Send)
    }


def test_a_ring_follows_the_order():
    links = _links(Candidate("ring").along(ORDER).build("allreduce", 8))
    assert links == {(a, ORDER[(i + 1) % 8]) for i, a in enumerate(ORDER)}
    assert _links(Candidate("ring").build("allreduce", 8)) == {(a, (a + 1) % 8) for a in range(8)}
    direct = Candidate("two_shot").along(ORDER).build("allreduce", 8)
    assert direct is Candidate("two_shot").build("allreduce", 8) or len(_links(direct)) == 56


@pytest.mark.parametrize("algorithm", FOLLOWS_ORDER)
def test_they_are_still_right(algorithm):
    verify(Candidate(algorithm).along(ORDER).build("allreduce", 8))
    if algorithm != fc.Algorithm.RING:
        for root in range(8):
            schedule = Candidate(algorithm).along(ORDER).build("broadcast", 8, root)
            assert schedule.root == root
            verify(schedule)


def _bus_ids(topology) -> list[str]:
    return [gpu.pci_bus_id for gpu in topology.gpus]


def test_the_order_of_ranks_is_that_of_their_gpus():
    machine = preset("dgx-1v")
    bus_ids = _bus_ids(machine)
    order = plan_order(machine, bus_ids)
    nvlink = machine["nvlink_peers"]
    assert all(b in nvlink[a] for a, b in zip(order, order[1:] + order[:1], strict=True))
    back = plan_order(machine, [b.upper() for b in reversed(bus_ids)])
    assert back[0] == 0
    assert all(7 - b in nvlink[7 - a] for a, b in zip(back, back[1:] + back[:1], strict=True))


def test_where_the_topology_says_nothing():
    machine = preset("dgx-1v")
    bus_ids = _bus_ids(machine)
    assert plan_order(machine, bus_ids[:2]) is None, "two ranks have one order"
    assert plan_order(machine, [*bus_ids[:3], "0000:ff:00.0"]) is None, "a GPU that it does not know"
    assert plan_order(machine, [bus_ids[0]] * 4) is None, "ranks that share a GPU"
    assert gpus_of(machine, [bus_ids[0], bus_ids[0], bus_ids[1]]) is None
    assert gpus_of(machine, [*bus_ids[:3], "0000:ff:00.0"]) is None
    assert gpus_of(machine, bus_ids[2:0:-1]) == [2, 1]


def _along():
    comm = fc.init()
    comm._host.order = (0, 2, 3, 1)
    for algorithm in FOLLOWS_ORDER:
        x = comm.allreduce(np.arange(1000) + comm.rank, algorithm=algorithm)
        assert (x == np.arange(1000) * 4 + 6).all()
        if algorithm != fc.Algorithm.RING:
            got = comm.broadcast(np.full(5, comm.rank), 2, algorithm=algorithm)
            assert (got == 2).all()
    gathered = comm.allgather(np.array([comm.rank]), algorithm="ring")
    return gathered.reshape(-1).tolist()


def test_an_engine_with_an_order_gives_the_same_results():
    assert run_ranks(_along, 4) == [[0, 1, 2, 3]] * 4
