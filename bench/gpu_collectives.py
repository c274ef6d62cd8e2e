"""Every collective on GPU arrays, timed by graph replays: what is chosen, beside NCCL's own.

    python bench/gpu_collectives.py --ranks 2,4,8 --sizes 4K,1M,64M --out results.jsonl

A size is that of the whole message: an all-gather of 1 MiB on four ranks has blocks of 256 KiB. A graph of
several calls is replayed on all ranks at once; a replay's time is that of the slowest rank, divided by its
calls. Results are checked before. ``of_moving`` is the time in parts of the all-gather's, and of the
reduce-scatter's where the collective adds up. Ranks share a GPU unless ``--own-gpu`` is given.
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

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_common import need_gpu, replayed, versions
from report import list_of, write_json_lines

import flagcx as fc
from flagcx.cli.sizes import parse_nbytes

REDUCING = ("allreduce", "reduce_scatter", "reduce", "reduce_scatterv")
NAMES = (
    "allgather", "reduce_scatter", "allreduce", "broadcast", "reduce", "gather", "scatter", "alltoall",
    "allgatherv", "gatherv", "scatterv", "reduce_scatterv", "alltoallv", "alltoallv_gpu", "sendrecv",
    "barrier",
)  # fmt: skip
NATIVE = ("allgather", "reduce_scatter", "allreduce", "broadcast", "reduce", "gather", "scatter", "alltoall")


class Bench:
    """One rank's measurements."""

    def __init__(self, replays: int) -> None:
        import cupy

        self.cupy, self.comm, self.replays = cupy, fc.init(), replays
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def call(self, name: str, nbytes: int, algorithm: str | None) -> tuple[Callable[[], Any], Any, Any]:
        """A call, the array that it fills, and the sum of its elements if all ranks' arrays hold rank + 1."""
        cupy, comm = self.cupy, self.comm
        n, r = comm.size, comm.rank
        block = max(nbytes // 4 // n, 1)
        whole, part = block * n, cupy.full(block, r + 1.0, cupy.float32)
        x, out = cupy.full(whole, r + 1.0, cupy.float32), cupy.zeros(whole, cupy.float32)
        ranks = block * n * (n + 1) / 2  # the sum of one block of each rank
        options = {} if algorithm is None else {"algorithm": algorithm}
        at_root = r == 0
        uneven = [block + (q % 2 * 2 - 1) * (block // 2) for q in range(n)]
        uneven[0] += whole - sum(uneven)
        own = x[: uneven[r]]
        mixed = sum(c * (q + 1.0) for q, c in enumerate(uneven))
        # Rank q sends uneven[(p - q) % n] to rank p, so each sends and gets the whole.
        sent = [uneven[(p - r) % n] for p in range(n)]
        taken = [uneven[(r - p) % n] for p in range(n)]
        on_gpu = cupy.asarray(sent), cupy.asarray(taken)
        exchanged = sum(c * (p + 1.0) for p, c in enumerate(taken))
        y = part.copy()
        added = n * (n + 1) / 2
        first, few = x if at_root else None, out[: uneven[r]]
        calls: dict[str, tuple[Callable[[], Any], Any, Any]] = {
            "allgather": (lambda: comm.allgather(part, out=out, **options), out, ranks),
            "reduce_scatter": (lambda: comm.reduce_scatter(x, out=y, **options), y, ranks),
            "allreduce": (lambda: comm.allreduce(x, out=out, **options), out, n * ranks),
            "broadcast": (lambda: comm.broadcast(x, **options), x, whole),
            "reduce": (lambda: comm.reduce(x, out=out if at_root else None, **options), out, n * ranks),
            "gather": (lambda: comm.gather(part, out=out if at_root else None, **options), out, ranks),
            "scatter": (lambda: comm.scatter(first, out=y, **options), y, block),
            "alltoall": (lambda: comm.alltoall(x, out=out, **options), out, ranks),
            "allgatherv": (lambda: comm.allgatherv(own, uneven, out=out), out, mixed),
            "gatherv": (lambda: comm.gatherv(own, uneven, out=out if at_root else None), out, mixed),
            "reduce_scatterv": (lambda: comm.reduce_scatterv(x, uneven, out=few), few, few.size * added),
            "scatterv": (lambda: comm.scatterv(first, uneven, out=few), few, uneven[r]),
            "alltoallv": (lambda: comm.alltoallv(x, sent, taken, out=out), out, exchanged),
            "alltoallv_gpu": (lambda: comm.alltoallv(x, *on_gpu, out=out), out, exchanged),
            "sendrecv": (
                lambda: comm.sendrecv(x, (r + 1) % n, out, (r - 1) % n), out, whole * ((r - 1) % n + 1.0)
            ),
            "barrier": (lambda: comm.barrier(stream=self.stream), None, None),
        }  # fmt: skip
        return calls[name]

    def replayed(self, call: Callable[[], Any], calls: int) -> list[float]:
        """Microseconds a call; see ``gpu_common.replayed``."""
        with self.stream:
            call()
            return replayed(self.comm, self.cupy, self.stream, call, calls, self.replays)

    def measure(self, name: str, nbytes: int, algorithm: str | None) -> dict[str, Any]:
        """One row."""
        comm = self.comm
        call, result, want = self.call(name, nbytes, algorithm)
        self.cupy.cuda.Device().synchronize()
        with self.stream:
            call()
        self.stream.synchronize()
        last = comm.profiler.records()[-1].operation
        right = True
        if result is not None and (comm.rank == 0 or name not in ("reduce", "gather", "gatherv")):
            total = float(result.sum(dtype=self.cupy.float64))
            right = abs(total - want) <= 1e-6 * abs(want)
        calls = 20 if nbytes <= 4 << 20 else 4
        times = self.replayed(call, calls)
        quartiles = statistics.quantiles(times, n=4)
        return {
            "collective": name, "ranks": comm.size, "nbytes": nbytes, "algorithm": algorithm or "chosen",
            "ran": f"{last.algorithm} {last.protocol}".strip(),
            "time_us": round(quartiles[1], 2),
            "quartiles_us": [round(q, 2) for q in (quartiles[0], quartiles[2])],
            "right": all(comm.allgather_object(right)), "calls": calls, "replays": self.replays,
        }  # fmt: skip


def measure(
    sizes: list[int], names: list[str], native: bool, replays: int, until: float
) -> list[dict[str, Any]]:
    """What rank 0 found; runs on every rank."""
    bench = Bench(replays)
    rows: list[dict[str, Any]] = []
    for nbytes in sizes:
        moving: dict[str, float] = {}
        for name in names:
            for algorithm in (None, "native") if native and name in NATIVE else (None,):
                if bench.comm.allgather_object(time.time() > until)[0]:
                    continue
                row = bench.measure(name, nbytes, algorithm)
                if algorithm is None:
                    moving[name] = row["time_us"]
                    beside = moving.get("reduce_scatter" if name in REDUCING else "allgather")
                    row["of_moving"] = round(row["time_us"] / beside, 2) if beside else None
                rows.append(row)
                if bench.comm.rank == 0:
                    print(json.dumps(row), flush=True)
    bench.comm.close()
    return rows if bench.comm.rank == 0 else []


def main() -> None:
    """Measures and prints JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=list_of(int), default="2,4,8")
    parser.add_argument("--sizes", type=list_of(parse_nbytes), default="4K,64K,1M,16M,64M,256M")
    parser.add_argument("--names", type=list_of(str), default=",".join(NAMES))
    parser.add_argument("--native", action="store_true", help="NCCL's own beside them")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1e6, help="when to stop")
    parser.add_argument("--own-gpu", action="store_true", help="one rank on each GPU")
    parser.add_argument("--out", type=Path, help="file for JSON lines")
    arguments = parser.parse_args()
    need_gpu()
    until = time.time() + arguments.seconds
    header = {"command": " ".join(sys.argv), **versions()}
    for ranks in arguments.ranks:
        args = (arguments.sizes, arguments.names, arguments.native, arguments.replays, until)
        rows = fc.launch(measure, ranks=ranks, args=args, timeout_s=500, share_gpu=not arguments.own_gpu)[0]
        if arguments.out:
            write_json_lines(arguments.out, ({**row, "run": header} for row in rows))


if __name__ == "__main__":
    main()
