"""What the facade costs on GPU arrays: host time of a call beside the bare call into NCCL.

    python bench/gpu_overhead.py --ranks 2 --out results.jsonl

Bursts of bare and of our calls take turns, each short enough not to fill the queue, so that a drift of the
machine hits both alike. ``ring`` is the replay of a CUDA graph, beside a bare launch of the same graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flagcx as fc

BURST, ROUNDS = 20, 200


def in_turns(
    comm: Any, synchronize: Callable[[], Any], calls: dict[str, Callable[[], Any]]
) -> dict[str, list]:
    """Host microseconds of a call, for each name one number a round."""
    times: dict[str, list] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            comm.barrier()
            start = time.perf_counter()
            for _ in range(BURST):
                call()
            times[name].append((time.perf_counter() - start) / BURST * 1e6)
            synchronize()
    return times


def measure(nbytes: int) -> dict[str, Any]:
    """Runs on every rank; what this rank found."""
    import cupy
    from cupy.cuda import nccl

    comm = fc.init()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.ones(nbytes // 4, cupy.float32)
        for _ in range(5):
            comm.allreduce(x, algorithm="native")
            comm.allreduce(x, algorithm="ring")
        transport = comm._device.transport
        bare, at, count, s = transport._communicator._comm, x.data.ptr, x.size, stream.ptr
        graph = next(g for p in transport._plans for g, _ in p._graphs.values())
        calls = {
            "bare": lambda: bare.allReduce(at, at, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, s),
            "native": lambda: comm.allreduce(x, algorithm="native"),
            "default": lambda: comm.allreduce(x),
            "graph": lambda: graph.launch(stream),
            "ring": lambda: comm.allreduce(x, algorithm="ring"),
        }
        calls["default"]()
        times = in_turns(comm, stream.synchronize, calls)
    row: dict[str, Any] = {
        "ranks": comm.size,
        "rank": comm.rank,
        "nbytes": nbytes,
        "nccl": nccl.get_version(),
    }
    for name, each in times.items():
        quartiles = statistics.quantiles(each, n=4)
        row[f"{name}_host_us"] = [round(q, 2) for q in quartiles]
    row["native_more_us"] = round(statistics.median(times["native"]) - statistics.median(times["bare"]), 2)
    row["ring_more_us"] = round(statistics.median(times["ring"]) - statistics.median(times["graph"]), 2)
    return row


def main() -> None:
    """Measures and prints JSON lines: quartiles of the host time, and what ours takes more."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,8", help="each above 1")
    parser.add_argument("--nbytes", type=int, default=4096)
    parser.add_argument("--out", default="", help="file for JSON lines")
    arguments = parser.parse_args()
    rows = []
    for ranks in (int(n) for n in arguments.ranks.split(",")):
        rows += fc.launch(measure, ranks=ranks, args=(arguments.nbytes,), timeout_s=120, share_gpu=True)[:2]
    text = "\n".join(json.dumps({**row, "command": " ".join(sys.argv)}) for row in rows)
    if arguments.out:
        with Path(arguments.out).open("a") as file:
            file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
