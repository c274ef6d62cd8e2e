"""``flagcx bench --gpu``: real times of every collective, with results that are verified."""

from __future__ import annotations

import flagcx as fc
from flagcx.cli.bench_ranks import ArraySource, rows
from flagcx.cli.bench_task import NAMES, BenchTask

TASKS = [(name, "float32") for name in NAMES] + [("allreduce", "bfloat16"), ("allgather", "int8")]


def _bench():
    comm = fc.init()
    found = []
    for collective, dtype in TASKS:
        task = BenchTask(collective, 1 << 10, 1 << 20, 1024, dtype=dtype, gpu=True, rounds=3)
        found += [row.as_json() for row in rows(comm, task, ArraySource(comm, task))]
    return found


def test_every_collective_and_nothing_wrong(ranks):
    found = ranks(2, _bench)[0]
    assert [(row["collective"], row["dtype"]) for row in found] == [task for task in TASKS for _ in range(2)]
    for row in found:
        assert row["nbytes"] in (1 << 10, 1 << 20)
        assert row.get("out_of_place_wrong", 0) == row.get("in_place_wrong", 0) == 0, row
        assert 1.0 < (row.get("out_of_place_us") or row["in_place_us"]) < 1e6
