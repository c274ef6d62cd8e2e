"""``flagcx tune --gpu``: a table of real times, which the next start of the ranks chooses by."""

from __future__ import annotations

import flagcx as fc
from flagcx.cli import tune
from flagcx.selection.table import Candidate, Table


def _measure(path, sizes):
    tune.sizes = lambda quick: list(sizes)
    return tune.measure(tune.Task(("allreduce", "broadcast"), True, path, gpu=True), lambda *progress: None)


def _choose(path, sizes):
    import cupy

    comm = fc.init(tuning=True, tuning_file=str(path))
    for nbytes in sizes:
        x = cupy.full(nbytes // 4, comm.rank + 1, cupy.float32)
        comm.allreduce(x)
        assert (x == comm.size * (comm.size + 1) // 2).all()
    ran = [(r.operation.algorithm, r.operation.protocol) for r in comm.profiler.records()]
    explained = [comm.explain("allreduce", nbytes).chosen for nbytes in sizes]
    assert [(row.algorithm, row.protocol) for row in explained] == ran
    assert all(row.measured_us for row in explained)
    return comm._device.selector.note, ran


def test_the_next_start_chooses_by_the_measured_times(ranks, tmp_path):
    path, sizes = tmp_path / "table.json", (1024, 65536, 1 << 20)
    written = ranks(2, _measure, path, sizes)
    assert written == [path, None]
    table = Table.from_json(path.read_text())
    assert table.fit.transport in ("nccl", "device")
    assert table.fit.machine["ranks_on_a_gpu"] >= 1
    for point in table.measured["allreduce"]:
        assert Candidate("native") in point.times_us and Candidate("two_shot") in point.times_us
        assert all(1.0 < time_us < 1e6 for time_us in point.times_us.values())
    (note, chosen), (same_note, same) = ranks(2, _choose, path, sizes)
    assert note == same_note == f"measured, {path}"
    assert chosen == same
    best = [table.rank("allreduce", nbytes, lambda candidate: True)[0][0] for nbytes in sizes]
    assert chosen == [(c.algorithm, c.protocol) for c in best]
