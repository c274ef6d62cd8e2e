"""A saved trace, read by Perfetto's own trace processor.

Its Python package fetches the trace processor over the network when it is first used, so this runs where
FLAGCX_TEST_PERFETTO=1 says that it may. Everywhere else ``trace_format`` reads traces by the letter of the
format's description.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

import flagcx as fc
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    os.environ.get("FLAGCX_TEST_PERFETTO") != "1",
    reason="Perfetto's trace processor is fetched over the network; allow it by FLAGCX_TEST_PERFETTO=1",
)


def _work(path: str) -> int:
    comm = fc.init()
    for _ in range(5):
        comm.allreduce(np.ones(1000, np.float32))
        comm.broadcast(np.ones(10), async_op=True).wait()
    comm.profiler.save(path)
    return len(comm.profiler.records())


def test_perfetto_reads_every_slice_of_every_rank(tmp_path):
    processor = pytest.importorskip("perfetto.trace_processor", reason="pip install perfetto")
    path = str(tmp_path / "trace.json")
    made = run_ranks(_work, 4, path)
    assert min(made) >= 10
    query = """
        select process.name as rank, slice.name as name, count(*) as count, min(dur) as least
        from slice join thread_track on slice.track_id = thread_track.id
        join thread using (utid) join process using (upid)
        where thread.name = 'running' group by rank, slice.name
    """
    with processor.TraceProcessor(trace=path) as opened:
        found = {(row.rank, row.name): (row.count, row.least) for row in opened.query(query)}
    for rank in range(4):
        assert found[f"rank {rank}", "allreduce"][0] >= 5
        assert found[f"rank {rank}", "broadcast"][0] == 5
    assert all(least >= 0 for _, least in found.values())
