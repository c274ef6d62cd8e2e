"""Machines of public files and posts: each has what its source says, and a plan within its bound."""

import pytest

from flagcx.topology import make_plan, read
from tests.topology.public import MACHINES


@pytest.mark.parametrize("name", MACHINES)
def test_a_public_machine_is_read_whole_and_planned(name, tmp_path):
    _, text, gpus, numa_nodes, nics = MACHINES[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    machine = read(tmp_path / name)
    assert (len(machine.gpus), len(machine["numa_nodes"]), len(machine["nics"])) == (gpus, numa_nodes, nics)
    plan = make_plan(machine)
    assert 0 < plan.bandwidth_gb_per_s <= plan.bound_gb_per_s * (1 + 1e-6)
