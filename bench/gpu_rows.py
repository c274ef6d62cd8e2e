"""An all-reduce with residual and RMS norm in one kernel, beside the same in several, by graph replays.

    python bench/gpu_rows.py --ranks 2 --rows 1,8,64,256 --columns 4096,8192 --out results.jsonl

Four ways, on the same data in bfloat16: our all-reduce alone; our all-reduce, then PyTorch's add and RMS norm
as kernels of their own, and as the one kernel that torch.compile makes of them; and
``comm.allreduce_rmsnorm``. A graph of several calls is replayed, with all ranks started together; the time of
a call is the median of the replays, on the rank that took longest. Ranks share GPUs where there are fewer
GPUs than ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_common import need_gpu, versions
from report import list_of, write_json_lines

import flagcx as fc

CALLS, REPLAYS, EPS = 20, 25, 1e-5
WAYS = ("all-reduce", "then add, norm", "then compiled", "fused")


class Setting:
    """The arrays of one shape, and the ways to work on them.

    Args:
        comm: The communicator.
        rows: Number of rows.
        columns: Elements of a row.
        algorithm: Of the fused call; chosen if None.
    """

    def __init__(self, comm: Any, rows: int, columns: int, algorithm: str | None) -> None:
        import cupy
        import torch

        self.comm, self.algorithm, self.columns = comm, algorithm, columns
        torch.manual_seed(7)
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        self.residual, self.weight = torch.randn(rows, columns, **kind), torch.randn(columns, **kind)
        each = [torch.randn(rows, columns, **kind) for _ in range(comm.size)]
        self.given, self.x = each[comm.rank], torch.empty(rows, columns, **kind)
        total = sum(x.float() for x in each) + self.residual.float()
        self.want = torch.nn.functional.rms_norm(total, (columns,), self.weight.float(), EPS)
        self.sum, self.out = torch.empty_like(self.x), torch.empty_like(self.x)

        def array(tensor: Any) -> Any:
            bits = tensor.view(torch.int16)
            return cupy.from_dlpack(bits).view(np.dtype("bfloat16"))

        tensors = (self.x, self.residual, self.weight, self.sum, self.out)
        self.arrays = {id(tensor): array(tensor) for tensor in tensors}

    def refill(self) -> None:
        """Gives the rows their first values again."""
        self.x.copy_(self.given)

    def ways(self, compiled: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
        """Each way by its name: what makes one call and returns the norm, if it makes one."""
        import torch

        at, comm = self.arrays, self.comm
        x, residual, weight, total, out = (
            at[id(t)] for t in (self.x, self.residual, self.weight, self.sum, self.out)
        )

        def fused() -> Any:
            comm.allreduce_rmsnorm(
                x, residual, weight, EPS, out=out, residual_out=total, algorithm=self.algorithm
            )
            return self.out

        def reduced() -> None:
            comm.allreduce(x)

        def separate() -> Any:
            comm.allreduce(x)
            torch.add(self.x, self.residual, out=self.sum)
            return torch.nn.functional.rms_norm(self.sum, (self.columns,), self.weight, EPS)

        def inductor() -> Any:
            comm.allreduce(x)
            return compiled(self.x, self.residual, self.weight)[1]

        return dict(zip(WAYS, (reduced, separate, inductor, fused), strict=True))


def add_and_norm(x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
    """The residual and its norm, for torch.compile."""
    import torch

    total = x + residual
    return total, torch.nn.functional.rms_norm(total, (x.shape[1],), weight, EPS)


def measure(shapes: list[tuple[int, int]], algorithm: str | None, out: Path | None, run: dict) -> list[dict]:
    """What rank 0 found; runs on every rank. Rows are written as soon as a shape has been measured."""
    import cupy
    import torch

    comm, run = fc.init(), {**run, **versions()}
    torch.cuda.set_device(cupy.cuda.runtime.getDevice())
    stream = cupy.cuda.Stream(non_blocking=True)
    theirs, found = torch.cuda.ExternalStream(stream.ptr), []
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(add_and_norm, dynamic=False)
    with stream, torch.cuda.stream(theirs):
        for rows, columns in shapes:
            setting = Setting(comm, rows, columns, algorithm)
            row: dict[str, Any] = {
                "ranks": comm.size,
                "rows": rows,
                "columns": columns,
                "nbytes": rows * columns * 2,
            }
            for name, call in setting.ways(compiled).items():
                setting.refill()
                made = call()
                ran = comm.profiler.records()[-1].operation
                if made is not None:
                    far = (made.float() - setting.want).abs() / (1 + setting.want.abs())
                    row[f"{name}: error"] = round(max(comm.allgather_object(far.max().item())), 5)
                times = _replays(comm, cupy, stream, theirs, call, setting.refill)
                row[name] = round(max(comm.allgather_object(statistics.median(times))), 2)
            row |= {"algorithm": ran.algorithm, "protocol": ran.protocol}
            row["fused / all-reduce"] = round(row["fused"] / row["all-reduce"], 3)
            found.append(row)
            if comm.rank == 0:
                print(json.dumps(row), flush=True)
                if out is not None:
                    write_json_lines(out, [{**row, "run": run}])
    return found


def _replays(comm: Any, cupy: Any, stream: Any, theirs: Any, call: Callable, refill: Callable) -> list[float]:
    """Microseconds of a call, for each replay of a graph of ``CALLS`` of them."""
    import torch

    for _ in range(3):
        call()
    stream.synchronize()
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=theirs, capture_error_mode="relaxed"), stream:
        for _ in range(CALLS):
            call()
    start, end, times = cupy.cuda.Event(), cupy.cuda.Event(), []
    for n in range(REPLAYS + 3):
        refill()
        stream.synchronize()
        comm.barrier()
        start.record(stream)
        graph.replay()
        end.record(stream)
        stream.synchronize()
        if n >= 3:
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1e3 / CALLS)
    return times


def table(rows: list[dict]) -> str:
    """The rows as a table: microseconds of each way, one line a shape."""
    lines = [
        f"{'rows':>5} {'columns':>7} {'bytes':>8} " + " ".join(f"{way:>14}" for way in WAYS) + "  fused by"
    ]
    for row in rows:
        cells = " ".join(f"{row[way]:>14.2f}" for way in WAYS)
        by = f"  {row['algorithm']} {row['protocol']}"
        lines.append(f"{row['rows']:>5} {row['columns']:>7} {row['nbytes']:>8} {cells}{by}")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints a table, and writes JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = list_of(int)
    parser.add_argument("--ranks", type=numbers, default="2")
    parser.add_argument("--rows", type=numbers, default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--columns", type=numbers, default="4096,8192")
    parser.add_argument(
        "--algorithm", help="of the fused call: one_shot or two_shot; chosen by size by default"
    )
    parser.add_argument("--out", type=Path, help="file that JSON lines are added to")
    given = parser.parse_args()
    need_gpu()
    out = given.out and given.out.resolve()
    run = {"command": " ".join(sys.argv).partition(" --out")[0]}
    shapes = [(rows, columns) for columns in given.columns for rows in given.rows]
    for ranks in given.ranks:
        what = (shapes, given.algorithm, out, run)
        found = fc.launch(measure, ranks=ranks, args=what, timeout_s=500, share_gpu=True)[0]
        print(f"{ranks} ranks: microseconds of a graph replay\n{table(found)}", flush=True)


if __name__ == "__main__":
    main()
